"""One process's part in one attempt at a checkpoint.

The module has its steps, their order, and the messages between processes.

1. Take this process's share of the state (`state_share`). No process communicates with another one
   or with the storage.
2. In the first save below a root, check whether all processes share the storage (`shared_storage`).
   Find the tensors that this process skips in the base (`skipping`). Write its chunks, in grid
   order, until all are durable; then write the chunk table and the host's record.
3. Process 0 waits for the records of all hosts and commits. The others check from time to time
   whether it has.

An `Attempt` is a context manager: if an error occurs before publishing begins, it is given up.
`take`, `writer` and `commit` are its steps. The first step runs on the thread that saves. The
others may run on another thread, and need nothing of the state.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from shardckpt.commit.assemble import assemble
from shardckpt.commit.base_places import base_location, check_base, check_bases
from shardckpt.commit.dependants import Dependants
from shardckpt.commit.publish import (
    Prior,
    data_stays,
    hold_place,
    new_attempt,
    publish,
    read_prior,
)
from shardckpt.commit.remove import discard_unfit, remove_replaced
from shardckpt.commit.waiting import wait_for_hosts
from shardckpt.errors import CommitError
from shardckpt.frameworks.coordination import coordinator_of
from shardckpt.io.cores import note_local_processes
from shardckpt.io.datafile import check_space
from shardckpt.io.failures import is_shutting_down
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.runs.job import RUN
from shardckpt.runs.rollback import Rollback
from shardckpt.writing.announcements import FAILURE, WORD, Announcements, in_words
from shardckpt.writing.committer import COMMITTER, CommitterWord
from shardckpt.writing.host import HostWriter
from shardckpt.writing.kept import SkippedError
from shardckpt.writing.save_plan import check_local
from shardckpt.writing.shared_storage import SharedStorage
from shardckpt.writing.state_share import StateShare, share_of
from shardckpt.writing.turns import turns_at

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from shardckpt.format.documents import FileReference, TableReference
    from shardckpt.format.record import CheckpointRecord, Contents, HostRecord
    from shardckpt.format.table import Table
    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.io.url import Location
    from shardckpt.options import SaveOptions
    from shardckpt.writing.kept import VersionToWrite
    from shardckpt.writing.replicas import ReplicaChecksums

_PLACEHOLDER = 4.0
"""Seconds that a process waits for the committer's placeholder on an object store before it writes
one itself."""
_UNNAMED = ""
"""Name of an attempt that the processes have not agreed on yet."""


class Attempt:
    """One process's part in one attempt at a checkpoint."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        options: SaveOptions,
        version: VersionToWrite | None = None,
    ) -> None:
        self.store = store
        self.version = version
        """The version that the attempt is, if its chunks may be differences."""
        self.coordinator = coordinator
        self.world = coordinator.world
        self.options = options
        self.alone = self.world.processes == 1
        self.commits = self.world.process == COMMITTER
        self.turns = None if self.alone else turns_at(coordinator, store)
        """This process's calls to this place."""
        self._announcements = None if self.alone else Announcements(coordinator, store)
        self._word = (
            None
            if self.turns is None or self._announcements is None
            else CommitterWord(
                store, self.world.process, self.turns, self._announcements, options.commit_timeout
            )
        )
        self._storage = (
            None
            if self._announcements is None
            else SharedStorage(coordinator, store, self._announcements)
        )
        self.name = (new_attempt() if self.turns is None else self.turns.next_name()) or _UNNAMED
        """Name of the attempt; after a failed save the processes find it when they write."""
        self.prior: Prior | None = None
        self.bases: tuple[str, ...] = ()
        """The checkpoints that hold the tensors that this process skips, once it has found them."""
        self._skipped: frozenset[str] = frozenset()
        self._nbytes = 0
        """Bytes that this process writes, before compression."""
        self._known: dict[FileReference, Contents] = {}
        """This process's contents by their file, if it saves alone."""
        self._tables: dict[TableReference, Table] = {}
        """This process's chunk table by its file, if it saves alone."""
        self._wrote = False
        """Whether any file of the attempt may exist."""
        self._stopped = ""
        """Reason for which this process stops waiting for others; "" if it does not."""
        self._meets = False
        """Whether this process has begun to meet the others, after a failed save."""
        self._unused_local: Sequence[str] = ()
        """Patterns for values of each process that have selected nothing on this process."""
        self._vouches = False
        """Whether this process's record may exist. Others may then commit the attempt, so its files
        must stay."""
        self._dependants: Dependants | None = None
        """The checkpoints that need the one to be replaced, if there is one; used by the committing
        process."""
        self._durable = False
        """Whether this process's share and its record are durable."""
        self.record: HostRecord | None = None
        """The record of this process's share, when that is durable."""
        self._ended = False
        """Whether only publishing, or waiting for it, is left. Both report their own errors, so
        `give_up` is not called."""
        if is_shutting_down():
            error = CommitError(
                f"{store}: Python is shutting down and starts no threads any more, so nothing can "
                "be saved, and nothing was. Save before the program ends, not in a function that "
                "`atexit` calls."
            )
            self.give_up(error)  # so that other processes do not wait for this one
            raise error

    @classmethod
    def at(
        cls,
        url: str | os.PathLike[str],
        coordinator: Coordinator | None,
        options: SaveOptions,
        version: VersionToWrite | None = None,
    ) -> Self:
        """An attempt at a checkpoint at `url`; the coordinator is detected if there is none."""
        coordinator = coordinator_of(coordinator, options.commit_timeout)
        note_local_processes(coordinator.world.sharing)
        return cls(Store.open(parse(url)), coordinator, options, version)

    def __enter__(self) -> Self:
        """This attempt."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an error, give the attempt up, unless publishing has begun."""
        # Processes count a skipped call alike.
        if error is not None and not self._ended and not isinstance(error, SkippedError):
            self.give_up(error)

    @property
    def place(self) -> Store:
        """The directory of the attempt."""
        return self.store.sub(self.name)

    def take(self, state: Any, *, waits: bool = True) -> StateShare:
        """Take this process's share of a state; see `share_of`. This writes nothing."""
        share = share_of(state, self.options, self.world, waits=waits, version=self.version)
        self._nbytes, self._skipped, self._unused_local = (
            share.plan.nbytes,
            share.plan.skipped,
            share.unused_local,
        )
        if self.alone:
            check_local(self._unused_local, {}, self.store)
        if self._skipped:
            check_base(self.store.location, self._base)
        return share

    @contextmanager
    def writer(
        self,
        contents: Contents,
        values: bytes | None,
        *,
        memory: int,
        threads: int = 1,
        replicas: ReplicaChecksums | None = None,
    ) -> Iterator[HostWriter]:
        """Hold the place, and yield the writer of this process's chunks.

        At the end of the block the share and its record are durable.

        Args:
            contents: the share's contents.
            values: the share's values.
            memory: bytes of chunks that may be in flight to the storage, if it is not a local disk.
            threads: most threads that write at a time.
            replicas: the share's checksums.
        """
        self._await_turn()
        store = self.store.synced_later()
        place = store.sub(self.name)
        if not self.alone:
            us = self.world.process, self.world.processes
            store, place = store.among(*us), place.among(*us)
        prior = read_prior(store, overwrite=self.options.overwrite)
        if self.commits:
            self._check_replaceable(prior)
        # After the checks of this process's own part, whose errors are more useful to it.
        if self._word is not None:
            self._word.check_not_given_up(self.name)
        contents = self._with_bases(contents)
        compression: str | None = self.options.compression
        kept = None
        if self.version is not None:
            kept = self.version.kept
            contents = self.version.begin(contents, self.store, self.name)
            compression = "difference" if contents.structure.chain else compression
        if compression is None:  # the size of compressed chunks and of differences is not known yet
            check_space(self.store, self._nbytes)
        wait_seconds = 0.0 if self.commits or store.near or not store.shared else _PLACEHOLDER
        self.prior = hold_place(
            store, prior, overwrite=self.options.overwrite, wait_seconds=wait_seconds
        )
        self._wrote = True
        self._look_at_storage(wait=True)
        writer = HostWriter(
            place,
            self.name,
            self.world.process,
            layout=self.options.layout,
            compression=compression,
            memory_limit=memory,
            threads=threads,
            summed=contents.structure.tensors.values() if self.options.fingerprint else None,
            kept=kept,
        )
        try:
            if self.commits and (prior.record is not None or not self.alone):
                # Early, so that the others find the same contents written already, and a collection
                # does not take an old placeholder or attempt here for all that there is.
                described = writer.describe(contents, hosts=self.world.processes)
                if self._storage is not None and not self._storage.proven:
                    self._storage.announce(self.name, described.key)
            yield writer
            checksums = None if replicas is None else replicas.complete()
            self.record = writer.finish(
                contents,
                hosts=self.world.processes,
                prior=self.prior.digest,
                values=values,
                replicas=checksums,
            )
            self._durable = True
        except BaseException:
            writer.abort()
            raise
        finally:
            self._vouches = writer.vouches
        if self.alone:
            assert writer.table is not None
            self._known[self.record.files.contents], self._tables[self.record.files.table] = (
                contents,
                writer.table,
            )

    def _await_turn(self) -> None:
        """Wait for what comes before this attempt.

        These are earlier versions and, after a failed save, the other processes.
        """
        if self.version is not None:
            self.version.await_turn(self.store, self.coordinator, lambda: self._stopped)
        if self.name == _UNNAMED:
            assert self.turns is not None
            assert self._word is not None
            self._meets = True
            self.name = self.turns.meet(
                str(self.store),
                self.options.commit_timeout,
                lambda: self._stopped or None,
                self._word.goes_on,
            )

    def commit(self, before_publish: Callable[[], None] = lambda: None) -> float:
        """Wait for the other hosts and publish, on the committing process.

        On the others, see it published.

        Args:
            before_publish: called on the committing process just before the checkpoint is
                published; an error from it fails the save.

        Returns:
            The time, in seconds of the monotonic clock, at which all hosts had finished; on the
            other processes, the time at which they saw the checkpoint published.
        """
        if not self.commits:
            self._ended = True
            self.see_published()
            return time.monotonic()
        finished = self.await_hosts()
        waited_at = time.monotonic()
        record = self.assemble_record(finished)
        with data_stays(self.store):
            before_publish()
        self.check_replaced()
        self._ended = True
        self.publish(record)
        return waited_at

    def await_hosts(self) -> list[int]:
        """Wait until all hosts have written their share; return the hosts."""
        if self.alone:
            return [self.world.process]
        timeout = self.options.commit_timeout
        hosts = wait_for_hosts(self.place, self.world.processes, timeout, self._failure)
        if not self.store.durable_when_visible:
            # On a disk, a record may be visible for a moment that is not durable.
            assert self._announcements is not None
            if (failed := self._announcements.failed_host(self.name)) is not None:
                raise CommitError(f"{self.place}: {failed} Nothing was published.")
        return hosts

    def assemble_record(self, hosts: Sequence[int]) -> CheckpointRecord:
        """The commit record, with everything that it refers to in place; only publishing remains.

        `hosts` are those that have finished.
        """
        assert self.prior is not None
        with data_stays(self.store, self.prior):
            record = assemble(self.place, self._known, self._tables, hosts)
        if record.structure.bases:
            check_bases(self.store.location, record, self.prior.attempt)
        check_local(self._unused_local, record.structure.tree, self.store)
        return record

    def check_replaced(self) -> None:
        """Check again that nobody relies on the checkpoint that this one replaces.

        The committing process makes this check.
        """
        assert self.prior is not None
        with data_stays(self.store):
            self._check_replaceable(self.prior)

    def _check_replaceable(self, prior: Prior) -> None:
        """Refuse to replace a checkpoint that others need.

        At the second call only what has changed is read.
        """
        if prior.is_checkpoint:
            if self._dependants is None:
                self._dependants = Dependants(self.store, self._superseded())
            self._dependants.check_replaceable(prior.attempt)

    def _superseded(self) -> Mapping[str, str | None]:
        """Checkpoints beside this one that it supersedes, perhaps without a marker yet."""
        if self.version is not None:
            return self.version.supersedes
        rollback = Rollback.of(self.options.metadata) if RUN in self.options.metadata else None
        return {} if rollback is None else rollback.neighbours

    def _take_over(self, fold: Prior) -> None:
        """Replace a fold of the checkpoint that this one replaces."""
        self.prior = fold
        self.check_replaced()

    def publish(self, record: CheckpointRecord) -> None:
        """Make the attempt the checkpoint, and announce that."""
        assert self.prior is not None
        try:
            published = publish(self.store, record, self.prior, self._take_over)
        except BaseException as e:
            if not self.alone:
                self._fail(e)
            raise
        if self.version is not None:
            self.version.published(record)
        self._tell(WORD, None)
        if self._storage is not None:
            self._storage.note()
        if published and self.prior.attempt is not None:
            remove_replaced(self.store, self.prior.attempt)
        if self.version is not None:
            self.version.settle()

    def see_published(self) -> None:
        """Wait for the committer's announcement.

        Raises:
            CommitError: the committer could not commit, or announces nothing for too long.
        """
        assert self.turns is not None
        assert self._word is not None
        try:
            self._word.wait(
                self.name, lambda: self._stopped, lambda: self._look_at_storage(wait=False)
            )
        except BaseException:
            self.turns.fail(self.name)
            raise
        if self._storage is not None:
            self._storage.note()

    def _look_at_storage(self, *, wait: bool) -> None:
        """Check that this process sees what the committer has written to the storage.

        This is done in the first save below a root.
        """
        if self._storage is not None and not (self.commits or self._storage.proven):
            limit = self.options.commit_timeout / 2
            self._storage.check(self.name, lambda: self._stopped, wait=wait, limit=limit)

    def stop_waiting(self, why: str) -> None:
        """Stop waiting for other processes, on all threads; `why` completes a sentence."""
        self._stopped = why

    def give_up(self, error: BaseException) -> None:
        """Handle a failure of this process's part: it publishes nothing.

        Any process may commit a complete attempt (`shardckpt commit`), so only an incomplete one
        goes. On a disk, a record may be visible although it is not durable; in a bucket, it may be
        durable although this process has not seen that.
        """
        if self.alone:
            if self._wrote and self.prior is not None:
                complete = self._durable or (self._vouches and self.store.durable_when_visible)
                discard_unfit(self.store, self.name, self.prior, complete=complete)
        else:  # other processes may still be writing; `gc` collects the files of this one
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Announce the failure of this process's part, or of the commit."""
        assert self.turns is not None
        assert self._word is not None
        if self.name != _UNNAMED:
            self._tell(WORD if self.commits else FAILURE, error)
        elif not self.commits and not self._meets:
            self.turns.report(in_words(error))
        if self.name != _UNNAMED:  # else the failed attempt of an earlier call may still be open
            self.turns.fail(self.name)
        if self.commits:
            self.turns.close(in_words(error), late=self._word.late)

    @property
    def _base(self) -> Location:
        assert self.options.base is not None  # set whenever skip= is
        return parse(self.options.base)

    def _with_bases(self, contents: Contents) -> Contents:
        """This process's contents, with all tensors that it skips found in the base."""
        if not self._skipped:
            return contents
        # It imports the reading of checkpoints, which other saves do not need.
        from shardckpt.writing.skipping import left_in_base

        structure = left_in_base(contents.structure, self._skipped, self.store.location, self._base)
        self.bases = tuple(
            str(base_location(self.store.location, base)) for base in structure.bases
        )
        return replace(contents, structure=structure)

    def _failure(self) -> str | None:
        if self._stopped:
            return f"not all hosts have finished, and {self._stopped}"
        assert self.turns is not None
        if (out_of_step := self.turns.out_of_step()) is not None:
            return (
                f"{out_of_step}. All processes must make the same saves; the next save that all "
                "of them make here is a new attempt."
            )
        assert self._announcements is not None
        return self._announcements.failed_host(self.name)

    def _tell(self, what: str, error: BaseException | None) -> None:
        if self._announcements is not None:
            self._announcements.tell(what, self.name, error)
