"""Common base of Ray and Dask clusters, as a `concurrent.futures.Executor`.

1. `ray://HOST:PORT` and `dask://HOST:PORT` name a running cluster. `ray://auto` and `dask://auto`
   name the cluster given by the environment, as inside a job of that cluster. shardckpt neither
   starts nor stops anything in the cluster.
2. The cluster schedules. It is asked periodically for its number of places, so that it gets more
   tasks as it grows.
3. Losing a worker process or its machine breaks the future of its task with a `WorkerLostError`. A
   task's own error is raised unchanged. Any other failure is raised as an error of shardckpt.
4. A cluster without any worker may still be starting: the job waits for it, for a limited time.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from shardckpt._version import __version__
from shardckpt.errors import CoordinationError, MissingExtraError, OptionError
from shardckpt.io.failures import causes
from shardckpt.text import Message, named

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

AUTO = "auto"
"""In place of an address: the cluster that the environment names."""
WORKER_TIMEOUT = 300
"""Seconds that a cluster may be without any worker; a cluster that grows on demand has to start a
machine."""
_LOOK_EVERY = 1
"""Seconds between two queries of a cluster's size."""
EXTRAS = {"ray": "ray", "dask": "distributed"}
"""Extra of shardckpt → the package that it requires."""
_URL = re.compile(r"(\w+)://(auto|\[[0-9a-fA-F:.]+\]:\d{1,5}|[^\s/:@\[\]]+:\d{1,5})", re.ASCII)


class WorkerLostError(BrokenExecutor):
    """The worker of a task was lost; its progress is unknown."""

    def __init__(self, message: str, times: int = 1) -> None:
        """Store the message and the number of workers lost over the task.

        Several can be lost, because the cluster may have retried by itself.
        """
        super().__init__(message)
        self.times = times


class ClusterExecutor(Executor, ABC):
    """A connection to a cluster."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._places = 0
        self._looked = float("-inf")
        self._alive = time.monotonic()

    @abstractmethod
    def start(
        self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[T]:
        """Submit a function call to the cluster and return the cluster's own future."""

    @abstractmethod
    def count(self) -> int:
        """Ask the cluster for the number of tasks that it can run at a time."""

    @abstractmethod
    def translate(self, error: BaseException) -> BaseException:
        """Translate an error of the cluster library."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in the cluster; function, arguments and result are picklable."""
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()

        def settle(done: Future[T]) -> None:
            try:
                error = self.lost() if done.cancelled() else done.exception()
                if error is not None:
                    error = self._explain(error)
            except Exception as e:  # noqa: BLE001  (of a message or of translate: else nobody ends)
                error = e
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(done.result())

        try:
            self.start(fn, args, kwargs).add_done_callback(settle)
        except Exception as e:  # noqa: BLE001  (the future raises it)
            result.set_exception(self._explain(e))
        return result

    def places(self) -> int:
        """Number of tasks that the cluster runs at a time now; at least 1.

        Raises:
            CoordinationError: the cluster has had no worker for too long.
        """
        now = time.monotonic()
        if now >= self._looked + _LOOK_EVERY:
            try:
                self._places = self.count()
            except Exception:  # noqa: BLE001  (it answers soon, or is lost)
                self._places = 0
            self._looked = now = time.monotonic()
            if self._places:
                self._alive = now
            elif now > self._alive + WORKER_TIMEOUT:
                raise CoordinationError(
                    f"{self._url} has had no worker {self.requirements()}for {WORKER_TIMEOUT} s. "
                    "Finished tasks are kept; repeat the call when there are workers, and it "
                    "continues from there."
                )
        return max(1, self._places)

    def requirements(self) -> str:
        """Requirements on a worker, as text for a message."""
        return ""

    def lost(self) -> CoordinationError:
        """The error for a lost connection."""
        return CoordinationError(
            f"{self._url}: the connection to the cluster was lost. Finished tasks are kept; the "
            "same call continues from there."
        )

    def absent(self, who: str = "a worker") -> MissingExtraError:
        """The error for a cluster in which shardckpt is not installed everywhere."""
        return MissingExtraError(
            f"{self._url}: {who} cannot import shardckpt; install shardckpt {__version__} "
            "wherever the cluster runs Python."
        )

    def _explain(self, error: BaseException) -> BaseException:
        """The error to raise: the task's own, or one that explains to a user how to proceed."""
        if any("No module named 'shardckpt" in str(cause) for cause in causes(error)):
            return self.absent()
        return self.translate(error)


def address_of(url: str) -> tuple[str, str]:
    """The kind and the address of a cluster.

    Raises:
        OptionError: the text is not the URL of a cluster.

    >>> address_of("ray://head.example:10001")
    ('ray', 'head.example:10001')
    >>> address_of("dask://auto")
    ('dask', 'auto')
    """
    match = _URL.fullmatch(url)
    if match is None or match[1] not in EXTRAS:
        known = ": give ray://HOST:PORT, dask://HOST:PORT, ray://auto or dask://auto; "
        raise OptionError(
            Message(
                named("engine", url),
                known,
                "without an engine, processes of this machine do the work.",
            )
        )
    return match[1], match[2]
