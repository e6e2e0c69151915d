"""Calls of a store that may never return, made on a separate thread.

Callers wait for a few seconds only.

The clients of torch.distributed and jax.distributed block in C++ while the process that holds the
store is stopped, whatever their timeouts are. One daemon thread makes the calls, one after another.
A caller waits for its answer for `ANSWER_SECONDS`. While a call that was given up has not returned,
further calls are refused at once. When it returns, because the holder continues or has ended, calls
are made again.
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

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""Seconds to wait for an answer. A store answers within a millisecond, and within a second when
thousands of processes ask at once."""

_Answer: TypeAlias = "SimpleQueue[tuple[Any, BaseException | None]]"
_Calls: TypeAlias = "SimpleQueue[tuple[Callable[[], Any], _Answer] | None]"


class SilentStoreError(CoordinationError):
    """The store has not answered yet. It may still answer, so a caller that can wait asks again."""


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
            threading.Thread(
                target=_make, args=(self._calls,), name="shardckpt-store", daemon=True
            ).start()
        except RuntimeError as e:
            raise CoordinationError(
                f"{store} cannot be asked: Python starts no thread for it ({e}); allow this "
                "process more threads (ulimit -u, the container's limit of pids), and coordinate "
                "before the program ends."
            ) from e
        finalize(self, self._calls.put, None).atexit = False

    def make(self, call: Callable[[], T]) -> T:
        """Make a call and return its result.

        Raises:
            SilentStoreError: no answer within `ANSWER_SECONDS`, or the answer to an earlier call is
                still missing.
            CoordinationError: this process was forked from the one that uses the store.
            BaseException: any exception of the call.
        """
        if os.getpid() != self._process:
            raise CoordinationError(
                f"this process was forked from one that uses {self._store}, and cannot use it; "
                "save and restore in that process."
            )
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
            f"{self._store} {what}; process 0 (or the launcher), which holds it, is stopped or "
            "cannot be reached: see whether it runs, or start the job again."
        )


def _make(calls: _Calls) -> None:
    """Make calls until None arrives; keep no reference to a call after its end."""
    while (asked := calls.get()) is not None:
        call, answer = asked
        try:
            answer.put((call(), None))
        except BaseException as e:  # noqa: BLE001  (raised in the waiting caller)
            answer.put((None, e))
        del asked, call, answer
