"""The end of the interpreter: threads that have to come to their end before, and what cannot be done any more.

Python ends daemon threads wherever they are. One that is inside a C++ library then takes the process with it ("terminate called
without an active exception", SIGABRT), and launchers count the job as failed. So what goes on in the background is begun by
`start_background`, and ended in order before the interpreter is: `threading._register_atexit` calls back before the pools of
`concurrent.futures`, which the background needs, are ended. Once what `atexit` has is run, Python starts no threads for anybody.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (registers its own end, which has to come after ours)
import os
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from shardckpt.errors import CommitError, ShardckptError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["is_ending", "reading_takes_threads", "saving_takes_threads", "start_background"]


@dataclass(frozen=True, slots=True)
class _Task:
    """What goes on in the background."""

    finish: Callable[[], None]
    stop: Callable[[], None]
    ended: SimpleQueue[None]


_tasks: dict[threading.Thread, _Task] = {}
_guard = threading.Lock()
"""Held while a task is begun: none is begun once the end has looked at which there are."""
_closed = False
"""Whether the end of the interpreter has looked. Threads of the program's own may still run then, and save."""


def start_background(
    thread: threading.Thread, *, finish: Callable[[], None] = lambda: None, stop: Callable[[], None] = lambda: None
) -> None:
    """Start a thread that the end of the interpreter waits for.

    Args:
        thread: a daemon that has not been started; its `run` is called.
        finish: called, on another thread, when the interpreter ends first: waits as long as waiting is worth it.
        stop: called after all `finish`, or after Ctrl-C: the thread has to come to its end soon.

    Raises:
        RuntimeError: Python starts no thread.
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
            raise RuntimeError("can't start new thread in the background: Python is ending")
        _tasks[thread] = task
        try:
            thread.start()
        except RuntimeError:
            del _tasks[thread]
            raise


def _end_all() -> None:
    """At the end of the interpreter: finish all, then stop all; Ctrl-C, at any moment, has them stopped at once."""
    global _closed  # noqa: PLW0603  (of the interpreter)
    finish = not _closed
    while True:
        with suppress(KeyboardInterrupt, SystemExit):  # the second from a handler of SIGTERM
            with _guard:
                _closed = True
                tasks = [*_tasks.items()]
            if finish:
                finish = False
                for _, task in tasks:
                    with suppress(Exception):
                        task.finish()
            for _, task in tasks:
                task.stop()
            for thread, task in tasks:
                if thread.ident is not None:  # else Ctrl-C came before it was started
                    task.ended.get()
            return


getattr(threading, "_register_atexit", atexit.register)(_end_all)
atexit.register(_end_all)  # Ctrl-C may come before the first line of the function, and then Python calls none of its kind


def _after_fork() -> None:
    """Forget what goes on in the parent, whose threads may have held the lock."""
    global _guard  # noqa: PLW0603  (of the interpreter)
    _guard = threading.Lock()
    _tasks.clear()


os.register_at_fork(after_in_child=_after_fork)


def is_ending() -> bool:
    """Whether the interpreter is shutting down."""
    return not threading.main_thread().is_alive()


def reading_takes_threads(place: object) -> AbstractContextManager[None]:
    """Report threads that cannot be started as errors of the read, around the code that reads from a place.

    Raises:
        StorageError: in place of the RuntimeError of a thread that cannot be started.
    """

    def as_error(why: str) -> StorageError:
        advice = "Read before the program ends, not in a function that `atexit` calls." if is_ending() else _ADVICE
        return StorageError(f"cannot read {place}: {why}. {advice}")

    return _threads_or(as_error)


def saving_takes_threads(place: object) -> AbstractContextManager[None]:
    """Report threads that cannot be started as errors of the save, around the code that saves to a place.

    Raises:
        CommitError: in place of the RuntimeError of a thread that cannot be started.
    """
    return _threads_or(lambda why: CommitError(f"{place}: the save was given up: {why}. {_ADVICE}"))


_ADVICE = "Allow this process more threads (ulimit -u, the container's limit of pids), or end some, and try again."
_MESSAGES = "can't start new thread", "can't create new thread", "cannot schedule new futures"


@contextmanager
def _threads_or(as_error: Callable[[str], ShardckptError]) -> Iterator[None]:
    """Raise `as_error(why)` in place of the RuntimeError of a thread that cannot be started."""
    try:
        yield
    except RuntimeError as e:
        if isinstance(e, ShardckptError) or not (is_ending() or str(e).startswith(_MESSAGES)):
            raise
        raise as_error(f"{'Python is ending and' if is_ending() else 'Python'} starts no threads any more ({e})") from e
