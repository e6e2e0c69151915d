"""What do we mean to reach? Each target is a ratio of two rates of one run, or of two of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.bench.floors import MEMCPY, READ, WRITE

__all__ = ["TARGETS", "Target", "held"]


@dataclass(frozen=True, slots=True)
class Target:
    """One of them, on tmpfs."""

    what: str
    state: str
    group: str
    """How the group's name begins."""
    operation: str
    other: str
    """The floor or peer; or, with `than`, nobody."""
    least: float
    """Our rate over theirs."""
    than: str | None = None
    """Another operation of ours to compare with."""


DCP, ORBAX, ORBAX_BEST = "DCP", "Orbax", "Orbax, at its best"
TARGETS = (
    Target("save ≥ 1.0 × DCP at its best", "llama", "torch ", "save", f"{DCP}, at its best", 1.0),
    Target("save ≥ 2 × Orbax", "llama", "jax", "save", ORBAX, 2.0),
    Target("save ≥ 0.9 × write(2)", "llama", "torch ", "save", WRITE, 0.9),
    Target("restore ≥ 3 × DCP", "llama", "torch ", "restore", DCP, 3.0),
    Target("restore ≥ 1.5 × Orbax", "llama", "jax", "restore", ORBAX, 1.5),
    Target("restore ≥ 0.5 × readv(2)", "llama", "torch ", "restore", READ, 0.5),
    Target("another mesh ≥ 0.8 × the same mesh, DTensor", "llama", "DTensors", "other", "", 0.8, than="restore"),
    Target("another mesh ≥ 0.8 × the same mesh, JAX", "llama", "jax", "other", "", 0.8, than="restore"),
    Target("another mesh ≥ 0.8 × the same mesh, torch_xla", "llama", "torch_xla", "other", "", 0.8, than="restore"),
    Target("an eighth of the columns ≥ 4 × Orbax", "llama", "jax", "columns", ORBAX, 4.0),
    Target("2,000 small tensors: save ≥ 2 × Orbax", "small", "jax", "save", ORBAX, 2.0),
    Target("2,000 small tensors: restore ≥ 2 × Orbax", "small", "jax", "restore", ORBAX, 2.0),
    Target("2,000 small tensors: save ≥ 1.0 × DCP at its best", "small", "torch ", "save", f"{DCP}, at its best", 1.0),
    Target("2,000 small tensors: restore ≥ 1.0 × DCP", "small", "torch ", "restore", DCP, 1.0),
    Target("stall ≤ 1.2 × memcpy, torch", "llama", "torch ", "stall", MEMCPY, 1 / 1.2),
    Target("stall ≤ 1.2 × memcpy, DTensor", "llama", "DTensors", "stall", MEMCPY, 1 / 1.2),
    Target("stall ≤ 1.2 × memcpy, JAX", "llama", "jax", "stall", MEMCPY, 1 / 1.2),
    Target("stall ≤ 1.2 × memcpy, torch_xla", "llama", "torch_xla", "stall", MEMCPY, 1 / 1.2),
    Target("torch_xla restore ≥ 0.7 × placing ready host shards", "llama", "torch_xla", "restore", "placing ready host shards", 0.7),
    Target("export ≥ 0.8 × write(2)", "llama", "torch ", "export", WRITE, 0.8),
)


def held(target: Target, found: dict[str, Any], ratios: dict[tuple[str, ...], float]) -> tuple[str, bool] | None:
    """What was measured, and whether that is enough; None: it was not measured."""
    groups = {r["group"] for r in found["results"] if r["group"].startswith(target.group)}
    for group in groups:
        if target.than is None:
            ratio = ratios.get(("tmpfs", target.state, group, target.operation, target.other))
        else:
            seconds = {
                r["operation"]: r["median"]
                for r in found["results"]
                if (r["storage"], r["state"], r["group"], r["subject"]) == ("tmpfs", target.state, group, "shardckpt")
            }
            able = target.operation in seconds and target.than in seconds
            ratio = seconds[target.than] / seconds[target.operation] if able else None
        if ratio is not None:
            return (f"{1 / ratio:.2f}" if "≤" in target.what else f"{ratio:.2f}"), ratio >= target.least
    return None
