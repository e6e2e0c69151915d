"""Saving one checkpoint, from one process or from many at once.

1. Flatten the state; every tensor leaf becomes a source that knows its shape, dtype, layout, which distinct boxes
   this process holds, and which processes hold them too.
2. Plan (`save_plan`): each tensor's chunks, and those that this process writes. No process asks another one.
3. Batch after batch of sources, within the memory limit: copy their boxes to the host, cut them into chunks,
   encode each and hand it to the writer, in grid order.
4. Wait until all is durable; write the chunk table and the host's record.
5. Process 0 waits for the records of all hosts and commits. The others look, from time to time, whether it has.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from crc32c import crc32c

from shardckpt import frameworks
from shardckpt.batches import batches
from shardckpt.contents import Contents
from shardckpt.coordination import Coordinator, check_coordinator
from shardckpt.errors import CommitError, CoordinationError, OptionError, ShardckptError
from shardckpt.io.assemble import assemble, wait_for_hosts
from shardckpt.io.commit import Prior, discard, new_attempt, publish, published_attempt, read_prior, remove_replaced
from shardckpt.io.host import HostWriter
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import SaveOptions
from shardckpt.per_process import encode_values
from shardckpt.record import CheckpointRecord, seal
from shardckpt.reshard.plan import chunks_inside
from shardckpt.save_plan import SavePlan, Write, plan_save
from shardckpt.structure import Structure
from shardckpt.tree import flatten

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from types import EllipsisType

    from numpy.typing import NDArray

    from shardckpt.box import Box
    from shardckpt.frameworks.base import Source
    from shardckpt.structure import TensorRecord

__all__ = ["save"]

COMMITTER = 0
"""The process that commits."""
_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0
"""Seconds between two looks for the committer's word."""
_STORAGE_LOOK = 10.0
"""Seconds until the first look whether the storage shows what nobody has said; the next ones are as long again apart as all before."""
_COMMITTING = 60.0
"""Seconds that the committer may take after the last host has finished."""
_WORD, _FAILURE = "word", "failure"
"""What the committer says of an attempt, or who has waited for it in vain; and what a process says that could not write its share."""
_SAMPLED = 1024
"""Elements of a large plain tensor by which processes that have different ones under one name are found."""
_WORDS = 64
"""Places for either; a job of any length keeps no more keys."""


def save(url: str | os.PathLike[str], state: Any, *, options: SaveOptions | None = None, coordinator: Coordinator | None = None) -> None:
    """Save `state` as one checkpoint; when this returns it is committed and durable.

    In a job of several processes all of them call it, with the same url and each with its own view of the state. They
    exchange no messages but one word in passing, that the checkpoint is committed.

    Args:
        url: where: a path, `file://…`, `gs://…`, `s3://…` or `memory://…`. The checkpoint is a directory.
        state: nested dicts, lists and tuples of tensors (torch_xla, DTensor, torch, JAX, numpy) and small leaves.
        options: see `SaveOptions`; the same on all processes.
        coordinator: how the processes know of each other; by default found out, once (`Coordinator.current`).

    Raises:
        LeafError, ShardingError: a leaf, or its layout, that cannot be stored, by name; this process wrote nothing.
        OptionError: a pattern in `shardings` that no plain tensor goes by, or `options` that are no SaveOptions.
        AlreadyExistsError: a checkpoint is committed there and `overwrite` is not set.
        CommitError: the processes contradict each other, or some did not finish in time; nothing was published.
        StorageError: the storage failed; what was there before is as it was, or the new checkpoint is there and whole.
    """
    if options is None:
        options = SaveOptions()
    if not isinstance(options, SaveOptions):
        raise OptionError(f"save(options=…): a {type(options).__name__} is no SaveOptions; give shardckpt.SaveOptions(…).")
    check_coordinator(coordinator)
    coordinator = Coordinator.current() if coordinator is None else coordinator
    store = Store.open(parse(url))
    attempt = _Attempt(store, coordinator, options)
    try:
        attempt.write(state)
        record = attempt.assembled() if attempt.commits else None
    except BaseException as e:
        attempt.give_up(e)
        raise
    if record is None:
        attempt.see_published()
    else:
        attempt.publish(record)


