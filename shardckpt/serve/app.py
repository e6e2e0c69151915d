"""The web application: routes, and what turns functions of a `Service` into responses."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from shardckpt.errors import OptionError, ShardckptError, UrlError
from shardckpt.io.store import kind_of
from shardckpt.io.url import parse
from shardckpt.serve import api, files, hub, problems, ui
from shardckpt.serve.access.forwarded import Proxies
from shardckpt.serve.access.guard import Guard, failed
from shardckpt.serve.access.identity import WHO, may_read, only_readable
from shardckpt.serve.health import damaged_checkpoints
from shardckpt.serve.jobs import endpoints as jobs
from shardckpt.serve.jobs.operations import OPERATIONS
from shardckpt.serve.jobs.rows import STATES
from shardckpt.serve.openapi import PATH, Endpoint, Parameter, document, posted
from shardckpt.serve.pool import on_thread
from shardckpt.serve.problems import DocumentResponse
from shardckpt.serve.sources import ByteSource, SourceResponse
from shardckpt.serve.versions import following

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shardckpt.serve.options import ServeOptions
    from shardckpt.serve.service import Service

_ANNOUNCED = (
    Parameter(
        name="url", about="Place of a checkpoint.", required=True, example="gs://bucket/run/100"
    ),
)
_THREADS, _DISTANT_THREADS = 8, 32
"""Requests that read at a time; others wait. Object stores answer late, so that more of them wait
for one."""


def application(service: Service, options: ServeOptions) -> Guard:
    """The ASGI application of a service."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        distant = any(not kind_of(place).near for place in service.roots.places.values())
        to_thread.current_default_thread_limiter().total_tokens = (
            _DISTANT_THREADS if distant else _THREADS
        )
        service.start()
        yield
        await to_thread.run_sync(service.close)

    routes = [
        Route("/healthz", _healthz),
        Route("/readyz", partial(_readyz, service)),
        Route("/metrics", partial(_metrics, service)),
        Route("/v1/openapi.json", partial(_openapi, service)),
        Route("/v1/announcements", partial(_announce, service), methods=["POST"]),
        Route("/v1/versions", partial(following.events, service)),
        Route("/v1/leases", partial(following.lease, service), methods=["POST"]),
        Route("/v1/jobs/{operation}", partial(jobs.start, service), methods=["POST"]),
        Route("/v1/jobs/{job}/cancel", partial(jobs.cancel, service), methods=["POST"]),
        Route("/v1/jobs/{job}/events", partial(jobs.events, service)),
        *(Route(one.path, _Endpoint(service, one)) for one in jobs.ENDPOINTS),
        *(Route(one.path, _Endpoint(service, one)) for one in api.ENDPOINTS if "{" not in one.path),
        Route(f"/v1/checkpoints/{PATH}", partial(_of_checkpoint, service)),
        *(
            Route(one.path.replace("{path}", PATH), _Endpoint(service, one))
            for one in files.ENDPOINTS
        ),
        *ui.routes(service),
        Route(f"/api/models/{PATH}", partial(_hub_api, service)),
        Route("/{ident:lines}/resolve/{rest:lines}", partial(_hub_file, service)),
    ]
    of_error = partial(problems.of_request, service.roots, service.scanner.watch)
    handlers: dict[Any, Any] = {
        ShardckptError: of_error,
        HTTPException: of_error,
        Exception: failed,
    }
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.router.default = problems.problem(404, "not-found", "there is no such path.")
    proxies = Proxies(
        options.trusted_proxy,
        unix_socket=options.unix_socket is not None,
        roots=service.roots.places,
    )
    guard = app.state.guard = Guard(app, service, options, proxies)
    return guard


