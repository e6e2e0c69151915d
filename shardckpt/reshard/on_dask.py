"""Execution of tasks by the workers of a Dask cluster.

A worker thread runs a task, so a cluster has as many places as its workers have threads. If a
worker dies, Dask itself gives its task to another worker, until it blames the task (its setting
`distributed.scheduler.allowed-failures`).

A worker that cannot import the function it receives does not answer with an error: the worker ends,
and its nanny with it (2026.8). So every call depends on a first call to a function that every
worker has, and that first call fails if shardckpt is not installed.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

import distributed
from dask import config
from distributed.scheduler import KilledWorker

from shardckpt.errors import CoordinationError, OptionError
from shardckpt.reshard.clusters import AUTO, ClusterExecutor, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")

_VERSION = "shardckpt._version:__version__"
"""A name that exists wherever shardckpt is installed, in the notation of `pkgutil.resolve_name`."""
_CONNECT = 30
"""Timeout in seconds for the scheduler's answer."""


class OnDask(ClusterExecutor):
    """A client of a Dask scheduler."""

    def __init__(self, url: str, address: str) -> None:
        super().__init__(url)
        scheduler = config.get("scheduler-address", None) if address == AUTO else f"tcp://{address}"
        if scheduler is None:
            raise OptionError(
                f"{url}: Dask knows of no scheduler; set DASK_SCHEDULER_ADDRESS, or give "
                "dask://HOST:PORT."
            )
        try:
            self._client = distributed.Client(
                scheduler, timeout=_CONNECT, set_as_default=False, name="shardckpt"
            )
        except (OSError, ValueError) as e:
            raise CoordinationError(
                f"{url}: no Dask scheduler answers there ({e}); check the address."
            ) from e
        self._calls = self._client.get_executor(pure=False)
        try:
            self._client.run_on_scheduler(resolve_name, _VERSION)
        except ModuleNotFoundError as e:
            self._client.close()
            raise self.absent("the scheduler") from e
        self._first = self._client.submit(resolve_name, _VERSION, pure=False)

    def start(
        self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[T]:
        """Submit a call."""
        future: Future[T] = self._calls.submit(_call, self._first, fn, args, kwargs)
        return future

    def count(self) -> int:
        """Number of threads of all workers."""
        return sum(self._client.nthreads().values())

    def translate(self, error: BaseException) -> BaseException:
        """Translate the loss of a worker into `WorkerLostError`."""
        if isinstance(error, KilledWorker):
            return WorkerLostError(str(error), error.allowed_failures + 1)
        return error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster.

        The scheduler then drops all calls that have not begun, whatever the arguments.
        """
        del wait, cancel_futures
        self._client.close()


def _call(first: str, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """The function that Dask runs as a task.

    `first` is the result of the first call, on which the task depends.
    """
    del first
    return fn(*args, **kwargs)
