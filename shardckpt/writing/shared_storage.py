"""Proof that all processes of a job save to one storage, before any of them writes data.

A path may be a disk of its own on each host, and a bucket's name may belong to another endpoint. Each process proves a storage once, at
its first save there in this round of the job; all later saves wait for nobody:

1. Process 0 writes the contents of its attempt, as in every save. The attempt's name is random, so no other storage has this file.
   Process 0 asks the other processes for the file, through the coordinator.
2. Each of them looks for the file and answers. Process 0 announces the verdict.

What a process remembers need not be what others remember: a mount may be new on one host only. A process that has nothing to prove answers
while it waits for the commit. A process that is not asked looks for the attempt by itself. If the coordinator's store is gone, nothing is
proven, and the save shows by itself what is shared.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardckpt.commit.assemble import finished_hosts, pause
from shardckpt.errors import CommitError, CoordinationError, StorageError
from shardckpt.excerpt import few, numbered
from shardckpt.frameworks.coordination import ALL_MUST_CALL, SilentStoreError, WaitNotice
from shardckpt.io.status import status
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardckpt.io.url import Location
    from shardckpt.writing.turns import Turns

_FIRST_LOOK, _LAST_LOOK = 0.002, 0.5
"""Seconds between two checks for the answers of other processes: least and most."""
_OWN_LOOK = 5.0
"""Seconds without a word until a process first looks at the storage by itself; the time until each next look doubles."""
_VISIBLE = 30.0
"""Seconds within which a file must become visible on all hosts, but at most half of the time limit. Listing a directory makes clients of
NFS ask the server anew; sshfs keeps listings for 20 s."""
_REPORT = 10.0
"""Seconds that process 0 may take to say for whom it has waited in vain."""


def storage_of(location: Location) -> tuple[str, object]:
    """Identify the storage of a location, as far as one process can see: a disk's device, or the bucket."""
    if location.local is None:
        return location.scheme, location.bucket
    path = location.local
    while (found := status(path)) is None:
        path = path.parent
    return location.scheme, found.st_dev


