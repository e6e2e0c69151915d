"""Everything that is known of a reshard, and of restores onto its layout, before either is done.

`forecast` puts it together; `document` makes of it the one JSON document that programs get. What the terminal and the page
show are the document's numbers, rounded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.forecast.hosts import DEVICES_PER_HOST, Hosts
from shardckpt.forecast.reshard import reshard_reads
from shardckpt.forecast.restore import RestoreForecast, forecast_restore
from shardckpt.forecast.stored import ByLayout, ByTable, unknown
from shardckpt.io.packed import DATA_FILE_BYTES
from shardckpt.io.places import read_places
from shardckpt.placements import Placements
from shardckpt.sharding import Sharding

if TYPE_CHECKING:
    from shardckpt.checkpoint import Checkpoint
    from shardckpt.forecast.rates import Rates
    from shardckpt.forecast.reshard import ReshardReads
    from shardckpt.forecast.stored import Stored
    from shardckpt.io.places import Places
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.reshard.plan import ReshardPlan
    from shardckpt.structure import StoredLayout

__all__ = ["Forecast", "document", "forecast", "known_places"]

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
    """Where the checkpoint's chunks are, read from its chunk table; None where that is too large."""
    table = checkpoint.record.table
    if table is not None and table.size > LARGEST_TABLE:
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
    record = checkpoint.record
    layouts = {name: decision.layout for name, decision in plan.decisions.items()}
    ranked = [(layout, len(plan.target.tensors[name].shape)) for name, layout in layouts.items()]
    each = devices_per_host or min(DEVICES_PER_HOST, max(1, len(Hosts.of(ranked, number=1).owners.device_ids)))
    hosts = Hosts.of(ranked, devices_per_host=each)
    stored: Stored = ByLayout(record) if places is None else ByTable(record, places)
    sources = [replace(plan.sources[name], name=name) for name in plan.target.tensors]
    before = forecast_restore(sources, layouts, hosts, stored, None if places is None else checkpoint.reader.limits)
    held = _stored_bytes(plan, stored)
    compressed = held / max(1, plan.source_bytes) if plan.compression is not None else 1.0
    made = ByLayout(replace(record, structure=plan.target, hosts=record.hosts[:1] * len(plan.tasks)), compressed)
    after = forecast_restore(list(plan.target.tensors.values()), layouts, hosts, made)
    saved_by = Hosts.of(((t.layout, len(t.shape)) for t in sources if not unknown(t)), number=max(1, len(record.hosts)))
    reads = None if places is None else reshard_reads(plan, places, checkpoint.reader.limits)
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
        reads=reads,
        stored_bytes=held,
        written_bytes=round(plan.written_bytes * compressed),
    )


def _stored_bytes(plan: ReshardPlan, stored: Stored) -> int:
    """Of the tensors that a reshard reads, as they are stored."""
    if plan.source.compression is None:
        return plan.source_bytes
    return sum(int(stored.chunks(tensor).length.sum()) for tensor in {id(t): t for t in plan.sources.values()}.values())


# --- for programs ---------------------------------------------------------------------------------------------------


def document(found: Forecast) -> dict[str, Any]:
    """Everything, for programs; keys are described in docs/cli.md."""
    plan, record = found.plan, found.plan.source
    meshes = {d.layout.mesh: None for d in plan.decisions.values() if isinstance(d.layout, Sharding | Placements)}
    return {
        "source": {
            "url": found.url,
            "attempt": record.attempt,
            "hosts": len(record.hosts),
            "layout": record.layout,
            "compression": record.compression,
            "tensors": record.totals.get("tensors", len(record.structure.tensors)),
            "bytes": record.totals["bytes"],
            "stored_bytes": record.totals["stored_bytes"],
        },
        "target": {
            "url": found.destination,
            "meshes": [mesh.to_json() for mesh in meshes],
            "devices": len(found.hosts.owners.device_ids),
            "devices_per_host": found.devices_per_host,
            "hosts": found.hosts.number,
            "layout": plan.layout,
            "compression": plan.compression,
            "tensors": len(plan.target.tensors),
            "bytes": plan.nbytes,
        },
        "reshard": _reshard(found),
        "restore": _restore(found.before, found),
        "restore_after": _restore(found.after, found),
        "pays_after_restores": found.pays_after,
        "rates": {"read": _rate(found.rates.read), "write": _rate(found.rates.write)},
        "flow": {
            "source_hosts": [list(span) for span in found.before.flow.writers.ranges()],
            "target_hosts": [list(span) for span in found.before.flow.readers.ranges()],
            "bytes": found.before.flow.nbytes.tolist(),
            "exact": found.before.flow.exact,
        },
        "tensors": sorted((_tensor(found, name) for name in plan.target.tensors), key=lambda t: -t["restore_bytes"]),
        "notices": _notices(plan),
    }


