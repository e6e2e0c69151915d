"""What will one process write of a state, and how will every tensor be stored?

Pure, from what the tensors say of themselves; the same on every process, as far as two processes know the same tensor.

1. Choose each tensor's chunks from its shape and layout alone.
2. Ask which processes hold each box. A plain host tensor says nothing of that: a large one all processes have, or
   only the one that shows it, as `host_tensors` says. Small ones may be on any processes, and nothing of them is
   written: their elements go into what the host says of the checkpoint.
3. Deal out the chunks of every box among its holders (`reshard.writers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.box import BoxArray
from shardckpt.errors import LeafError, OptionError, ShardingError
from shardckpt.fields import MOST_DIMENSIONS
from shardckpt.names import array_path, matches, piece_path, shown
from shardckpt.placements import Placements
from shardckpt.reshard.chunks import chunking, grid_shape, smallest_chunk
from shardckpt.reshard.plan import Piece, chunk_boxes, count_chunks
from shardckpt.reshard.writers import Part, deal
from shardckpt.structure import StoredLayout, TensorRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.frameworks.base import Source
    from shardckpt.options import SaveOptions
    from shardckpt.sharding import Layout
    from shardckpt.world import World

__all__ = ["SMALL_BYTES", "SavePlan", "Write", "plan_save"]

SMALL_BYTES = 64 << 10
"""Plain tensors of fewer bytes are told of rather than written, in a job of several processes."""


@dataclass(frozen=True, slots=True)
class Write:
    """Some chunks of a piece, all in one box that this process holds."""

    box: int
    """Which of the source's boxes."""
    piece: Piece
    chunks: range
    """Which of the piece's chunks in that box, counted in grid order."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """One process's share of a save."""

    tensors: dict[str, TensorRecord]
    """How every tensor of this process is stored."""
    writes: dict[str, list[Write]]
    """What this process writes, by tensor; in the order of the tensors, without those of which it writes nothing."""
    small: list[str]
    """Small plain tensors, of which the elements are told."""


def plan_save(sources: Mapping[str, Source], options: SaveOptions, world: World) -> SavePlan:
    """Plan one process's share.

    Raises:
        LeafError, ShardingError: a tensor that cannot be stored, by name.
        OptionError: a pattern in `shardings` that no plain tensor goes by.
    """
    tensors = tensor_records(sources, options, world)
    everyone = tuple(range(world.processes))
    small = []
    parts: list[Part] = []
    places: list[tuple[str, int, Piece]] = []
    for name, source in sources.items():
        tensor, boxes = tensors[name], source.boxes
        holders = source.holders
        if holders is None:
            if world.processes > 1 and tensor.nbytes < SMALL_BYTES:
                small.append(name)
                continue
            local = world.processes == 1 or options.host_tensors == "local"
            holders = [(world.process,) if local else everyone] * len(boxes)
        pieces = BoxArray.of([piece.box for piece in tensor.pieces], len(tensor.shape))
        for i in range(len(boxes)):
            box = boxes[i]
            # A tensor may have as many pieces as shards: of each box only those that it touches are looked at in Python.
            touched = np.flatnonzero((np.maximum(pieces.start, box.start) < np.minimum(pieces.stop, box.stop)).all(axis=1))
            for piece in (tensor.pieces[k] for k in touched.tolist()):
                common = box.overlap(piece.box)
                assert common is not None
                size = prod(piece.chunks) * tensor.dtype.storage.itemsize
                parts.append(Part(name, piece.path, common.start, holders[i], count_chunks(piece, common), size))
                places.append((name, i, piece))
    writes: dict[str, list[Write]] = {}
    for (name, i, piece), share in zip(places, deal(parts, world.process), strict=True):
        if share:
            writes.setdefault(name, []).append(Write(i, piece, share))
    return SavePlan(tensors, writes, small)


