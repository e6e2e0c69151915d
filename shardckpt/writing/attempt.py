"""One process's part in one attempt at a checkpoint: what is done, in which order, and what is said of it.

1. Take: flatten the state; every tensor leaf becomes a source that knows its shape, dtype, layout, which distinct boxes
   this process holds, and which processes hold them too. Plan (`save_plan`) each tensor's chunks, and those that this
   process writes. Take whatever is small. No process asks another one, and none asks the storage.
2. Find what this process skips in the base (`skipping`). Write its chunks, in grid order, until all is durable; then the
   chunk table and the host's record.
3. Process 0 waits for the records of all hosts and commits. The others look, from time to time, whether it has.

The first is for the thread that saves. The others may be done by another thread, which needs nothing of the state.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from crc32c import crc32c

from shardckpt import frameworks
from shardckpt.commit.assemble import assemble, pause, wait_for_hosts
from shardckpt.commit.base_places import base_location, check_base, check_bases
from shardckpt.commit.publish import (
    Prior,
    clear_place,
    discard,
    hold_place,
    new_attempt,
    publish,
    published_attempt,
    read_prior,
    remove_replaced,
)
from shardckpt.errors import CommitError, CoordinationError, OtherJobError, ShardckptError
from shardckpt.format.documents import FileReference, seal
from shardckpt.format.record import CheckpointRecord, Contents, HostRecord
from shardckpt.format.structure import Structure
from shardckpt.frameworks.coordination import SilentStoreError
from shardckpt.frameworks.per_process import encode_values
from shardckpt.io.datafile import check_space
from shardckpt.io.failures import is_ending
from shardckpt.io.url import parse
from shardckpt.state import flatten
from shardckpt.state.flatten import plain_state
from shardckpt.writing.host import HostWriter
from shardckpt.writing.save_plan import SavePlan, plan_save, skipped_names
from shardckpt.writing.skipping import left_in_base

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.frameworks.base import Source
    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location
    from shardckpt.layout.world import World
    from shardckpt.options import SaveOptions

COMMITTER = 0
"""The process that commits."""
_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0
"""Seconds between two looks for the committer's word; in between an eighth of the time waited."""
_STORAGE_LOOK = 10.0
"""Seconds until the first look whether the storage shows what nobody has said; the next ones are as long again apart as all before."""
_PLACEHOLDER = 4.0
"""Seconds that a process waits for the committer's placeholder before it writes one itself; on an object store."""
_COMMITTING = 60.0
"""Seconds that the committer may take after the last host has finished."""
_WORD, _FAILURE = "word", "failure"
"""Kinds of announcements: the committer's word on an attempt (or that of a process that gave up waiting for it), and the failure of a
process that could not write its share."""
_SAMPLED = 1024
"""Elements of a large plain tensor by which processes that have different ones under one name are found."""
_WORDS = 64
"""Places for either; a job of any length keeps no more keys."""


@dataclass(frozen=True, slots=True)
class StateShare:
    """One process's part of a state, and the plan of what it writes."""

    plan: SavePlan
    sources: Mapping[str, Source]
    """Its tensors but for those that it skips. Nothing of them has been taken yet but what is in `contents`."""
    contents: Contents
    values: bytes | None
    """The file of what this process owns by itself; None: nothing."""


