"""Storage of the tensors of a save: the arrays or pieces of each, and their chunks.

They are chosen from the tensors' shapes and layouts alone (step 1 of `save_plan`), so processes
that know the same tensor choose the same.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from itertools import product
from math import prod
from operator import add
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardckpt.errors import LeafError, OptionError, ShardingError
from shardckpt.format.documents import LARGEST_DIMENSION, MOST_DIMENSIONS
from shardckpt.format.structure import StoredLayout, TensorRecord
from shardckpt.layout.placements import Placements
from shardckpt.plan.chunks import Floor, chunking, even_runs, smallest_chunk
from shardckpt.plan.pieces import Piece
from shardckpt.state.glob import is_glob
from shardckpt.state.names import array_path, piece_path, shown
from shardckpt.state.select import selector

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

    from shardckpt.frameworks.base import Source
    from shardckpt.layout.box import BoxArray
    from shardckpt.layout.dtypes import DType
    from shardckpt.layout.sharding import Layout
    from shardckpt.layout.world import World
    from shardckpt.options import SaveOptions

LONGEST_PATH = 60_000
"""Most bytes of a tensor's stored name: OCDBT keys have fewer than 2^16 bytes, and a key also
contains the chunk's grid position."""


def tensor_records(
    sources: Mapping[str, Source],
    options: SaveOptions,
    world: World,
    skipped: frozenset[str] = frozenset(),
    *,
    differences: bool = False,
) -> dict[str, TensorRecord]:
    """Storage of each tensor: its array or pieces. Skipped tensors have no pieces yet."""
    smallest = _smallest_chunks(
        {name: source for name, source in sources.items() if name not in skipped},
        world,
        files=options.layout == "zarr",
        differences=differences,
    )
    records: dict[str, TensorRecord] = {}
    known: dict[Hashable, TensorRecord] = {}
    for (name, source), layout in zip(
        sources.items(), _layouts(sources, options.shardings), strict=True
    ):
        if name in skipped:
            shape = source.shape
            _check_storable(name, shape, source.dtype)
            if layout is not None:
                with _naming(name):
                    # Readers refuse a layout that does not fit; the result is not needed here.
                    layout.parts(len(shape))
            records[name] = TensorRecord(name, shape, source.dtype, layout, ())
        else:
            own_boxes = source.boxes if source.own_pieces else None
            shape = source.shape
            key = (shape, source.dtype.name, id(layout), smallest[name])
            if key in known and own_boxes is None:
                _check_storable(name, shape, source.dtype)
                records[name] = known[key].called(name)
                continue
            tensor = records[name] = tensor_record(
                name, shape, source.dtype, layout, smallest[name], own_boxes=own_boxes
            )
            if tensor.is_one_array:
                known[key] = tensor
    return records


def tensor_record(
    name: str,
    shape: tuple[int, ...],
    dtype: DType,
    layout: StoredLayout | None,
    smallest: Floor,
    *,
    own_boxes: BoxArray | None = None,
) -> TensorRecord:
    """Storage of one tensor: its array or pieces.

    Args:
        name: its name.
        shape: in elements.
        dtype: of its elements.
        layout: how it is laid out over devices; None: a plain host tensor.
        smallest: lower limit for the size of its chunks.
        own_boxes: boxes that are stored as one array each, for a tensor of which this process knows
            nothing else.

    Raises:
        LeafError, ShardingError: the tensor cannot be stored; the message names it.
    """
    _check_storable(name, shape, dtype)
    with _naming(name):
        blocks = _blocks(shape, layout, own_boxes)
        pieces = _pieces(
            name, shape, dtype.storage.itemsize, blocks, smallest, apart=own_boxes is not None
        )
    return TensorRecord(name, shape, dtype, layout, pieces, partial=own_boxes is not None)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the tensor's name to a ShardingError about its layout."""
    try:
        yield
    except ShardingError as e:
        raise ShardingError(f"{shown(name)}: {e}") from e


def _check_storable(name: str, shape: tuple[int, ...], dtype: DType) -> None:
    if len(shape) > MOST_DIMENSIONS:
        raise LeafError(
            f"{shown(name)} has {len(shape)} dimensions, and at most {MOST_DIMENSIONS} can be "
            "stored; reshape it."
        )
    if len(array_path(name)) > LONGEST_PATH:
        raise LeafError(
            f"{shown(name)} has a name of {len(name):,} characters, too long to be stored; use "
            "shorter keys."
        )
    # A tensor with elements fits in some process's memory. Readers would refuse this one, and with
    # it the complete checkpoint.
    if 0 in shape and prod([max(n, 1) for n in shape]) * dtype.itemsize > LARGEST_DIMENSION:
        raise LeafError(
            f"{shown(name)} has no elements, and with its shape {shape} more bytes than can be "
            "addressed; reshape it."
        )


