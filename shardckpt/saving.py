"""Saving one checkpoint from one process.

1. Flatten the state; every tensor leaf becomes a source that knows its shape, dtype, layout and which distinct boxes
   this process holds.
2. Choose each tensor's chunks from shape and layout alone.
3. Batch after batch of sources, within the memory limit: copy their boxes to the host, cut them into chunks,
   encode each and hand it to the writer, in grid order.
4. Wait until all is durable; write the chunk table and the host's record; commit.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt import frameworks
from shardckpt.batches import batches
from shardckpt.box import BoxArray
from shardckpt.errors import LeafError, OptionError, ShardingError, StorageError
from shardckpt.fields import MOST_DIMENSIONS
from shardckpt.io.commit import RECORD, assemble, discard, new_attempt, publish, read_prior
from shardckpt.io.host import HostWriter
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.names import array_path, matches, piece_path, shown
from shardckpt.options import SaveOptions
from shardckpt.record import CheckpointRecord, Structure, TensorRecord
from shardckpt.reshard.chunks import chunking, grid_shape, smallest_chunk
from shardckpt.reshard.plan import Piece, chunk_boxes, chunks_inside
from shardckpt.tree import flatten

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from types import EllipsisType

    from numpy.typing import NDArray

    from shardckpt.frameworks.base import Source
    from shardckpt.sharding import Layout

__all__ = ["save"]

HOST = 0


def save(url: str | os.PathLike[str], state: Any, *, options: SaveOptions | None = None) -> None:
    """Save `state` as one checkpoint; when this returns it is committed and durable.

    Args:
        url: where: a path, `file://…` or `memory://…`. The checkpoint is a directory.
        state: nested dicts, lists and tuples of tensors (torch_xla, torch, JAX, numpy) and small leaves.
        options: see `SaveOptions`.

    Raises:
        LeafError, ShardingError: a leaf, or its layout, that cannot be stored, by name; nothing was written.
        OptionError: a pattern in `shardings` that no plain tensor goes by, or `options` that are no SaveOptions.
        AlreadyExistsError: a checkpoint is committed there and `overwrite` is not set.
        StorageError: the storage failed; what was there before is as it was.
    """
    if options is None:
        options = SaveOptions()
    if not isinstance(options, SaveOptions):
        raise OptionError(f"save(options=…): a {type(options).__name__} is no SaveOptions; give shardckpt.SaveOptions(…).")
    flat = flatten(state, frameworks.is_tensor, frameworks.identity)
    sources = frameworks.sources(flat.tensors)
    structure = Structure(flat.tree, _tensor_records(sources, options))

    store = Store.open(parse(url))
    prior = read_prior(store, overwrite=options.overwrite)
    attempt = new_attempt()
    place = store.sub(attempt)
    try:
        _write(place, attempt, sources, structure, options)
        record = assemble(store, attempt)
    except BaseException:
        # Nothing refers to the attempt yet, and from here nothing ever will.
        discard(place)
        raise
    publish(store, record, prior)
    if isinstance(prior.record, CheckpointRecord):
        replaced = store.sub(prior.record.attempt)
        try:
            if not replaced.exists(RECORD):  # else it is a checkpoint by itself, and no attempt of ours
                replaced.delete_prefix("")
        except StorageError as e:
            raise StorageError(f"{store}: the new checkpoint is committed; the one that it replaces cannot be removed ({e})") from e


def _tensor_records(sources: Mapping[str, Source], options: SaveOptions) -> dict[str, TensorRecord]:
    """How each tensor will be stored."""
    smallest = smallest_chunk(sum(prod(s.shape) * s.dtype.storage.itemsize for s in sources.values()))
    records = {}
    for (name, source), layout in zip(sources.items(), _layouts(sources, options.shardings), strict=True):
        if len(source.shape) > MOST_DIMENSIONS:
            raise LeafError(f"{shown(name)} has {len(source.shape)} dimensions, and at most {MOST_DIMENSIONS} can be stored; reshape it.")
        try:
            pieces = _pieces(name, source.shape, source.dtype.storage.itemsize, layout, smallest)
        except ShardingError as e:
            raise ShardingError(f"{shown(name)}: {e}") from e
        records[name] = TensorRecord(name, source.shape, source.dtype, layout, pieces)
    return records


def _layouts(sources: Mapping[str, Source], shardings: Mapping[str, Layout]) -> list[Layout | None]:
    """How each tensor is laid out: as it is on its devices, or a plain one by the first pattern that matches it."""
    layouts = []
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


def _pieces(name: str, shape: tuple[int, ...], itemsize: int, layout: Layout | None, smallest: int) -> tuple[Piece, ...]:
    """One array for the whole tensor, or several where no useful common grid exists."""
    origin = (0,) * len(shape)
    cut = chunking(shape, itemsize, (1,) * len(shape) if layout is None else layout.parts(len(shape)), smallest=smallest)
    if cut.piece == shape:
        return (Piece(array_path(name), origin, shape, cut.chunks),)
    boxes = chunk_boxes(Piece("", origin, shape, cut.piece), np.arange(prod(grid_shape(shape, cut.piece))))
    return tuple(
        # The last piece of a dimension may be shorter than a chunk.
        Piece(piece_path(name, i), boxes[i].start, boxes[i].shape, tuple(map(min, cut.chunks, boxes[i].shape)))
        for i in range(len(boxes))
    )


def _write(place: Store, attempt: str, sources: Mapping[str, Source], structure: Structure, options: SaveOptions) -> None:
    """Write all chunks of this process, batch after batch within the memory limit."""
    staging = options.budget // 4
    writer = HostWriter(
        place, attempt, HOST, layout=options.layout, compression=options.compression, memory_limit=options.budget - 2 * staging
    )
    try:
        for batch in batches(sources, lambda name: (sources[name].staged_bytes,), (staging,)):
            fetched = frameworks.fetch([sources[name] for name in batch])
            for name, arrays in zip(batch, fetched, strict=True):
                for piece, position, elements in _chunks(structure.tensors[name], sources[name].boxes, arrays):
                    writer.put(piece, position, elements)
        writer.finish(structure, dict(options.metadata))
    except BaseException:
        writer.abort()
        raise


def _chunks(
    tensor: TensorRecord, boxes: BoxArray, arrays: Sequence[NDArray[np.generic]]
) -> Iterator[tuple[Piece, int, NDArray[np.generic]]]:
    """The chunks in some boxes of a tensor, with their elements as they are stored."""
    pieces = BoxArray.of([piece.box for piece in tensor.pieces], len(tensor.shape))
    for i, array in enumerate(arrays):
        box = boxes[i]
        stored = array.view(tensor.dtype.storage) if array.dtype != tensor.dtype.storage else array
        # A tensor may have as many pieces as shards: of each box only those that it touches are looked at in Python.
        touched = np.flatnonzero((np.maximum(pieces.start, box.start) < np.minimum(pieces.stop, box.stop)).all(axis=1))
        for piece in (tensor.pieces[k] for k in touched.tolist()):
            part = box.overlap(piece.box)
            assert part is not None
            positions, inside = chunks_inside(piece, part)
            start, stop = (inside.start - np.array(box.start, np.int64)).tolist(), (inside.stop - np.array(box.start, np.int64)).tolist()
            for position, a, b in zip(positions.tolist(), start, stop, strict=True):
                index: tuple[slice | EllipsisType, ...] = (*map(slice, a, b), ...)  # the ellipsis keeps a 0-d array an array
                yield piece, position, stored[index]
