"""The JSON document of a forecast, for programs; docs/json.md describes its keys.

The terminal and the page show this document's numbers, rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.writing.packed import DATA_FILE_BYTES

if TYPE_CHECKING:
    from shardckpt.format.structure import StoredLayout
    from shardckpt.reshard.forecast.forecast import Forecast
    from shardckpt.reshard.forecast.rates import Rate, Rates
    from shardckpt.reshard.forecast.restore import RestoreForecast
    from shardckpt.reshard.plan import ReshardPlan


def document(found: Forecast) -> dict[str, Any]:
    """All numbers of a forecast."""
    plan, record = found.plan, found.plan.source
    meshes = {d.layout.mesh: None for d in plan.decisions.values() if isinstance(d.layout, Sharding | Placements)}
    return {
        "source": {
            "url": found.url,
            "attempt": record.attempt,
            "format": "shardckpt" if found.native else record.writer,
            "hosts": len(record.hosts),
            "processes": record.processes,
            "layout": record.layout,
            "compression": record.compression,
            "tensors": record.totals.get("tensors", len(record.structure.tensors)),
            "bytes": record.totals["bytes"],
            "stored_bytes": record.totals["stored_bytes"],
        },
        "target": {
            "url": found.destination,
            "replaces": found.replaces,
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
        "conversions": [one.to_json() for one in plan.conversions],
        "notices": plan.notices,
    }


def _reshard(found: Forecast) -> dict[str, Any]:
    plan = found.plan
    chunks = sum(t.num_chunks for t in plan.target.tensors.values())
    read_back = (found.stored_bytes if found.reuse else found.written_bytes) if found.options.verify else 0
    return {
        "bytes_read": found.read_bytes,
        "bytes_written": found.written_bytes,
        "amplification": round(found.amplification, 4),
        "requests": None if found.reads is None else found.reads.requests,
        "requests_counted_tasks": 0 if found.reads is None else found.reads.counted,
        "files": _files(plan, chunks),
        "chunks": chunks,
        "taken_over": found.reuse,
        "tasks": len(plan.tasks),
        "workers": plan.memory.workers,
        "peak_memory": plan.memory.peak,
        "memory_limit": found.options.budget,
        "bytes_read_back": read_back,
        "seconds": _seconds(found.rates, found.read_bytes + read_back, found.written_bytes),
    }


def _files(plan: ReshardPlan, chunks: int) -> int:
    """Approximate number of data files: each task writes its own files."""
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


def _rate(rate: Rate | None) -> dict[str, Any] | None:
    if rate is None:
        return None
    return {"bytes_per_second": round(rate.per_second), "sample_bytes": rate.sample_bytes, "sample_seconds": rate.sample_seconds}


def _seconds(rates: Rates, read: int, written: int) -> float | None:
    """Seconds for reading and then writing so many bytes; None if a required rate is unknown."""
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
    """A short JSON form of a layout: its mesh's axes and its spec, or the equivalent of other layouts; null for plain tensors."""
    if layout is None:
        return None
    if isinstance(layout, Sharding):
        return {"axes": layout.mesh.axis_sizes, "spec": layout.spec.to_json()}
    if isinstance(layout, Placements):
        return {"axes": layout.mesh.axis_sizes, "placements": list(map(str, layout.placements))}
    return {"op_sharding": layout.to_hlo()[:200]}


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)
