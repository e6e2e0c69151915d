"""A process that is alone: it agrees with itself, and peeks at what it has announced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.frameworks.coordination.base import Coordinator

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["SingleProcess"]


class SingleProcess(Coordinator):
    """The coordinator of a job of one process."""

    def __init__(self, *, devices: Mapping[str, Iterable[int]] | None = None, timeout: float = 600) -> None:
        """Take a run id; there is nobody to wait for."""
        self._values: dict[str, bytes] = {}
        super().__init__(0, 1, devices=devices, timeout=timeout)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _get(self, key: str) -> bytes | None:
        return self._values.get(key)
