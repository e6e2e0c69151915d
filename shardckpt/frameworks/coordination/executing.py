"""Execution of an agreement with a store and a clock, until it ends or the time is up."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from shardckpt.frameworks.coordination.agreement import Get, Late, Report, Set
from shardckpt.frameworks.coordination.calls import SilentStoreError
from shardckpt.frameworks.coordination.waiting import WaitNotice

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.frameworks.coordination.agreement import Steps

T = TypeVar("T")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25
"""Seconds between two looks at the store. The pause grows, so that a quick start is quick and a
slow one costs little."""


def execute(
    steps: Steps[T],
    get_key: Callable[[str], bytes | None],
    set_key: Callable[[str, bytes], None],
    *,
    seconds: float,
    check: Callable[[], None],
) -> T:
    """Execute the operations of an agreement until it ends or the time is up.

    Args:
        steps: the agreement.
        get_key: gives the value of one of its keys; None, at once, if the key is missing.
        set_key: sets one of its keys.
        seconds: the time.
        check: called before each pause; an exception from it ends the agreement.
    """
    deadline = time.monotonic() + seconds
    pause, notice = _SHORTEST_PAUSE, WaitNotice()
    result: bytes | Late | None = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as end:
            answer: T = end.value
            return answer
        result = None
        if isinstance(step, Get):
            result = until(deadline - time.monotonic(), partial(get_key, step.key))
        elif isinstance(step, Set):
            until(deadline - time.monotonic(), partial(set_key, step.key, step.value))
        elif isinstance(step, Report):
            notice.write(step.missing)
        elif (left := deadline - time.monotonic()) <= 0:
            result = Late(seconds, is_over=True)
        elif notice.is_due():
            result = Late(seconds - left, is_over=False)
        else:
            check()
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE)


def until(seconds: float, ask: Callable[[], T]) -> T:
    """Call a store that may be silent, again and again for this many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except SilentStoreError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LONGEST_PAUSE)
