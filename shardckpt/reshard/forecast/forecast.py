"""Everything that is known of a reshard, and of restores onto its layout, before either is done.

1. The layouts are those that the reshard's plan has decided on; who restores onto them follows from their devices (`hosts`).
2. A restore of what is stored now, and one of what the reshard would make, are counted alike (`restore`).
3. So is what the reshard itself reads (`reshard`), where the chunk tables say where everything lies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from shardckpt.commit.publish import published_attempt
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.reading.based_reader import BasedReader
from shardckpt.reading.places import read_places
from shardckpt.reading.reader import memory_of_runs, reading_limits
from shardckpt.reshard.carrying import TakenOver, way
from shardckpt.reshard.forecast.hosts import DEVICES_PER_HOST, Hosts, placed
from shardckpt.reshard.forecast.reshard import ReshardReads, reshard_reads
from shardckpt.reshard.forecast.restore import RestoreForecast, forecast_restore
from shardckpt.reshard.forecast.stored import ByLayout, ByTable
from shardckpt.reshard.memory import readers

if TYPE_CHECKING:
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.places import Places
    from shardckpt.reading.reader import ChunkReader
    from shardckpt.reading.runs import RunLimits
    from shardckpt.reshard.forecast.rates import Rates
    from shardckpt.reshard.forecast.stored import StoredTensors
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.reshard.plan import ReshardPlan

__all__ = ["Forecast", "forecast", "known_places"]

LARGEST_TABLE = 256 << 20
"""Bytes of a chunk table that is read to plan: nine million chunks."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """A reshard and what it changes."""

    url: str
    """Of the checkpoint that would be read."""
    destination: str | None
    """Where the new one would go, where that was said."""
    plan: ReshardPlan
    hosts: Hosts
    """That would restore onto the new layout."""
    devices_per_host: int
    source_hosts: Hosts
    """That saved, as far as the record tells."""
    options: ReshardOptions
    """Of the reshard."""
    before: RestoreForecast
    """A restore of the source straight onto the new layout."""
    after: RestoreForecast
    """The same of what the reshard would make."""
    rates: Rates
    replaces: bool
    """Whether a checkpoint is committed at the destination, which the reshard would have to be allowed to replace."""
    taken_over: TakenOver | None
    """How the reshard takes the source's files over as they are, where nothing in them changes."""
    reads: ReshardReads | None
    """Of the reshard, as the chunk tables have it; None: they were not read."""
    stored_bytes: int
    """Of the tensors that the reshard reads."""
    written_bytes: int
    """Stored bytes that the reshard writes: where it compresses, taken to shrink as much as the source's did."""

    @property
    def pays_after(self) -> int | None:
        """Restores by all hosts after which the reshard has saved more bytes of storage traffic than it took; None: never."""
        saved = int(self.before.read.sum() - self.after.read.sum())
        return -(-(self.read_bytes + self.written_bytes) // saved) if saved > 0 else None

    @cached_property
    def read_bytes(self) -> int:
        """Stored bytes that the reshard reads; without the tables, chunks are taken to be compressed alike."""
        if self.reads is not None:
            return self.reads.nbytes
        return round(self.plan.read_bytes * self.stored_bytes / max(1, self.plan.source_bytes))

    @property
    def amplification(self) -> float:
        """Stored bytes that the reshard reads, per stored byte of the tensors."""
        return self.read_bytes / max(1, self.stored_bytes)


def known_places(checkpoint: Checkpoint) -> Places | None:
    """Where the checkpoint's chunks are, read from its chunk table; None where that is too large, or some are in other checkpoints."""
    table, reader = checkpoint.record.table, checkpoint.reader
    if isinstance(reader, BasedReader) or (table is not None and table.size > LARGEST_TABLE):
        return None
    return read_places(checkpoint.place, checkpoint.record, reader.whole_table())


def _limits(reader: ChunkReader | BasedReader) -> RunLimits | None:
    """How far chunks are joined into one read; None where several readers share the work."""
    return None if isinstance(reader, BasedReader) else reader.limits


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
    """Put together what a reshard costs and changes.

    Args:
        checkpoint: the source.
        plan: of the reshard.
        rates: of the storage.
        options: of the reshard.
        destination: where the new checkpoint would go.
        devices_per_host: of those that would restore it; None: `DEVICES_PER_HOST`, or all devices where there are fewer.
        places: where the source's chunks are; None: what the record says must do.
    """
    record, location = checkpoint.record, checkpoint.location
    limits = None if places is None else _limits(checkpoint.reader)
    layouts = {name: placed(decision.layout, len(plan.target.tensors[name].shape)) for name, decision in plan.decisions.items()}
    ranked = [(layout, len(plan.target.tensors[name].shape)) for name, layout in layouts.items()]
    each = devices_per_host or min(DEVICES_PER_HOST, max(1, len(Hosts.of(ranked, number=1).owners.device_ids)))
    hosts = Hosts.of(ranked, devices_per_host=each)
    stored: StoredTensors = ByLayout(record) if places is None else ByTable(record, places)
    sources = [replace(plan.sources[name], name=name) for name in plan.target.tensors]
    before = forecast_restore(sources, layouts, hosts, stored, limits)
    held = _stored_bytes(plan, stored)
    compressed = held / max(1, plan.source_bytes) if plan.compression is not None else 1.0
    made = ByLayout(replace(record, structure=plan.target, hosts=record.hosts[:1] * len(plan.tasks)), compressed)
    after = forecast_restore(list(plan.target.tensors.values()), layouts, hosts, made)
    saved_by = Hosts.of(((placed(t.layout, len(t.shape)), len(t.shape)) for t in sources), number=max(1, len(record.hosts)))
    place = None if destination is None else Store.open(parse(destination))
    taken_over = way(checkpoint.place, place) if place is not None and plan.unchanged else None
    if taken_over:
        reads: ReshardReads | None = ReshardReads(0, 0, len(plan.tasks))
    else:
        threads = readers(location)
        memory = memory_of_runs(location, record, threads, plan.memory.reading)
        own, _ = reading_limits(local=location.local is not None, threads=threads, memory=memory)
        reads = None if places is None or limits is None else reshard_reads(plan, places, own)
    return Forecast(
        url=str(checkpoint.location),
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
        taken_over=taken_over,
        reads=reads,
        stored_bytes=held,
        written_bytes=0 if taken_over else round(plan.written_bytes * compressed),
    )


def _stored_bytes(plan: ReshardPlan, stored: StoredTensors) -> int:
    """Of the tensors that a reshard reads, as they are stored."""
    if plan.source.compression is None:
        return plan.source_bytes
    return sum(int(stored.chunks(tensor).length.sum()) for tensor in {id(t): t for t in plan.sources.values()}.values())
