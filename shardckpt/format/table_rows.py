"""Rows of chunk tables: those of each array, those of given chunks, and those of merged tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from numpy.typing import NDArray

T = TypeVar("T")


class ByPath(Mapping[str, T]):
    """Array path → the value of the array, which is made at each access."""

    def __init__(self, paths: Collection[str], make: Callable[[str], T]) -> None:
        """`make` makes the value of one of the paths."""
        self._paths = paths
        self._make = make

    def __getitem__(self, path: str) -> T:
        """The value of an array."""
        if path not in self._paths:
            raise KeyError(path)
        return self._make(path)

    def __contains__(self, path: object) -> bool:
        """Whether there is such an array."""
        return path in self._paths

    def __iter__(self) -> Iterator[str]:
        """Paths of arrays."""
        return iter(self._paths)

    def __len__(self) -> int:
        """Number of arrays."""
        return len(self._paths)


def find_rows(
    stored: NDArray[np.uint64],
    first: NDArray[np.int64],
    count: NDArray[np.int64],
    array: NDArray[np.int64],
    chunks: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Rows of chunks; -1 for a chunk that the table lacks.

    Args:
        stored: the table's positions of chunks, ascending within an array.
        first: (a,) the first row of each array.
        count: (a,) the number of its rows.
        array: (n,) the chunk's array among those.
        chunks: (n,) the chunk's position in its grid.
    """
    # In an array without holes the row of a chunk follows from its position.
    row = np.where((chunks >= 0) & (chunks < count[array]), first[array] + chunks, -1)
    held = np.flatnonzero(row >= 0)
    row[held[stored[row[held]] != chunks[held].astype(np.uint64)]] = -1
    others = np.flatnonzero(row < 0)
    others = others[np.argsort(array[others], kind="stable")]
    for of_array in np.split(others, np.flatnonzero(np.diff(array[others])) + 1):
        if len(of_array) and count[array[of_array[0]]]:
            begin, positions = (
                int(first[array[of_array[0]]]),
                chunks[of_array].astype(np.uint64),
            )
            there = stored[begin : begin + int(count[array[of_array[0]]])]
            at = np.minimum(np.searchsorted(there, positions), len(there) - 1)
            row[of_array] = np.where(there[at] == positions, begin + at, -1)
    return row


def number_rows(counts: Sequence[Mapping[str, int]]) -> tuple[dict[str, int], NDArray[np.int64]]:
    """The arrays of several tables, in the order in which they first occur.

    Args:
        counts: array path → rows, of each table.

    Returns:
        Array path → rows in all tables; and for each row, table after table, the array's position
        among those.
    """
    arrays: dict[str, int] = {}
    numbers = []
    for of_table in counts:
        mine = np.fromiter(
            (arrays.setdefault(path, len(arrays)) for path in of_table), np.int64, len(of_table)
        )
        numbers.append(np.repeat(mine, np.fromiter(of_table.values(), np.int64, len(of_table))))
    number = np.concatenate([*numbers, np.empty(0, np.int64)])
    together = np.bincount(number, minlength=len(arrays)).tolist()
    return dict(zip(arrays, together, strict=True)), number