def _reshard(found: Forecast) -> dict[str, Any]:
    plan = found.plan
    chunks = sum(t.num_chunks for t in plan.target.tensors.values())
    read_back = found.written_bytes if found.options.verify else 0
    return {
        "bytes_read": found.read_bytes,
        "bytes_written": found.written_bytes,
        "amplification": round(found.amplification, 4),
        "requests": None if found.reads is None else found.reads.requests,
        "requests_counted_tasks": 0 if found.reads is None else found.reads.counted,
        "files": _files(plan, chunks),
        "chunks": chunks,
        "tasks": len(plan.tasks),
        "workers": plan.memory.workers,
        "peak_memory": plan.memory.peak,
        "memory_limit": found.options.budget,
        "bytes_read_back": read_back,
        "seconds": _seconds(found.rates, found.read_bytes + read_back, found.written_bytes),
    }


def _files(plan: ReshardPlan, chunks: int) -> int:
    """Data files, about: a task's share goes into files of its own."""
    return chunks if plan.layout == "zarr" else sum(-(-task.nbytes // DATA_FILE_BYTES) for task in plan.tasks)


def _restore(what: RestoreForecast, found: Forecast) -> dict[str, Any]:
    reads = what.read
    return {
        "bytes_read": int(reads.sum()),
        "bytes_needed": int(what.needed.sum()),
        "amplification": round(what.amplification, 4),
        "requests": what.requests,
        "requests_counted_hosts": what.requests_counted,
        "largest_host": int(reads.max(initial=0)),
        "mean_host": int(reads.mean()) if len(reads) else 0,
        "bytes_by_host": reads.tolist(),
        "seconds": _seconds(found.rates, int(reads.max(initial=0)), 0),
    }


def _rate(rate: Any) -> dict[str, Any] | None:
    if rate is None:
        return None
    return {"bytes_per_second": round(rate.per_second), "sample_bytes": rate.sample_bytes, "sample_seconds": rate.sample_seconds}


def _seconds(rates: Rates, read: int, written: int) -> float | None:
    """How long it takes to read so many bytes, and then to write so many; None where a rate is not known that is needed."""
    seconds = 0.0
    for rate, nbytes in ((rates.read, read), (rates.write, written)):
        if rate is None and nbytes:
            return None
        seconds += nbytes / rate.per_second if rate is not None else 0.0
    return round(seconds, 3)


def _tensor(found: Forecast, name: str) -> dict[str, Any]:
    source, target, decision = found.plan.sources[name], found.plan.target.tensors[name], found.plan.decisions[name]
    before, after = found.before.tensors[name], found.after.tensors[name]
    return {
        "name": name,
        "shape": list(target.shape),
        "dtype": target.dtype.name,
        "bytes": target.nbytes,
        "source_dtype": source.dtype.name,
        "source_chunk_shape": list(source.pieces[0].chunks),
        "target_chunk_shape": list(target.pieces[0].chunks),
        "source_layout": layout_json(source.layout),
        "target_layout": layout_json(decision.layout),
        "restore_bytes": before.read,
        "restore_amplification": _rounded(before.amplification),
        "restore_after_bytes": after.read,
        "restore_after_amplification": _rounded(after.amplification),
        "rule": decision.rule,
        "why": decision.why,
        "notices": list(decision.notices),
    }


def layout_json(layout: StoredLayout | None) -> dict[str, Any] | None:
    """A layout in few words: its mesh's axes and its spec, or what there is in their place; null for plain."""
    if layout is None:
        return None
    if isinstance(layout, Sharding):
        return {"axes": layout.mesh.axis_sizes, "spec": layout.spec.to_json()}
    if isinstance(layout, Placements):
        return {"axes": layout.mesh.axis_sizes, "placements": list(map(str, layout.placements))}
    return {"op_sharding": layout.to_hlo()[:200]}


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)


def _notices(plan: ReshardPlan) -> list[dict[str, Any]]:
    """What people should know, each once, with the number of tensors that it is about and the first of them."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for name, decision in plan.decisions.items():
        for notice in decision.notices:
            counts[notice] += 1
            first.setdefault(notice, name)
    return [{"notice": notice, "tensors": n, "first": first[notice]} for notice, n in counts.most_common()]
