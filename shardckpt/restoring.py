"""Restoring: from stored chunks to the leaves of a state, whatever layout they were saved in.

1. Lay `like` beside the stored tree and check everything: names, kinds, shapes, dtypes. Nothing has been read yet.
2. Each leaf says which distinct boxes of its tensor this process needs, and lends memory to read into, or
   asks for staging buffers.
3. Batch after batch within the memory limit: read the chunks that the boxes touch, each once, straight into place
   or into staging; while one batch is being placed on the devices the next one is read.
4. Rebuild `like`'s containers around the leaves.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardckpt import frameworks
from shardckpt.box import BoxArray
from shardckpt.checkpoint import Checkpoint
from shardckpt.errors import DtypeMismatchError, MismatchError, NamesMismatchError, OptionError, ShapeMismatchError, StructureMismatchError
from shardckpt.io.budget import BufferPool, Lease, round_up
from shardckpt.io.reader import Request
from shardckpt.names import Only, selector
from shardckpt.options import DEFAULT_MEMORY_LIMIT, parse_bytes
from shardckpt.tree import leaf_names, match, stored_names, unflatten

if TYPE_CHECKING:
    import os
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from shardckpt.frameworks.base import Sink
    from shardckpt.record import TensorRecord

__all__ = ["restore"]

LARGEST_BATCH = 256 << 20
"""Bytes read in one go where no staging limits it; smaller batches tell less adjacent chunks apart."""
Array = NDArray[np.generic]


def restore(
    source: str | os.PathLike[str] | Checkpoint,
    like: Any = None,
    *,
    only: Only | None = None,
    strict: bool = True,
    cast: bool = False,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
) -> Any:
    """Restore a state, or a part of one.

    Args:
        source: where the checkpoint is, or an open one.
        like: says where things go. CPU `torch.Tensor`s, Parameters and ndarrays are filled in place and returned as
            the same objects; meta tensors give new CPU tensors; torch_xla leaves (even lazy ones) and
            `shardckpt.Target`s give new device tensors with that sharding, built from this process's shards alone.
            None: everything, as numpy arrays in plain containers.
        only: patterns of names (`"model/**"`), or a function of a name; all other leaves keep what `like` holds.
        strict: names that are missing from the checkpoint, or that it has and `like` has not, are an error.
        cast: allow stored tensors to be converted to the dtype of their leaf.
        memory_limit: bytes of host staging. One tensor's shards of this process are the least it takes.

    Returns:
        `like`'s containers with the restored leaves; containers of the stored tree where `like` is None.

    Raises:
        NotFoundError: no committed checkpoint there.
        MismatchError: names, structure, shape or dtype differ from `like`; nothing was read.
        CorruptionError: stored bytes are damaged or missing; leaves that are filled in place are then undefined.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    limit = parse_bytes(memory_limit, "memory_limit")
    if limit <= 0:
        raise OptionError(f"restore(memory_limit={limit}): must be positive.")
    pool = BufferPool(limit)
    wanted = selector(only)
    if only is not None and not any(map(wanted, [*checkpoint.names(), *leaf_names(checkpoint.tree)])):
        raise NamesMismatchError(f"{checkpoint.location}: only={only!r} selects none of its names; `shardckpt info` lists them.")
    if like is None:
        stored = stored_names(checkpoint.tree, wanted)
        leaves: dict[str, list[tuple[str, object]]] = {name: [(name, _empty(checkpoint.tensor(name)))] for name in stored}
        return unflatten(checkpoint.tree, _run(checkpoint, _jobs(checkpoint, leaves, cast=False), pool), wanted)
    try:
        matched = match(like, checkpoint.tree, frameworks.is_tensor, only=wanted, strict=strict)
    except MismatchError as e:
        raise type(e)(f"{checkpoint.location}: {e}") from None
    return matched.build(_run(checkpoint, _jobs(checkpoint, matched.tensors, cast=cast), pool))


def _empty(tensor: TensorRecord) -> NDArray[Any]:
    return np.empty(tensor.shape, tensor.dtype.numpy)


def _jobs(checkpoint: Checkpoint, leaves: Mapping[str, Sequence[tuple[str, object]]], *, cast: bool) -> list[_Job]:
    """What to restore, every shape and dtype checked.

    Args:
        checkpoint: where from.
        leaves: stored name → (name in `like`, leaf) of every leaf that gets the tensor.
        cast: whether dtypes may differ.
    """
    frameworks.settle(leaf for wanted in leaves.values() for _, leaf in wanted)
    jobs = []
    filled: dict[Hashable, str] = {}
    for stored, wanted in leaves.items():
        tensor = checkpoint.tensor(stored)
        landings: dict[Hashable, _Landing] = {}
        for name, leaf in wanted:
            sink = frameworks.target(name, leaf, tensor.shape, tensor.dtype)
            if sink.shape != tensor.shape:
                raise ShapeMismatchError(
                    f"{name}: {checkpoint.location} has shape {tensor.shape}, the leaf to restore into has {sink.shape}; "
                    f"make them equal, or leave the tensor out with only=."
                )
            if sink.dtype != tensor.dtype and not cast:
                raise DtypeMismatchError(
                    f"{name}: {checkpoint.location} has dtype {tensor.dtype.name}, the leaf to restore into has {sink.dtype.name}; "
                    f"pass cast=True to convert."
                )
            memory = frameworks.identity(leaf) if sink.destinations else None
            if memory is not None and filled.setdefault(memory, stored) != stored:
                raise StructureMismatchError(
                    f"{name}: in `like` it is the same memory as the leaf for {filled[memory]}, {checkpoint.location} has two tensors; "
                    f"give each a tensor of its own."
                )
            # Leaves of tied tensors that want the same thing get one object, as they were one when saved.
            landings.setdefault(sink.tie_key, _Landing(tensor, sink, [])).names.append(name)
        jobs.append(_Job(tensor, list(landings.values())))
    return jobs


