"""Tasks done by the workers of a Dask cluster.

A task is done by a thread of a worker: a cluster has as many places as its workers have threads. Dask itself gives a task whose
worker dies to another one, until it takes the task for the culprit (its setting `distributed.scheduler.allowed-failures`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import distributed
from dask import config
from distributed.scheduler import KilledWorker

from shardckpt.errors import CoordinationError, OptionError
from shardckpt.reshard.clusters import AUTO, ClusterExecutor, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["OnDask"]

T = TypeVar("T")

_CONNECT = 30
"""Seconds that the scheduler may take to answer."""


class OnDask(ClusterExecutor):
    """A client of a Dask scheduler."""

    def __init__(self, url: str, address: str) -> None:
        super().__init__(url)
        found = config.get("scheduler-address", None) if address == AUTO else f"tcp://{address}"
        if found is None:
            raise OptionError(f"{url}: Dask knows of no scheduler; set DASK_SCHEDULER_ADDRESS, or give dask://HOST:PORT.")
        try:
            self._client = distributed.Client(found, timeout=_CONNECT, set_as_default=False, name="shardckpt")
        except (OSError, ValueError) as e:
            raise CoordinationError(f"{url}: no Dask scheduler answers there ({e}).") from e
        self._calls = self._client.get_executor(pure=False)

    def start(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[T]:
        """Submit a call."""
        future: Future[T] = self._calls.submit(fn, *args, **kwargs)
        return future

    def count(self) -> int:
        """Threads of all workers."""
        return sum(self._client.nthreads().values())

    def understand(self, error: BaseException) -> BaseException:
        """Whether it is about a worker that is gone."""
        if isinstance(error, KilledWorker):
            return WorkerLostError(str(error), error.allowed_failures + 1)
        return error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster; calls that have not begun are not made."""
        del wait
        if cancel_futures:
            self._calls.shutdown(wait=False)
        self._client.close()
