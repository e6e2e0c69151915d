"""What do we mean to reach? Each target is a ratio of two rates of one run, or of two of ours, on tmpfs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.bench.floors import MEMCPY, READ, WRITE
from tools.bench.ratios import OURS, ratios

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TARGETS", "Held", "Target", "held"]


@dataclass(frozen=True, slots=True)
class Target:
    """One of them."""

    what: str
    """What is done, in words."""
    state: str
    group: str
    """How the group's name begins."""
    operation: str
    other: str
    """The floor or peer; or, with `than`, what we are compared with in words."""
    least: float
    """Our rate over theirs."""
    than: str | None = None
    """Another operation of ours, whose rate is what we compare with."""


@dataclass(frozen=True, slots=True)
class Held:
    """What became of a target."""

    target: Target
    ratio: float

    @property
    def met(self) -> bool:
        """Whether that is enough."""
        return self.ratio >= self.target.least

    @property
    def verdict(self) -> str:
        """Whether, and if not by how much it was missed."""
        return "yes" if self.met else f"**no**, missed by {1 - self.ratio / self.target.least:.1%}"

    @property
    def bound(self) -> str:
        """What was to be reached, as a ratio of rates."""
        return f"≥ {self.target.least:.2g} × {self.target.other}"


DCP, DCP_BEST, ORBAX, PLACING = "DCP", "DCP, at its best", "Orbax", "placing ready host shards"
TORCH, DTENSOR, JAX, XLA = "torch tensors", "DTensors", "jax", "torch_xla"
SAME = "the same mesh"
LLAMA, SMALL = "llama", "small"
TARGETS = (
    Target("save, torch", LLAMA, TORCH, "save", DCP_BEST, 1.0),
    Target("save, torch", LLAMA, TORCH, "save", WRITE, 0.9),
    Target("save, JAX", LLAMA, JAX, "save", ORBAX, 2.0),
    Target("restore, torch", LLAMA, TORCH, "restore", DCP, 3.0),
    Target("restore, torch", LLAMA, TORCH, "restore", READ, 0.5),
    Target("restore, JAX", LLAMA, JAX, "restore", ORBAX, 1.5),
    Target("restore, torch_xla", LLAMA, XLA, "restore", PLACING, 0.7),
    Target("restore onto another mesh, DTensor", LLAMA, DTENSOR, "other", SAME, 0.8, than="restore"),
    Target("restore onto another mesh, JAX", LLAMA, JAX, "other", SAME, 0.8, than="restore"),
    Target("restore onto another mesh, torch_xla", LLAMA, XLA, "other", SAME, 0.8, than="restore"),
    Target("an eighth of the columns, JAX", LLAMA, JAX, "columns", ORBAX, 4.0),
    Target("save 2,000 small tensors, torch", SMALL, TORCH, "save", DCP_BEST, 1.0),
    Target("restore 2,000 small tensors, torch", SMALL, TORCH, "restore", DCP, 1.0),
    Target("save 2,000 small tensors, JAX", SMALL, JAX, "save", ORBAX, 2.0),
    Target("restore 2,000 small tensors, JAX", SMALL, JAX, "restore", ORBAX, 2.0),
    Target("stall of a save in the background, torch", LLAMA, TORCH, "stall", MEMCPY, 1 / 1.2),
    Target("stall of a save in the background, DTensor", LLAMA, DTENSOR, "stall", MEMCPY, 1 / 1.2),
    Target("stall of a save in the background, JAX", LLAMA, JAX, "stall", MEMCPY, 1 / 1.2),
    Target("stall of a save in the background, torch_xla", LLAMA, XLA, "stall", MEMCPY, 1 / 1.2),
    Target("export to one file, torch", LLAMA, TORCH, "export", WRITE, 0.8),
)


def held(found: dict[str, Any]) -> Iterator[Held]:
    """What became of each target whose operation was measured."""
    known = ratios(found)
    ours = {(r["group"], r["operation"], r["state"]): r for r in found["results"] if (r["subject"], r["storage"]) == (OURS, "tmpfs")}
    for target in TARGETS:
        for group in dict.fromkeys(group for group, _, _ in ours if group.startswith(target.group)):
            if target.than is None:
                ratio = known.get(("tmpfs", target.state, group, target.operation, target.other))
                if ratio is not None:
                    yield Held(target, ratio.value)
            else:
                own, than = ours.get((group, target.operation, target.state)), ours.get((group, target.than, target.state))
                if own is not None and than is not None:
                    yield Held(target, than["median"] / own["median"])
