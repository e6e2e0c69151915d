"""One process's part in one attempt at a checkpoint: its steps, their order, and the messages between processes.

1. Take: flatten the state. Every tensor leaf becomes a source that knows its shape, dtype, layout, the distinct boxes
   that this process holds, and the other processes that hold them. Plan (`save_plan`) each tensor's chunks, and the chunks that
   this process writes. Copy everything that is small. No process communicates with another one or with the storage.
2. Find the tensors that this process skips in the base (`skipping`). Write its chunks, in grid order, until all are durable;
   then write the chunk table and the host's record.
3. Process 0 waits for the records of all hosts and commits. The others check from time to time whether it has.

The first step runs on the thread that saves. The others may run on another thread, and need nothing of the state.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

from shardckpt import frameworks
from shardckpt.commit.assemble import assemble, pause, wait_for_hosts
from shardckpt.commit.base_places import base_location, check_base, check_bases
from shardckpt.commit.dependants import Dependants
from shardckpt.commit.job import RUN
from shardckpt.commit.publish import (
    Prior,
    data_stays,
    discard_unfit,
    hold_place,
    new_attempt,
    publish,
    published_attempt,
    read_prior,
    remove_replaced,
)
from shardckpt.commit.rollback import Rollback
from shardckpt.errors import CommitError, CoordinationError, OptionError, OtherJobError, ShardckptError
from shardckpt.format.record import CheckpointRecord, Contents, HostRecord
from shardckpt.format.structure import Structure
from shardckpt.frameworks.coordination import ALL_MUST_CALL, SilentStoreError, WaitNotice
from shardckpt.frameworks.per_process import encode_values, values_file
from shardckpt.io.datafile import check_space
from shardckpt.io.failures import is_shutting_down
from shardckpt.io.threads import collector_paused
from shardckpt.io.url import parse
from shardckpt.layout.dtypes import with_plain_bools
from shardckpt.state import flatten
from shardckpt.state.flatten import local_names, plain_state
from shardckpt.writing.host import HostWriter
from shardckpt.writing.replicas import ReplicaChecksums
from shardckpt.writing.save_plan import SavePlan, plan_save, skipped_names
from shardckpt.writing.turns import turns_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardckpt.format.documents import FileReference
    from shardckpt.format.structure import TensorRecord
    from shardckpt.frameworks.base import Source
    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location
    from shardckpt.layout.world import World
    from shardckpt.options import SaveOptions
    from shardckpt.writing.turns import Turns

COMMITTER = 0
"""The process that commits."""
_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0
"""Seconds between two checks for the committer's word: least and most. Between these limits an eighth of the time waited so far."""
_STORAGE_LOOK = 10.0
"""Seconds until the first check whether the storage shows a commit without announcement; the time until each next check doubles."""
_PLACEHOLDER = 4.0
"""Seconds that a process waits for the committer's placeholder on an object store before it writes one itself."""
_COMMITTING = 60.0
"""Seconds that the committer may take after the last host has finished."""
_WORD, _FAILURE = "word", "failure"
"""Kinds of announcements: the committer's word on an attempt (or the word of a process that gave up waiting for it), and the failure
of a process that could not write its share."""
_UNNAMED = ""
"""Name of an attempt that the processes have not agreed on yet."""
_WORDS = 64
"""Number of keys per kind of announcement; a job of any length keeps no more keys."""


@dataclass(frozen=True, slots=True)
class StateShare:
    """One process's part of a state, and the plan of what it writes."""

    plan: SavePlan
    sources: Mapping[str, Source]
    """Its tensors without the skipped ones. Only the parts in `contents` have been copied so far."""
    contents: Contents
    values: bytes | None
    """The file of the values that this process owns by itself; None: there are none."""
    late: Sequence[str] = ()
    """The small plain tensors on devices, which `contents` lacks."""
    replicas: ReplicaChecksums | None = None
    """The checksums of boxes that other processes hold, too; None: they are not compared."""


