"""Lists of devices, short enough for a table or a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

MOST_RUNS = 4
"""Most runs of consecutive ids that are listed."""


def device_list(device_ids: ArrayLike, most: int = 16) -> str:
    """Device ids in about `most` characters; complete where they follow a pattern.

    >>> device_list([3]), device_list([0, 1, 2, 3]), device_list([0, 8])
    ('3', '0–3', '0,8')
    >>> device_list(range(0, 256, 8)), device_list([0, 1, 4, 5, 8, 9, 12, 13])
    ('0,8,…,248', '0–1,4–5,…,12–13')
    >>> device_list([0, 3, 4, 9, 17, 23]), device_list([10**6, *range(0, 10**5, 7)])
    ('0…23 (6)', '14287 devices')

    Args:
        device_ids: The ids in any order, each once.
        most: Number of characters.
    """
    ids = np.sort(np.asarray(device_ids, np.int64).reshape(-1))
    if not len(ids):
        return "none"
    breaks = np.flatnonzero(np.diff(ids) != 1)
    first, last = ids[np.r_[0, breaks + 1]], ids[np.r_[breaks, len(ids) - 1]]
    if len(first) <= MOST_RUNS:
        listed = ",".join(map(_run, first.tolist(), last.tolist()))
        if len(listed) <= most:
            return listed
    if len(first) > 2 and len(np.unique(np.diff(first))) == 1 and len(np.unique(last - first)) == 1:
        pattern = (
            f"{_run(first[0], last[0])},{_run(first[1], last[1])},…,{_run(first[-1], last[-1])}"
        )
        if len(pattern) <= most:
            return pattern
    span = f"{ids[0]}…{ids[-1]} ({len(ids)})"
    return span if len(span) <= most else f"{len(ids)} devices"


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"
