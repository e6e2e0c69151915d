"""Checks of every request: its origin and its user. Each gets an id, and is counted and logged.

1. `Host` must be this service's, so that no page of another site reaches a service on loopback
   under a name of its own (DNS rebinding). Requests whose headers name another origin are refused.
2. With tokens, a request has a bearer token or the cookie of a session; without, whoever reaches
   loopback may read. The path is the one that the router matches (`scope["path"]`). `Request.url`
   is made from the Host header as well.
3. Bodies are small and arrive in time. Every response forbids scripts, frames and sniffing, unless
   the page says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from itertools import count
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse

from shardckpt.reading.inspection.markup import PREFIX
from shardckpt.serve.access.identity import ANYBODY, NOBODY, begin_request
from shardckpt.serve.access.tokens import Guesses
from shardckpt.serve.problems import RETRY, problem
from shardckpt.serve.sources import (
    ABORT,
    ANSWERS,
    NO_MEMORY,
    PIECE,
    STREAMED,
    send_seconds,
    until_gone,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from shardckpt.serve.access.forwarded import Proxies
    from shardckpt.serve.access.identity import Identity
    from shardckpt.serve.access.tokens import Tokens
    from shardckpt.serve.options import ServeOptions
    from shardckpt.serve.service import Service

log = logging.getLogger("shardckpt.serve.requests")
COOKIE = "shardckpt-session"
LOGIN = "/ui/login"
_FREE = ("/healthz", "/readyz")
"""Paths for probes, which send neither the right Host nor a token."""
_OPEN = (LOGIN, "/static/")
"""Beginnings of paths that need no token."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PROCESS, _numbers = secrets.token_hex(4), count()
"""Request ids are made of these, without a system call, after which other threads would have the
interpreter first."""
_LARGEST_BODY, _BODY_SECONDS = 64 << 10, 10.0
_RECHECK_SECONDS = 2.0
"""Seconds after which a response that is still sent looks again whether its user may have it."""
_LARGE = 64 << 10
"""Bytes from which on a body takes memory of those that all answers share."""
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="shardckpt"'}
_REFUSALS = (401, 403, 421, 429)
_SESSIONS = (LOGIN, "/ui/logout")
"""Paths whose requests write nothing."""
_NAME = re.compile(r"(?:[!-~]|\w){1,200}")
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


