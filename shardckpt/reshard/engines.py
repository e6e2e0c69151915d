"""Who does the tasks: anything that is a `concurrent.futures.Executor`.

- None: this process alone, where there is one worker, and processes of this machine where there are more.
- an Executor: whatever it is; its workers reach source and destination by the same urls.

A worker that is lost breaks the futures of what it was doing with a `BrokenExecutor`; the job gives the task to another one.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt
from shardckpt.reshard.processes import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["executor"]

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def executor(engine: Executor | None, workers: int) -> Iterator[Executor]:
    """Who does the tasks, as long as the `with` block goes on; what it was given stays as it is afterwards.

    Args:
        engine: see the module's docstring.
        workers: how many tasks are done at once, where that is not the engine's to say.

    Raises:
        OptionError: there is no such engine.
    """
    if isinstance(engine, Executor):
        yield engine
        return
    if engine is not None:
        raise OptionError(f"reshard(engine={excerpt(engine)}): give a concurrent.futures.Executor, or None for this machine's processes.")
    own = _Inline() if workers == 1 else LocalProcesses(workers)
    try:
        yield own
    except BaseException:
        own.shutdown(cancel_futures=True)
        raise
    own.shutdown()


class _Inline(Executor):
    """Does everything at once, in the thread that asks for it."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call the function; what interrupts the thread is raised here, everything else by the future."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as e:  # noqa: BLE001  (the future's to raise)
            future.set_exception(e)
        return future
