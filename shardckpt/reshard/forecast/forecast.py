"""The forecast of a reshard, and of restores onto its layout, before either is done.

1. The layouts are those in the reshard's plan; the hosts that restore onto them follow from their
   devices (`hosts`).
2. A restore of the stored checkpoint and a restore of the reshard's result are counted by the same
   code (`restore`).
3. The reads of the reshard itself are counted (`reshard`), if chunk tables give the place of every
   chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from shardckpt.commit.publish import published_attempt
from shardckpt.io.store import Store, kind_of
from shardckpt.io.url import parse
from shardckpt.reading.places import read_places
from shardckpt.reading.reader import memory_of_runs, reading_limits
from shardckpt.reshard.forecast.hosts import DEVICES_PER_HOST, Hosts, placed
from shardckpt.reshard.forecast.reshard import ReshardReads, reshard_reads
from shardckpt.reshard.forecast.restore import RestoreForecast, forecast_restore
from shardckpt.reshard.forecast.stored import ByLayout, ByTable
from shardckpt.reshard.reuse_method import ReuseMethod, reuse_method
from shardckpt.streaming.memory import readers
from shardckpt.text import file_size, visible

if TYPE_CHECKING:
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.places import Places
    from shardckpt.reshard.forecast.rates import Rates
    from shardckpt.reshard.forecast.stored import StoredTensors
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.reshard.plan import ReshardPlan

LARGEST_TABLE = 256 << 20
"""Maximum bytes of a chunk table that is read for planning: nine million chunks."""


@dataclass(frozen=True, eq=False, repr=False)
class Forecast:
    """A reshard and its effects."""

    url: str
    """URL of the checkpoint that would be read."""
    native: bool
    """Whether it is one of shardckpt's; a checkpoint of another format would be imported."""
    destination: str | None
    """Place of the new checkpoint, if given."""
    plan: ReshardPlan
    hosts: Hosts
    """Hosts that would restore onto the new layout."""
    devices_per_host: int
    source_hosts: Hosts
    """Hosts that saved the checkpoint, as far as the record shows."""
    options: ReshardOptions
    """Options of the reshard."""
    before: RestoreForecast
    """A restore of the source straight onto the new layout."""
    after: RestoreForecast
    """A restore of the reshard's result onto the new layout."""
    rates: Rates
    replaces: bool
    """Whether a checkpoint is committed at the destination; the reshard would need `overwrite` to
    replace it."""
    reuse: ReuseMethod | None
    """The method by which the reshard reuses the source's files, if nothing in them changes."""
    reads: ReshardReads | None
    """Reads of the reshard according to the chunk tables; None: the tables were not read."""
    stored_bytes: int
    """Stored bytes of the tensors that the reshard reads."""
    written_bytes: int
    """Stored bytes that the reshard writes; if it compresses, the estimate uses the source's
    compression ratio."""

    def __repr__(self) -> str:
        """Bytes that the reshard moves, and that a restore reads before and after it."""
        moved = f"reads {file_size(self.read_bytes)}, writes {file_size(self.written_bytes)}"
        restores = (
            f"a restore reads {file_size(int(self.before.read.sum()))} as stored, "
            f"{file_size(int(self.after.read.sum()))} after it"
        )
        return visible(f"<Forecast of a reshard of {self.url}: {moved}; {restores}>")

    @property
    def pays_after(self) -> int | None:
        """Number of restores after which the reshard saved more storage traffic than it caused.

        All hosts take part in each restore. None means that the number is never reached.
        """
        saved = int(self.before.read.sum() - self.after.read.sum())
        return -(-(self.read_bytes + self.written_bytes) // saved) if saved > 0 else None

    @cached_property
    def read_bytes(self) -> int:
        """Stored bytes that the reshard reads.

        Without the tables, the same compression ratio is assumed for all chunks.
        """
        if self.reads is not None:
            return self.reads.nbytes
        return round(self.plan.read_bytes * self.stored_bytes / max(1, self.plan.source_bytes))

    @property
    def amplification(self) -> float:
        """Stored bytes that the reshard reads, per stored byte of the tensors."""
        return self.read_bytes / max(1, self.stored_bytes)


def known_places(checkpoint: Checkpoint) -> Places | None:
    """Places of the checkpoint's chunks, from its chunk table.

    None if there is no table, because it is of another format; if the table is too large; or if
    other checkpoints hold some chunks.
    """
    table = checkpoint.record.table
    if (
        not checkpoint.native
        or checkpoint.record.structure.bases
        or (table is not None and table.size > LARGEST_TABLE)
    ):
        return None
    return read_places(checkpoint.place, checkpoint.record, checkpoint.reader.whole_table())


def forecast(
    checkpoint: Checkpoint,
    plan: ReshardPlan,
    rates: Rates,
    *,
    options: ReshardOptions,
    destination: str | None = None,
    devices_per_host: int | None = None,
    places: Places | None = None,
) -> Forecast:
    """Compute the costs and effects of a reshard.

    Args:
        checkpoint: the source.
        plan: plan of the reshard.
        rates: rates of the storage.
        options: options of the reshard.
        destination: place of the new checkpoint.
        devices_per_host: devices of each restoring host; None: `DEVICES_PER_HOST`, or all devices
            if there are fewer.
        places: places of the source's chunks; None: estimate them from the record.
    """
    record, location = checkpoint.record, checkpoint.location
    # Without places the reader is not opened, because that reads the table.
    limits = None if places is None else checkpoint.reader.limits
    layouts = {
        name: placed(decision.layout, len(plan.target.tensors[name].shape))
        for name, decision in plan.decisions.items()
    }
    ranked = [(layout, len(plan.target.tensors[name].shape)) for name, layout in layouts.items()]
    each = devices_per_host or min(
        DEVICES_PER_HOST, max(1, len(Hosts.of(ranked, number=1).owners.device_ids))
    )
    hosts = Hosts.of(ranked, devices_per_host=each)
    stored: StoredTensors = ByLayout(record) if places is None else ByTable(record, places)
    sources = [replace(plan.sources[name], name=name) for name in plan.target.tensors]
    before = forecast_restore(sources, layouts, hosts, stored, limits)
    held = _stored_bytes(plan, stored)
    compressed = held / max(1, plan.source_bytes) if plan.compression is not None else 1.0
    made = ByLayout(
        replace(record, structure=plan.target, hosts=record.hosts[:1] * len(plan.tasks)), compressed
    )
    after = forecast_restore(list(plan.target.tensors.values()), layouts, hosts, made)
    saved_by = Hosts.of(
        ((placed(t.layout, len(t.shape)), len(t.shape)) for t in sources),
        number=max(1, len(record.hosts)),
    )
    place = None if destination is None else Store.open(parse(destination))
    reuse = (
        reuse_method(checkpoint.place, place)
        if place is not None and checkpoint.native and plan.unchanged
        else None
    )
    if reuse:
        reads: ReshardReads | None = ReshardReads(0, 0, len(plan.tasks))
    else:
        threads = readers(location)
        memory = memory_of_runs(location, record, threads, plan.memory.reading)
        own, _ = reading_limits(local=kind_of(location).near, threads=threads, memory=memory)
        reads = None if places is None or limits is None else reshard_reads(plan, places, own)
    return Forecast(
        url=str(checkpoint.location),
        native=checkpoint.native,
        destination=destination,
        plan=plan,
        hosts=hosts,
        devices_per_host=each,
        source_hosts=saved_by,
        options=options,
        before=before,
        after=after,
        rates=rates,
        replaces=place is not None and published_attempt(place) is not None,
        reuse=reuse,
        reads=reads,
        stored_bytes=held,
        written_bytes=0 if reuse else round(plan.written_bytes * compressed),
    )


def _stored_bytes(plan: ReshardPlan, stored: StoredTensors) -> int:
    """Stored bytes of the tensors that a reshard reads."""
    if plan.source.compression is None:
        return plan.source_bytes
    return sum(
        int(stored.chunks(tensor).length.sum())
        for tensor in {id(t): t for t in plan.sources.values()}.values()
    )
