"""Detection of preemption: whether this process has been notified that it is about to be stopped.

Each source of an `OnPreemption` policy is checked when `look` is called, once per step. A notice is
never withdrawn. A signal handler only records the signal and calls the handler that was there
before. A forked process gets the earlier handlers back: it takes no part in the job, so a signal
ends it as usual.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from shardckpt.errors import OptionError
from shardckpt.io.status import exists

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    from shardckpt.training.policies import OnPreemption


_installed: WeakSet[Notices] = WeakSet()
"""The notices with a handler that may still be in place."""


class Notices:
    """Notices of preemption that this process receives."""

    def __init__(self, policies: Sequence[OnPreemption]) -> None:
        """Install handlers for the policies' signals.

        Raises:
            OptionError: there are signals to handle, and this is not the main thread.
        """
        self._policies = tuple(policies)
        self._source: str | None = None
        self._closed = False
        self._process = os.getpid()
        numbers = sorted({number for policy in policies for number in policy.signals})
        if numbers and threading.current_thread() is not threading.main_thread():
            raise OptionError(
                "OnPreemption(signals=…): only the main thread can handle signals; make the "
                "CheckpointManager there, or give signals=() and a file or a function."
            )
        # Kept as one object: each look-up of a method creates a new one.
        self._handler = self._take_note
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        self.install()
        if numbers:
            _installed.add(self)

    @property
    def signals(self) -> Iterable[int]:
        """The signals that are handled."""
        return self._before.keys()

    def install(self) -> None:
        """Install the handlers, also in place of those that other code has installed since."""
        for number in self._before:
            signal.signal(number, self._handler)

    def look(self) -> str | None:
        """The source of the notice; None if there is none."""
        for policy in self._policies if self._source is None else ():
            if policy.file is not None and exists(Path(policy.file)):
                self._source = os.fspath(policy.file)
            elif policy.when is not None and policy.when():
                self._source = getattr(policy.when, "__name__", "a function")
        return self._source

    def close(self) -> None:
        """Restore the earlier handlers, except where other code has replaced ours."""
        self._closed = True
        if threading.current_thread() is not threading.main_thread():
            return  # our handlers stay, and pass everything on
        self.restore_handlers()

    def restore_handlers(self) -> bool:
        """Restore the earlier handlers, except where other code has replaced ours.

        Return whether any was restored.
        """
        restored = False
        for number, before in self._before.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL if before is None else before)
                restored = True
        return restored

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if before is signal.SIG_DFL and (self._closed or os.getpid() != self._process):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._source = signal.Signals(number).name
        if callable(before):
            before(number, frame)


_forking = threading.local()
"""`masks`: the signal masks from before the forks of this thread that are in progress."""


def _before_fork() -> None:
    """Hold back the signals that are handled until the forked process has its earlier handlers.

    A signal that comes before that would be noted for Python, and Python forgets what is noted when
    a process is forked.
    """
    numbers = {number for notices in [*_installed] for number in notices.signals}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    _forking.masks = [*getattr(_forking, "masks", ()), mask]


def _restore_mask() -> None:
    if masks := getattr(_forking, "masks", ()):  # else this module was imported meanwhile
        *_forking.masks, mask = masks
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork() -> None:
    """Restore the handlers from before, in the forked process.

    Another object's handler may be on top, so look again after each.
    """
    while any(notices.restore_handlers() for notices in [*_installed]):
        pass
    _restore_mask()


os.register_at_fork(before=_before_fork, after_in_parent=_restore_mask, after_in_child=_after_fork)