class Attempt:
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
        self.bases: tuple[str, ...] = ()
        """The checkpoints in which tensors lie that this process has skipped, once it has found them."""
        self._skipped: frozenset[str] = frozenset()
        self._nbytes = 0
        """Bytes that this process writes."""
        self._said: dict[FileReference, Contents] = {}
        """This process's contents by the file that holds them, where it is the only process."""
        self._wrote = False
        """Whether anything of the attempt may be there."""
        self._stopped = ""
        """Why other processes are not waited for any more."""
        self._vouches = False
        """Whether this process's record may be there, by which others may commit the attempt."""
        if is_ending():
            error = CommitError(
                f"{store}: Python is ending and starts no threads any more, so nothing can be saved, and nothing was. "
                f"Save before the program ends, not in a function that `atexit` calls."
            )
            self.give_up(error)  # others who save do not wait for this process
            raise error

    def take(self, state: Any, plan: Callable[[Mapping[str, Source], SaveOptions, World], SavePlan] = plan_save) -> StateShare:
        """Take this process's share of a state: everything but the elements of large tensors, when this returns.

        Args:
            state: as in `shardckpt.save`.
            plan: plans it, or remembers having done so.
        """
        flat = flatten(plain_state(state), frameworks.is_tensor, frameworks.identity, frameworks.meaning)
        tensors = frameworks.reduce_partial(flat.tensors) if self.options.reduce_partial else flat.tensors
        sources = frameworks.sources(tensors, self.world, unread=skipped_names(tensors, self.options.skip))
        planned = plan(sources, self.options, self.world)
        self._nbytes, self._skipped = planned.nbytes, planned.skipped
        if self._skipped:
            check_base(self.store.location, self._base)
        values = encode_values(flat.per_process) if flat.per_process else {}
        structure, metadata = Structure(flat.tree, planned.tensors), json.loads(json.dumps(self.options.metadata))
        contents = Contents(structure, _small(planned, sources), metadata, _samples(planned, sources))
        written = {name: source for name, source in sources.items() if name not in self._skipped}
        return StateShare(planned, written, contents, seal({"values": values}) if values else None)

    def write(
        self, contents: Contents, values: bytes | None, fill: Callable[[HostWriter], None], memory: int, *, threads: int = 1
    ) -> HostRecord:
        """Write this process's share, and its record.

        Args:
            contents: of the share.
            values: of the share.
            fill: hands all chunks to the writer.
            memory: bytes of chunks that may be on their way to the storage, where that is no local disk.
            threads: that may write at a time.
        """
        us = self.world.process, self.world.processes
        store, place = (self.store, self.place) if self.alone else (self.store.among(*us), self.place.among(*us))
        prior = read_prior(store, overwrite=self.options.overwrite)
        self._check_not_given_up()  # after what may be wrong with this process's own part: it is told that rather
        if self.options.compression is None:  # else nobody knows
            check_space(self.store, self._nbytes)
        contents = self._with_bases(contents)
        patience = 0.0 if self.commits or store.location.bucket is None else _PLACEHOLDER
        self.prior = hold_place(store, prior, overwrite=self.options.overwrite, patience=patience)
        self._wrote = True
        writer = HostWriter(
            place,
            self.name,
            self.world.process,
            layout=self.options.layout,
            compression=self.options.compression,
            memory_limit=memory,
            threads=threads,
        )
        try:
            if not self.alone and self.commits:
                writer.describe(contents)  # early: the others then find that it says what they would
            fill(writer)
            record = writer.finish(contents, hosts=self.world.processes, prior=self.prior.digest, values=values)
        except BaseException:
            writer.abort()
            raise
        finally:
            self._vouches = writer.vouches
        if self.alone:
            self._said[record.files.contents] = contents
        return record

    def await_hosts(self) -> None:
        """Wait until all hosts have written their share."""
        if not self.alone:
            wait_for_hosts(self.place, self.world.processes, self.options.commit_timeout, self._failure)

    def assemble_record(self) -> CheckpointRecord:
        """The record, with all that it refers to in place; what remains is to publish it."""
        assert self.prior is not None
        record = assemble(self.place, self._said)
        if record.structure.bases:
            check_bases(self.store.location, record, self.prior.attempt)
        return record

    def publish(self, record: CheckpointRecord) -> None:
        """Make the attempt the checkpoint, and tell the others."""
        assert self.prior is not None
        try:
            publish(self.store, record, self.prior)
        except BaseException as e:
            self._tell(_WORD, e)
            raise
        self._tell(_WORD, None)
        if self.prior.attempt is not None:
            remove_replaced(self.store, self.prior.attempt)

    def see_published(self) -> None:
        """Wait for the committer's word.

        Raises:
            CommitError: it could not commit, or says nothing for too long.
        """
        began, silent = time.monotonic(), ""
        look = began + _STORAGE_LOOK
        while (waited := time.monotonic() - began) < (timeout := self.options.commit_timeout + (0 if silent else _COMMITTING)):
            if self._stopped:
                raise CommitError(f"{self.store}: process {COMMITTER} has not committed yet, and {self._stopped}")
            try:
                word, silent = self._heard(_WORD), ""
            except SilentStoreError as e:  # the committer may have stopped, or only the store: the storage knows
                word, silent = None, f" ({str(e).rstrip('.')})"
            except CoordinationError as e:  # the committer's process has ended, perhaps with all done; likewise
                why = f"and cannot be asked ({str(e).rstrip('.')})"
                break
            if word is not None and word["error"] is None:
                return
            if word is not None and word["process"] == COMMITTER:  # another one's is that it has waited in vain
                kind = OtherJobError if word.get("code") == OtherJobError.code else CommitError
                raise kind(f"{self.store}: process {COMMITTER} did not commit the save: {word['error']}")
            if (now := time.monotonic()) > look:
                # A word gives way to that on a later save; and who calls the place by another name than the committer hears none.
                with suppress(ShardckptError):
                    if published_attempt(self.store) == self.name:
                        return
                look = now + (now - began)
            time.sleep(pause(waited, _FIRST_LOOK, _LAST_LOOK))
        else:
            why = f"within {timeout:g} s{silent}"
        if published_attempt(self.store) != self.name:
            # For who comes too late, or has missed this save and would complete it with what it saves next.
            self._tell(_WORD, CommitError(f"process {self.world.process} has given up waiting for it."))
            raise CommitError(
                f"{self.store}: this process has written its share, and process {COMMITTER} has not committed {why}; if it is gone, "
                f"`shardckpt commit` publishes what all have written."
            )

    def stop_waiting(self, why: str) -> None:
        """Stop waiting for other processes, on all threads; `why` completes a sentence."""
        self._stopped = why

    def give_up(self, error: BaseException) -> None:
        """This process's part has failed, and it publishes nothing."""
        if self.alone:
            # What is complete somebody may commit at any time (`shardckpt commit`); on a disk, where room is short, the risk is taken.
            if self._wrote and (self.store.location.local is not None or not self._vouches):
                with suppress(ShardckptError):  # what cannot be read may name it
                    if published_attempt(self.store) != self.name:
                        discard(self.place)
                        if self.prior is not None and self.prior.holds:
                            clear_place(self.store, self.prior.generation)
        else:  # others may still be writing; `gc` collects what they leave
            self._tell(_WORD if self.commits else _FAILURE, error)

    @property
    def _base(self) -> Location:
        assert self.options.base is not None  # options that skip have one
        return parse(self.options.base)

    def _with_bases(self, contents: Contents) -> Contents:
        """What this process says of its state, with all that it skips found in the base."""
        if not self._skipped:
            return contents
        structure = left_in_base(contents.structure, self._skipped, self.store.location, self._base)
        self.bases = tuple(str(base_location(self.store.location, base)) for base in structure.bases)
        return replace(contents, structure=structure)

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
        if self._stopped:
            return f"not all hosts have finished, and {self._stopped}"
        try:
            heard = self._heard(_FAILURE)
        except CoordinationError:  # nobody can say so; the records say who has finished
            return None
        return None if heard is None else f"process {heard['process']} could not write its share: {heard['error']}"

    def _tell(self, what: str, error: BaseException | None) -> None:
        """Announce something that has happened, without waiting; a store that cannot be reached changes nothing."""
        if not self.alone:
            with suppress(ShardckptError):
                said = {"error": None if error is None else _in_words(error), "code": getattr(error, "code", None)}
                self.coordinator.announce(self._key(what), {"save": self._save, "process": self.world.process, **said})

    def _heard(self, what: str) -> dict[str, Any] | None:
        """The announcement of that kind about this attempt, if there is one."""
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

    Of this name, because processes may reach one directory by different paths, or links. It is a part of what the attempt is called: no
    other checkpoint of the job has one of that name, by which a base is told (`bases`).
    """
    name = store.location.resolved.name  # of a disk: looks at the names of the path, and no further
    with _counting:
        key = coordinator.run_id, name
        _counts[key] += 1
        return f"{coordinator.run_id}-{sha256(name.encode()).hexdigest()[:12]}-{_counts[key]}"


def stored(array: NDArray[np.generic], tensor: TensorRecord) -> NDArray[np.generic]:
    """Elements in the dtype as which they are stored, without a copy."""
    return array.view(tensor.dtype.storage) if array.dtype != tensor.dtype.storage else array


def _small(plan: SavePlan, sources: Mapping[str, Source]) -> dict[str, bytes]:
    """The elements of small plain tensors, as they are stored."""
    fetched = frameworks.fetch([sources[name] for name in plan.small])
    found = {}
    for name, arrays in zip(plan.small, fetched, strict=True):
        found[name] = b"".join(stored(array, plan.tensors[name]).tobytes() for array in arrays)
    return found


def _samples(plan: SavePlan, sources: Mapping[str, Source]) -> dict[str, int]:
    """A checksum of some elements, first and last among them, of every large plain tensor that can be looked at without a copy."""
    names = [name for name in plan.shared if not sources[name].staged_bytes and 0 not in sources[name].shape]
    found = {}
    for name, arrays in zip(names, frameworks.fetch([sources[name] for name in names]), strict=True):
        (array,) = arrays
        places = np.linspace(0, array.size - 1, _SAMPLED, dtype=np.int64)
        found[name] = crc32c(stored(array, plan.tensors[name]).flat[places].tobytes())
    return found