def _utf8(value: str) -> str:
    """A header's value as its sender meant it: UTF-8, or else Latin-1, as HTTP has it."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


class Guard:
    """ASGI middleware around the whole service."""

    def __init__(
        self, app: ASGIApp, service: Service, options: ServeOptions, proxies: Proxies
    ) -> None:
        """Guard an application of a service.

        Args:
            app: the application.
            service: its tokens say who may do what; without them, whoever reaches it may read.
            options: `allow_host` names it besides the names of loopback; with tokens, and none
                given, any name does.
            proxies: the proxies whose headers are believed.
        """
        tokens, hosts = service.tokens, options.allow_host
        self._app, self._tokens, self._metrics, self._proxies = (
            app,
            tokens,
            service.metrics,
            proxies,
        )
        self._audit = service.audit
        self._user, self._groups = options.user_header, options.groups_header
        self._hosts = (
            None
            if tokens is not None and not hosts
            else {*_LOOPBACK, *(host.lower() for host in hosts)}
        )
        self._guesses = Guesses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        prefix = self._proxies.apply(scope)
        PREFIX.set(prefix or "")
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        answer = _Answer(send, given if _ID.fullmatch(given) else f"{_PROCESS}{next(_numbers):08x}")
        begun, who, notes = time.perf_counter(), None, dict[str, Any]()
        scope.setdefault("state", {})["id"] = answer.ident
        self._metrics.in_flight.inc()
        try:
            refused, who = self._admit(request, forwarded=prefix is not None)
            scope["state"]["identity"] = who
            answer.holds = lambda: self._admit(request, forwarded=prefix is not None)[1] == who
            notes = begin_request(who or NOBODY)
            writes = (
                request.method not in ("GET", "HEAD") and request.scope["path"] not in _SESSIONS
            )
            if refused is None and writes:
                refused = self._announce(request, answer, who)
            await (self._app if refused is None else refused)(
                scope, _Limited(request, receive), answer
            )
        except Exception:  # a bug, the token file, or a storage that fails while a body is sent
            if answer.revoked:
                log.info(
                    "%s %s ended: the rights of its user have changed (%s)",
                    request.method,
                    _path(request),
                    answer.ident,
                )
                scope["extensions"][ABORT]()  # the end of what was sent would look complete
                await until_gone(receive)
                return
            log.exception("%s %s failed (%s)", request.method, _path(request), answer.ident)
            if not answer.status:
                await failed(request)(scope, receive, answer)
            elif not answer.complete:
                raise  # the connection is closed, as the end of what was sent would look complete
        finally:
            answer.end()
            self._metrics.in_flight.dec()
            self._note(request, answer, who, time.perf_counter() - begun)
            if (
                request.method not in ("GET", "HEAD")
                or answer.status in _REFUSALS
                or "refused" in notes
            ):
                self._audit.note(
                    **{**self._fields(request, answer, who), "result": answer.status, **notes}
                )

    def _announce(self, request: Request, answer: _Answer, who: Identity | None) -> Response | None:
        """Tell the audit log of a write before it is begun; return the refusal if that fails."""
        try:
            self._audit.require(**self._fields(request, answer, who), result="asked")
        except HTTPException as e:
            return problem(e.status_code, "audit", e.detail, dict(e.headers or {}))
        return None

    @staticmethod
    def _fields(request: Request, answer: _Answer, who: Identity | None) -> dict[str, Any]:
        return {
            "id": answer.ident,
            "who": None if who is None else who.name,
            "client": address_of(request),
            "what": f"{request.method} {_path(request)}",
        }

    def _admit(
        self, request: Request, *, forwarded: bool
    ) -> tuple[Response | None, Identity | None]:
        """The refusal of a request, if it is refused, and the user who makes it."""
        if request.scope["path"] in _FREE:
            given = _BEARER.fullmatch(request.headers.get("authorization", ""))
            return None, ANYBODY if self._tokens is None else self._tokens.identity(
                given[1]
            ) if given else None
        host = request.headers.get("host", "").lower()
        name = re.sub(r":\d{1,5}$", "", host)
        if len(request.headers.getlist("host")) != 1 or (
            self._hosts is not None and name not in self._hosts
        ):
            return problem(
                421,
                "host",
                "the Host header is not a name of this service; --allow-host NAME makes it one.",
            ), None
        origin = request.headers.get("origin")
        site, mode = (
            request.headers.get("sec-fetch-site", "none"),
            request.headers.get("sec-fetch-mode"),
        )
        scheme, _, place = (origin or "").lower().partition("://")
        foreign = origin is not None and (
            place != host or (forwarded and scheme != request.scope["scheme"])
        )
        if foreign or (site in ("cross-site", "same-site") and mode != "navigate"):
            return problem(403, "origin", "requests from pages of other origins are refused."), None
        if self._tokens is None:
            return None, ANYBODY
        member, refused = self._member(request, self._tokens) if forwarded else (None, None)
        return (
            (refused, None)
            if refused is not None
            else self._authenticate(request, self._tokens, member)
        )

    def _member(self, request: Request, tokens: Tokens) -> tuple[Identity | None, Response | None]:
        """User whom a trusted proxy has signed in, or the refusal of its headers."""
        users, groups = (
            request.headers.getlist(name) if name else [] for name in (self._user, self._groups)
        )
        if len(users) > 1 or len(groups) > 1:
            return None, problem(
                400, "header", "the proxy sends the name of the user, or of the groups, twice."
            )
        name = _utf8(users[0].strip(" \t")) if users else ""
        if not name:
            return None, None
        if not _NAME.fullmatch(name):
            return None, problem(
                400,
                "header",
                "the name of the user has at most 200 visible characters, without blanks.",
            )
        return tokens.member(
            name,
            [_utf8(group) for one in ",".join(groups).split(",") if (group := one.strip(" \t"))],
        ), None

    def _authenticate(
        self, request: Request, tokens: Tokens, member: Identity | None
    ) -> tuple[Response | None, Identity | None]:
        given = _BEARER.fullmatch(request.headers.get("authorization", ""))
        who = None if given is None else tokens.identity(given[1])
        if given is not None and who is None and member is None:
            if tokens.has_expired(given[1]):
                return problem(401, "token", "this token has expired.", _CHALLENGE), None
            if wait := self.wrong_token(address_of(request)):
                return problem(
                    429,
                    "guesses",
                    "too many wrong tokens came from there.",
                    {"Retry-After": str(wait)},
                ), None
        elif who is None:
            cookie = request.cookies.get(COOKIE)
            who = member or (None if cookie is None else tokens.in_session(cookie))
            if (
                who is not None
                and request.method not in ("GET", "HEAD")
                and "origin" not in request.headers
            ):
                return problem(
                    403, "origin", "a change in a session comes from a page of this service."
                ), None
        if who is not None or request.scope["path"].startswith(_OPEN):
            return None, who
        if "text/html" in request.headers.get("accept", "") and request.method == "GET":
            return RedirectResponse(LOGIN, 303), None
        detail = (
            "this needs a valid bearer token; clients of shardckpt read it from "
            "SHARDCKPT_HTTP_HEADERS."
        )
        return problem(401, "token", detail, _CHALLENGE), None

    def wrong_token(self, address: str) -> int:
        """Count a wrong token.

        Return the seconds for which others from its address are told to wait.
        """
        wait = self._guesses.wait(address)
        if not wait:
            self._guesses.add(address)
            self._metrics.wrong_tokens.inc()
        return wait

    def _note(
        self, request: Request, answer: _Answer, who: Identity | None, seconds: float
    ) -> None:
        self._metrics.note(
            request.method, request.scope["path"], answer.status, answer.sent, seconds
        )
        fields = {
            "id": answer.ident,
            "method": request.method,
            "path": _path(request),
            "status": answer.status,
            "bytes": answer.sent,
            "seconds": round(seconds, 6),
            "client": address_of(request),
            "token": None if who is None else who.name,
        }
        log.info("request", extra={"fields": fields})


class _Answer:
    """Sends a response, with the headers of every response, and counts it."""

    def __init__(self, send: Send, ident: str) -> None:
        self._send, self.ident = send, ident
        self.status = self.sent = 0
        self.complete = self._refused = self.revoked = False
        self.holds: Callable[[], bool] = lambda: True
        """Whether the user of the request has the rights that it began with."""
        self._checked = time.monotonic()
        self._held = 0
        """Bytes of memory for the body."""

    async def __call__(self, message: Message) -> None:
        if self._refused:
            return
        if message["type"] == "http.response.start":
            length = next(
                (
                    int(value)
                    for name, value in message.get("headers", ())
                    if name == b"content-length"
                ),
                0,
            )
            if not message.pop(STREAMED, False) and length > _LARGE and not self._take(length):
                await self._refuse()
                return
            self.status = message["status"]
            given = [
                (name, _below_prefix(name, value)) for name, value in message.get("headers", ())
            ]
            headers = [*given, *_ALWAYS, (b"x-request-id", self.ident.encode())]
            there = {name for name, _ in headers}
            message = {
                **message,
                "headers": headers + [one for one in _DEFAULTS if one[0] not in there],
            }
        elif message["type"] == "http.response.body":
            self._check()
            if self._held:
                await self._send_in_pieces(message)
                return
            self.sent += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        await self._send(message)

    def end(self) -> None:
        """Give the memory back."""
        ANSWERS.give_back(self._held)
        self._held = 0

    def _check(self) -> None:
        """Raise OSError, as for a client that has gone, if the token's rights have changed.

        The token may have been revoked, have expired or have other rights now.
        """
        if self.status and time.monotonic() > self._checked + _RECHECK_SECONDS:
            self._checked = time.monotonic()
            self.revoked = not self.holds()
            if self.revoked:
                raise PermissionError("the rights of the user have changed")

    def _take(self, nbytes: int) -> bool:
        granted = ANSWERS.take(nbytes)
        self._held = nbytes if granted else 0
        return granted

    async def _refuse(self) -> None:
        refused = problem(503, "http-503", NO_MEMORY, RETRY)
        for message in (
            {
                "type": "http.response.start",
                "status": 503,
                "headers": refused.raw_headers,
                STREAMED: True,
            },
            {"type": "http.response.body", "body": refused.body},
        ):
            await self(message)
        self._refused = True

    async def _send_in_pieces(self, message: Message) -> None:
        """Send a large body; each piece waits until the client has read those before it."""
        body, more = memoryview(message.get("body", b"")), message.get("more_body", False)
        async with asyncio.timeout(send_seconds(len(body))):
            for at in range(0, len(body) or 1, PIECE):
                self._check()
                part = body[at : at + PIECE]
                goes_on = more or at + PIECE < len(body)
                await self._send({"type": "http.response.body", "body": part, "more_body": goes_on})
                self.sent += len(part)
        self.complete = not more


def _below_prefix(name: bytes, value: bytes) -> bytes:
    return (
        PREFIX.get().encode() + value
        if name.lower() == b"location" and value.startswith(b"/")
        else value
    )


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


def address_of(request: Request) -> str:
    """The client's address; "": not known."""
    return "" if request.client is None else request.client.host


def _path(request: Request) -> str:
    """The path, without the query, which may contain secrets that were sent by mistake."""
    return str(request.scope["path"])[:1000]
