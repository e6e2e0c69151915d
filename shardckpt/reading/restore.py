"""Restoring: from stored chunks to the leaves of a state, whatever layout they were saved in.

1. Lay `like` beside the stored tree and check everything: names, kinds, shapes, dtypes. Nothing has been read yet.
2. Each leaf says which distinct boxes of its tensor this process needs, and lends memory to read into, or
   asks for staging buffers.
3. Batch after batch within the memory limit: read the chunks that the boxes touch, each once, straight into place
   or into staging; while one batch is being placed on the devices the next one may be read (`reading_ahead`).
4. Rebuild `like`'s containers around the leaves.
"""

from __future__ import annotations

import logging
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from shardckpt import frameworks
from shardckpt.errors import (
    DtypeMismatchError,
    MismatchError,
    NamesMismatchError,
    OptionError,
    ShapeMismatchError,
    ShardckptError,
    StructureMismatchError,
    out_of_memory_is_typed,
)
from shardckpt.frameworks.coordination import Coordinator, check_coordinator
from shardckpt.frameworks.per_process import choose_value, decode_value
from shardckpt.io.buffers import Arena, BufferPool, Lease, round_up
from shardckpt.io.ending import reading_takes_threads
from shardckpt.io.threads import read_ahead
from shardckpt.io.url import parse
from shardckpt.layout.box import BoxArray
from shardckpt.layout.dtypes import castable
from shardckpt.options import DEFAULT_MEMORY_LIMIT, check_flag, parse_bytes
from shardckpt.plan.batches import batches
from shardckpt.reading.checkpoint import Checkpoint, empty
from shardckpt.reading.cooperative import Choice, Meeting, check_choice, exchange_bytes
from shardckpt.reading.locate import Request
from shardckpt.state import leaf_names, match, per_process_names, stored_names, unflatten
from shardckpt.state.names import Only, selector
from shardckpt.state.stateful import StateOwner

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.frameworks.base import Sink
    from shardckpt.frameworks.per_process import PerProcess
    from shardckpt.state.document import Node


_log = logging.getLogger("shardckpt")
LARGEST_BATCH = 256 << 20
"""Bytes read in one go where no staging limits it; smaller batches tell less adjacent chunks apart."""
STAGED_BATCH = 64 << 20
"""Bytes staged for one batch that is read from files. Two such buffers go round and stay warm, where larger ones are fresh memory for
most of a state; from an object store many requests at a time matter more."""
Array = NDArray[np.generic]