class _Attempt:
    """One process's part in one attempt at a checkpoint."""

    def __init__(self, store: Store, coordinator: Coordinator, options: SaveOptions) -> None:
        self.store = store
        self.coordinator = coordinator
        self.world = coordinator.world
        self.options = options
        self.alone = self.world.processes == 1
        self.commits = self.world.process == COMMITTER
        self.name = new_attempt() if self.alone else _next_attempt(coordinator, store)
        self.place = store.sub(self.name)
        self.prior: Prior | None = None
        self._vouches = False
        """Whether this process's record may be there, by which others may commit the attempt."""

    def write(self, state: Any) -> None:
        """Write this process's share, and its record."""
        flat = flatten(state, frameworks.is_tensor, frameworks.identity, frameworks.meaning)
        tensors = frameworks.reduce_partial(flat.tensors) if self.options.reduce_partial else flat.tensors
        sources = frameworks.sources(tensors, self.world)
        plan = plan_save(sources, self.options, self.world)
        values = encode_values(flat.per_process)
        us = self.world.process, self.world.processes
        self.prior = read_prior(self.store.among(*us), overwrite=self.options.overwrite)
        self._check_not_given_up()  # after what may be wrong with this process's own part: it is told that rather
        contents = Contents(Structure(flat.tree, plan.tensors), _small(plan, sources), self.options.metadata, _samples(plan, sources))
        staging = self.options.budget // 4
        writer = HostWriter(
            self.place.among(*us),
            self.name,
            self.world.process,
            layout=self.options.layout,
            compression=self.options.compression,
            memory_limit=self.options.budget - 2 * staging,
        )
        try:
            if not self.alone and self.commits:
                writer.describe(contents)  # early: the others then find that it says what they would
            _write_chunks(writer, plan, sources, staging)
            writer.finish(
                contents,
                hosts=self.world.processes,
                prior=self.prior.digest,
                values=seal({"values": values}) if values else None,
            )
        except BaseException:
            writer.abort()
            raise
        finally:
            self._vouches = writer.vouches

    def assembled(self) -> CheckpointRecord:
        """Wait for all hosts; what remains is to publish the record."""
        if not self.alone:
            wait_for_hosts(self.place, self.world.processes, self.options.commit_timeout, self._failure)
        return assemble(self.place)

    def publish(self, record: CheckpointRecord) -> None:
        """Make the attempt the checkpoint, and tell the others."""
        assert self.prior is not None
        try:
            publish(self.store, record, self.prior)
        except BaseException as e:
            self._tell(_WORD, _in_words(e))
            raise
        self._tell(_WORD, None)
        if isinstance(self.prior.record, CheckpointRecord):
            remove_replaced(self.store, self.prior.record.attempt)

    def see_published(self) -> None:
        """Wait for the committer's word.

        Raises:
            CommitError: it could not commit, or says nothing for too long.
        """
        timeout = self.options.commit_timeout + _COMMITTING
        began, pause, why = time.monotonic(), _FIRST_LOOK, f"within {timeout:g} s"
        deadline, look = began + timeout, began + _STORAGE_LOOK
        while (now := time.monotonic()) < deadline:
            try:
                word = self._heard(_WORD)
            except CoordinationError as e:  # the committer's process has ended, perhaps with all done; the storage knows
                why = f"and cannot be asked ({e})"
                break
            if word is not None and word["error"] is None:
                return
            if word is not None and word["process"] == COMMITTER:  # another one's is that it has waited in vain
                raise CommitError(f"{self.store}: process {COMMITTER} did not commit the save: {word['error']}")
            if now > look:
                # A word gives way to that on a later save; and who calls the place by another name than the committer hears none.
                with suppress(ShardckptError):
                    if published_attempt(self.store) == self.name:
                        return
                look = now + (now - began)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)
        if published_attempt(self.store) != self.name:
            # For who comes too late, or has missed this save and would complete it with what it saves next.
            self._tell(_WORD, f"process {self.world.process} has given up waiting for it.")
            raise CommitError(
                f"{self.store}: this process has written its share, and process {COMMITTER} has not committed {why}; if it is gone, "
                f"`shardckpt commit` publishes what all have written."
            )

    def give_up(self, error: BaseException) -> None:
        """This process's part has failed, and it publishes nothing."""
        if self.alone:
            # What is complete somebody may commit at any time (`shardckpt commit`); on a disk, where room is short, the risk is taken.
            if self.store.location.local is not None or not self._vouches:
                discard(self.place)
        else:  # others may still be writing; `gc` collects what they leave
            self._tell(_WORD if self.commits else _FAILURE, _in_words(error))

    def _check_not_given_up(self) -> None:
        """Refuse an attempt that others have ended before this process begins it.

        The attempt is told by counting. A process that has missed a save is at one that the others have left behind, perhaps
        with all their records: its own would complete it, with the values of another save.
        """
        word = None
        if not self.alone:
            with suppress(CoordinationError):  # nobody can be asked, so nobody has left it behind and gone on
                word = self._heard(_WORD)
        if word is not None:
            raise CommitError(
                f"{self.store}: the others have given this save up before process {self.world.process} began it: {word['error']} "
                f"If that has missed a save to this place, which all have to make equally often, save to another or start the job anew."
            )

    def _failure(self) -> str | None:
        try:
            heard = self._heard(_FAILURE)
        except CoordinationError:  # nobody can say so; the records say who has finished
            return None
        return None if heard is None else f"process {heard['process']} could not write its share: {heard['error']}"

    def _tell(self, what: str, error: str | None) -> None:
        """Tell whoever asks; blocks nobody. What it is about has happened, whether anybody can be told or not."""
        if not self.alone:
            with suppress(ShardckptError):
                self.coordinator.announce(self._key(what), {"save": self._save, "process": self.world.process, "error": error})

    def _heard(self, what: str) -> dict[str, Any] | None:
        """What somebody has said of this attempt."""
        said: Any = self.coordinator.peek(self._key(what))
        return said if isinstance(said, dict) and said.get("save") == self._save else None

    @property
    def _save(self) -> str:
        """Tells this save from all others of the job."""
        return f"{self.store.location.name}/{self.name}"

    def _key(self, what: str) -> str:
        return f"{what}/{crc32(self._save.encode()) % _WORDS}"


