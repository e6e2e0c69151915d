"""A process that takes itself for one of several, none of which is running: enough to restore,
where nobody is waited for."""

from __future__ import annotations

from shardckpt import Coordinator
from shardckpt.layout.world import World


class OneOfSeveral(Coordinator):
    """The coordinator of one of them; it has agreed with nobody."""

    def __init__(self, process: int, processes: int) -> None:
        self.world = World(process, processes)
        self.run_id = "20261121T115800-1f2e3d4c"

    def _set(self, key: str, value: bytes) -> None:
        raise AssertionError(f"{key} is told to nobody")

    def _get(self, key: str) -> bytes | None:
        raise AssertionError(f"{key} is asked of nobody")
