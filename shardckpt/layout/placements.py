"""The boxes of a tensor that every rank holds under DTensor's placements.

A placement describes the effect of one mesh dimension on the tensor: it holds replicas, or shards
of a tensor dimension.

1. Placements become splits: per tensor dimension, in order, outermost first. Shards split in the
   order of the mesh. A strided shard, `_S(d,f)`, means that later mesh dimensions have already
   split d into f parts: its split is placed inside theirs. FSDP2 over tensor parallelism does that.
   If later dimensions make fewer parts than f, the missing factor is a split of which every rank
   holds all parts: several boxes per rank.
2. Each split cuts its input as `torch.chunk` does, into parts of ceil(length / parts), the last
   ones short or empty. Nested splits round up repeatedly where a `Sharding` rounds once: 10 rows
   over 4 and then 2 begin at 0, 2, 3, 5, 6, 8, 9; over 8 at 0, 2, 4, 6, 8.
3. A mesh dimension splits one tensor dimension only, so all boxes together are the cells of a grid.
4. If the boxes are those of a `Sharding`, the tensor's layout should be recorded as that `Sharding`
   (`as_sharding`), which every framework understands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import FormatError, ShardingError
from shardckpt.layout.box import BoxArray
from shardckpt.layout.device_boxes import checked_tensor_shape
from shardckpt.layout.mesh import MAX_AXES, MAX_DEVICES, Mesh, referred_mesh
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.splits import (
    DimSplit,
    cuts,
    cuts_once,
    grid_boxes,
    intervals,
    without_empty,
    without_idle,
)
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Index = NDArray[np.int64]

MOST_BOXES = MAX_DEVICES
"""Maximum boxes of one tensor over all ranks; bounds the memory spent on a foreign checkpoint."""

_TEXT = re.compile(r"R|S\((\d{1,2})\)|_S\((\d{1,2}),(\d{1,7})\)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Placement:
    """The effect of one mesh dimension on a tensor.

    Raises:
        ShardingError: the fields are not a DTensor placement.

    >>> Placement.parse("_S(0,2)")
    Placement(dim=0, split_factor=2)
    >>> str(Placement())
    'R'
    """

    dim: int | None = None
    """The tensor dimension that the mesh dimension shards; None: it holds replicas."""
    split_factor: int = 1
    """Number of parts into which later mesh dimensions have already split the tensor dimension; 1
    for a plain shard."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if self.dim is None and self.split_factor == 1:
            return
        if type(self.dim) is not int or not 0 <= self.dim < MAX_AXES:
            raise ShardingError(
                f"Placement: the tensor dimension must be a number from 0 to {MAX_AXES - 1}, "
                f"found {shorten(self.dim)}."
            )
        if type(self.split_factor) is not int or not 1 <= self.split_factor <= MAX_DEVICES:
            raise ShardingError(
                f"Placement: the split factor must be from 1 to {MAX_DEVICES}, found "
                f"{shorten(self.split_factor)}."
            )

    @classmethod
    def parse(cls, text: object) -> Placement:
        """Parse the output of `str`.

        Raises:
            ShardingError: the text is not a placement.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ShardingError(
                "Placement: expected 'R', 'S(0)' or '_S(0,2)', with the tensor dimension first, "
                f"found {shorten(text)}."
            )
        plain, strided, factor = match.groups()
        return cls(int(strided), int(factor)) if strided else cls(int(plain)) if plain else cls()

    def __str__(self) -> str:
        """DTensor's own notation, without its spaces."""
        if self.dim is None:
            return "R"
        return f"S({self.dim})" if self.split_factor == 1 else f"_S({self.dim},{self.split_factor})"


