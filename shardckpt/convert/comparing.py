"""`shardckpt.diff`: comparison of two checkpoints of any format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.convert.opening import open as opened
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.compare import compare
from shardckpt.reading.compare_values import DEFAULT_MEMORY_LIMIT

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from shardckpt.reading.compare import Comparison


def diff(
    a: str | os.PathLike[str] | Checkpoint,
    b: str | os.PathLike[str] | Checkpoint,
    *,
    values: bool = True,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints of any format, name by name and bit by bit.

    Args:
        a: a path or url, or an open checkpoint.
        b: the other one.
        values: also compare the elements of tensors: NaNs with the same bits are equal, 0.0 and
            -0.0 are not.
        memory_limit: bytes (or text such as "512MiB") for elements of both, at least 1 MiB.
        progress: called with bytes compared so far and in all.

    Returns:
        The differences; `equal()` says whether there are none. Layouts are compared too, and are
        not a difference by themselves.

    Raises:
        NotFoundError, UncommittedError, FormatError, VersionError: as for `open`.
        OptionError: the memory limit is too low.
        CorruptionError, MissingDataError, ReplacedError, StorageError: elements cannot be read.
    """
    first, second = (one if isinstance(one, Checkpoint) else opened(one) for one in (a, b))
    return compare(first, second, values=values, memory_limit=memory_limit, progress=progress)
