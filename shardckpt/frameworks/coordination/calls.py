"""Calls of a store that may never return: each is made on a thread of its own, and waited for some seconds only.

The clients of torch.distributed and jax.distributed block in C++ while the process that holds the store is stopped, whatever their
time-outs say. One daemon thread makes the calls, one after another. A caller waits for its answer for `ANSWER_SECONDS`; as long as a
call that was given up so has not returned, further calls are refused at once. When it returns, because the holder goes on, or
has ended, calls are made again.
"""

from __future__ import annotations

import os
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import finalize

from shardckpt.errors import CoordinationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ANSWER_SECONDS", "SilentStoreError", "StoreCalls"]

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""A store answers within a millisecond, and within a second where thousands of processes ask at once."""

_Answer: TypeAlias = "SimpleQueue[tuple[Any, BaseException | None]]"
_Calls: TypeAlias = "SimpleQueue[tuple[Callable[[], Any], _Answer] | None]"


class SilentStoreError(CoordinationError):
    """The store has not answered yet. It may still do so, so who can wait asks again."""


class StoreCalls:
    """Calls of one store, from any number of threads."""

    def __init__(self, store: str) -> None:
        """Start the thread.

        Args:
            store: its name, for messages.

        Raises:
            CoordinationError: no thread can be started.
        """
        self._store = store
        self._process = os.getpid()
        self._calls: _Calls = SimpleQueue()
        self._unanswered: _Answer | None = None
        try:
            threading.Thread(target=_make, args=(self._calls,), name="shardckpt-store", daemon=True).start()
        except RuntimeError as e:
            raise CoordinationError(
                f"{store} cannot be asked: Python starts no thread for it ({e}); allow this process more threads (ulimit -u, the "
                f"container's limit of pids), and coordinate before the program ends."
            ) from e
        finalize(self, self._calls.put, None).atexit = False

    def make(self, call: Callable[[], T]) -> T:
        """Make a call, and return what it returns.

        Raises:
            SilentStoreError: no answer within `ANSWER_SECONDS`, or one to an earlier call is still missing.
            CoordinationError: this process was forked from the one that asks the store.
            BaseException: what the call raises.
        """
        if os.getpid() != self._process:
            raise CoordinationError(f"this process was forked from one that asks {self._store}, and cannot ask it; coordinate in that one.")
        if self._unanswered is not None and self._unanswered.empty():
            raise self._silent("has not answered an earlier question yet")
        answer: _Answer = SimpleQueue()
        self._calls.put((call, answer))
        try:
            value, error = answer.get(timeout=ANSWER_SECONDS)
        except Empty:
            self._unanswered = answer
            raise self._silent(f"has not answered for {ANSWER_SECONDS:g} s") from None
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def _silent(self, what: str) -> SilentStoreError:
        return SilentStoreError(
            f"{self._store} {what}; process 0 (or the launcher), which holds it, is stopped or cannot be reached: see whether it runs, "
            f"or start the job again."
        )


def _make(calls: _Calls) -> None:
    """Make calls until there are none any more; nothing of one is held until the next."""
    while (asked := calls.get()) is not None:
        call, answer = asked
        try:
            answer.put((call(), None))
        except BaseException as e:  # noqa: BLE001  (raised where the answer is waited for)
            answer.put((None, e))
        del asked, call, answer
