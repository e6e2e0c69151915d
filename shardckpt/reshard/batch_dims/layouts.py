"""Layouts of a tensor over the processes of a data-parallel program.

Each of k equal parts of the batch goes through the same program. The part of a tensor in one
process is related to the tensor of the complete batch in one of a few forms:

- `Replicate`: all parts equal the tensor.
- `Shard`: the parts, concatenated along a dimension, form the tensor. If that dimension results
  from merging others, the batch may be inside it: the dimension is (outer, batch, inner) in
  row-major order.
- `Partial`: the parts, reduced element by element, form the tensor.
- `Numbered`: the numbers of the samples, which every process counts from 0. They select each
  sample's own row.
- `Unknown`: none of these, or the form cannot be determined. It has a reason, and the node where it
  began.

Each may be off by a power of the batch size: a program that divides a sum by its number of samples
divides by k times less in each process. The mean of the parts' means is so a sum with the power -1
(a `Partial` of "mean").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same in every process.

    >>> str(Replicate()), str(Replicate(1))
    ('Replicate', 'Replicate × B')
    """

    power: int = 0
    """The tensor is the part times k to this power."""

    def __str__(self) -> str:
        return f"Replicate{_scale_text(self.power)}"


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut along a dimension: each process has its samples.

    >>> str(Shard(0)), str(Shard(0, outer=4))
    ('Shard(0)', 'Shard(0, outer=4)')
    """

    dim: int
    """The dimension, from 0."""
    outer: int = 1
    """Elements of that dimension outside of the batch: each process has this many runs of it,
    evenly spaced."""
    power: int = 0
    """The tensor is the parts put together, times k to this power."""

    def __str__(self) -> str:
        outer = f", outer={self.outer}" if self.outer > 1 else ""
        return f"Shard({self.dim}{outer}){_scale_text(self.power)}"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each process has one term of the reduction.

    >>> str(Partial("sum")), str(Partial("sum", -1)), str(Partial("max"))
    ('Partial(sum)', 'Partial(mean)', 'Partial(max)')
    """

    reduction: str
    """sum, max or min."""
    power: int = 0
    """The tensor is the parts reduced, times k to this power; -1 makes a sum the mean."""

    @property
    def op(self) -> str:
        """Reduction of the parts: sum, mean, max or min."""
        return "mean" if (self.reduction, self.power) == ("sum", -1) else self.reduction

    def __str__(self) -> str:
        return f"Partial({self.op}){_scale_text(0 if self.op == 'mean' else self.power)}"


@dataclass(frozen=True, slots=True)
class Numbered:
    """Each sample's number, counted from 0 in every process: `arange(batch)`, perhaps reshaped.

    >>> str(Numbered(0))
    'Numbered(0)'
    """

    dim: int
    """The dimension that has the samples."""
    outer: int = 1
    """Elements of that dimension outside of the batch, as for `Shard`."""

    def __str__(self) -> str:
        return str(Shard(self.dim, self.outer)).replace("Shard", "Numbered")


@dataclass(frozen=True, slots=True)
class Unknown:
    """The layout cannot be determined.

    >>> str(Unknown("an operation without a rule", "sort_1"))
    'Unknown: sort_1: an operation without a rule'
    """

    reason: str
    """Reason."""
    node: str = ""
    """Node of the graph where the uncertainty began."""

    def __str__(self) -> str:
        return f"Unknown: {self.node}: {self.reason}" if self.node else f"Unknown: {self.reason}"


Layout: TypeAlias = Replicate | Shard | Partial | Numbered | Unknown
"""Relation between the parts of a tensor and the tensor."""


def _scale_text(power: int) -> str:
    if not power:
        return ""
    return " × B" if power == 1 else f" × B^{power}"