class Attempt:
    """One process's part in one attempt at a checkpoint."""

    def __init__(self, store: Store, coordinator: Coordinator, options: SaveOptions) -> None:
        self.store = store
        self.coordinator = coordinator
        self.world = coordinator.world
        self.options = options
        self.alone = self.world.processes == 1
        self.commits = self.world.process == COMMITTER
        self.turns = None if self.alone else turns_at(coordinator, store)
        """This process's calls to this place."""
        self.name = (new_attempt() if self.turns is None else self.turns.next_name()) or _UNNAMED
        """Name of the attempt; after a failed save the processes find it when they write."""
        self.prior: Prior | None = None
        self.bases: tuple[str, ...] = ()
        """The checkpoints that hold the tensors that this process skips, once it has found them."""
        self._skipped: frozenset[str] = frozenset()
        self._nbytes = 0
        """Bytes that this process writes, before compression."""
        self._said: dict[FileReference, Contents] = {}
        """This process's contents by the file that holds them, if it is the only process."""
        self._wrote = False
        """Whether any file of the attempt may exist."""
        self._stopped = ""
        """Reason for which this process stops waiting for others; "" if it does not."""
        self._meets = False
        """Whether this process has begun to meet the others, after a failed save."""
        self._vouches = False
        """Whether this process's record may exist, which lets other processes commit the attempt."""
        self._dependants: Dependants | None = None
        """The checkpoints that need the one to be replaced, if there is one; used by the committing process."""
        self._durable = False
        """Whether this process's share and its record are durable."""
        if is_shutting_down():
            error = CommitError(
                f"{store}: Python is shutting down and starts no threads any more, so nothing can be saved, and nothing was. "
                f"Save before the program ends, not in a function that `atexit` calls."
            )
            self.give_up(error)  # so that other processes do not wait for this one
            raise error

    @property
    def place(self) -> Store:
        """The directory of the attempt."""
        return self.store.sub(self.name)

    @collector_paused()
    def take(
        self, state: Any, plan: Callable[[Mapping[str, Source], SaveOptions, World], SavePlan] = plan_save, *, waits: bool = True
    ) -> StateShare:
        """Take this process's share of a state. When this returns, everything is copied except the elements of large tensors.

        Args:
            state: as in `shardckpt.save`.
            plan: makes the plan, or returns it from a cache.
            waits: whether to wait for devices to copy small plain tensors; False: they are left to the caller, as `StateShare.late`.
        """
        flat = flatten(
            plain_state(state),
            frameworks.is_tensor,
            frameworks.identity,
            frameworks.meaning,
            composite=frameworks.composite,
            local=local_names(state),
            process=self.world.process,
        )
        tensors = frameworks.reduce_partial(flat.tensors) if self.options.reduce_partial else flat.tensors
        sources = frameworks.sources(tensors, self.world, unread=skipped_names(tensors, self.options.skip), local=flat.local)
        if not self.alone:
            frameworks.check_aliases(sources, plain=self.options.host_tensors == "replicated")
        planned = plan(sources, self.options, self.world)
        self._nbytes, self._skipped = planned.nbytes, planned.skipped
        if self._skipped:
            check_base(self.store.location, self._base)
        values = values_file(encode_values(flat.per_process, flat.axes)) if flat.per_process else None
        structure, metadata = Structure(flat.tree, planned.tensors), json.loads(json.dumps(self.options.metadata))
        late = [] if waits or not planned.small else [*{*frameworks.names_on_devices(sources)}.intersection(planned.small)]
        contents = Contents(structure, small_elements(planned, sources, late), metadata)
        written = {name: source for name, source in sources.items() if name not in self._skipped}
        replicas = None
        if planned.replicated:  # empty if they are not to be compared
            replicas = ReplicaChecksums(planned, sources, wholly=self.options.check_replicas is True or self.options.fingerprint)
            if waits:
                replicas.fetch_late()
        return StateShare(planned, written, contents, values, late, replicas)

    def write(
        self,
        contents: Contents,
        values: bytes | None,
        fill: Callable[[HostWriter], None],
        memory: int,
        *,
        replicas: ReplicaChecksums | None = None,
        threads: int = 1,
    ) -> HostRecord:
        """Write this process's share, and its record.

        Args:
            contents: the share's contents.
            values: the share's values.
            replicas: the share's checksums.
            fill: hands all chunks to the writer.
            memory: bytes of chunks that may be in flight to the storage, if it is not a local disk.
            threads: most threads that write at a time.
        """
        if self.name == _UNNAMED:
            assert self.turns is not None
            self._meets = True
            self.name = self.turns.meet(str(self.store), self.options.commit_timeout, lambda: self._stopped or None, self._goes_on)
        us = self.world.process, self.world.processes
        store, place = (self.store, self.place) if self.alone else (self.store.among(*us), self.place.among(*us))
        prior = read_prior(store, overwrite=self.options.overwrite)
        if self.commits:
            self._check_replaceable(prior)
        self._check_not_given_up()  # after the checks of this process's own part, whose errors are more useful to it
        if self.options.compression is None:  # the size of compressed chunks is not known yet
            check_space(self.store, self._nbytes)
        contents = self._with_bases(contents)
        wait_seconds = 0.0 if self.commits or store.location.bucket is None else _PLACEHOLDER
        self.prior = hold_place(store, prior, overwrite=self.options.overwrite, wait_seconds=wait_seconds)
        self._wrote = True
        writer = HostWriter(
            place,
            self.name,
            self.world.process,
            layout=self.options.layout,
            compression=self.options.compression,
            memory_limit=memory,
            threads=threads,
            summed=contents.structure.tensors.values() if self.options.fingerprint else None,
        )
        try:
            if not self.alone and self.commits:
                writer.describe(contents)  # early, so that the others find the same contents written already
            fill(writer)
            checksums = None if replicas is None else replicas.complete()
            record = writer.finish(contents, hosts=self.world.processes, prior=self.prior.digest, values=values, replicas=checksums)
            self._durable = True
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
        if not self.alone and self.store.location.local is not None:  # a record may be visible for a moment that is not durable
            heard = None
            with suppress(CoordinationError):
                heard = self._heard(_FAILURE)
            if heard is not None:
                raise CommitError(f"{self.place}: {_failed_host(heard)} Nothing was published.")

    def assemble_record(self) -> CheckpointRecord:
        """The commit record, with everything that it refers to in place; only publishing remains."""
        assert self.prior is not None
        with data_stays(self.store):
            record = assemble(self.place, self._said)
        if record.structure.bases:
            check_bases(self.store.location, record, self.prior.attempt)
        return record

    def check_replaced(self) -> None:
        """Check again, on the committing process, that nobody relies on the checkpoint that this one replaces."""
        assert self.prior is not None
        with data_stays(self.store):
            self._check_replaceable(self.prior)

    def _check_replaceable(self, prior: Prior) -> None:
        """Refuse to replace a checkpoint that others need; at the second call only what has changed is read."""
        if prior.is_checkpoint:
            if self._dependants is None:
                rollback = Rollback.of(self.options.metadata) if RUN in self.options.metadata else None
                self._dependants = Dependants(self.store, {} if rollback is None else rollback.neighbours)
            self._dependants.check_replaceable(prior.attempt)

    def publish(self, record: CheckpointRecord) -> None:
        """Make the attempt the checkpoint, and announce that."""
        assert self.prior is not None
        try:
            published = publish(self.store, record, self.prior)
        except BaseException as e:
            if not self.alone:
                self._fail(e)
            raise
        self._tell(_WORD, None)
        if published and self.prior.attempt is not None:
            remove_replaced(self.store, self.prior.attempt)

    def see_published(self) -> None:
        """Wait for the committer's announcement.

        Raises:
            CommitError: the committer could not commit, or announces nothing for too long.
        """
        assert self.turns is not None
        try:
            self._await_word(self.turns)
        except BaseException:
            self._remember_failure()
            raise

    def _await_word(self, turns: Turns) -> None:
        began, silent, notice = time.monotonic(), "", WaitNotice(str(self.store))
        look = began + _STORAGE_LOOK
        while (waited := time.monotonic() - began) < (timeout := self.options.commit_timeout + (0 if silent else _COMMITTING)):
            if (reason := self._why_no_word(turns, waited)) is not None:
                raise CommitError(f"{self.store}: process {COMMITTER} has not committed yet, and {reason}")
            try:
                word, silent = self._heard(_WORD), ""
            except SilentStoreError as e:  # the committer may have stopped, or only the store: the storage shows which
                word, silent = None, f" ({str(e).rstrip('.')})"
            except CoordinationError as e:  # the committer's process has ended, perhaps after the commit: the storage shows which
                why = f"and does not answer ({str(e).rstrip('.')})"
                break
            if word is not None and word["error"] is None:
                return
            if word is not None and word["process"] == COMMITTER:  # another process's word only says that it has waited in vain
                kind = next((kind for kind in (OtherJobError, OptionError) if word.get("code") == kind.code), CommitError)
                raise kind(f"{self.store}: process {COMMITTER} did not commit the save: {word['error']}")
            if (now := time.monotonic()) > look:
                # A later save overwrites the word, and a process that reaches the place by another name than the committer gets none.
                with suppress(ShardckptError):
                    if published_attempt(self.store) == self.name:
                        return
                look = now + (now - began)
            notice.look(lambda: f"process {COMMITTER} to commit the save")
            time.sleep(pause(waited, _FIRST_LOOK, _LAST_LOOK))
        else:
            why = f"within {timeout:g} s{silent}"
        if published_attempt(self.store) != self.name:
            # For processes that come too late, or have missed this save and would complete it with the data of their next save.
            self._tell(_WORD, CommitError(f"process {self.world.process} does not wait for it any more."))
            raise CommitError(
                f"{self.store}: this process has written its share, and process {COMMITTER} has not committed {why}. {ALL_MUST_CALL} "
                f"If process {COMMITTER} is gone, `shardckpt commit` publishes the save."
            )

    def _why_no_word(self, turns: Turns, waited: float) -> str | None:
        """The reason for which no announcement will come, or is not awaited; None if there is none."""
        if self._stopped:
            return self._stopped
        closed = turns.why_closed() if waited > _LAST_LOOK else None
        return None if closed is None else f"it has given up another save to this place: {closed}"

    def stop_waiting(self, why: str) -> None:
        """Stop waiting for other processes, on all threads; `why` completes a sentence."""
        self._stopped = why

    def give_up(self, error: BaseException) -> None:
        """Handle a failure of this process's part: it publishes nothing.

        Any process may commit a complete attempt (`shardckpt commit`), so only an incomplete one goes. On a disk, a record may be
        visible although it is not durable; in a bucket, it may be durable although this process has not seen that.
        """
        if self.alone:
            if self._wrote and self.prior is not None:
                complete = self._durable or (self._vouches and self.store.location.local is None)
                discard_unfit(self.store, self.name, self.prior, complete=complete)
        else:  # other processes may still be writing; `gc` collects the files of this one
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Announce the failure of this process's part, or of the commit."""
        assert self.turns is not None
        if self.name != _UNNAMED:
            self._tell(_WORD if self.commits else _FAILURE, error)
        elif not self.commits and not self._meets:
            self.turns.report(_in_words(error))
        self._remember_failure()
        if self.commits:
            self.turns.close(_in_words(error))

    def _remember_failure(self) -> None:
        assert self.turns is not None
        if self.name != _UNNAMED:  # else the failed attempt of an earlier call may still be open
            self.turns.failed = self.name

    def _goes_on(self, failed: str) -> bool:
        """Whether the committer published an attempt that failed here, or another process has waited for it in vain."""
        with suppress(ShardckptError):
            word = self._heard(_WORD, failed)
            if word is not None:
                return word["error"] is None or word["process"] != COMMITTER
            return published_attempt(self.store) == failed
        return False

    @property
    def _base(self) -> Location:
        assert self.options.base is not None  # set whenever skip= is
        return parse(self.options.base)

    def _with_bases(self, contents: Contents) -> Contents:
        """This process's contents, with all tensors that it skips found in the base."""
        if not self._skipped:
            return contents
        from shardckpt.writing.skipping import left_in_base  # it imports the reading of checkpoints, which other saves do not need

        structure = left_in_base(contents.structure, self._skipped, self.store.location, self._base)
        self.bases = tuple(str(base_location(self.store.location, base)) for base in structure.bases)
        return replace(contents, structure=structure)

    def _check_not_given_up(self) -> None:
        """Refuse an attempt that other processes have given up before this process begins it.

        The attempt's name comes from a counter. A process that has missed a save gets the name of an attempt that the others have left
        behind, perhaps with all their records. Its own record would complete that attempt with the values of another save.
        """
        if self.turns is None:
            return
        why, refused = None, False
        with suppress(CoordinationError):  # no process can be asked, so none has left it behind and gone on
            word = self._heard(_WORD)
            why = None if word is None else word["error"]
            refused = word is not None and word.get("code") == OptionError.code
        if why is None and not self.commits:
            why = self.turns.why_closed()
        if why is not None:
            us = f"process {self.world.process}"
            if not self.commits:
                self.turns.report("it has missed a save to this place, or began it after the others had given it up")
            if refused:
                raise OptionError(f"{self.store}: process {COMMITTER} did not begin the save: {why}")
            raise CommitError(
                f"{self.store}: the other processes gave up this save before {us} began it: {why} All processes must make the same "
                f"saves, and {us} has missed one or is late. The next save that all of them make here is a new attempt."
            )

    def _failure(self) -> str | None:
        if self._stopped:
            return f"not all hosts have finished, and {self._stopped}"
        assert self.turns is not None
        if (out_of_step := self.turns.out_of_step()) is not None:
            return f"{out_of_step}. All processes must make the same saves; the next save that all of them make here is a new attempt."
        try:
            heard = self._heard(_FAILURE)
        except CoordinationError:  # no announcement can be read; the records show which hosts have finished
            return None
        return None if heard is None else _failed_host(heard)

    def _tell(self, what: str, error: BaseException | None) -> None:
        """Announce an event without waiting; an unreachable coordination store changes nothing."""
        if not self.alone:
            with suppress(ShardckptError):
                said = {"error": None if error is None else _in_words(error), "code": getattr(error, "code", None)}
                save = self._save(self.name)
                self.coordinator.announce(_key(what, save), {"save": save, "process": self.world.process, **said})

    def _heard(self, what: str, attempt: str | None = None) -> dict[str, Any] | None:
        """The announcement of that kind about an attempt, by default this one, or None."""
        save = self._save(attempt or self.name)
        said: Any = self.coordinator.peek(_key(what, save))
        return said if isinstance(said, dict) and said.get("save") == save else None

    def _save(self, attempt: str) -> str:
        """A key that distinguishes the save with that attempt from all others of the job."""
        return f"{self.store.location.name}/{attempt}"


def _key(what: str, save: str) -> str:
    return f"{what}/{crc32(save.encode()) % _WORDS}"


def _failed_host(heard: Mapping[str, Any]) -> str:
    return f"process {heard['process']} could not write its share: {heard['error']}"


def _in_words(error: BaseException) -> str:
    """An error as text for the announcement to other processes."""
    if isinstance(error, ShardckptError):
        return str(error)
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}."


def stored(array: NDArray[np.generic], tensor: TensorRecord) -> NDArray[np.generic]:
    """Elements viewed in the dtype in which they are stored, without a copy."""
    return array.view(tensor.dtype.storage) if array.dtype != tensor.dtype.storage else array


def small_elements(plan: SavePlan, sources: Mapping[str, Source], without: Sequence[str] = ()) -> dict[str, bytes]:
    """The elements of small plain tensors, as stored."""
    names = [name for name in plan.small if name not in without] if without else plan.small
    fetched = frameworks.fetch([sources[name] for name in names])
    found = {}
    for name, arrays in zip(names, fetched, strict=True):
        found[name] = b"".join(with_plain_bools(stored(array, plan.tensors[name])).tobytes() for array in arrays)
    return found