def _smallest_chunks(
    sources: Mapping[str, Source], world: World, *, files: bool, differences: bool
) -> dict[str, Floor]:
    """The lower limit of the chunk size by tensor.

    For `files` and `differences` see `smallest_chunk`.

    Processes that know a tensor must cut it the same. A tensor on some devices is known to all
    processes of those devices, and so are all other tensors on exactly the same devices. No process
    can know which other tensors the other processes have.
    """
    groups = {
        name: None if world.processes == 1 else _known_with(source)
        for name, source in sources.items()
    }
    sizes: Counter[bytes | None] = Counter()
    for name, source in sources.items():
        sizes[groups[name]] += prod(source.shape) * source.dtype.storage.itemsize
    return {
        name: smallest_chunk(
            0 if group == _PLAIN else sizes[group], files=files, differences=differences
        )
        for name, group in groups.items()
    }


_PLAIN = b""


def _known_with(source: Source) -> bytes:
    """A key that is equal for tensors that are certain to be known to the same processes.

    `_PLAIN` where nothing is certain.
    """
    return (
        _PLAIN
        if source.holders is None or source.layout is None
        else _devices(source.layout, len(source.shape))
    )


@lru_cache(maxsize=64)
def _devices(layout: StoredLayout, ndim: int) -> bytes:
    ids = (
        layout.mesh.device_ids if isinstance(layout, Placements) else layout.tiling(ndim).device_ids
    )
    return sha256(
        np.sort(ids).tobytes()
    ).digest()  # a short key: thousands of tensors may share a mesh of a hundred thousand devices


def _layouts(
    sources: Mapping[str, Source], shardings: Mapping[str, Layout]
) -> list[StoredLayout | None]:
    """Each tensor's layout, for a plain tensor from the first pattern that matches it.

    Any other tensor has its own layout over devices.
    """
    layouts: list[StoredLayout | None] = []
    used: set[str] = set()
    shadowed: dict[str, str] = {}
    order = {pattern: number for number, pattern in enumerate(shardings)}
    globs = {pattern: selector(pattern) for pattern in shardings if is_glob(pattern)}
    for name, source in sources.items():
        fitting = (
            [pattern for pattern, selects in globs.items() if selects(name)]
            if source.layout is None
            else []
        )
        if name in order and name not in globs and source.layout is None:
            fitting = sorted([*fitting, name], key=order.__getitem__)
        used.update(fitting[:1])
        for pattern in fitting[1:]:
            shadowed[pattern] = fitting[0]
        layouts.append(shardings[fitting[0]] if fitting else source.layout)
    for pattern in shardings:
        if pattern not in used:
            raise OptionError(
                f"SaveOptions(shardings=…): {pattern!r} is shadowed by {shadowed[pattern]!r}, "
                "which comes first; put it before that."
                if pattern in shadowed
                else f"SaveOptions(shardings=…): {pattern!r} matches no plain tensor; patterns are "
                "matched with whole names."
            )
    return layouts


_Block: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]"
"""A box of a tensor that is cut into equal tiles: its first index, its shape, and the number of
tiles per dimension."""


def _pieces(
    name: str,
    shape: tuple[int, ...],
    itemsize: int,
    blocks: Iterable[_Block],
    smallest: Floor,
    *,
    apart: bool,
) -> tuple[Piece, ...]:
    """One array for the complete tensor, or several arrays.

    There are several if no useful common grid exists or `apart` is set.
    """
    pieces = []
    for start, extent, parts in blocks:
        cut = chunking(extent, itemsize, parts, smallest=smallest)
        if cut.piece == shape and not apart:
            return (Piece(array_path(name), start, shape, cut.chunks),)
        for corner in product(*map(range, start, map(add, start, extent), cut.piece)):
            # The last piece of a dimension may be short, even shorter than a chunk.
            sides = tuple(
                min(side, a + n - i)
                for side, a, n, i in zip(cut.piece, start, extent, corner, strict=True)
            )
            pieces.append(
                Piece(
                    piece_path(name, shape, corner),
                    corner,
                    sides,
                    tuple(map(min, cut.chunks, sides)),
                )
            )
    return tuple(pieces)


def _blocks(
    shape: tuple[int, ...], layout: StoredLayout | None, own_boxes: BoxArray | None
) -> Iterator[_Block]:
    """A tensor, or the part that this process knows, as boxes that have one common grid each."""
    undivided = (1,) * len(shape)
    if own_boxes is not None:
        for i in range(len(own_boxes)):
            yield own_boxes[i].start, own_boxes[i].shape, undivided
    elif isinstance(layout, Placements):
        for runs in product(*map(even_runs, layout.cuts(shape))):
            starts, lengths, parts = zip(*runs, strict=True)
            yield starts, lengths, parts
    else:
        yield (0,) * len(shape), shape, undivided if layout is None else layout.parts(len(shape))
