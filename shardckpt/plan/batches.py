"""Items in order, as many at a time as fit."""

from __future__ import annotations

from operator import add, gt
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["batches"]

T = TypeVar("T")


def batches(items: Iterable[T], costs: Callable[[T], tuple[int, ...]], limits: tuple[int, ...]) -> Iterator[list[T]]:
    """Consecutive items whose costs stay within all limits together, or a single item that does not.

    Args:
        items: In order; taken one by one, as batches are asked for.
        costs: What an item costs, one number per limit (bytes, say).
        limits: The most that a batch may cost.

    >>> list(batches([3, 4, 9, 1, 1, 1], lambda n: (n, 1), (8, 2)))
    [[3, 4], [9], [1, 1], [1]]
    """
    batch: list[T] = []
    spent: tuple[int, ...] = ()
    for item in items:
        cost = costs(item)
        total = tuple(map(add, spent, cost)) if batch else cost
        if batch and any(map(gt, total, limits)):
            yield batch
            batch, total = [], cost
        batch.append(item)
        spent = total
    if batch:
        yield batch
