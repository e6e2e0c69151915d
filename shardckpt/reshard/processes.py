"""Processes on this machine that do what they are told, one thing at a time each; one that dies is replaced.

An `Executor` of the standard library's kind, for what its own process pool does not do:

1. A process that dies (the kernel ends it for want of memory, say) breaks the one future that it was at work on, with a
   `BrokenExecutor`, and no other. The next call starts another process.
2. Processes are started anew, not forked, and import nothing of the calling program: that need not guard its main module.
3. They end at once when the program that started them does, whatever they are doing. Ctrl-C is the program's alone.

Functions and arguments are sent over a pipe to processes of one's own, as `multiprocessing` does it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from threading import Lock, Thread, local
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LocalProcesses", "serve"]

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE = 10
"""Seconds that a process may take to end when it has nothing more to do."""


class LocalProcesses(Executor):
    """So many processes, started when they are first needed."""

    def __init__(self, processes: int) -> None:
        # A thread for each process: it starts it, tells it what to do, and waits for the answer.
        self._threads = ThreadPoolExecutor(processes, "shardckpt-worker")
        self._mine = local()
        self._all: set[_Process] = set()
        self._changing = Lock()
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in one of the processes; function, arguments and result are picklable."""
        return self._threads.submit(self._call, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all processes: when they have done what was submitted, or now, with `cancel_futures`."""
        if cancel_futures:
            with self._changing:
                self._ended = True
                for process in self._all:
                    process.kill()
        self._threads.shutdown(wait=wait or cancel_futures, cancel_futures=cancel_futures)
        with self._changing:
            for process in self._all:
                process.end()
            self._all.clear()

    def _call(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        process: _Process | None = getattr(self._mine, "process", None)
        if process is None:
            with self._changing:
                if self._ended:
                    raise BrokenExecutor("The processes were told to end.")
                process = self._mine.process = _Process()
                self._all.add(process)
        try:
            went_well, result = process.ask(fn, args, kwargs)
        except (EOFError, OSError) as e:
            self._mine.process = None
            with self._changing:
                self._all.discard(process)
            raise BrokenExecutor(f"A worker process has ended by itself ({process.end()}).") from e
        if not went_well:
            raise result
        answer: T = result
        return answer


def _module_paths() -> Iterator[str]:
    """Where this process finds modules; not in a working directory that was removed."""
    for path in sys.path:
        with suppress(FileNotFoundError):
            yield path or os.getcwd()  # noqa: PTH109


class _Process:
    """One process, and the pipe to it."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            code = f"from shardckpt.reshard.processes import serve; serve({theirs.fileno()})"
            # BLAS has a thread for each core, which takes a third of the time in which numpy is imported, and nothing for it to do.
            own = {"PYTHONPATH": os.pathsep.join(_module_paths()), "OPENBLAS_NUM_THREADS": "1"}
            command = [sys.executable, "-c", code]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=os.environ | own)  # noqa: S603

    def ask(self, *call: object) -> tuple[bool, Any]:
        """Whether a call went well, and what it returned or raised; EOFError or OSError where the process ends instead."""
        self._pipe.send(call)
        answer: tuple[bool, Any] = self._pipe.recv()
        return answer

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def end(self) -> str:
        """End it, as soon as it has nothing to do; how it has ended, in words."""
        self._pipe.close()
        try:
            status = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return f"{signal.Signals(-status).name}" if status < 0 else f"status {status}"


def serve(pipe: int) -> None:
    """What such a process does: calls functions that come through a pipe, until that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(pipe)
    calls: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = SimpleQueue()

    def receive() -> None:
        try:
            while True:
                calls.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # whoever wanted the answer is gone

    Thread(target=receive, daemon=True).start()
    while True:
        function, args, kwargs = calls.get()
        try:
            answer = True, function(*args, **kwargs)
        except BaseException as e:  # noqa: BLE001  (the caller raises it)
            answer = False, e
        connection.send(answer)
