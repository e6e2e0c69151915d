"""Handle and progress of a save in the background: what any thread reads of it or waits for."""

from __future__ import annotations

import logging
import os
from numbers import Real
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import CoordinationError, OptionError, out_of_memory
from shardckpt.io.threads import InterruptibleCondition
from shardckpt.text import shorten
from shardckpt.writing.save import SaveReport

if TYPE_CHECKING:
    from types import TracebackType

_log = logging.getLogger("shardckpt")


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

    def wait(
        self, until: Literal["commit", "local"] = "commit", timeout: float | None = None
    ) -> SaveReport | None:
        """Wait for the save.

        Args:
            until: "commit" waits until the checkpoint is committed. "local" waits until this
                process's share is durable; other processes may still be writing theirs.
            timeout: seconds; None for no limit. `SaveOptions.commit_timeout` also limits the wait
                for other processes.

        Returns:
            The report. With "local" it is None if the save is still in progress.

        Raises:
            ShardckptError: the error that ended the save (see `save`), at every call. Other
                exceptions are raised unchanged.
            OptionError: `until` or `timeout` is invalid.
            CoordinationError: the timeout expired and the save continues; or this process was
                forked during the save.
        """
        if until not in ("commit", "local"):
            raise OptionError(f'SaveHandle.wait({until!r}): use "commit" or "local".')
        seconds = None if timeout is None else _seconds(timeout)
        try:
            return self._outcome.wait(until, seconds)
        finally:
            self._outcome.heard = self._outcome.ended

    def __del__(self) -> None:
        """Leave the save to itself; if it fails, or has failed, that is in the log."""
        self._outcome.let_go()

    def __repr__(self) -> str:
        return f"<SaveHandle of {self.url}: {self._outcome.state}>"


def _seconds(timeout: Any) -> float | None:
    """The seconds of a number, at least 0; None if Python cannot wait as long."""
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not is_number or timeout != timeout:  # noqa: PLR0124 - only a NaN is not itself
        raise OptionError(
            f"SaveHandle.wait(timeout={shorten(timeout)}): give a number of seconds, or None."
        )
    return None if timeout > TIMEOUT_MAX else max(0.0, float(timeout))


class SaveProgress:
    """The progress of a save. One thread sets it, any number of threads may read it or wait."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.nbytes = 0
        self.report: SaveReport | None = None
        self.heard = False
        """Whether a caller has got the report or the error, or the log has the error."""
        self._let_go = False
        """Whether nobody can wait for it any more."""
        self._durable = False
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        """The traceback with which the save has ended."""
        self._process = os.getpid()
        self._changed = InterruptibleCondition()

    @property
    def ended(self) -> bool:
        """Whether the save has ended."""
        return self.report is not None or self._error is not None

    @property
    def state(self) -> str:
        """One or two words about the save, for `repr`."""
        if self._error is not None:
            return f"failed with {type(self._error).__name__}"
        return (
            "committed"
            if self.report is not None
            else "durable here"
            if self._durable
            else "in flight"
        )

    def wait(self, until: str, timeout: float | None) -> SaveReport | None:
        """See `SaveHandle.wait`."""
        if not self.ended and os.getpid() != self._process:
            raise CoordinationError(
                f"{self.url}: this process was forked from the one that saves; wait for the save "
                "there. Start processes that save "
                f'with multiprocessing.get_context("spawn").'
            )
        with self._changed.lock:
            self._changed.wait_for(
                lambda: self.ended or (until == "local" and self._durable), timeout
            )
        if self._error is not None:
            # The frames of the save stay, and those of an earlier wait go.
            raise self._error.with_traceback(self._trace)
        if self.report is None and not (until == "local" and self._durable):
            raise CoordinationError(
                f"{self.url}: the save has not ended within {timeout:g} s, and goes on; call "
                "wait() again."
            )
        return self.report

    def durable(self) -> None:
        """Note that this process's share is durable."""
        with self._changed.lock:
            self._durable = True
            self._changed.notify_all()

    def end(self, ended: SaveReport | BaseException) -> None:
        """Note that the save has ended, with a report or with an error."""
        with self._changed.lock:
            if isinstance(ended, SaveReport):
                self.report = ended
            else:
                self._error = ended
                if isinstance(ended, MemoryError):
                    self._error = out_of_memory(self.url, ended)
                    self._error.__cause__ = ended
                self._trace = self._error.__traceback__
            self._changed.notify_all()
        if self._let_go:
            self.warn()

    def let_go(self) -> None:
        """Note that nobody can wait for it any more; called at any moment, so it locks nothing."""
        self._let_go = True
        self.warn()

    def warn(self) -> None:
        """Log an error that no caller has received."""
        if self._error is not None and not self.heard and os.getpid() == self._process:
            self.heard = True
            _log.warning(
                "%s: the save failed in the background, and nothing waited for it: %s",
                self.url,
                self._error,
            )
