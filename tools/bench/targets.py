"""Targets: ratios of two rates of one run, or of two of ours, and own processor time per byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.bench.measure import GETS, MEMCPY, PUTS, READ, WRITE
from tools.bench.ratios import OURS, ratios

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TARGETS", "Held", "Target", "held"]


@dataclass(frozen=True, slots=True)
class Target:
    """One of them."""

    what: str
    """The operation and its data, in words."""
    state: str
    group: str
    """Beginning of the group's name."""
    operation: str
    other: str = ""
    """The peer, or how the floor's name begins; or, with `than`, what we are compared with in
    words."""
    least: float = 0.0
    """Our rate over theirs."""
    than: str | None = None
    """Another operation of ours, whose rate is what we compare with."""
    storage: str = "tmpfs"
    most_cpu: float | None = None
    """Seconds of own processor time per GB, which are then what is compared."""


@dataclass(frozen=True, slots=True)
class Held:
    """A target, and the value that was measured for it."""

    target: Target
    value: float
    """The ratio, or the seconds per GB."""

    @property
    def met(self) -> bool:
        """Whether that is enough."""
        most = self.target.most_cpu
        return self.value >= self.target.least if most is None else self.value <= most

    @property
    def verdict(self) -> str:
        """Whether, and if not the difference from the bound."""
        return (
            "yes"
            if self.met
            else (
                f"**no** ({self.value / (self.target.most_cpu or self.target.least) - 1:+.1%})"
            ).replace("-", "−")
        )

    @property
    def bound(self) -> str:
        """The least ratio, or the most processor time."""
        most = self.target.most_cpu
        return (
            f"≥ {self.target.least:.2g} × {self.target.other}"
            if most is None
            else f"≤ {most:.2f} CPU s/GB"
        )

    @property
    def shown(self) -> str:
        """The value, in as many digits as tell it from a bound that it misses."""
        rounded = f"{self.value:.2f}"
        return (
            f"{self.value:.3f}"
            if not self.met and float(rounded) == (self.target.most_cpu or self.target.least)
            else rounded
        )