@dataclass(frozen=True, slots=True)
class Placements:
    """A tensor laid out over a mesh of ranks by one placement per mesh dimension.

    Raises:
        ShardingError: the number of placements differs from the mesh dimensions, or a split factor
            does not fit the later dimensions.

    >>> tp_then_fsdp = Placements.of(Mesh((2, 2), ("dp", "tp")), ["_S(0,2)", "S(0)"])
    >>> tp_then_fsdp.rank_boxes((5, 3), 1)[0]
    Box(start=(3, 0), stop=(4, 3))
    >>> tp_then_fsdp.as_sharding((8, 3)).spec
    PartitionSpec(('tp', 'dp'), None)
    """

    mesh: Mesh
    """The ranks."""
    placements: tuple[Placement, ...]
    """One per mesh dimension."""
    _splits: tuple[tuple[DimSplit, ...], ...] = field(init=False, repr=False, compare=False)
    """Splits per tensor dimension, up to the last one that is sharded."""

    def __post_init__(self) -> None:
        """Order the splits of every tensor dimension."""
        if len(self.placements) != self.mesh.ndim:
            raise ShardingError(
                f"Placements: {len(self.placements)} placements for a mesh of {self.mesh.ndim} "
                "dimensions; give one for each."
            )
        splits = _order_splits(self)
        every = [split for of_dimension in splits for split in of_dimension]
        of_each_rank = prod(split.parts for split in every if split.axis is None)
        cells = prod(split.parts for split in every)
        if max(cells, self.mesh.size * of_each_rank) > MOST_BOXES:
            raise ShardingError(f"{self.text}: a tensor would be in more than {MOST_BOXES} boxes.")
        object.__setattr__(self, "_splits", splits)

    @classmethod
    def of(cls, mesh: Mesh, texts: Sequence[object]) -> Placements:
        """Parse placements in the format of `str`.

        Raises:
            ShardingError: a text is not a placement.
        """
        return cls(mesh, tuple(map(Placement.parse, texts)))

    @property
    def text(self) -> str:
        """Text for people: `_S(0,2) over dp=2, S(0) over tp=4`, shortened if it is very long."""
        sizes = self.mesh.axis_sizes.items()
        texts = [
            f"{placement} over {name}={size}"
            for placement, (name, size) in zip(self.placements, sizes, strict=True)
        ]
        return clip(", ".join(texts) or "R", 200)

    @property
    def num_devices(self) -> int:
        """Number of ranks of the mesh."""
        return self.mesh.size

    def parts(self, ndim: int) -> tuple[int, ...]:
        """Cells per dimension of a tensor with `ndim` dimensions, including empty ones.

        Raises:
            ShardingError: a placement shards a dimension beyond those.
        """
        return tuple(prod(split.parts for split in splits) for splits in self._splits_of(ndim))

    def cuts(self, shape: Sequence[int]) -> tuple[Index, ...]:
        """Cuts of each dimension: ascending, from 0 to its length.

        The cells between them are all boxes of all ranks.

        Raises:
            ShardingError: the placements do not determine where the elements of such a tensor are.

        >>> placements = Placements.of(Mesh((4, 2), None), ["S(0)", "S(0)"])
        >>> [cuts.tolist() for cuts in placements.cuts((10, 3))]
        [[0, 2, 3, 5, 6, 8, 9, 10], [0, 3]]
        """
        return tuple(cuts(length, splits) for length, splits in self._dimensions(shape))

    def boxes(self, shape: Sequence[int]) -> tuple[Index, BoxArray]:
        """The non-empty boxes of every rank.

        Returns:
            (m,) ranks in the order of the mesh, each repeated once per box, and the m boxes.

        Raises:
            ShardingError: as for `cuts`.
        """
        ranks = self.mesh.size
        spans = self._spans(shape, np.arange(ranks))
        boxes = grid_boxes(ranks, *spans)
        kept = boxes.sizes() > 0
        return np.repeat(self.mesh.device_ids, len(boxes) // ranks)[kept], BoxArray(
            boxes.start[kept], boxes.stop[kept]
        )

    def rank_boxes(self, shape: Sequence[int], rank: int) -> BoxArray:
        """The non-empty boxes of one rank, in row-major order.

        None if the mesh does not have the rank.

        Raises:
            ShardingError: as for `cuts`.
        """
        row = _row(self.mesh, rank)
        return without_empty(grid_boxes(len(row), *self._spans(shape, row)))

    def local_boxes(self, shape: Sequence[int], rank: int) -> BoxArray:
        """The position of each of `rank_boxes` in the rank's local tensor.

        The boxes fill the local tensor without gaps.

        Raises:
            ShardingError: as for `cuts`.
        """
        row = _row(self.mesh, rank)
        _, sizes = self._spans(shape, row)
        return without_empty(
            grid_boxes(len(row), [np.cumsum(size, axis=1) - size for size in sizes], sizes)
        )

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...] | None:
        """The shape of a rank's local tensor; None if the mesh does not have the rank.

        Raises:
            ShardingError: as for `cuts`.
        """
        row = _row(self.mesh, rank)
        _, sizes = self._spans(shape, row)
        return tuple(int(size.sum()) for size in sizes) if len(row) else None

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same boxes as `rank` of any tensor, ascending.

        Empty for a rank that is not in the mesh.
        """
        return _holders(self, rank)

    def as_sharding(self, shape: Sequence[int]) -> Sharding | None:
        """The sharding that gives every rank the same box of a tensor of that shape.

        The sharding makes all splits in order, at once.

        None if that gives other boxes, or if ranks hold several boxes.

        Raises:
            ShardingError: as for `cuts`.
        """
        dimensions = self._dimensions(shape)
        if all(length for length, _ in dimensions) and not all(
            cuts_once(length, splits) for length, splits in dimensions
        ):
            return None
        names = self.mesh.axis_names
        return Sharding(
            self.mesh,
            PartitionSpec(
                *(
                    tuple(names[s.axis] for s in splits if s.axis is not None)
                    for _, splits in dimensions
                )
            ),
        )

    def to_json(self, mesh: int | None = None) -> dict[str, object]:
        """The JSON form: `{"mesh": {…}, "placements": ["_S(0,2)", "S(0)"]}`.

        Args:
            mesh: index of the mesh in a list that the document stores once; it is written instead
                of the mesh.
        """
        return {
            "mesh": self.mesh.to_json() if mesh is None else mesh,
            "placements": [str(placement) for placement in self.placements],
        }

    @classmethod
    def from_json(cls, doc: object, meshes: Sequence[Mesh] = ()) -> Placements:
        """Parse the output of `to_json`.

        Args:
            doc: the document.
            meshes: the list; a number in place of a mesh is an index in it.

        Raises:
            FormatError: the document is invalid.
        """
        if not isinstance(doc, Mapping) or set(doc) != {"mesh", "placements"}:
            raise FormatError(
                f"placements: expected an object with mesh and placements, found {shorten(doc)}."
            )
        mesh, texts = referred_mesh(doc["mesh"], meshes, "placements"), doc["placements"]
        if not isinstance(texts, list) or len(texts) > MAX_AXES:
            raise FormatError(
                f"placements: expected a list of at most {MAX_AXES}, found {shorten(texts)}."
            )
        try:
            return cls.of(mesh, texts)
        except ShardingError as error:
            raise FormatError(str(error)) from error

    def _splits_of(self, ndim: int) -> tuple[tuple[DimSplit, ...], ...]:
        """The splits of every dimension."""
        if len(self._splits) > ndim:
            raise ShardingError(
                f"{self.text}: it shards dimension {len(self._splits) - 1} of a tensor with "
                f"{ndim} dimensions; redistribute it."
            )
        return self._splits + ((),) * (ndim - len(self._splits))

    def _dimensions(self, shape: Sequence[int]) -> list[tuple[int, tuple[DimSplit, ...]]]:
        """Every dimension's length and splits."""
        shape = checked_tensor_shape(shape)
        dimensions = list(zip(shape, self._splits_of(len(shape)), strict=True))
        for d, (length, splits) in enumerate(dimensions):
            parts = prod(split.parts for split in splits)
            if length % parts and any(split.axis is None for split in splits):
                # Here torch's functions disagree: distribute_tensor cuts into all parts at once up
                # to torch 2.9; full_tensor and later versions cut into the split factor's parts
                # first.
                raise ShardingError(
                    f"{self.text}: the length {length} of dimension {d} is not a multiple of its "
                    f"{parts} parts, and torch has no single rule for strided shards of such a "
                    "length; redistribute it to plain Shard placements."
                )
        return dimensions

    def _spans(self, shape: Sequence[int], rows: Index) -> tuple[list[Index], list[Index]]:
        """The parts of every dimension at some mesh positions.

        For each dimension, these are (n, k) starts and sizes of k intervals each.
        """
        coordinates = np.empty((len(rows), self.mesh.ndim), np.int64)
        for axis in reversed(range(self.mesh.ndim)):
            rows, coordinates[:, axis] = np.divmod(rows, self.mesh.shape[axis])
        spans = [
            intervals(length, splits, coordinates) for length, splits in self._dimensions(shape)
        ]
        return [start for start, _ in spans], [size for _, size in spans]


