"""Bytes that are read when they are sent: ranges, validators and streaming (RFC 9110).

The bytes may come from any source.

A response reads one block while the one before it is sent, and has memory for a few, however slow
its client is. Blocks are smaller where there are more responses, so that all of them together have
a bounded amount.
"""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np
from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.exceptions import HTTPException

from shardckpt.serve.pool import of_loop
from shardckpt.serve.problems import RETRY, problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray
    from starlette.types import Receive, Scope, Send

_BLOCKS = ((4, 8 << 20), (16, 2 << 20), (32, 1 << 19), (1 << 30, 1 << 17))
"""Number of streams below which a block has at most so many bytes."""
_READS = 6
"""Reads at a time: each may hold blocks of the view besides."""
_WAIT_SECONDS, _SEND_SECONDS, _LEAST_RATE = 1.0, 60.0, 64 << 10
"""Seconds that an answer waits for memory, seconds that its client may take, and least bytes per
second of a large one."""
_READ_SECONDS = 60.0
"""Most seconds before the first block, and between two."""
PIECE = 1 << 18
ABORT, STREAMED = "shardckpt.abort", "shardckpt.streamed"
"""The extension of a request that ends its connection; the mark of the start of an answer that
holds no more memory than it has taken."""
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
    """Fills memory with the bytes from an offset on; called on other threads, one call at a
    time."""
    media_type: str = "application/octet-stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    block_end: Callable[[int, int], int] | None = None
    """The end of a good read from an offset on, of at most so many bytes; None: any is good."""
    whole: bool = False
    """Whether it is read with one call, and has no ranges."""
    held: int = 0
    """Bytes in memory for as long as it is sent."""


class AnswerMemory:
    """Memory for answers that are held until they are sent. Safe to use from several threads."""

    def __init__(self, nbytes: int) -> None:
        """Lend at most so many bytes at a time; one larger answer has to be alone."""
        self._total, self._held = nbytes, 0
        self._changed = threading.Condition()

    def take(self, nbytes: int, seconds: float = 0.0) -> bool:
        """Take memory, once others have given back enough; return whether it was there in time."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: not self._held or self._held + nbytes <= self._total, seconds
            )
            self._held += nbytes if free else 0
            return free

    def give_back(self, nbytes: int) -> None:
        """Give memory back."""
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()

    @contextmanager
    def lent(self, nbytes: int) -> Iterator[None]:
        """Lend memory to a block; waits for it. Raises HTTPException when it takes too long."""
        if not self.take(nbytes, _WAIT_SECONDS):
            raise HTTPException(503, NO_MEMORY, RETRY)
        try:
            yield
        finally:
            self.give_back(nbytes)


NO_MEMORY = "too many large answers are being sent; try again."
ANSWERS = AnswerMemory(128 << 20)
"""The memory for large answers of all services of this process."""


def send_seconds(nbytes: int) -> float:
    """The time within which a client has to take an answer from memory."""
    return _SEND_SECONDS + nbytes / _LEAST_RATE


def of_bytes(
    data: bytes,
    etag: str,
    media_type: str,
    headers: Mapping[str, str] | None = None,
    *,
    held: bool = False,
) -> ByteSource:
    """Bytes in memory; `held`: nobody else holds them."""

    def read_into(offset: int, into: memoryview) -> None:
        into[:] = data[offset : offset + len(into)]

    return ByteSource(
        len(data), etag, read_into, media_type, headers or {}, held=len(data) if held else 0
    )


class SourceResponse:
    """The response to a GET or HEAD request for bytes."""

    def __init__(self, source: ByteSource, *, sends: bool = True) -> None:
        """Send nothing yet.

        A source of one read is read here, on the calling thread, if its bytes will be sent.
        """
        self._source = source
        self._data: memoryview | None = None
        reads = source.whole and sends and source.size > 0
        self._reserved = source.size if reads else source.held
        if not ANSWERS.take(self._reserved, _WAIT_SECONDS):
            raise HTTPException(503, NO_MEMORY, RETRY)
        if reads:
            try:
                self._data = np.empty(source.size, np.uint8).data
                source.read_into(0, self._data)
            except BaseException:
                ANSWERS.give_back(self._reserved)
                raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            await self._answer(scope, receive, send)
        finally:
            self._data = None
            ANSWERS.give_back(self._reserved)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        source = self._source
        asked = {
            name: value.decode("latin-1") for name, value in scope["headers"] if name in _CONDITIONS
        }
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
                "the file differs from that of If-Match; start again without it.",
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
        if (
            b"range" in asked
            and not source.whole
            and (condition is None or condition == headers["etag"])
        ):
            span = _span(asked[b"range"], source.size)
            if span == (0, 0):
                refused = problem(
                    416,
                    "range",
                    f"there are {source.size} bytes.",
                    {"Content-Range": f"bytes */{source.size}"},
                )
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
            async with asyncio.timeout(send_seconds(end)):
                await _start(send, status, headers)
                # Each waits until the client has read those before it.
                for at in range(0, end, PIECE):
                    await send(
                        {
                            "type": "http.response.body",
                            "body": self._data[at : at + PIECE],
                            "more_body": at + PIECE < end,
                        }
                    )
            return
        gone = asyncio.create_task(until_gone(receive))
        try:
            await self._stream(send, gone, status, headers, begin, end)
        finally:
            gone.cancel()

    async def _stream(
        self,
        send: Send,
        gone: asyncio.Task[None],
        status: int,
        headers: Mapping[str, str],
        begin: int,
        end: int,
    ) -> None:
        global _streams  # noqa: PLW0603  (of this process)
        _streams += 1
        reader = _Reader(self._source, end)
        ahead: asyncio.Task[memoryview] | None = None
        try:
            try:
                data = await reader.read(begin)  # its errors come before the status is sent
            except TimeoutError:
                raise HTTPException(
                    503, "the storage does not answer in time; try again.", RETRY
                ) from None
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
        """Each with the part that was lent last: while that lives, the transport may still be
        sending it."""

    async def read(self, begin: int) -> memoryview:
        """The block from an offset on."""
        most = next(nbytes for streams, nbytes in _BLOCKS if _streams < streams)
        stop = min(self._end, begin + most)
        if self._source.block_end is not None:
            stop = min(stop, self._source.block_end(begin, most))
        part = self._part(stop - begin, most, last=stop == self._end)
        async with asyncio.timeout(_READ_SECONDS):
            await to_thread.run_sync(
                self._source.read_into,
                begin,
                part,
                limiter=of_loop(_limit, lambda: CapacityLimiter(_READS)),
                abandon_on_cancel=True,
            )
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


async def until_gone(receive: Receive) -> None:
    """Wait until the client has closed the connection.

    The server drops bytes that are sent after that, without an error.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": raw, STREAMED: True})


def _matches(condition: str, etag: str, *, strongly: bool = False) -> bool:
    """Whether If-Match or If-None-Match names the tag; strongly: a weak tag is another one."""
    tags = (
        one.strip() if strongly else one.strip().removeprefix("W/") for one in condition.split(",")
    )
    return condition.strip() == "*" or f'"{etag}"' in tags


def _span(text: str, size: int) -> tuple[int, int] | None:
    """The half-open range that a header asks for; (0, 0): there is none of it.

    None: a form that is ignored, as several ranges are.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return None
    if match[3] is not None:
        n = min(int(match[3]), size)
        return (size - n, size) if n else (0, 0)
    first, last = int(match[1]), size - 1 if match[2] is None else min(int(match[2]), size - 1)
    if match[2] is not None and int(match[2]) < first:
        return None
    return (first, last + 1) if first <= last else (0, 0)
