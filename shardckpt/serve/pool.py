"""The threads that answer requests: some for short work, and others for what may wait for a calculation.

One user holds at most half of them, so that nobody waits for the requests of others. Without tokens there is only one user.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.exceptions import HTTPException

from shardckpt.serve.access.identity import UNKNOWN, WHO

if TYPE_CHECKING:
    from collections.abc import Callable

_LONG = 16
_WAIT_SECONDS = 20.0
_long: RunVar[CapacityLimiter] = RunVar("shardckpt-long")
_shares: RunVar[dict[tuple[str, bool], asyncio.Semaphore]] = RunVar("shardckpt-shares")

T = TypeVar("T")


async def on_thread(function: Callable[..., T], *args: Any, long: bool = False) -> T:
    """Call a function on a thread.

    Args:
        function: the function.
        args: its arguments.
        long: whether it may wait for a calculation.

    Raises:
        HTTPException: the user's other requests hold their share of the threads for too long.
    """
    limiter = _get(_long, lambda: CapacityLimiter(_LONG)) if long else to_thread.current_default_thread_limiter()
    who = WHO.get().name
    if who == UNKNOWN:
        return await to_thread.run_sync(function, *args, limiter=limiter)
    share = _get(_shares, dict).setdefault((who, long), asyncio.Semaphore(int(limiter.total_tokens) // 2))
    try:
        async with asyncio.timeout(_WAIT_SECONDS):
            await share.acquire()
    except TimeoutError:
        raise HTTPException(503, "too many requests with this token are at work; try again.", {"Retry-After": "5"}) from None
    try:
        return await to_thread.run_sync(function, *args, limiter=limiter)
    finally:
        share.release()


def _get(variable: RunVar[T], make: Callable[[], T]) -> T:
    """The value of a variable of this event loop."""
    try:
        return variable.get()
    except LookupError:
        variable.set(make())
        return variable.get()
