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
from shardckpt.errors import OptionError
from shardckpt.io.commit import commit, new_attempt, read_prior
from shardckpt.io.host import HostWriter
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.names import array_path, matches, piece_path
from shardckpt.options import SaveOptions
from shardckpt.record import CheckpointRecord, Structure, TensorRecord
from shardckpt.reshard.chunks import chunk_shape, grid_shape, smallest_chunk
from shardckpt.reshard.plan import Piece, chunk_boxes, chunks_inside
from shardckpt.tree import flatten

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from types import EllipsisType

    from numpy.typing import NDArray

    from shardckpt.box import BoxArray
    from shardckpt.frameworks.base import Source
    from shardckpt.sharding import Layout

__all__ = ["save"]

HOST = 0
LARGEST_COMMON_CHUNK = 16 << 20
"""Bytes; where a common grid would need larger chunks (tiles of prime length), every shard becomes a piece."""


def save(url: str | os.PathLike[str], state: Any, *, options: SaveOptions | None = None) -> None:
    """Save `state` as one checkpoint; when this returns it is committed and durable.

    Args:
        url: where: a path, `file://…` or `memory://…`. The checkpoint is a directory.
        state: nested dicts, lists and tuples of tensors (torch_xla, torch, numpy) and small leaves.
        options: see `SaveOptions`.

    Raises:
        LeafError: a leaf that cannot be stored, by name; nothing was written.
        AlreadyExistsError: a checkpoint is committed there and `overwrite` is not set.
        StorageError: the storage failed; what was there before is as it was.
    """
    options = options or SaveOptions()
    flat = flatten(state, frameworks.is_tensor, frameworks.identity)
    sources = frameworks.sources(flat.tensors)
    structure = Structure(flat.tree, _tensor_records(sources, options))

    store = Store.open(parse(url))
    prior = read_prior(store, overwrite=options.overwrite)
    attempt = new_attempt()
    place = store.sub(attempt)
    try:
        _write(place, attempt, sources, structure, options)
    except BaseException:
        # Nothing refers to the attempt yet.
        place.delete_prefix("")
        raise
    commit(store, attempt, prior)
    if isinstance(prior.record, CheckpointRecord):
        store.sub(prior.record.attempt).delete_prefix("")


def _tensor_records(sources: Mapping[str, Source], options: SaveOptions) -> dict[str, TensorRecord]:
    """How each tensor will be stored."""
    smallest = smallest_chunk(sum(prod(s.shape) * s.dtype.storage.itemsize for s in sources.values()))
    unused = set(options.shardings)
    records = {}
    for name, source in sources.items():
        layout = source.layout
        if layout is None:
            pattern = next((p for p in options.shardings if matches(p, name)), None)
            if pattern is not None:
                layout = options.shardings[pattern]
                unused.discard(pattern)
        pieces = _pieces(name, source.shape, source.dtype.storage.itemsize, layout, smallest)
        records[name] = TensorRecord(name, source.shape, source.dtype, layout, pieces)
    if unused:
        raise OptionError(f"SaveOptions(shardings=…): {min(unused)!r} matches no plain tensor; patterns are matched with whole names.")
    return records


def _pieces(name: str, shape: tuple[int, ...], itemsize: int, layout: Layout | None, smallest: int) -> tuple[Piece, ...]:
    """One array for the whole tensor, or one per shard where no useful common grid exists."""
    whole = (1,) * len(shape)
    parts = whole if layout is None else layout.parts(len(shape))
    chunks = chunk_shape(shape, itemsize, parts, smallest=smallest)
    if layout is None or prod(chunks) * itemsize <= LARGEST_COMMON_CHUNK:
        return (Piece(array_path(name), (0,) * len(shape), shape, chunks),)
    tile = layout.tile(shape)
    shards = chunk_boxes(Piece("", (0,) * len(shape), shape, tile), np.arange(prod(grid_shape(shape, tile))))
    return tuple(
        Piece(piece_path(name, i), box.start, box.shape, chunk_shape(box.shape, itemsize, whole, smallest=smallest))
        for i, box in enumerate(shards[i] for i in range(len(shards)))
    )


def _write(place: Store, attempt: str, sources: Mapping[str, Source], structure: Structure, options: SaveOptions) -> None:
    """Write all chunks of this process, batch after batch within the memory limit."""
    staging = options.budget // 4
    writer = HostWriter(
        place, attempt, HOST, layout=options.layout, compression=options.compression, memory_limit=options.budget - 2 * staging
    )
    try:
        for batch in _batches(sources, staging):
            fetched = frameworks.fetch([sources[name] for name in batch])
            for name, arrays in zip(batch, fetched, strict=True):
                for piece, position, elements in _chunks(structure.tensors[name], sources[name].boxes, arrays):
                    writer.put(piece, position, elements)
        writer.finish(structure, dict(options.metadata))
    except BaseException:
        writer.abort()
        raise


def _batches(sources: Mapping[str, Source], limit: int) -> Iterator[list[str]]:
    """Names of sources that are fetched together: at most `limit` staged bytes, or a single larger tensor."""
    batch: list[str] = []
    size = 0
    for name, source in sources.items():
        if batch and size + source.staged_bytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += source.staged_bytes
    if batch:
        yield batch


def _chunks(
    tensor: TensorRecord, boxes: BoxArray, arrays: Sequence[NDArray[np.generic]]
) -> Iterator[tuple[Piece, int, NDArray[np.generic]]]:
    """The chunks in some boxes of a tensor, with their elements as they are stored."""
    for i, array in enumerate(arrays):
        box = boxes[i]
        stored = array.view(tensor.dtype.storage) if array.dtype != tensor.dtype.storage else array
        for piece in tensor.pieces:
            part = box.overlap(piece.box)
            if part is None:
                continue
            positions, inside = chunks_inside(piece, part)
            start, stop = (inside.start - np.array(box.start, np.int64)).tolist(), (inside.stop - np.array(box.start, np.int64)).tolist()
            for position, a, b in zip(positions.tolist(), start, stop, strict=True):
                index: tuple[slice | EllipsisType, ...] = (*map(slice, a, b), ...)  # the ellipsis keeps a 0-d array an array
                yield piece, position, stored[index]
