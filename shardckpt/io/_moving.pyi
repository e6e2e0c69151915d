from typing import Any

from numpy.typing import NDArray

MOST_DIMS: int

def write_chunks(
    fd: int,
    offset: int,
    begun: int,
    blocks: tuple[NDArray[Any], ...],
    chunk: tuple[int, ...],
    first: int,
    last: int,
    crcs: NDArray[Any],
    scratch: NDArray[Any],
    seconds: float,
    /,
) -> tuple[int, int, int]: ...
def read_chunks(
    fd: int,
    bands: tuple[
        tuple[
            int, int, int, tuple[int, ...], tuple[tuple[NDArray[Any], tuple[int, ...], int], ...]
        ],
        ...,
    ],
    done: int,
    crcs: NDArray[Any],
    scratch: NDArray[Any],
    seconds: float,
    /,
) -> tuple[int, int, int]: ...
def find_changes(
    olds: tuple[NDArray[Any], ...],
    news: tuple[NDArray[Any], ...],
    itemsize: int,
    results: NDArray[Any],
    room: NDArray[Any],
    /,
) -> int: ...
