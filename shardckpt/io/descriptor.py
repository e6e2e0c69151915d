"""Open files that Ctrl-C cannot leak.

Python may raise KeyboardInterrupt between the call of `os.open` and the statement that keeps its result. Nobody can close the file
then, and a lock on it lasts as long as the process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


class OpenFile:
    """An open file or directory, which is closed with this object at the latest."""

    __slots__ = ("__weakref__", "_held")

    def __init__(self, path: str | Path, flags: int) -> None:
        """Open as `os.open` does; a new file gets the mode 0o666, and started processes do not inherit the descriptor."""
        self._held: list[int] = []
        self._held.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,), (0o666,)))  # C code alone, which no signal interrupts

    def fileno(self) -> int:
        """The descriptor; -1 if the file is closed."""
        return self._held[0] if self._held else -1

    def close(self) -> None:
        """Close the file, unless it is closed."""
        held = self._held
        held[:] = filter(None, map(os.close, map(list.pop, (held,) * len(held))))  # C code alone, as above

    def __enter__(self) -> int:
        return self._held[0]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