def _order_splits(layout: Placements) -> tuple[tuple[DimSplit, ...], ...]:
    """Splits per tensor dimension, outermost first."""
    order: dict[int, list[DimSplit]] = {}
    for axis in reversed(range(layout.mesh.ndim)):
        placement = layout.placements[axis]
        if placement.dim is None:
            continue
        splits = order.setdefault(placement.dim, [])
        parts = layout.mesh.shape[axis]
        # A mesh dimension of size 1 splits nothing.
        factor = placement.split_factor if parts > 1 else 1
        made, behind = 1, 0
        while behind < len(splits) and factor % (made * splits[behind].parts) == 0:
            made *= splits[behind].parts
            behind += 1
        missing = factor // made
        if missing > 1 and behind < len(splits):
            raise ShardingError(
                f"{layout.text}: the split factor {factor} of tensor dimension {placement.dim} "
                "does not fit the later mesh dimensions that cut it; redistribute it to plain "
                "Shard placements."
            )
        splits[behind:behind] = [
            *([DimSplit(missing, None)] if missing > 1 else []),
            DimSplit(parts, axis),
        ]
    return tuple(without_idle(order.get(d, [])) for d in range(max(order, default=-1) + 1))


@lru_cache(maxsize=256)
def _row(mesh: Mesh, rank: int) -> Index:
    """The row-major position of a rank in the mesh: an array of one position, or none."""
    return np.flatnonzero(mesh.device_ids == rank)


@lru_cache(maxsize=256)
def _holders(layout: Placements, rank: int) -> tuple[int, ...]:
    """`Placements.holders`, cached.

    A thousand tensors replicated over thousands of ranks share one tuple.
    """
    row = _row(layout.mesh, rank)
    if not len(row):
        return ()
    place = np.unravel_index(row[0], layout.mesh.shape)
    same = tuple(
        slice(None) if p.dim is None else i for p, i in zip(layout.placements, place, strict=True)
    )
    return tuple(np.sort(layout.mesh.devices[same], axis=None).tolist())
