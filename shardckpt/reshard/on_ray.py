"""Tasks done by a Ray cluster.

A task takes one CPU and, so that Ray gives no machine more of them than it has room for, the memory that it takes at most. Ray
has a process for each. It does not do a task again by itself: what is lost comes back here, and is counted.

`ray://HOST:PORT` is Ray's client: this process need not be in the cluster. `ray://auto` is a driver within it. A program that is
connected to Ray already uses the connection that it has.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray import exceptions

from shardckpt.errors import CoordinationError
from shardckpt.reshard.clusters import AUTO, ClusterExecutor, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["OnRay"]

T = TypeVar("T")

_LOST = (
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.LocalRayletDiedError,
    exceptions.ObjectLostError,
)
"""What Ray raises when a process or a machine is gone, with a task or with its result."""


class OnRay(ClusterExecutor):
    """A connection to a Ray cluster."""

    def __init__(self, url: str, address: str, memory: int) -> None:
        super().__init__(url)
        self._memory = memory
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what goes wrong is raised too
                    ray.init(AUTO if address == AUTO else url, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, TimeoutError, RuntimeError, ValueError, exceptions.RayError) as e:
                raise CoordinationError(
                    f"{url}: no Ray cluster answers there ({(str(e).strip().splitlines() or [type(e).__name__])[-1]})."
                ) from e
        options = {"num_cpus": 1, "memory": memory, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        self._call = ray.remote(**options)(_call)
        self._refs: dict[Future[Any], Any] = {}

    def start(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[T]:
        """Submit a call, spread over all machines: what they share is the storage, and each has a network of its own."""
        ref = self._call.remote(fn, args, kwargs)
        future: Future[T] = ref.future()
        self._refs[future] = ref
        future.add_done_callback(lambda done: self._refs.pop(done, None))
        return future

    def count(self) -> int:
        """Over all machines, how many tasks they have CPUs and memory for."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return int(sum(min(has.get("CPU", 0), has.get("memory", 0) // self._memory) for has in nodes))

    def asked(self) -> str:
        """What a machine must have to do a task."""
        return f"with a CPU and {self._memory} bytes of memory "

    def understand(self, error: BaseException) -> BaseException:
        """The error of the task itself, out of its wrapping; or whether a worker is gone."""
        if isinstance(error, exceptions.RayTaskError):
            cause: BaseException = error.cause
            return cause
        if isinstance(error, _LOST):
            return WorkerLostError(_first_line(error))
        if isinstance(error, ConnectionError):
            return self.lost()
        return CoordinationError(f"{self._url}: {_first_line(error)}") if isinstance(error, exceptions.RayError) else error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster; what was submitted and is not done is told to end."""
        del wait
        if cancel_futures:
            for ref in list(self._refs.values()):
                with suppress(Exception):  # a cluster that is gone ends it too
                    ray.cancel(ref)
        if self._connected:
            ray.shutdown()


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """What Ray knows as the task."""
    return fn(*args, **kwargs)


def _first_line(error: BaseException) -> str:
    """Of Ray's messages, which go on about what might be the cause."""
    return str(error).strip().partition("\n")[0]