class _Endpoint:
    """Answers requests by a declared function, on another thread."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service, self._endpoint = service, endpoint
        self.methods = {"GET", "HEAD"}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        if request.method not in self.methods:
            raise HTTPException(
                405, f"use {' or '.join(sorted(self.methods))}.", {"Allow": "GET, HEAD"}
            )
        path = tuple(request.path_params.values())
        response = await on_thread(
            _answer, self._service, self._endpoint, path, request, long=self._endpoint.long
        )
        await response(scope, receive, send)


def _answer(
    service: Service, endpoint: Endpoint, path: tuple[str, ...], request: Request
) -> Response | SourceResponse:
    content = endpoint.answer(service, *path, **endpoint.parse(request))
    if isinstance(content, bytes):
        return Response(content, media_type="application/json")
    return (
        SourceResponse(content, sends=request.method == "GET")
        if isinstance(content, ByteSource)
        else DocumentResponse(content)
    )


async def _of_checkpoint(service: Service, request: Request) -> Any:
    endpoint, path = await on_thread(api.endpoint_of, service, request.path_params["path"])
    return await on_thread(_answer, service, endpoint, path, request, long=endpoint.long)


async def _hub_api(service: Service, request: Request) -> Any:
    return DocumentResponse(await on_thread(hub.api, service, request.path_params["path"]))


async def _hub_file(service: Service, request: Request) -> Any:
    return SourceResponse(
        await on_thread(
            hub.resolve, service, request.path_params["ident"], request.path_params["rest"]
        )
    )


async def _healthz(_request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _readyz(service: Service, _request: Request) -> Response:
    ready, gone = service.scanner.complete.is_set(), service.scanner.watch.vanished
    known = sorted(only_readable(gone))
    notes = "".join(f"root {name} has vanished\n" for name in known)
    others = len(gone) - len(known)
    notes += f"{others} other root{'s have' if others > 1 else ' has'} vanished\n" if others else ""
    return PlainTextResponse(
        f"ready\n{notes}" if ready else "the roots are being scanned\n", 200 if ready else 503
    )


async def _metrics(service: Service, _request: Request) -> Response:
    def text() -> bytes:
        scanner = service.scanner
        numbers: dict[str, Any] = {
            "checkpoints": dict.fromkeys(("committed", "uncommitted", "unreadable", "deleted"), 0)
            | service.catalogue.totals(),
            "unreachable_roots": len(only_readable(scanner.problems)),
            "vanished_roots": len(only_readable(scanner.watch.vanished)),
            "passed_over_directories": len(only_readable(scanner.passed_over)),
        }
        if (upkeep := service.upkeep) is not None:
            numbers["jobs"] = dict.fromkeys(STATES, 0) | upkeep.journal.counts()
            numbers["damaged_checkpoints"] = len(damaged_checkpoints(service))
            if upkeep.scrubber is not None:
                numbers["scrub_due_bytes"] = upkeep.scrubber.status()["due_bytes"]
        service.metrics.bad_token_lines.set(
            0 if service.tokens is None else service.tokens.bad_lines
        )
        return service.metrics.text(numbers, traffic=WHO.get().roots is None)

    return Response(await on_thread(text), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _openapi(service: Service, _request: Request) -> Response:
    posts: dict[str, tuple[Any, Any]] = {
        "/v1/announcements": (_announce, _ANNOUNCED),
        "/v1/jobs/{job}/cancel": (jobs.cancel, None),
    }
    posts["/v1/leases"] = following.lease, following.LEASE
    posts |= {f"/v1/jobs/{one.name}": (one.run, one.parameters) for one in OPERATIONS.values()}
    endpoints = [*api.ENDPOINTS, *jobs.ENDPOINTS, *files.ENDPOINTS]
    described = {path: posted(path, *one) for path, one in posts.items()}
    return DocumentResponse(document(endpoints, described, tokens=service.tokens is not None))


async def _announce(service: Service, request: Request) -> Response:
    """Look at a place that a manager names, `{"url": …}`, now.

    Nothing is written; a place outside of the roots is ignored.
    """
    try:
        announcement = await request.json()
        place = parse(announcement["url"])
    except (ValueError, KeyError, TypeError, RecursionError, UrlError) as e:
        raise OptionError(
            'an announcement is a JSON document {"url": "gs://bucket/run/100"}.'
        ) from e
    ident = service.roots.ident(place)
    if ident is None or not may_read(ident):
        return DocumentResponse({"id": None}, 202)
    service.scanner.announce(ident)
    following.announce(service, ident)
    return DocumentResponse({"id": ident}, 202)
