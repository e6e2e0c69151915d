"""Checks of every request: its origin and its user. Each gets an id, and is counted and logged.

1. `Host` must be this service's, so that no page of another site reaches a service on loopback under a name of its own (DNS rebinding).
   Requests whose headers name another origin are refused.
2. With tokens, a request has a bearer token or the cookie of a session; without, whoever reaches loopback may read.
   The path is the one that the router matches (`scope["path"]`). `Request.url` is made from the Host header as well.
3. Bodies are small and arrive in time. Every response forbids scripts, frames and sniffing, unless the page says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from itertools import count
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse

from shardckpt.serve.problems import problem
from shardckpt.serve.tokens import ANYBODY, Guesses

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from shardckpt.serve.metrics import ServeMetrics
    from shardckpt.serve.tokens import Identity, Tokens

log = logging.getLogger("shardckpt.serve.requests")
COOKIE = "shardckpt-session"
LOGIN = "/ui/login"
_FREE = ("/healthz", "/readyz")
"""Paths for probes, which send neither the right Host nor a token."""
_OPEN = (LOGIN, "/static/")
"""Beginnings of paths that need no token."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PROCESS, _numbers = secrets.token_hex(4), count()
"""Request ids are made of these, without a system call, after which other threads would have the interpreter first."""
_LARGEST_BODY, _BODY_SECONDS = 64 << 10, 10.0
_CLOSE = {"Connection": "close"}
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_BEARER = re.compile(r"Bearer +([\x21-\x7e]{1,512}) *", re.IGNORECASE | re.ASCII)
_ALWAYS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_DEFAULTS = [
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"private, no-store"),
]


class Guard:
    """ASGI middleware around the whole service."""

    def __init__(self, app: ASGIApp, *, tokens: Tokens | None, hosts: tuple[str, ...], metrics: ServeMetrics) -> None:
        """Guard an application.

        Args:
            app: the application.
            tokens: who may do what; None: whoever reaches it may read.
            hosts: host names of the service besides those of loopback; with tokens, and none given, any.
            metrics: counts requests.
        """
        self._app, self._tokens, self._metrics = app, tokens, metrics
        self._hosts = None if tokens is not None and not hosts else {*_LOOPBACK, *(host.lower() for host in hosts)}
        self._guesses = Guesses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        answer = _Answer(send, given if _ID.fullmatch(given) else f"{_PROCESS}{next(_numbers):08x}")
        begun, who = time.perf_counter(), None
        scope.setdefault("state", {})["id"] = answer.ident
        self._metrics.in_flight.inc()
        try:
            refused, who = self._admit(request)
            scope["state"]["identity"] = who
            await (self._app if refused is None else refused)(scope, _Limited(request, receive), answer)
        except Exception:  # a bug, the token file, or a storage that fails while a body is sent
            log.exception("%s %s failed (%s)", request.method, _path(request), answer.ident)
            if not answer.status:
                await failed(request)(scope, receive, answer)
            elif not answer.complete:
                raise  # the connection is closed, as the end of what was sent would look complete
        finally:
            self._metrics.in_flight.dec()
            self._note(request, answer, who, time.perf_counter() - begun)

    def _admit(self, request: Request) -> tuple[Response | None, Identity | None]:
        """The refusal of a request, if it is refused, and the user who makes it."""
        if request.scope["path"] in _FREE:
            return None, None
        host = request.headers.get("host", "").lower()
        name = re.sub(r":\d{1,5}$", "", host)
        if len(request.headers.getlist("host")) != 1 or (self._hosts is not None and name not in self._hosts):
            return problem(
                421, "host", "the Host header is not a name of this service; if it should be, start it with --allow-host NAME."
            ), None
        origin = request.headers.get("origin")
        site, mode = request.headers.get("sec-fetch-site", "none"), request.headers.get("sec-fetch-mode")
        foreign = origin is not None and origin.lower().partition("://")[2] != host
        if foreign or (site in ("cross-site", "same-site") and mode != "navigate"):
            return problem(403, "origin", "requests from pages of other origins are refused."), None
        if self._tokens is None:
            return None, ANYBODY
        return self._authenticate(request, self._tokens)

    def _authenticate(self, request: Request, tokens: Tokens) -> tuple[Response | None, Identity | None]:
        address = "" if request.client is None else request.client.host
        given = _BEARER.fullmatch(request.headers.get("authorization", ""))
        if given is not None:
            wait = self.wait(address)
            if wait:
                return problem(429, "guesses", "too many wrong tokens came from there.", {"Retry-After": str(wait)}), None
            who = tokens.identity(given[1])
            if who is None:
                self.wrong_token(address)
        else:
            cookie = request.cookies.get(COOKIE)
            who = None if cookie is None else tokens.in_session(cookie)
            if who is not None and request.method not in ("GET", "HEAD") and "origin" not in request.headers:
                return problem(403, "origin", "a change in a session comes from a page of this service."), None
        if who is not None or request.scope["path"].startswith(_OPEN):
            return None, who
        if "text/html" in request.headers.get("accept", "") and request.method == "GET":
            return RedirectResponse(LOGIN, 303), None
        detail = "this needs a valid bearer token; clients of shardckpt read it from SHARDCKPT_HTTP_HEADERS."
        return problem(401, "token", detail, {"WWW-Authenticate": 'Bearer realm="shardckpt"'}), None

    def wait(self, address: str) -> int:
        """Seconds for which no token from an address is looked at."""
        return self._guesses.wait(address)

    def wrong_token(self, address: str) -> None:
        """Count a wrong token."""
        self._guesses.add(address)
        self._metrics.wrong_tokens.inc()

    def _note(self, request: Request, answer: _Answer, who: Identity | None, seconds: float) -> None:
        self._metrics.note(request.method, request.scope["path"], answer.status, answer.sent, seconds)
        fields = {
            "id": answer.ident,
            "method": request.method,
            "path": _path(request),
            "status": answer.status,
            "bytes": answer.sent,
            "seconds": round(seconds, 6),
            "client": "" if request.client is None else request.client.host,
            "token": None if who is None else who.name,
        }
        log.info("request", extra={"fields": fields})


class _Answer:
    """Sends a response, with the headers of every response, and counts it."""

    def __init__(self, send: Send, ident: str) -> None:
        self._send, self.ident = send, ident
        self.status = self.sent = 0
        self.complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), *_ALWAYS, (b"x-request-id", self.ident.encode())]
            there = {name for name, _ in headers}
            message = {**message, "headers": headers + [one for one in _DEFAULTS if one[0] not in there]}
        elif message["type"] == "http.response.body":
            self.sent += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        await self._send(message)


def failed(request: Request, _error: Exception | None = None) -> Response:
    """The response to a request that failed after a failure inside the service."""
    return problem(500, "internal", f"the log has more under the id {request.state.id}.")


class _Limited:
    """Receives the body of a request within the limits."""

    def __init__(self, request: Request, receive: Receive) -> None:
        self._receive, self._left = receive, _LARGEST_BODY
        self._deadline = asyncio.get_running_loop().time() + _BODY_SECONDS
        self._complete = request.method in ("GET", "HEAD")

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time.", _CLOSE) from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise HTTPException(413, f"bodies have at most {_LARGEST_BODY} bytes.", _CLOSE)
        self._complete = not message.get("more_body", False)
        return message


def _path(request: Request) -> str:
    """The path, without the query, which may contain secrets that were sent by mistake."""
    return str(request.scope["path"])[:1000]
