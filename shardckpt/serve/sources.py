"""Bytes that are read when they are sent: ranges, validators and streaming (RFC 9110), whatever the bytes come from.

A response reads one block while the one before it is sent, and has memory for a few, however slow its client is. Blocks are smaller where
there are more responses, so that all of them together have a bounded amount.
"""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np
from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.exceptions import HTTPException

from shardckpt.serve.problems import problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from starlette.types import Receive, Scope, Send

_BLOCKS = ((4, 16 << 20), (16, 4 << 20), (32, 1 << 20), (1 << 30, 1 << 18))
"""Number of streams below which a block has at most so many bytes."""
_READS = 6
"""Reads at a time: each may hold blocks of the view besides."""
_WHOLE, _WHOLE_SECONDS, _SEND_SECONDS = threading.BoundedSemaphore(16), 1.0, 60.0
"""Answers in memory at a time, how long one waits for others, and how long its client may take."""
_PIECE = 1 << 18
_RANGE = re.compile(r"bytes=(?:(\d{1,1000})-(\d{1,1000})?|-(\d{1,1000}))", re.ASCII)
_CONDITIONS = (b"range", b"if-range", b"if-match", b"if-none-match")
_streams = 0
_limit: RunVar[CapacityLimiter] = RunVar("shardckpt-reads")


@dataclass(frozen=True, slots=True)
class ByteSource:
    """Bytes of a known number."""

    size: int
    etag: str
    """Strong: differs for other bytes; without quotes."""
    read_into: Callable[[int, memoryview], object]
    """Fills memory with the bytes from an offset on; called on other threads, one call at a time."""
    media_type: str = "application/octet-stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    block_end: Callable[[int, int], int] | None = None
    """The end of a good read from an offset on, of at most so many bytes; None: any is good."""
    whole: bool = False
    """Whether it is read with one call, and has no ranges."""


def of_bytes(data: bytes, etag: str, media_type: str, headers: Mapping[str, str] | None = None) -> ByteSource:
    """Bytes in memory."""

    def read_into(offset: int, into: memoryview) -> None:
        into[:] = data[offset : offset + len(into)]

    return ByteSource(len(data), etag, read_into, media_type, headers or {})


class SourceResponse:
    """The response to a GET or HEAD request for bytes."""

    def __init__(self, source: ByteSource, *, sends: bool = True) -> None:
        """Send nothing yet. What is read with one call, and will be sent, is read here, on the thread that calls."""
        self._source = source
        self._data: memoryview | None = None
        if source.whole and sends and source.size:
            if not _WHOLE.acquire(timeout=_WHOLE_SECONDS):
                raise HTTPException(503, "too many such answers are being sent; try again.", {"Retry-After": "5"})
            try:
                self._data = np.empty(source.size, np.uint8).data
                source.read_into(0, self._data)
            except BaseException:
                _WHOLE.release()
                raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            await self._answer(scope, receive, send)
        finally:
            if self._data is not None:
                self._data = None
                _WHOLE.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        source = self._source
        asked = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _CONDITIONS}
        headers = {
            "etag": f'"{source.etag}"',
            "content-type": source.media_type,
            "cache-control": "private, no-cache",
            **({} if source.whole else {"accept-ranges": "bytes"}),
            **source.headers,
        }
        if b"if-match" in asked and not _matches(asked[b"if-match"], source.etag, strongly=True):
            refused = problem(
                412,
                "changed",
                "the file differs from the one that If-Match names; start again without If-Match.",
                {"ETag": headers["etag"]},
            )
            await refused(scope, receive, send)
            return
        if b"if-none-match" in asked and _matches(asked[b"if-none-match"], source.etag):
            await _start(send, 304, headers)
            await send({"type": "http.response.body"})
            return
        status, begin, end = 200, 0, source.size
        condition = asked.get(b"if-range")
        if b"range" in asked and not source.whole and (condition is None or condition == headers["etag"]):
            span = _span(asked[b"range"], source.size)
            if span == (0, 0):
                refused = problem(416, "range", f"there are {source.size} bytes.", {"Content-Range": f"bytes */{source.size}"})
                await refused(scope, receive, send)
                return
            if span is not None:
                status, (begin, end) = 206, span
                headers["content-range"] = f"bytes {begin}-{end - 1}/{source.size}"
        headers["content-length"] = str(end - begin)
        if scope["method"] == "HEAD" or begin == end:
            await _start(send, status, headers)
            await send({"type": "http.response.body"})
            return
        if self._data is not None:
            async with asyncio.timeout(_SEND_SECONDS):
                await _start(send, status, headers)
                for at in range(0, end, _PIECE):  # each waits until the client has read those before it
                    await send({"type": "http.response.body", "body": self._data[at : at + _PIECE], "more_body": at + _PIECE < end})
            return
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await self._stream(send, gone, status, headers, begin, end)
        finally:
            gone.cancel()

    async def _stream(self, send: Send, gone: asyncio.Task[None], status: int, headers: Mapping[str, str], begin: int, end: int) -> None:
        global _streams  # noqa: PLW0603  (of this process)
        _streams += 1
        reader = _Reader(self._source, end)
        ahead: asyncio.Task[memoryview] | None = None
        try:
            data = await reader.read(begin)  # its errors come before the status is sent
            await _start(send, status, headers)
            at = begin
            while not gone.done():
                at += len(data)
                if at < end:
                    ahead = asyncio.create_task(reader.read(at))
                await send({"type": "http.response.body", "body": data, "more_body": at < end})
                if ahead is None or at >= end:
                    return
                data = await ahead
        finally:
            _streams -= 1
            if ahead is not None and not ahead.cancel():
                ahead.cancelled() or ahead.exception()  # nobody waits for it any more


