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
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


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
