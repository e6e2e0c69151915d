"""A partition spec: the mesh axes that cut each dimension of a tensor.

The vocabulary is torch_xla's and JAX's. One entry per tensor dimension, major first: None (not
cut), an axis by name or by its index in the mesh, or a tuple of axes that cut the dimension
together, first axis outermost. Dimensions beyond the last entry are not cut. Axes that appear
nowhere hold replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardckpt.errors import FormatError, ShardingError
from shardckpt.layout.mesh import MAX_AXES, Mesh
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

Axis: TypeAlias = str | int
"""A mesh axis, by name or by index."""

SpecPart: TypeAlias = Axis | tuple[Axis, ...] | None
"""The mesh axes that cut one dimension."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class PartitionSpec:
    """The mesh axes that cut each dimension of a tensor, in the notation of torch_xla and JAX.

    There is one entry per tensor dimension:

    - None: the dimension is not cut.
    - An axis, by its name or by its index in the mesh: the axis cuts the dimension.
    - A tuple of axes: all of them cut the dimension, the first axis outermost. `("x",)` is stored
      as "x" and `()` as None.

    Dimensions after the last entry are not cut. The tensor is replicated along all axes that no
    entry names.

    Raises:
        ShardingError: An entry has another type, tuples are nested, or an axis appears twice.

    Examples:
        >>> PartitionSpec("data", None, ("fsdp", "tensor"))
        PartitionSpec('data', None, ('fsdp', 'tensor'))
        >>> PartitionSpec(("data",), ()) == PartitionSpec("data", None)
        True
    """

    parts: tuple[SpecPart, ...]
    """The entries."""

    def __init__(self, *parts: SpecPart) -> None:
        checked = tuple(_checked_part(part, d) for d, part in enumerate(parts))
        if len(checked) > MAX_AXES:
            raise ShardingError(
                f"PartitionSpec: {len(checked)} entries; a tensor has at most {MAX_AXES} "
                "dimensions."
            )
        object.__setattr__(self, "parts", checked)
        _refuse_repeats(self)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[SpecPart]:
        return iter(self.parts)

    def __getitem__(self, d: int) -> SpecPart:
        return self.parts[d]

    def __repr__(self) -> str:
        return f"PartitionSpec({', '.join(map(repr, self.parts))})"

    @property
    def axes(self) -> tuple[tuple[Axis, ...], ...]:
        """The entries as tuples of axes; None becomes `()`."""
        return tuple(
            () if part is None else part if isinstance(part, tuple) else (part,)
            for part in self.parts
        )

    def named(self, mesh: Mesh) -> PartitionSpec:
        """The same spec, with axis indices replaced by the axis names of `mesh`.

        Raises:
            ShardingError: The mesh lacks an axis, or an index and a name stand for the same axis.
        """
        return PartitionSpec(
            *(tuple(_axis_name(axis, mesh, self) for axis in axes) for axes in self.axes)
        )

    def to_json(self) -> list[object]:
        """The JSON form: a list with one entry per dimension.

        An entry is null, a name, an index, or a list of names and indices.
        """
        return [list(part) if isinstance(part, tuple) else part for part in self.parts]

    @classmethod
    def from_json(cls, doc: object) -> PartitionSpec:
        """Parse the output of `to_json`.

        Raises:
            FormatError: The document is invalid.
        """
        if not isinstance(doc, list) or len(doc) > MAX_AXES:
            raise FormatError(
                f"partition spec: expected a list of at most {MAX_AXES} entries, found "
                f"{type(doc).__name__}."
            )
        try:
            return cls(
                *(tuple(part[: MAX_AXES + 1]) if isinstance(part, list) else part for part in doc)
            )
        except ShardingError as error:
            raise FormatError(str(error)) from error


def _checked_part(part: object, d: int) -> SpecPart:
    if part is None:
        return None
    if not isinstance(part, tuple):
        return _checked_axis(part, d)
    if len(part) > MAX_AXES:
        raise ShardingError(
            f"PartitionSpec: entry {d} has {len(part)} axes; a mesh has at most {MAX_AXES}."
        )
    axes = tuple(_checked_axis(axis, d) for axis in part)
    return axes if len(axes) > 1 else axes[0] if axes else None


def _checked_axis(axis: object, d: int) -> Axis:
    if isinstance(axis, str) and axis:
        return axis
    if isinstance(axis, int | np.integer) and not isinstance(axis, bool) and axis >= 0:
        return int(axis)
    if isinstance(axis, tuple | list):
        raise ShardingError(
            f"PartitionSpec: entry {d} holds {shorten(axis)} inside a tuple; tuples cannot be "
            "nested, write one flat tuple."
        )
    raise ShardingError(
        f"PartitionSpec: entry {d} holds {shorten(axis)}; expected None, an axis name, an axis "
        "index from 0, or a tuple of those."
    )


def _refuse_repeats(spec: PartitionSpec) -> None:
    seen: set[Axis] = set()
    for axes in spec.axes:
        for axis in axes:
            if axis in seen:
                raise ShardingError(
                    f"{shorten(spec)}: axis {shorten(axis)} appears more than once; an axis can "
                    "cut one dimension, once."
                )
            seen.add(axis)


def _axis_name(axis: Axis, mesh: Mesh, spec: PartitionSpec) -> str:
    if isinstance(axis, str):
        if axis in mesh.axis_names:
            return axis
    elif axis < mesh.ndim:
        return mesh.axis_names[axis]
    raise ShardingError(
        f"{shorten(spec)}: the mesh has no axis {shorten(axis)}; its axes are "
        f"{', '.join(map(shorten, mesh.axis_names)) or 'none'}."
    )
