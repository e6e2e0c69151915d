"""Engines that run the tasks: anything that is a `concurrent.futures.Executor`.

- None: this process alone, where there is one worker, and processes of this machine where there are more.
- a url, as in "ray://head:10001" or "dask://scheduler:8786": the workers of a cluster, see `clusters`.
- an Executor: whatever it is; its workers reach source and destination by the same urls.

A worker that is lost breaks the futures of what it was doing with a `BrokenExecutor`; the job gives the task to another one.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt
from shardckpt.reshard.clusters import address_of, connect
from shardckpt.reshard.memory import PROCESS_BYTES
from shardckpt.reshard.processes import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Engine", "check_engine", "start"]

P = ParamSpec("P")
T = TypeVar("T")

MOST_PLACES = 4096
"""Tasks that a cluster does at a time, however large it is."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Something that does tasks."""

    executor: Executor
    places: Callable[[], int]
    """How many tasks it does at a time, now."""
    ahead: int = 1
    """How many tasks to hand out for each place: with 2, the next one is there when one is done."""
    changes: bool = False
    """Whether that may change while all of them are being done."""


def check_engine(engine: object) -> None:
    """Whether there may be such an engine.

    Raises:
        OptionError: there is none.
    """
    if isinstance(engine, str):
        address_of(engine)
    elif engine is not None and not isinstance(engine, Executor):
        raise OptionError(
            f"engine={excerpt(engine)}: give a concurrent.futures.Executor, a url such as ray://HOST:PORT, or None for this "
            f"machine's processes."
        )


@contextmanager
def start(engine: Executor | str | None, workers: int | None, at_once: int, memory: int) -> Iterator[Engine]:
    """An engine, as long as the `with` block goes on; what there was before stays as it is afterwards.

    Args:
        engine: see the module's docstring.
        workers: how many tasks a cluster does at once; None: as many as it has places for.
        at_once: how many tasks others do.
        memory: bytes of buffers that a task takes.

    Raises:
        MissingExtraError: the package for such a cluster is not installed.
        CoordinationError: the cluster does not answer.
    """
    if isinstance(engine, Executor):
        # How many workers it has it does not say; if fewer, the others wait with it.
        yield Engine(engine, lambda: at_once)
        return
    if isinstance(engine, str):
        cluster = connect(engine, memory + PROCESS_BYTES)
        own: Executor = cluster
        made = Engine(own, lambda: min(cluster.places(), workers or MOST_PLACES), 2 if workers is None else 1, changes=True)
    else:
        own = _Inline() if at_once == 1 else LocalProcesses(at_once)
        made = Engine(own, lambda: at_once, 2)
    try:
        yield made
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