class _Reader:
    """Reads blocks of a source, one after another, into buffers that are used again."""

    def __init__(self, source: ByteSource, end: int) -> None:
        self._source, self._end = source, end
        self._buffers: list[tuple[NDArray[np.uint8], ref[NDArray[np.uint8]]]] = []
        """Each with the part that was lent last: while that lives, the transport may still be sending it."""

    async def read(self, begin: int) -> memoryview:
        """The block from an offset on."""
        most = next(nbytes for streams, nbytes in _BLOCKS if _streams < streams)
        stop = min(self._end, begin + most)
        if self._source.block_end is not None:
            stop = min(stop, self._source.block_end(begin, most))
        part = self._part(stop - begin, most, last=stop == self._end)
        await to_thread.run_sync(self._source.read_into, begin, part, limiter=_limiter())
        return part

    def _part(self, nbytes: int, most: int, *, last: bool) -> memoryview:
        """Memory for a block: a buffer that nobody sends from any more, or a new one."""
        busy: list[tuple[NDArray[np.uint8], ref[NDArray[np.uint8]]]] = []
        idle: list[NDArray[np.uint8]] = []
        for buffer, part in self._buffers:
            if part() is not None:
                busy.append((buffer, part))
            elif nbytes <= len(buffer) <= most:
                idle.append(buffer)
        chosen = idle[0] if idle else np.empty(nbytes if last else most, np.uint8)
        lent = chosen[:nbytes]
        self._buffers = [*busy, (chosen, ref(lent))]
        return lent.data


def _limiter() -> CapacityLimiter:
    """The limit of reads at a time, of this event loop."""
    try:
        return _limit.get()
    except LookupError:
        _limit.set(CapacityLimiter(_READS))
        return _limit.get()


async def _until_gone(receive: Receive) -> None:
    """Wait until the client has closed the connection: what is sent then is dropped without an error."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


def _matches(condition: str, etag: str, *, strongly: bool = False) -> bool:
    """Whether If-Match or If-None-Match names the tag; strongly: a weak tag is another one."""
    tags = (one.strip() if strongly else one.strip().removeprefix("W/") for one in condition.split(","))
    return condition.strip() == "*" or f'"{etag}"' in tags


def _span(text: str, size: int) -> tuple[int, int] | None:
    """The half-open range that a header asks for; (0, 0): there is none of it; None: a form that is ignored, as several ranges are."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        return None
    if found[3] is not None:
        n = min(int(found[3]), size)
        return (size - n, size) if n else (0, 0)
    first, last = int(found[1]), size - 1 if found[2] is None else min(int(found[2]), size - 1)
    if found[2] is not None and int(found[2]) < first:
        return None
    return (first, last + 1) if first <= last else (0, 0)
