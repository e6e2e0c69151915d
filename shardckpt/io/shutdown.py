"""Interpreter shutdown: background threads that must end before it.

The module also handles threads that can no longer start.

Python stops daemon threads wherever they are. A thread that is inside a C++ library then aborts the
process ("terminate called without an active exception", SIGABRT), and launchers count the job as
failed. So background work is started by `start_background`, and ended in order before the
interpreter shuts down: `threading._register_atexit` calls back before the pools of
`concurrent.futures`, which the background needs, are shut down. Once the `atexit` functions have
run, Python starts no more threads.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (registers its own shutdown hook, which must run after ours)
import os
import threading
from _thread import start_new_thread
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class _Task:
    """A background task."""

    finish: Callable[[], None]
    stop: Callable[[], None]
    ended: SimpleQueue[None]


_tasks: dict[threading.Thread, _Task] = {}
_guard = threading.RLock()  # a signal handler may save while a task starts
"""Held while a task starts, so that no task starts after the shutdown has listed the tasks."""
_closed = False
"""Whether the shutdown has listed the tasks. Other threads of the program may still run then, and
save."""


def start_background(
    thread: threading.Thread,
    *,
    finish: Callable[[], None] = lambda: None,
    stop: Callable[[], None] = lambda: None,
) -> None:
    """Start a thread that the interpreter shutdown waits for.

    Args:
        thread: a daemon thread that has not been started; its `run` is called.
        finish: called on another thread when the interpreter shuts down first; waits as long as
            waiting is useful.
        stop: called after all `finish` calls, or after Ctrl-C; makes the thread end soon.

    Raises:
        RuntimeError: Python cannot start the thread.
    """
    task, run = _Task(finish, stop, SimpleQueue()), thread.run

    def run_and_tell() -> None:
        try:
            run()
        finally:
            _tasks.pop(thread, None)
            task.ended.put(None)

    thread.run = run_and_tell  # type: ignore[method-assign]
    with _guard:
        if _closed:
            raise RuntimeError("can't start new thread in the background: Python is shutting down")
        _tasks[thread] = task
        try:
            thread.start()
        except RuntimeError:
            del _tasks[thread]
            raise


def has_begun() -> bool:
    """Whether the interpreter shutdown has begun to end the background.

    The main thread is alive until that is done.
    """
    return _closed


def _end_all() -> None:
    """At interpreter shutdown: finish all tasks, then stop them.

    After Ctrl-C, at any moment, stop them at once.
    """
    global _closed  # noqa: PLW0603  (of the interpreter)
    finish = not _closed
    while True:
        with suppress(KeyboardInterrupt, SystemExit):  # SystemExit comes from a handler of SIGTERM
            with _guard:
                _closed = True
                tasks = [*_tasks.items()]
            if finish:
                finish = False
                _call_on_a_thread([task.finish for _, task in tasks])
            _call_on_a_thread([task.stop for _, task in tasks])
            for thread, task in tasks:
                if thread.ident is not None:  # otherwise Ctrl-C came before the thread started
                    task.ended.get()
            return


def _call_on_a_thread(functions: Sequence[Callable[[], None]]) -> None:
    """Call functions that use locks on a thread that Ctrl-C does not interrupt, and wait.

    `Condition` and `Event` acquire their lock in Python: an exception that comes then leaves it
    locked, and the task waits for it for ever. The thread that calls this function waits in C code,
    which leaves no lock behind.
    """
    ended: SimpleQueue[None] = SimpleQueue()

    def call() -> None:
        try:
            for function in functions:
                with suppress(Exception):
                    function()
        finally:
            ended.put(None)

    if functions:
        try:
            start_new_thread(call, ())  # `Thread.start` waits for an Event
        except RuntimeError:  # no more threads
            call()
        ended.get()


getattr(threading, "_register_atexit", atexit.register)(_end_all)
atexit.register(
    _end_all
    # Ctrl-C may come before the function's first line, and then Python calls no more
    # `_register_atexit` functions.
)


def _after_fork() -> None:
    """Forget the parent's tasks, whose threads may have held the lock."""
    global _guard  # noqa: PLW0603  (of the interpreter)
    _guard = threading.RLock()
    _tasks.clear()


os.register_at_fork(after_in_child=_after_fork)