def _in_words(error: BaseException) -> str:
    """An error, as others are told of it."""
    if isinstance(error, ShardckptError):
        return str(error)
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}."


_counts: Counter[tuple[str, str]] = Counter()
_counting = Lock()


def _next_attempt(coordinator: Coordinator, store: Store) -> str:
    """The attempt that all processes of a job make when they save to a place of this name for the n-th time.

    Of this name, because processes may reach one directory by different paths.
    """
    with _counting:
        key = coordinator.run_id, store.location.name
        _counts[key] += 1
        return f"{coordinator.run_id}-{_counts[key]}"


def _small(plan: SavePlan, sources: Mapping[str, Source]) -> dict[str, bytes]:
    """The elements of small plain tensors, as they are stored."""
    fetched = frameworks.fetch([sources[name] for name in plan.small])
    found = {}
    for name, arrays in zip(plan.small, fetched, strict=True):
        found[name] = b"".join(_stored(array, plan.tensors[name]).tobytes() for array in arrays)
    return found


def _samples(plan: SavePlan, sources: Mapping[str, Source]) -> dict[str, int]:
    """A checksum of some elements, first and last among them, of every large plain tensor that can be looked at without a copy."""
    names = [name for name in plan.shared if not sources[name].staged_bytes and 0 not in sources[name].shape]
    found = {}
    for name, arrays in zip(names, frameworks.fetch([sources[name] for name in names]), strict=True):
        (array,) = arrays
        places = np.linspace(0, array.size - 1, _SAMPLED, dtype=np.int64)
        found[name] = crc32c(_stored(array, plan.tensors[name]).flat[places].tobytes())
    return found


def _write_chunks(writer: HostWriter, plan: SavePlan, sources: Mapping[str, Source], staging: int) -> None:
    """Write all chunks of this process, batch after batch within `staging` bytes of copies."""
    for batch in batches(plan.writes, lambda name: (sources[name].staged_bytes,), (staging,)):
        wanted = [sorted({write.box for write in plan.writes[name]}) for name in batch]
        fetched = frameworks.fetch([sources[name] for name in batch], wanted)
        for name, boxes, arrays in zip(batch, wanted, fetched, strict=True):
            tensor, held = plan.tensors[name], sources[name].boxes
            stored = {i: _stored(array, tensor) for i, array in zip(boxes, arrays, strict=True)}
            for write in plan.writes[name]:
                for position, elements in _chunks(write, held[write.box], stored[write.box]):
                    writer.put(write.piece, position, elements)


def _stored(array: NDArray[np.generic], tensor: TensorRecord) -> NDArray[np.generic]:
    return array.view(tensor.dtype.storage) if array.dtype != tensor.dtype.storage else array


def _chunks(write: Write, box: Box, array: NDArray[np.generic]) -> Iterator[tuple[int, NDArray[np.generic]]]:
    """The chunks of a share, with their elements as they are stored."""
    part = box.overlap(write.piece.box)
    assert part is not None
    positions, inside = chunks_inside(write.piece, part, write.chunks)
    corner = np.array(box.start, np.int64)
    start, stop = (inside.start - corner).tolist(), (inside.stop - corner).tolist()
    for position, a, b in zip(positions.tolist(), start, stop, strict=True):
        index: tuple[slice | EllipsisType, ...] = (*map(slice, a, b), ...)  # the ellipsis keeps a 0-d array an array
        yield position, array[index]
