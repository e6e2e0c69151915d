"""The handle of a save in the background, and the report of a save."""

from __future__ import annotations

import os
from dataclasses import dataclass
from threading import Condition
from typing import Literal

from shardckpt.errors import CoordinationError, OptionError, out_of_memory
from shardckpt.io.extension import ENGINE


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of one process on one save, with the seconds of each phase.

    The phases follow one another without gaps, so they add up:

        stall_s = planning_s + copying_s + blocked_s                  while the call blocked the caller
        total_s = stall_s + writing_s + waiting_s + committing_s      from the call to the commit

    Background work during the stall counts as stall; `writing_s` is the time for the rest of the writing. `shardckpt.save` blocks its
    caller for all of `total_s`. It copies while it writes, and `writing_s` includes these copies.
    """

    url: str
    attempt: str
    """Name of the attempt, as in the commit record."""
    tensors: int
    """Number of tensors that this process knows."""
    nbytes: int
    """Bytes of the elements that this process wrote."""
    stored_bytes: int
    """Bytes of these elements in the storage, with padding, compression and checksums."""
    planning_s: float
    """Seconds from the call to the first copy: names, layouts, and the assignment of writes."""
    copying_s: float
    """Seconds for copies from devices, or from the host's own tensors, to the buffers. Copies from CUDA devices are only queued."""
    blocked_s: float
    """Seconds of waiting for a buffer."""
    writing_s: float
    """Seconds from the end of the stall until this process's share was durable."""
    waiting_s: float
    """Seconds that the committing process waited for the others, or that this process waited for the commit."""
    committing_s: float
    """Seconds until the checkpoint was published, on the committing process; 0 on the others."""
    streamed: bool
    """Whether the buffers were too small, so that the call waited until part of the state was written."""
    bases: tuple[str, ...] = ()
    """The other checkpoints that hold the skipped tensors."""
    engine: str = ENGINE
    """The engine that moves raw chunks to a local disk here: `C`, the extension, or `Python`."""

    @property
    def stall_s(self) -> float:
        """Seconds for which the call blocked the caller."""
        return self.planning_s + self.copying_s + self.blocked_s

    @property
    def total_s(self) -> float:
        """Seconds from the call to the commit."""
        return self.stall_s + self.writing_s + self.waiting_s + self.committing_s


class SaveHandle:
    """A save in the background, returned by `save_async`. Threads may share it."""

    def __init__(self, outcome: SaveProgress) -> None:
        """See `save_async`."""
        self._outcome = outcome

    @property
    def url(self) -> str:
        """Location of the checkpoint."""
        return self._outcome.url

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that this process writes."""
        return self._outcome.nbytes

    @property
    def report(self) -> SaveReport | None:
        """The report; None until the save has succeeded."""
        return self._outcome.report

    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._outcome.ended

    def wait(self, until: Literal["commit", "local"] = "commit", timeout: float | None = None) -> SaveReport | None:
        """Wait for the save.

        Args:
            until: "commit" waits until the checkpoint is committed. "local" waits until this process's share is durable; other
                processes may still be writing theirs.
            timeout: seconds; None for no limit. `SaveOptions.commit_timeout` also limits the wait for other processes.

        Returns:
            The report. With "local" it is None if the save is still in progress.

        Raises:
            ShardckptError: the error that ended the save (see `save`), at every call. Other exceptions are raised unchanged.
            CoordinationError: the timeout expired and the save continues; or this process was forked during the save.
        """
        if until not in ("commit", "local"):
            raise OptionError(f'SaveHandle.wait({until!r}): use "commit" or "local".')
        return self._outcome.wait(until, timeout)

    def __repr__(self) -> str:
        return f"<SaveHandle of {self.url}: {self._outcome.state}>"


class SaveProgress:
    """The progress of a save. One thread sets it, any number of threads may read it or wait."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.nbytes = 0
        self.report: SaveReport | None = None
        self._durable = False
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._changed = Condition()

    @property
    def ended(self) -> bool:
        """Whether the save has ended."""
        return self.report is not None or self._error is not None

    @property
    def state(self) -> str:
        """One or two words about the save, for `repr`."""
        if self._error is not None:
            return f"failed with {type(self._error).__name__}"
        return "committed" if self.report is not None else "durable here" if self._durable else "in flight"

    def wait(self, until: str, timeout: float | None) -> SaveReport | None:
        """See `SaveHandle.wait`."""
        if not self.ended and os.getpid() != self._process:
            raise CoordinationError(
                f"{self.url}: this process was forked from the one that saves; wait for the save there. Start processes that save "
                f'with multiprocessing.get_context("spawn").'
            )
        with self._changed:
            self._changed.wait_for(lambda: self.ended or (until == "local" and self._durable), timeout)
        if self._error is not None:
            raise self._error
        if self.report is None and not (until == "local" and self._durable):
            raise CoordinationError(f"{self.url}: the save has not ended within {timeout:g} s, and goes on; call wait() again.")
        return self.report

    def durable(self) -> None:
        """Note that this process's share is durable."""
        with self._changed:
            self._durable = True
            self._changed.notify_all()

    def end(self, ended: SaveReport | BaseException) -> None:
        """Note that the save has ended, with a report or with an error."""
        with self._changed:
            if isinstance(ended, SaveReport):
                self.report = ended
            else:
                self._error = ended
                if isinstance(ended, MemoryError):
                    self._error = out_of_memory(self.url, ended)
                    self._error.__cause__ = ended
            self._changed.notify_all()