@out_of_memory_is_typed
def restore(
    source: str | os.PathLike[str] | Checkpoint,
    like: Any = None,
    *,
    only: Only | None = None,
    strict: bool = True,
    cast: bool = False,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    cooperative: Choice = False,
    coordinator: Coordinator | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Restore a state, or a part of one.

    Args:
        source: where the checkpoint is, or an open one.
        like: says where things go. CPU `torch.Tensor`s, Parameters and ndarrays are filled in place and returned as
            the same objects; meta tensors give new CPU tensors; torch_xla leaves (even lazy ones), JAX arrays, `jax.ShapeDtypeStruct`s
            and `shardckpt.Target`s give new device tensors with that sharding, built from this process's shards alone.
            None: everything, as numpy arrays in plain containers. A `train_state` puts it all back into its objects.
        only: patterns of names (`"model/**"`), or a function of a name; all other leaves keep what `like` holds.
        strict: names that are missing from the checkpoint, or that it has and `like` has not, are an error. False: they are skipped,
            and one warning in the log says which.
        cast: allow stored tensors to be converted to the dtype of their leaf, as `numpy.astype` does: rounded to the nearest,
            and integers wrap. What has no conversion, and complex to real, is refused.
        memory_limit: bytes of host staging. One tensor's shards of this process are the least it takes.
        cooperative: have processes that need the same read a part each and send it to the others, so that the storage serves
            every byte once. All processes of the job then call this together, with the same options, and wait for each other.
            True: wherever several need the same; "auto": where it is faster by `Bandwidths`, and never from a path; a
            `Bandwidths`: where it is faster by these. False: each reads by itself and waits for nobody.
        coordinator: says which process this is, for what is `PerProcess` in `like`, and connects it with the others for
            `cooperative`; by default found out.
        progress: called with bytes of tensors that are restored so far, and in all, by this process.

    Returns:
        `like`'s containers with the restored leaves; containers of the stored tree where `like` is None.

    Raises:
        NotFoundError: no committed checkpoint there.
        MismatchError: names, structure, shape or dtype differ from `like`; nothing was read.
        LeafError, ShardingError: a leaf that cannot be restored into, by name; nothing was read.
        OptionError: an option that cannot be.
        ReplacedError: the checkpoint was replaced or deleted while it was being read.
        CorruptionError: stored bytes are damaged or missing; leaves that are filled in place are then undefined. A base that is gone,
            or was replaced, is a MissingDataError before anything is read.
        StorageError: the storage failed, or Python is ending and starts no threads to read with.
        CoordinationError: `cooperative`, and another process does not answer, or failed in a way of its own. What one process
            cannot read is raised on all that read together with it.
    """
    if coordinator is not None:
        check_coordinator(coordinator)  # before the meeting, for without one nobody can be told
    place = source.location if isinstance(source, Checkpoint) else source
    meeting = None if cooperative is False else Meeting(cooperative, coordinator)
    with meeting or nullcontext(), reading_takes_threads(place):
        if meeting is not None:
            meeting.location = source.location if isinstance(source, Checkpoint) else parse(source)
            check_choice(cooperative)
        check_flag(strict, "strict")
        check_flag(cast, "cast")
        limit = parse_bytes(memory_limit, "memory_limit")
        if limit <= 0:
            raise OptionError(f"restore(memory_limit={limit}): must be positive.")
        checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
        run = partial(_run_all, checkpoint, limit=limit, meeting=meeting, progress=progress)
        return _restored(checkpoint, checkpoint.parsed_tree, like, run, only=only, strict=strict, cast=cast, coordinator=coordinator)


def _restored(
    checkpoint: Checkpoint,
    tree: Node,
    like: Any,
    run: Callable[..., dict[str, object]],
    *,
    only: Only | None,
    strict: bool,
    cast: bool,
    coordinator: Coordinator | None,
) -> Any:
    """`restore`, of an open checkpoint.

    Args:
        checkpoint: where from.
        tree: its state, in the form that `like` has.
        like: see there, as all that follows.
        run: reads and places what jobs say (`_run_all`).
        only: see there.
        strict: see there.
        cast: see there.
        coordinator: see there.
    """
    wanted = selector(only)
    if only is not None and not any(map(wanted, [*checkpoint.names(), *leaf_names(checkpoint.parsed_tree)])):
        raise NamesMismatchError(f"{checkpoint.location}: only={only!r} selects none of its names; `shardckpt info` lists them.")
    if like is None:
        stored = stored_names(checkpoint.parsed_tree, wanted)
        leaves: dict[str, list[tuple[str, object]]] = {
            name: [(name, empty(name, t.shape, t.dtype.numpy))] for name, t in ((name, checkpoint.tensor(name)) for name in stored)
        }
        own = _all_values(checkpoint, per_process_names(checkpoint.parsed_tree, wanted))
        read = run(_jobs(checkpoint, _sinks(checkpoint, leaves), cast=False), in_place=False)
        return unflatten(checkpoint.parsed_tree, {**read, **own}, wanted)
    if isinstance(like, StateOwner):
        tree = like.arranged(tree, wanted)
        into = like.like(tree, checkpoint.tensor, wanted, lambda: (coordinator or Coordinator.current()).world)
        like.load_state_dict(_restored(checkpoint, tree, into, run, only=only, strict=strict, cast=cast, coordinator=coordinator))
        return like
    try:
        matched = match(like, tree, frameworks.is_tensor, only=wanted, strict=strict, meaning=frameworks.meaning)
        chosen = chosen_values(checkpoint, matched.per_process, coordinator)
    except MismatchError as e:
        raise type(e)(f"{checkpoint.location}: {e}") from None
    if matched.missing or matched.unexpected:
        _log.warning("%s: restore(strict=False): %s", checkpoint.location, matched.skipped())
    jobs = _jobs(checkpoint, _sinks(checkpoint, matched.tensors), cast=cast)
    return matched.build({**run(jobs, in_place=True), **chosen})


def fill(checkpoint: Checkpoint, places: Mapping[str, Sequence[tuple[str, Sink]]]) -> None:
    """Read tensors, or boxes of them, into places that somebody has chosen, without a `like`.

    Args:
        checkpoint: where from.
        places: stored name → (name for messages, sink) of every place that the tensor goes to. Tie keys tell them apart.

    Raises:
        MismatchError: a sink's shape or dtype is not the tensor's, or two different ones share memory; nothing was read.
        ReplacedError, CorruptionError: as in `restore`.
    """
    _run_all(checkpoint, _jobs(checkpoint, places.items(), cast=False), DEFAULT_MEMORY_LIMIT, in_place=True)


def _all_values(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, object]:
    """Of each value that processes own by themselves, all, in the order of the processes."""
    if not names:
        return {}
    stored = [checkpoint.process_values(process) for process in range(checkpoint.record.processes)]
    return {name: [decode_value(values[name], name) for values in stored if name in values] for name in names}


def chosen_values(checkpoint: Checkpoint, wanted: Mapping[str, PerProcess], coordinator: Coordinator | None) -> dict[str, object]:
    """Of each value that processes own by themselves, the one for this process."""
    if not wanted:
        return {}
    world = (Coordinator.current() if coordinator is None else coordinator).world
    saved = checkpoint.record.processes
    same = saved == world.processes
    stored = {p: checkpoint.process_values(p) for p in ([world.process] if same else range(saved))}
    chosen = {}
    for name, leaf in wanted.items():
        if same and leaf.choose is not None and name not in stored[world.process]:
            stored = {p: checkpoint.process_values(p) for p in range(saved)}
        values = {p: decode_value(documents[name], name) for p, documents in stored.items() if name in documents}
        chosen[name] = choose_value(values, leaf, name, saved=saved, world=world)
    return chosen


def _sinks(checkpoint: Checkpoint, leaves: Mapping[str, Sequence[tuple[str, object]]]) -> Iterator[tuple[str, list[tuple[str, Sink]]]]:
    """Per stored name, the sinks of the leaves that get the tensor, with their names in `like`."""
    frameworks.settle(leaf for wanted in leaves.values() for _, leaf in wanted)
    for stored, wanted in leaves.items():
        tensor = checkpoint.tensor(stored)
        yield stored, [(name, frameworks.target(name, leaf, tensor.shape, tensor.dtype)) for name, leaf in wanted]


def _jobs(checkpoint: Checkpoint, places: Iterable[tuple[str, Iterable[tuple[str, Sink]]]], *, cast: bool) -> list[_Job]:
    """What to restore, every shape and dtype checked.

    Args:
        checkpoint: where from.
        places: stored name, and (name for messages, sink) of every place that gets the tensor.
        cast: whether dtypes may differ.
    """
    jobs = []
    for stored, wanted in places:
        tensor = checkpoint.tensor(stored)
        landings: dict[Hashable, _Landing] = {}
        for name, sink in wanted:
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
            if not castable(tensor.dtype, sink.dtype):
                raise DtypeMismatchError(
                    f"{name}: {checkpoint.location} has dtype {tensor.dtype.name}, which cannot be converted to {sink.dtype.name}; "
                    f"restore it as it is."
                )
            # Leaves of tied tensors that want the same thing get one object, as they were one when saved.
            landings.setdefault(sink.tie_key, _Landing(tensor, sink)).names.append(name)
        jobs.append(_Job(tensor, list(landings.values())))
    _refuse_shared_memory(jobs)
    return jobs


def _refuse_shared_memory(jobs: Sequence[_Job]) -> None:
    """Raise unless what is filled in place has memory of its own: several threads write, in no particular order."""
    extents = [(*byte_bounds(array), array, landing) for job in jobs for landing in job.landings for array in landing.destinations or ()]
    extents.sort(key=lambda extent: extent[:2])
    open_until: list[tuple[int, Array, _Landing]] = []
    for start, stop, array, landing in extents:
        open_until = [other for other in open_until if other[0] > start]
        for _, other, before in open_until:
            same_view = landing.tensor is before.tensor and landing.view == before.view
            if not same_view and _share_memory(array, other):
                raise StructureMismatchError(
                    f"{landing.names[0]}: in `like` it shares memory with {before.names[0]}, so both cannot be restored in place; give "
                    f"each a tensor of its own. If both are one tied parameter, leave one name out: import with exclude=, then "
                    f"restore with strict=False."
                )
        open_until.append((stop, array, landing))


def _share_memory(a: Array, b: Array) -> bool:
    """Whether an element of one lies in the memory of the other; in doubt, yes."""
    try:
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]  # numpy takes any number here
    except np.exceptions.TooHardError:
        return True


class _Landing:
    """One place that a tensor goes to."""

    def __init__(self, tensor: TensorRecord, sink: Sink) -> None:
        self.tensor = tensor
        self.sink = sink
        self.names: list[str] = []
        """The names in the result that it is returned under."""
        self.buffers: list[Array] = []
        """Per box, what the chunks are read into."""
        self.boxes = sink.boxes
        self.destinations = sink.destinations
        self.converts = sink.dtype != tensor.dtype or any(not v.dtype.isnative for v in self.destinations or ())
        """Whether elements are converted on their way into the buffers."""
        lent = sink.buffer_shapes if self.destinations is None and not sink.adopts else []
        self.staged_bytes = sum(round_up(prod(shape) * sink.dtype.numpy.itemsize) for shape in lent)
        """Host bytes that it needs beyond its own memory."""

    @property
    def view(self) -> list[object]:
        """Where it is filled in place, and how that memory is seen."""
        return [(v.ctypes.data, v.shape, v.strides, v.dtype) for v in self.destinations or ()]

    def prepare(self, lease: Lease, arena: Arena) -> None:
        """Set `buffers`, of the sink's dtype: where the leaf is, memory that it keeps, or lent memory."""
        memory = arena if self.sink.adopts else lease
        own = self.destinations
        self.buffers = [memory.array(shape, self.sink.dtype.numpy) for shape in self.sink.buffer_shapes] if own is None else own

    def finish(self) -> object:
        """Hand the elements to the sink; the restored leaf."""
        return self.sink.place(self.buffers)


@dataclass(slots=True)
class _Job:
    """One stored tensor and every place it goes to."""

    tensor: TensorRecord
    landings: list[_Landing]
    nbytes: int = field(init=False)
    """Bytes of the boxes that this process needs, as they are stored: its own share, not the whole tensor."""

    def __post_init__(self) -> None:
        """Count them once."""
        elements = sum(prod(shape) for landing in self.landings for shape in (landing.boxes.stop - landing.boxes.start).tolist())
        self.nbytes = elements * self.tensor.dtype.storage.itemsize

    @property
    def staged_bytes(self) -> int:
        """Staging that the job takes from the pool."""
        return sum(landing.staged_bytes for landing in self.landings)

    @property
    def placing_bytes(self) -> int:
        """Host bytes that placing takes besides; one leaf is placed at a time."""
        return max(landing.sink.placing_bytes for landing in self.landings)

    def request(self) -> Request:
        """All boxes of all landings, so that a chunk that several want is read once."""
        boxes = [landing.boxes for landing in self.landings]
        together = boxes[0] if len(boxes) == 1 else BoxArray(*map(np.concatenate, ([b.start for b in boxes], [b.stop for b in boxes])))
        buffers = [buffer for landing in self.landings for buffer in landing.buffers]
        storage = self.tensor.dtype.storage
        if any(landing.converts for landing in self.landings):
            return Request(self.tensor.name, storage, self.tensor.pieces, together, buffers, convert_from=self.tensor.dtype.numpy)
        # As bits: nothing touches them on their way.
        return Request(self.tensor.name, storage, self.tensor.pieces, together, [buffer.view(storage) for buffer in buffers])


def _run_all(
    checkpoint: Checkpoint,
    jobs: Sequence[_Job],
    limit: int,
    *,
    in_place: bool,
    meeting: Meeting | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, object]:
    """Read and place everything, with others or alone; the restored leaves by name.

    Args:
        checkpoint: where from.
        jobs: what.
        limit: bytes of host staging.
        in_place: whether memory that is filled is the caller's.
        meeting: where it is agreed on what is read together with other processes; None: nothing is.
        progress: told how many bytes are placed, and how many there are.
    """
    done, total = 0, sum(job.nbytes for job in jobs)

    def placed(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    def fetch(batch: Sequence[_Job]) -> None:
        with checkpoint.reading():
            checkpoint.reader.read([job.request() for job in batch])

    staged = STAGED_BATCH if checkpoint.location.scheme == "file" else LARGEST_BATCH
    checkpoint.open_bases(job.tensor for job in jobs)
    in_place = in_place and any(landing.destinations for job in jobs for landing in job.landings)
    alone, shared = (list(jobs), []) if meeting is None else meeting.divide(checkpoint, jobs, limit)
    pool = BufferPool(limit - exchange_bytes(limit) if shared else limit)
    restored: dict[str, object] = {}
    for group in shared:
        restored |= _run(group.jobs, pool, group.read, staged, in_place=in_place, placed=placed)
    return restored | _run(alone, pool, fetch, staged, in_place=in_place, placed=placed)


def _run(
    jobs: Sequence[_Job],
    pool: BufferPool,
    fetch: Callable[[Sequence[_Job]], None],
    staged: int,
    *,
    in_place: bool,
    placed: Callable[[int], None],
) -> dict[str, object]:
    """Read and place some tensors; the restored leaves by name.

    Args:
        jobs: what.
        pool: lends the buffers.
        fetch: fills the buffers of a batch.
        staged: bytes of staging for one batch, where one tensor does not take more.
        in_place: whether memory that is filled is the caller's, who is told so if that fails.
        placed: told how many bytes are placed, after each batch.
    """
    restored: dict[str, object] = {}
    arena = Arena()
    # Tensors that are read together: at most half of the limit each, one batch being placed and one read.
    limits = (pool.limit // 2, LARGEST_BATCH, staged)
    some = list(batches(jobs, lambda job: (job.staged_bytes + job.placing_bytes, job.nbytes, job.staged_bytes), limits))

    def read(batch: Sequence[_Job]) -> Lease:
        lease = pool.take(sum(job.staged_bytes for job in batch), beside=sum(job.placing_bytes for job in batch))
        try:
            for job in batch:
                for landing in job.landings:
                    landing.prepare(lease, arena)
            fetch(batch)
        except ShardckptError as e:
            lease.give_back()
            if in_place:
                raise type(e)(f"{e} What `like` has been filled with in place is undefined now.") from e
            raise
        except BaseException:
            lease.give_back()
            raise
        return lease

    with closing(read_ahead(some, read, copies=any(job.placing_bytes for job in jobs))) as coming:
        for batch, lease in coming:
            with lease:
                for job in batch:
                    for landing in job.landings:
                        leaf = landing.finish()
                        restored.update(dict.fromkeys(landing.names, leaf))
                        landing.buffers = []
            placed(sum(job.nbytes for job in batch))
    return restored
