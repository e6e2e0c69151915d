"""One request on its way through the proxy: its body in, an answer out.

A rule says at what speed and to what extent.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import TYPE_CHECKING

from aiohttp import web
from fault_requests import Exchange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import ClientResponse
    from fault_requests import Operation
    from fault_rules import Link, Rule

__all__ = ["HOP_BY_HOP", "PIECE", "Transfer"]

PIECE = 1 << 18
"""Bytes of a body that are handled at a time."""
HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "expect",
    "content-length",
}
"""Headers that are about one connection (RFC 9110, 7.6.1), and the length, which the one who sends
a body knows."""
_S3_CODES = {
    400: "RequestTimeout",
    403: "AccessDenied",
    408: "RequestTimeout",
    409: "OperationAborted",
    429: "SlowDown",
    500: "InternalError",
    503: "SlowDown",
}
"""Status → S3's name for the error: clients go by these names rather than by the status."""


class Transfer:
    """A client's request and its answer, and what is noted of them."""

    def __init__(self, request: web.BaseRequest, operation: Operation) -> None:
        self.request = request
        self.exchange = Exchange(operation)
        """Record of the request and its outcome."""
        self.body = bytearray()
        """Of the request, as far as it came."""
        self.links: tuple[Link, ...] = ()
        """Lines that both bodies go through."""
        self._received = False

    async def receive(self, limit: int | None = None) -> None:
        """Take in the request's body, or so many bytes of it; a second call does nothing."""
        if self._received:
            return
        self._received = True
        if (
            self.request.headers.get("Expect", "").lower() == "100-continue"
            and self.request.transport is not None
        ):
            self.request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while limit is None or len(self.body) < limit:
            piece = await self.request.content.read(
                PIECE if limit is None else min(PIECE, limit - len(self.body))
            )
            if not piece:
                break
            self.body += piece
            self.exchange.bytes_up += len(piece)
            await self._pass(len(piece))

    async def refuse(
        self, status: int, why: str, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """Answer with an error, as the service would put it."""
        body = b""
        if self.request.method != "HEAD" and status not in {304, 308}:
            if self.exchange.operation.service == "gcs":
                body = json.dumps({"error": {"code": status, "message": why}}).encode()
            else:
                body = (
                    f"<Error><Code>{_S3_CODES.get(status, 'Unknown')}</Code>"
                    f"<Message>{why}</Message></Error>"
                ).encode()
        response = web.StreamResponse(status=status)
        response.content_type = (
            "application/json" if self.exchange.operation.service == "gcs" else "application/xml"
        )
        response.content_length = len(body)
        response.headers.extend(headers or {})
        await self._begin(response)
        await self._write(response, body)
        return response

    async def send(self, answer: ClientResponse) -> web.StreamResponse:
        """Send the storage's answer on, as it comes."""
        response = _like(answer)
        if "Content-Length" in answer.headers:
            response.headers["Content-Length"] = answer.headers["Content-Length"]
        await self._begin(response)
        async for piece in answer.content.iter_chunked(PIECE):
            await self._write(response, piece)
        return response

    async def send_part(self, answer: ClientResponse, rule: Rule) -> web.StreamResponse:
        """Send a part of the storage's answer, and end the connection or say that it was all."""
        body = await answer.read()
        part = body[: len(body) // 2 if rule.after_bytes is None else rule.after_bytes]
        response = _like(answer)
        response.content_length = len(body if rule.fault == "truncate" else part)
        await self._begin(response)
        await self._write(response, part)
        if rule.fault == "truncate" and self.request.transport is not None:
            self.request.transport.close()
        return response

    def reset(self) -> None:
        """Drop the client's connection as a crashed peer does: RST, not FIN."""
        if self.request.transport is not None:
            connection = self.request.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.request.transport.abort()

    async def _begin(self, response: web.StreamResponse) -> None:
        self.exchange.status = response.status
        await response.prepare(self.request)

    async def _write(self, response: web.StreamResponse, piece: bytes) -> None:
        await self._pass(len(piece))
        self.exchange.bytes_down += len(piece)
        await response.write(piece)

    async def _pass(self, nbytes: int) -> None:
        """Wait until so many bytes are through the links."""
        for link in self.links:
            await asyncio.sleep(link.reserve(nbytes, asyncio.get_running_loop().time()))


def _like(answer: ClientResponse) -> web.StreamResponse:
    """A response with an answer's status and headers, its length excepted."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    response.headers.extend(
        (name, value) for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP
    )
    return response