DCP, DCP_BEST, ORBAX, ORBAX_BEST = "DCP", "DCP, at its best", "Orbax", "Orbax, at its best"
PLACING = "host shards to devices"
TORCH, DTENSOR, JAX, XLA = "torch tensors", "DTensors", "jax", "torch_xla"
SAME = "the same mesh"
LLAMA, SMALL, TEN, FLAT, MATRICES = "llama", "small", "ten", "flat", "matrices"
GS = "gs"
TARGETS = (
    Target("save, torch", LLAMA, TORCH, "save", DCP_BEST, 1.0),
    Target("save, torch", LLAMA, TORCH, "save", WRITE, 0.6),
    Target("save 1-D tensors, torch", FLAT, TORCH, "save", WRITE, 0.7),
    Target("save, DTensor", LLAMA, DTENSOR, "save", WRITE, 0.6),
    Target("save, JAX", LLAMA, JAX, "save", ORBAX, 2.0),
    Target("restore, torch", LLAMA, TORCH, "restore", DCP, 3.0),
    Target("restore, torch", LLAMA, TORCH, "restore", READ, 0.75),
    Target("restore 1-D tensors, torch", FLAT, TORCH, "restore", READ, 0.75),
    Target("restore, DTensor", LLAMA, DTENSOR, "restore", READ, 0.7),
    Target("restore, JAX", LLAMA, JAX, "restore", ORBAX, 1.5),
    Target("restore, torch_xla", LLAMA, XLA, "restore", PLACING, 0.7),
    Target(
        "restore onto another mesh, DTensor", LLAMA, DTENSOR, "other", SAME, 0.8, than="restore"
    ),
    Target("restore onto another mesh, JAX", LLAMA, JAX, "other", SAME, 0.8, than="restore"),
    Target("restore onto another mesh, torch_xla", LLAMA, XLA, "other", SAME, 0.8, than="restore"),
    Target("read an eighth of the columns, JAX", LLAMA, JAX, "columns", ORBAX, 4.0),
    Target("save 2,000 small tensors, torch", SMALL, TORCH, "save", DCP_BEST, 1.0),
    Target("restore 2,000 small tensors, torch", SMALL, TORCH, "restore", DCP, 1.0),
    Target("save 10 small tensors, torch", TEN, TORCH, "save", DCP, 1.0),
    Target("restore 10 small tensors, torch", TEN, TORCH, "restore", DCP, 1.0),
    Target("save 2,000 small tensors, JAX", SMALL, JAX, "save", ORBAX, 2.0),
    Target("restore 2,000 small tensors, JAX", SMALL, JAX, "restore", ORBAX, 2.0),
    Target("stall of save_async, torch", LLAMA, TORCH, "stall", MEMCPY, 1 / 1.2),
    Target("stall of save_async, DTensor", LLAMA, DTENSOR, "stall", MEMCPY, 1 / 1.2),
    Target("stall of save_async, JAX", LLAMA, JAX, "stall", MEMCPY, 1 / 1.2),
    Target("stall of save_async, torch_xla", LLAMA, XLA, "stall", MEMCPY, 1 / 1.2),
    Target("export to one file, torch", LLAMA, TORCH, "export", WRITE, 0.8),
    Target("save 1-D tensors to a bucket, torch", FLAT, TORCH, "save", PUTS, 0.85, storage=GS),
    Target("save 1-D tensors to a bucket, torch", FLAT, TORCH, "save", most_cpu=0.45, storage=GS),
    Target("save matrices to a bucket, torch", MATRICES, TORCH, "save", PUTS, 0.85, storage=GS),
    Target("save matrices to a bucket, torch", MATRICES, TORCH, "save", most_cpu=0.6, storage=GS),
    Target("save matrices to a bucket, torch", MATRICES, TORCH, "save", DCP, 5.0, storage=GS),
    Target("save matrices to a bucket, JAX", MATRICES, JAX, "save", PUTS, 0.85, storage=GS),
    Target("save matrices to a bucket, JAX", MATRICES, JAX, "save", ORBAX_BEST, 1.5, storage=GS),
    Target(
        "restore 1-D tensors from a bucket, torch", FLAT, TORCH, "restore", GETS, 0.7, storage=GS
    ),
    Target(
        "restore 1-D tensors from a bucket, torch",
        FLAT,
        TORCH,
        "restore",
        most_cpu=0.55,
        storage=GS,
    ),
    Target(
        "restore matrices from a bucket, torch", MATRICES, TORCH, "restore", GETS, 0.7, storage=GS
    ),
    Target(
        "restore matrices from a bucket, torch",
        MATRICES,
        TORCH,
        "restore",
        most_cpu=0.55,
        storage=GS,
    ),
    Target(
        "restore matrices from a bucket, torch", MATRICES, TORCH, "restore", DCP, 3.0, storage=GS
    ),
    Target(
        "restore matrices from a bucket, JAX", MATRICES, JAX, "restore", ORBAX_BEST, 1.5, storage=GS
    ),
)


def held(figures: dict[str, Any]) -> Iterator[Held]:
    """Targets whose operation was measured, with their values.

    Of several floors of a kind, the fastest one counts.
    """
    known: dict[tuple[str, ...], float] = {}
    for key, ratio in ratios(figures).items():
        kind = (*key[:-1], key[-1].partition(",")[0] if ratio.floor else key[-1])
        known[kind] = min(ratio.value, known.get(kind, ratio.value))
    ours = {
        (r["storage"], r["group"], r["operation"], r["state"]): r
        for r in figures["results"]
        if r["subject"] == OURS
    }
    for target in TARGETS:
        for group in dict.fromkeys(
            group
            for storage, group, _, _ in ours
            if storage == target.storage and group.startswith(target.group)
        ):
            own, than = (
                ours.get((target.storage, group, operation, target.state))
                for operation in (target.operation, target.than)
            )
            value = known.get((target.storage, target.state, group, target.operation, target.other))
            if target.most_cpu is not None:
                value = None if own is None else own["cpu_median"] / own["nbytes"] * 1e9
            elif target.than is not None:
                value = None if own is None or than is None else than["median"] / own["median"]
            if value is not None:
                yield Held(target, value)