@dataclass(slots=True)
class _Landing:
    """One place that a tensor goes to."""

    tensor: TensorRecord
    sink: Sink
    names: list[str]
    """The names in the result that it is returned under."""
    buffers: list[Array] = field(default_factory=list)
    """Per box, what the chunks are read into: of the stored dtype."""

    @property
    def same_dtype(self) -> bool:
        """Whether elements go as they are."""
        return self.sink.dtype == self.tensor.dtype

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Per box, the shape of its buffer."""
        return [v.shape for v in self.sink.destinations] if self.sink.destinations is not None else self.sink.buffer_shapes

    @property
    def staged_bytes(self) -> int:
        """Host bytes that it needs beyond its own memory."""
        stored, wanted = self.tensor.dtype.storage.itemsize, self.sink.dtype.numpy.itemsize
        if self.sink.destinations is not None:
            sizes = [] if self.same_dtype else [stored]
        else:
            sizes = [stored] if self.same_dtype else [stored, wanted]
        return sum(round_up(prod(shape) * size) for shape in self.shapes for size in sizes)

    def prepare(self, lease: Lease) -> None:
        """Set `buffers`."""
        storage = self.tensor.dtype.storage
        if self.sink.destinations is not None and self.same_dtype:
            self.buffers = [v.view(storage) for v in self.sink.destinations]
            return
        self.buffers = [lease.array(shape, storage) for shape in self.shapes]

    def finish(self, lease: Lease) -> object:
        """Convert if need be, and hand the elements to the target; the restored leaf."""
        logical = [b.view(self.tensor.dtype.numpy) for b in self.buffers]
        if self.same_dtype:
            return self.sink.place(logical)
        if self.sink.destinations is not None:
            converted: list[Array] = list(self.sink.destinations)
        else:
            converted = [lease.array(b.shape, self.sink.dtype.numpy) for b in logical]
        for destination, source in zip(converted, logical, strict=True):
            np.copyto(destination, source, casting="unsafe")
        return self.sink.place(converted)


@dataclass(slots=True)
class _Job:
    """One stored tensor and every place it goes to."""

    tensor: TensorRecord
    landings: list[_Landing]

    @property
    def staged_bytes(self) -> int:
        """Staging that the job takes from the pool."""
        return sum(landing.staged_bytes for landing in self.landings)

    def request(self) -> Request:
        """All boxes of all landings, so that a chunk that several want is read once."""
        boxes = [landing.sink.boxes for landing in self.landings]
        together = BoxArray(np.concatenate([b.start for b in boxes]), np.concatenate([b.stop for b in boxes]))
        buffers = [buffer for landing in self.landings for buffer in landing.buffers]
        return Request(self.tensor.name, self.tensor.dtype.storage, self.tensor.pieces, together, buffers)


def _run(checkpoint: Checkpoint, jobs: Sequence[_Job], pool: BufferPool) -> dict[str, object]:
    """Read and place everything; the restored leaves by name."""
    restored: dict[str, object] = {}
    batches = list(_batches(jobs, pool.limit // 2))

    def read(batch: Sequence[_Job]) -> Lease:
        lease = pool.take(sum(job.staged_bytes for job in batch))
        try:
            for job in batch:
                for landing in job.landings:
                    landing.prepare(lease)
            checkpoint.reader.read([job.request() for job in batch])
        except BaseException:
            lease.give_back()
            raise
        return lease

    with ThreadPoolExecutor(1, "shardckpt-ahead") as ahead:
        coming = ahead.submit(read, batches[0]) if batches else None
        for batch, following in zip_longest(batches, batches[1:]):
            assert coming is not None
            with coming.result() as lease:
                coming = ahead.submit(read, following) if following is not None else None
                for job in batch:
                    for landing in job.landings:
                        leaf = landing.finish(lease)
                        restored.update(dict.fromkeys(landing.names, leaf))
                        landing.buffers = []
    return restored


def _batches(jobs: Sequence[_Job], limit: int) -> Iterator[list[_Job]]:
    """Tensors that are read together: at most `limit` bytes of staging, or a single larger tensor."""
    batch: list[_Job] = []
    staged = read = 0
    for job in jobs:
        if batch and (staged + job.staged_bytes > limit or read + job.tensor.nbytes > LARGEST_BATCH):
            yield batch
            batch, staged, read = [], 0, 0
        batch.append(job)
        staged += job.staged_bytes
        read += job.tensor.nbytes
    if batch:
        yield batch
