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


def document(forecast: Forecast) -> dict[str, Any]:
    """All numbers of a forecast."""
    plan, record = forecast.plan, forecast.plan.source
    meshes = {
        d.layout.mesh: None
        for d in plan.decisions.values()
        if isinstance(d.layout, Sharding | Placements)
    }
    return {
        "source": {
            "url": forecast.url,
            "attempt": record.attempt,
            "format": "shardckpt" if forecast.native else record.writer,
            "hosts": len(record.hosts),
            "processes": record.processes,
            "layout": record.layout,
            "compression": record.compression,
            "tensors": record.totals.get("tensors", len(record.structure.tensors)),
            "bytes": record.totals["bytes"],
            "stored_bytes": record.totals["stored_bytes"],
        },
        "target": {
            "url": forecast.destination,
            "replaces": forecast.replaces,
            "meshes": [mesh.to_json() for mesh in meshes],
            "devices": len(forecast.hosts.owners.device_ids),
            "devices_per_host": forecast.devices_per_host,
            "hosts": forecast.hosts.number,
            "layout": plan.layout,
            "compression": plan.compression,
            "tensors": len(plan.target.tensors),
            "bytes": plan.nbytes,
        },
        "reshard": _reshard(forecast),
        "restore": _restore(forecast.before, forecast),
        "restore_after": _restore(forecast.after, forecast),
        "pays_after_restores": forecast.pays_after,
        "rates": {"read": _rate(forecast.rates.read), "write": _rate(forecast.rates.write)},
        "flow": {
            "source_hosts": [list(span) for span in forecast.before.flow.writers.ranges()],
            "target_hosts": [list(span) for span in forecast.before.flow.readers.ranges()],
            "bytes": forecast.before.flow.nbytes.tolist(),
            "exact": forecast.before.flow.exact,
        },
        "tensors": sorted(
            (_tensor(forecast, name) for name in plan.target.tensors),
            key=lambda t: -t["restore_bytes"],
        ),
        "conversions": [one.to_json() for one in plan.conversions],
        "notices": plan.notices,
    }


def _reshard(forecast: Forecast) -> dict[str, Any]:
    plan = forecast.plan
    chunks = sum(t.num_chunks for t in plan.target.tensors.values())
    read_back = (
        (forecast.stored_bytes if forecast.reuse else forecast.written_bytes)
        if forecast.options.verify
        else 0
    )
    return {
        "bytes_read": forecast.read_bytes,
        "bytes_written": forecast.written_bytes,
        "amplification": round(forecast.amplification, 4),
        "requests": None if forecast.reads is None else forecast.reads.requests,
        "requests_counted_tasks": 0 if forecast.reads is None else forecast.reads.counted,
        "files": _files(plan, chunks),
        "chunks": chunks,
        "taken_over": forecast.reuse,
        "tasks": len(plan.tasks),
        "workers": plan.memory.workers,
        "peak_memory": plan.memory.peak,
        "memory_limit": forecast.options.budget,
        "bytes_read_back": read_back,
        "seconds": _seconds(
            forecast.rates, forecast.read_bytes + read_back, forecast.written_bytes
        ),
    }


def _files(plan: ReshardPlan, chunks: int) -> int:
    """Approximate number of data files: each task writes its own files."""
    return (
        chunks
        if plan.layout == "zarr"
        else sum(-(-task.nbytes // DATA_FILE_BYTES) for task in plan.tasks)
    )


def _restore(what: RestoreForecast, forecast: Forecast) -> dict[str, Any]:
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
        "seconds": _seconds(forecast.rates, int(reads.max(initial=0)), 0),
    }


def _rate(rate: Rate | None) -> dict[str, Any] | None:
    if rate is None:
        return None
    return {
        "bytes_per_second": round(rate.per_second),
        "sample_bytes": rate.sample_bytes,
        "sample_seconds": rate.sample_seconds,
    }


def _seconds(rates: Rates, read: int, written: int) -> float | None:
    """Seconds for reading and then writing so many bytes; None if a required rate is unknown."""
    seconds = 0.0
    for rate, nbytes in ((rates.read, read), (rates.write, written)):
        if rate is None and nbytes:
            return None
        seconds += nbytes / rate.per_second if rate is not None else 0.0
    return round(seconds, 3)


def _tensor(forecast: Forecast, name: str) -> dict[str, Any]:
    source, target, decision = (
        forecast.plan.sources[name],
        forecast.plan.target.tensors[name],
        forecast.plan.decisions[name],
    )
    before, after = forecast.before.tensors[name], forecast.after.tensors[name]
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
        "restore_amplification": _round(before.amplification),
        "restore_after_bytes": after.read,
        "restore_after_amplification": _round(after.amplification),
        "rule": decision.rule,
        "why": decision.why,
        "notices": list(decision.notices),
    }


def layout_json(layout: StoredLayout | None) -> dict[str, Any] | None:
    """A short JSON form of a layout; null for plain tensors.

    It has the mesh's axes and the layout's spec, or the equivalent of other layouts.
    """
    if layout is None:
        return None
    if isinstance(layout, Sharding):
        return {"axes": layout.mesh.axis_sizes, "spec": layout.spec.to_json()}
    if isinstance(layout, Placements):
        return {"axes": layout.mesh.axis_sizes, "placements": list(map(str, layout.placements))}
    return {"op_sharding": layout.to_hlo()[:200]}


def _round(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)
