"""Threads that answer requests, and streams of events.

Some threads are for short work, and others are for what may wait for a calculation.

One user holds at most half of them, so that nobody waits for the requests of others. Without tokens
there is only one user.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from shardckpt.serve.access.identity import UNKNOWN, WHO
from shardckpt.serve.problems import RETRY

if TYPE_CHECKING:
    import threading
    from collections import Counter
    from collections.abc import AsyncGenerator, Callable

_LONG = 16
_WAIT_SECONDS = 20.0
_EVENTS_SECONDS, _KEEPALIVE_SECONDS = 300.0, 10.0
"""A stream of events ends after some minutes; the client asks again."""
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
    limiter = (
        of_loop(_long, lambda: CapacityLimiter(_LONG))
        if long
        else to_thread.current_default_thread_limiter()
    )
    who = WHO.get().name
    if who == UNKNOWN:
        return await to_thread.run_sync(function, *args, limiter=limiter)
    share = of_loop(_shares, dict).setdefault(
        (who, long), asyncio.Semaphore(int(limiter.total_tokens) // 2)
    )
    try:
        async with asyncio.timeout(_WAIT_SECONDS):
            await share.acquire()
    except TimeoutError:
        raise HTTPException(
            503, "too many requests with this token are at work; try again.", RETRY
        ) from None
    try:
        return await to_thread.run_sync(function, *args, limiter=limiter)
    finally:
        share.release()


def of_loop(variable: RunVar[T], make: Callable[[], T]) -> T:
    """The value of a variable of this event loop."""
    try:
        return variable.get()
    except LookupError:
        variable.set(make())
        return variable.get()


def event_stream(
    events: AsyncGenerator[bytes | None],
    clients: Counter[str],
    most: int,
    busy: HTTPException,
    closing: threading.Event,
) -> StreamingResponse:
    """The response that sends events.

    Args:
        events: the events; None while nothing happens.
        clients: counts those who follow, by user.
        most: most of them.
        busy: raised where there are more.
        closing: set when the service is about to end.
    """
    who = WHO.get().name
    if clients.total() >= most or (who != UNKNOWN and clients[who] >= most // 2):
        raise busy

    async def followed() -> AsyncGenerator[bytes]:
        clock = asyncio.get_running_loop().time
        end, sent = clock() + _EVENTS_SECONDS, clock()
        clients[who] += 1
        try:
            async for event in events:
                if event is not None or clock() >= sent + _KEEPALIVE_SECONDS:
                    sent = clock()
                    yield b": still there\n\n" if event is None else event
                if clock() >= end or closing.is_set():
                    return
        finally:
            clients[who] -= 1
            await events.aclose()

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(followed(), headers=headers, media_type="text/event-stream")