class StorageProof:
    """One process's part in the proof, for one save."""

    def __init__(self, turns: Turns, store: Store, attempt: str, timeout: float) -> None:
        """Nothing is asked yet.

        Args:
            turns: this process's calls to the place.
            store: the place.
            attempt: name of the save's attempt.
            timeout: seconds to wait for other processes.
        """
        self._turns = turns
        self._coordinator = turns.coordinator
        self._key = f"storage/{turns.key}"
        self._store = store
        self._attempt = attempt
        self._timeout = timeout
        self._storage = storage_of(store.location)
        self._answered = False
        self.in_vain = False
        """Whether this process has waited in vain for process 0."""

    def ask(self, key: str, failure: Callable[[], str | None]) -> None:
        """Ask all other processes for a file that this process has just written, as process 0; return when all have found it.

        Args:
            key: the file, relative to the attempt.
            failure: returns the reason for which the save fails; None if none is known.

        Raises:
            CommitError: a process does not find the file, or does not answer in time.
        """
        if self._storage in self._turns.places.proven:
            return
        question = {"attempt": self._attempt, "file": f"{self._attempt}/{key}"}
        began, notice, look = time.monotonic(), WaitNotice(str(self._store)), _OWN_LOOK
        answers: dict[int, dict[str, Any]] = {}
        missing = {*range(1, self._coordinator.world.processes)}
        asked = False
        while True:
            waited = time.monotonic() - began
            try:
                asked = asked or self._announce(self._key, question)
                answers.update(self._answers(missing))
                missing.difference_update(answers)
            except SilentStoreError:  # it may answer soon
                pass
            except CoordinationError:
                return
            if waited > look:  # a process that does not reach the coordinator's store may have finished
                missing.difference_update(finished_hosts(self._store.sub(self._attempt)))
                look *= 2
            if not missing:
                break
            late = numbered("process", sorted(missing))
            over = f"{late} did not begin this save within {self._timeout:g} s" if waited > self._timeout else ""
            self._pause(waited, failure, notice, late, over)
        blind = {process: answer["host"] for process, answer in sorted(answers.items()) if not answer["found"]}
        why = self._not_shared(question["file"], blind) if blind else None
        with suppress(CoordinationError):
            self._announce(self._key, {**question, "shared": why is None, "why": why})
        if why is not None:
            raise CommitError(why)
        self._turns.places.proven.add(self._storage)

    def _answers(self, processes: Iterable[int]) -> dict[int, dict[str, Any]]:
        """The answers of those processes that have answered."""
        heard = {process: self._peek(f"{self._key}/{process}") for process in processes}
        return {process: answer for process, answer in heard.items() if answer is not None}

    def await_verdict(self, failure: Callable[[], str | None]) -> None:
        """Look for the file that process 0 asks for, answer, and wait until process 0 has heard from all.

        Args:
            failure: as for `ask`; it may raise an error itself.

        Raises:
            CommitError: a process does not find the file, or process 0 does not say so in time.
        """
        if self._storage in self._turns.places.proven:
            return
        began, notice, look = time.monotonic(), WaitNotice(str(self._store)), _OWN_LOOK
        while True:
            waited, silent = time.monotonic() - began, ""
            question = None
            try:
                question = self._answer()
            except SilentStoreError as e:
                silent = f" ({str(e).rstrip('.')})"
            except CoordinationError:
                return
            if self._is_settled(question):
                return
            if question is None and waited > look:
                if self._store.sub(self._attempt).list_children():  # process 0 has written there, and need not ask
                    self._turns.places.proven.add(self._storage)
                    return
                look *= 2
            seconds, doing = (self._timeout, "begun") if question is None else (self._timeout + _REPORT, "heard from all processes in")
            self.in_vain = waited > seconds
            late = f"process 0 has not {doing} this save within {seconds:g} s{silent}" if self.in_vain else ""
            self._pause(waited, failure, notice, "process 0", late)

    def _is_settled(self, question: dict[str, Any] | None) -> bool:
        """Whether process 0 has announced that all processes share the storage; raises the error that it has announced."""
        if question is None or "shared" not in question:
            return False
        if not question["shared"]:
            raise CommitError(question["why"])
        self._turns.places.proven.add(self._storage)
        return True

    def _pause(self, waited: float, failure: Callable[[], str | None], notice: WaitNotice, missing: str, late: str = "") -> None:
        """Pause before the next check.

        Raises:
            CommitError: the save fails; or `late`, what has not happened in time, is not empty.
        """
        if (reason := failure()) is not None:
            raise CommitError(f"{self._store}: {reason} Nothing was published.")
        if late:
            raise CommitError(
                f"{self._store}: {late}. In the first save of a job to a storage, all processes look for a file of process 0. "
                f"{ALL_MUST_CALL} Nothing was published."
            )
        notice.look(lambda: f"{missing} to begin the save")
        time.sleep(pause(waited, _FIRST_LOOK, _LAST_LOOK))

    def answer_late(self) -> None:
        """Answer process 0 if it asks; for a process that has proven the storage and already waits for the commit."""
        with suppress(CoordinationError):
            self._answer()

    def _answer(self) -> dict[str, Any] | None:
        """The question or verdict of process 0 about this attempt; the question is answered once. None: there is none.

        Raises:
            CoordinationError: the coordinator's store is gone, or silent.
        """
        question = self._peek(self._key)
        if question is not None and not self._answered and "shared" not in question:
            answer = {"attempt": self._attempt, "found": self._finds(question["file"]), "host": socket.gethostname()}
            self._answered = self._announce(f"{self._key}/{self._coordinator.world.process}", answer)
        return question

    def _finds(self, file: str) -> bool:
        """Whether a file of the place becomes visible."""
        began = time.monotonic()
        while not self._store.exists(file):
            waited = time.monotonic() - began
            if waited > min(_VISIBLE, self._timeout / 2):
                return False
            self._list_parents(file)
            time.sleep(pause(waited))
        return True

    def _list_parents(self, file: str) -> None:
        """List the directories of a file, so that no client relies on what it knows of them."""
        above, attempt = self._store.location.parent, file.partition("/")[0]
        with suppress(StorageError):  # a parent may be closed to this user
            if above is not None and self._store.location.local is not None:
                Store.open(above).list_children()
            self._store.list_children()
            self._store.sub(attempt).list_children()

    def _not_shared(self, file: str, blind: dict[int, str]) -> str:
        """The message of the error that all processes raise; `blind` has the hosts of the processes that do not see the file."""
        own = socket.gethostname()
        others = few([f"{process} ({host})" for process, host in blind.items()])
        if self._store.location.local is not None:
            what, mend = "directory", "Mount one shared file system there on all hosts, or save to an object store (gs://, s3://)."
        elif self._store.location.bucket is not None:
            what, mend = "bucket", "Give all processes the same endpoint and the keys of the same account."
        else:
            what, mend = "memory", "memory:// is the memory of one process; save to a shared file system or an object store."
        return (
            f"{self._store} is not shared: process 0 ({own}) has written {file} there, and it is not visible to process {others}. Each "
            f"of them has a {what} of its own at this place. {mend} A process that saves for itself alone passes "
            f"coordinator=shardckpt.SingleProcess(). Nothing was published, and no data was written."
        )

    def _peek(self, key: str) -> dict[str, Any] | None:
        said: dict[str, Any] | None = self._coordinator.peek(key)
        return said if said is not None and said["attempt"] == self._attempt else None

    def _announce(self, key: str, value: dict[str, Any]) -> bool:
        self._coordinator.announce(key, value)
        return True
