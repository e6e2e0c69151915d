"""Worker processes on this machine, each for one call at a time; a process that dies is replaced.

This `Executor` has properties that the standard library's process pool lacks:

1. A process that dies (for example, the kernel kills it for lack of memory) breaks only the future
   of its own call, with a `BrokenExecutor`. The next call starts another process.
2. Processes are spawned, not forked, and import nothing of the calling program, which need not
   guard its main module.
3. Processes end immediately when the program that started them ends. Only the program handles
   Ctrl-C.

Functions and arguments are pickled over a pipe to child processes, as in `multiprocessing`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Lock, Thread, local
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from shardckpt.io.failures import child_command, process_advice
from shardckpt.reshard.clusters import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

_END_TIMEOUT = 10
"""Timeout in seconds for the end of an idle process."""
_PAUSE = 1
"""Seconds until a process that could not be started beside others is tried again."""


class LocalProcesses(Executor):
    """An executor with a fixed number of processes, each started when it is first needed."""

    def __init__(self, processes: int) -> None:
        # One thread per process starts it, sends it calls, and waits for the results.
        self._threads = ThreadPoolExecutor(processes, "shardckpt-worker")
        self._of_thread = local()
        self._all: set[_Process] = set()
        self._changing = Lock()
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in one of the processes; function, arguments and result are picklable."""
        return self._threads.submit(self._call, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all processes: after the submitted calls, or now, with `cancel_futures`."""
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
        process: _Process | None = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._start()
        try:
            succeeded, result = process.ask(fn, args, kwargs)
        except (EOFError, OSError) as e:
            self._of_thread.process = None
            with self._changing:
                self._all.discard(process)
            raise BrokenExecutor(f"A worker process ended unexpectedly ({process.end()}).") from e
        if not succeeded:
            raise result
        answer: T = result
        return answer

    def _start(self) -> _Process:
        """Start this thread's process.

        If that fails while others work, the task goes back to them, and no worker counts as lost.
        """
        with self._changing:
            if self._ended:
                raise BrokenExecutor("The worker processes are shutting down.")
            try:
                process = self._of_thread.process = _Process()
            except OSError as e:
                others, error = bool(self._all), e
            else:
                self._all.add(process)
                return process
        if others:
            time.sleep(_PAUSE)
        raise WorkerLostError(
            f"A worker process could not be started ({error}). {process_advice(error)}",
            times=0 if others else 1,
        ) from error


class _Process:
    """One process, and the pipe to it."""

    def __init__(self) -> None:
        self._pipe, other_end = Pipe()
        with other_end:
            code = f"from shardckpt.reshard.processes import serve; serve({other_end.fileno()})"
            # BLAS starts a thread per core, which takes a third of numpy's import time, and the
            # threads would be idle.
            environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(  # noqa: S603
                child_command(code),
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def ask(self, *call: object) -> tuple[bool, Any]:
        """Run a call; return whether it succeeded, and its result or error.

        EOFError or OSError if the process ends instead.
        """
        self._pipe.send(call)
        text = self._pipe.recv()
        try:
            answer: tuple[bool, Any] = self._pipe.recv()
        except (EOFError, OSError):
            raise
        except Exception as e:  # noqa: BLE001  (the error's class may not make it anew)
            return False, _not_sent(text, e)
        return answer

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    def end(self) -> str:
        """End the process as soon as it is idle; return its exit status or signal as text."""
        self._pipe.close()
        try:
            status = self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return f"{signal.Signals(-status).name}" if status < 0 else f"status {status}"


def serve(pipe: int) -> None:
    """Run the calls that arrive through a pipe, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(pipe)
    calls: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = SimpleQueue()

    def receive() -> None:
        try:
            while True:
                calls.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # the parent has ended

    Thread(target=receive, daemon=True).start()
    while True:
        function, args, kwargs = calls.get()
        try:
            answer = True, function(*args, **kwargs)
        except BaseException as e:  # noqa: BLE001  (the caller raises it)
            answer = False, e
        text = "" if answer[0] else repr(answer[1])
        try:
            data = ForkingPickler.dumps(answer)
        except Exception as e:  # noqa: BLE001  (classes may raise anything)
            data = ForkingPickler.dumps((False, _not_sent(text or repr(answer[1]), e)))
        connection.send(text)
        connection.send_bytes(data)


def _not_sent(text: str, error: Exception) -> RuntimeError:
    return RuntimeError(f"{text} cannot be sent to another process: {error!r}")