def tensor_records(sources: Mapping[str, Source], options: SaveOptions, world: World) -> dict[str, TensorRecord]:
    """How each tensor will be stored."""
    # Processes that know the same tensor must cut it alike. Of plain tensors another process may know others than this
    # one; what lies on a mesh, all of the mesh's processes know.
    plain_counts = world.processes == 1
    counted = (s for s in sources.values() if plain_counts or s.holders is not None)
    on_devices = smallest_chunk(sum(prod(s.shape) * s.dtype.storage.itemsize for s in counted))
    elsewhere = on_devices if plain_counts else smallest_chunk(0)
    records = {}
    for (name, source), layout in zip(sources.items(), _layouts(sources, options.shardings), strict=True):
        if len(source.shape) > MOST_DIMENSIONS:
            raise LeafError(f"{shown(name)} has {len(source.shape)} dimensions, and at most {MOST_DIMENSIONS} can be stored; reshape it.")
        try:
            smallest = elsewhere if source.holders is None else on_devices
            itemsize = source.dtype.storage.itemsize
            if source.own_pieces:
                pieces = _piece_per_box(name, source.shape, itemsize, source.boxes, smallest)
            else:
                pieces = _pieces(name, source.shape, itemsize, layout, smallest)
        except ShardingError as e:
            raise ShardingError(f"{shown(name)}: {e}") from e
        records[name] = TensorRecord(name, source.shape, source.dtype, layout, pieces, partial=source.own_pieces)
    return records


def _layouts(sources: Mapping[str, Source], shardings: Mapping[str, Layout]) -> list[StoredLayout | None]:
    """How each tensor is laid out: as it is on its devices, or a plain one by the first pattern that matches it."""
    layouts: list[StoredLayout | None] = []
    used: set[str] = set()
    shadowed: dict[str, str] = {}
    for name, source in sources.items():
        fitting = [pattern for pattern in shardings if matches(pattern, name)] if source.layout is None else []
        used.update(fitting[:1])
        for pattern in fitting[1:]:
            shadowed[pattern] = fitting[0]
        layouts.append(shardings[fitting[0]] if fitting else source.layout)
    for pattern in shardings:
        if pattern not in used:
            raise OptionError(
                f"SaveOptions(shardings=…): {pattern!r} is shadowed by {shadowed[pattern]!r}, which comes first; put it before that."
                if pattern in shadowed
                else f"SaveOptions(shardings=…): {pattern!r} matches no plain tensor; patterns are matched with whole names."
            )
    return layouts


def _pieces(name: str, shape: tuple[int, ...], itemsize: int, layout: StoredLayout | None, smallest: int) -> tuple[Piece, ...]:
    """One array for the whole tensor, or several where no useful common grid exists."""
    if isinstance(layout, Placements):
        return _piece_per_box(name, shape, itemsize, layout.distinct_boxes(shape), smallest)
    origin = (0,) * len(shape)
    cut = chunking(shape, itemsize, (1,) * len(shape) if layout is None else layout.parts(len(shape)), smallest=smallest)
    if cut.piece == shape:
        return (Piece(array_path(name), origin, shape, cut.chunks),)
    boxes = chunk_boxes(Piece("", origin, shape, cut.piece), np.arange(prod(grid_shape(shape, cut.piece))))
    return tuple(
        # The last piece of a dimension may be shorter than a chunk.
        Piece(piece_path(name, shape, boxes[i].start), boxes[i].start, boxes[i].shape, tuple(map(min, cut.chunks, boxes[i].shape)))
        for i in range(len(boxes))
    )


def _piece_per_box(name: str, shape: tuple[int, ...], itemsize: int, boxes: BoxArray, smallest: int) -> tuple[Piece, ...]:
    """An array for every box."""
    pieces = []
    for i in range(len(boxes)):
        box = boxes[i]
        cut = chunking(box.shape, itemsize, (1,) * box.ndim, smallest=smallest)
        pieces.append(Piece(piece_path(name, shape, box.start), box.start, box.shape, tuple(map(min, cut.chunks, box.shape))))
    return tuple(pieces)
