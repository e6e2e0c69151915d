"""Engines that run the tasks: anything that is a `concurrent.futures.Executor`.

- None: this process alone for one worker, and local processes for several.
- a URL such as "ray://head:10001" or "dask://scheduler:8786": the workers of a cluster, see
  `clusters`.
- any Executor; its workers must reach source and destination by the same URLs.

A lost worker breaks the futures of its calls with a `BrokenExecutor`; the job then hands the task
to another worker.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from shardckpt.errors import MissingExtraError, OptionError
from shardckpt.reshard.clusters import EXTRAS, ClusterExecutor, address_of
from shardckpt.reshard.processes import LocalProcesses
from shardckpt.streaming.memory import PROCESS_BYTES
from shardckpt.text import Message, install_command, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
T = TypeVar("T")

MOST_PLACES = 4096
"""Maximum number of tasks that a cluster runs at a time, however large it is."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An executor, and how many tasks to give it."""

    executor: Executor
    places: Callable[[], int]
    """Returns the number of tasks that the engine runs at a time, now."""
    ahead: int = 1
    """Number of tasks to submit per place; with 2, the next task is ready when one finishes."""
    changes: bool = False
    """Whether the number of places may change during the job."""


def check_engine(engine: object) -> None:
    """Check the type and URL of an engine.

    Raises:
        OptionError: the engine is neither None, nor a URL of a cluster, nor an Executor.
    """
    if isinstance(engine, str):
        address_of(engine)
    elif engine is not None and not isinstance(engine, Executor):
        advice = (
            ": give a concurrent.futures.Executor, a url such as ray://HOST:PORT, or None for "
            "this machine's processes."
        )
        raise OptionError(Message(named("engine", engine), advice))


@contextmanager
def start_engine(
    engine: Executor | str | None, workers: int | None, at_once: int, memory: int
) -> Iterator[Engine]:
    """Context manager of an engine; resources that existed before it stay unchanged afterwards.

    Args:
        engine: see the module's docstring.
        workers: number of tasks that a cluster runs at once; None: as many as it has places.
        at_once: number of tasks that other engines run at once.
        memory: bytes of buffers that a task uses.

    Raises:
        MissingExtraError: the package for such a cluster is not installed.
        CoordinationError: the cluster does not answer.
    """
    if isinstance(engine, Executor):
        # An Executor does not expose its number of workers; if there are fewer, the remaining tasks
        # wait in its queue.
        yield Engine(engine, lambda: at_once)
        return
    if isinstance(engine, str):
        cluster = _connect(engine, memory + PROCESS_BYTES)
        own: Executor = cluster
        made = Engine(
            own,
            lambda: min(cluster.places(), workers or MOST_PLACES),
            2 if workers is None else 1,
            changes=True,
        )
    else:
        own = _Inline() if at_once == 1 else LocalProcesses(at_once)
        made = Engine(own, lambda: at_once, min(at_once, 2))
    try:
        yield made
    except BaseException:
        own.shutdown(cancel_futures=True)
        raise
    own.shutdown()


def _connect(url: str, memory: int) -> ClusterExecutor:
    """Connect to a running cluster.

    `memory` is the bytes that a task uses, for a cluster that schedules by memory.
    """
    kind, address = address_of(url)
    try:
        if kind == "ray":
            from shardckpt.reshard.on_ray import OnRay

            return OnRay(url, address, memory)
        from shardckpt.reshard.on_dask import OnDask

        return OnDask(url, address)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != EXTRAS[kind]:
            raise
        raise MissingExtraError(
            f"{url} needs {EXTRAS[kind]}; install it with `{install_command(kind)}`."
        ) from None


class _Inline(Executor):
    """Executor that runs each call immediately, in the submitting thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call the function.

        An interrupt of the thread is raised here, any other error through the future.
        """
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as e:  # noqa: BLE001  (the future raises it)
            future.set_exception(e)
        return future
