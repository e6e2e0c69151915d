"""A process that takes itself for one of several, none of which is running: enough to restore,
where nobody is waited for; and threads that take themselves for the processes of a job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from shardckpt import Coordinator
from shardckpt.errors import CoordinationError, ShardckptError
from shardckpt.layout.world import World

if TYPE_CHECKING:
    from collections.abc import Callable


class OneOfSeveral(Coordinator):
    """The coordinator of one of them; it has agreed with nobody."""

    def __init__(self, process: int, processes: int) -> None:
        self.world = World(process, processes)
        self.run_id = "20261121T115800-1f2e3d4c"

    def _set(self, key: str, value: bytes) -> None:
        raise AssertionError(f"{key} is told to nobody")

    def _get(self, key: str) -> bytes | None:
        raise AssertionError(f"{key} is asked of nobody")


class OneOfThreads(Coordinator):
    """The coordinator of one of several threads that take themselves for processes; they share a
    dict of keys."""

    def __init__(self, keys: dict[str, bytes], process: int, processes: int) -> None:
        self.keys = keys
        super().__init__(process, processes, timeout=20)

    def _set(self, key: str, value: bytes) -> None:
        self.keys[key] = value

    def _get(self, key: str) -> bytes | None:
        return self.keys.get(key)


class MayLoseStore(OneOfThreads):
    """One of several threads whose store is gone once a key has been set, until this is undone."""

    last: str | None = None
    """The end of that key."""
    is_gone = False

    def _set(self, key: str, value: bytes) -> None:
        self._check()
        super()._set(key, value)
        self.is_gone = self.last is not None and key.endswith(self.last)
        self._check()

    def _get(self, key: str) -> bytes | None:
        self._check()
        return super()._get(key)

    def _check(self) -> None:
        if self.is_gone:
            raise CoordinationError("the store is gone")


class Interrupted(OneOfThreads):
    """One of several threads that is interrupted once, before or after it sets a key."""

    at: str | None = None
    """The end of that key."""
    is_late = False
    """Whether the key is set before the interruption."""

    def _set(self, key: str, value: bytes) -> None:
        is_hit = self.at is not None and key.endswith(self.at)
        if not is_hit or self.is_late:
            super()._set(key, value)
        if is_hit:
            self.at = None
            raise KeyboardInterrupt


def on_threads(
    processes: int, action: Callable[[Any], Any], kind: type[OneOfThreads] = OneOfThreads
) -> list[Any]:
    """The results of an action, or its ShardckptErrors, in each of several threads that take
    themselves for the processes of a job; `kind` is the class of their coordinators."""
    keys: dict[str, bytes] = {}

    def act(process: int) -> Any:
        try:
            return action(kind(keys, process, processes))
        except ShardckptError as error:
            return error

    with ThreadPoolExecutor(processes) as pool:
        return [*pool.map(act, range(processes))]
