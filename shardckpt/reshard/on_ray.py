"""Execution of tasks by a Ray cluster.

A task reserves one CPU and the maximum memory that it uses, so that Ray gives no machine more tasks
than fit. Ray runs each in a process. Ray does not retry a task by itself: losses are reported here,
and counted.

`ray://HOST:PORT` is Ray's client: this process need not be in the cluster. `ray://auto` is a driver
within the cluster. A program that is already connected to Ray uses its existing connection.
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

T = TypeVar("T")

_LOST = (
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.LocalRayletDiedError,
    exceptions.ObjectLostError,
)
"""Ray's errors for the loss of a process or machine with a task or its result."""


class OnRay(ClusterExecutor):
    """A connection to a Ray cluster."""

    def __init__(self, url: str, address: str, memory: int) -> None:
        super().__init__(url)
        self._memory = memory
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # failures are raised too
                    ray.init(
                        AUTO if address == AUTO else url,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                    )
            except (
                ConnectionError,
                TimeoutError,
                RuntimeError,
                ValueError,
                exceptions.RayError,
            ) as e:
                raise CoordinationError(
                    f"{url}: no Ray cluster answers there "
                    f"({(str(e).strip().splitlines() or [type(e).__name__])[-1]}); check the "
                    "address."
                ) from e
        options = {
            "num_cpus": 1,
            "memory": memory,
            "max_retries": 0,
            "scheduling_strategy": "SPREAD",
        }
        self._call = ray.remote(**options)(_call)
        self._refs: dict[Future[Any], Any] = {}

    def start(
        self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[T]:
        """Submit a call; calls are spread over all machines.

        The machines share the storage, and each machine has its own network.
        """
        ref = self._call.remote(fn, args, kwargs)
        future: Future[T] = ref.future()
        self._refs[future] = ref
        future.add_done_callback(lambda done: self._refs.pop(done, None))
        return future

    def count(self) -> int:
        """Number of tasks for which all machines together have CPUs and memory."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return int(
            sum(min(has.get("CPU", 0), has.get("memory", 0) // self._memory) for has in nodes)
        )

    def requirements(self) -> str:
        """Resources that a machine needs for a task."""
        return f"with a CPU and {self._memory} bytes of memory "

    def translate(self, error: BaseException) -> BaseException:
        """Unwrap the error of the task itself; translate the loss of a worker."""
        if isinstance(error, exceptions.RayTaskError):
            cause: BaseException = error.cause or error
            return cause
        if isinstance(error, _LOST):
            return WorkerLostError(_first_line(error))
        if isinstance(error, ConnectionError):
            return self.lost()
        return (
            CoordinationError(f"{self._url}: {_first_line(error)}")
            if isinstance(error, exceptions.RayError)
            else error
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster; with `cancel_futures`, unfinished calls are cancelled."""
        del wait
        if cancel_futures:
            for ref in list(self._refs.values()):
                with suppress(Exception):  # a lost cluster ends them too
                    ray.cancel(ref)
        if self._connected:
            ray.shutdown()


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """The function that Ray runs as a task."""
    return fn(*args, **kwargs)


def _first_line(error: BaseException) -> str:
    """The first line of a Ray message; the other lines speculate about the cause."""
    return str(error).strip().partition("\n")[0]
