"""The endpoints of followers of versions: events about new versions, and leases.

An event comes as soon as a version is announced. Leases are for readers that cannot write.

A `Publisher` and a `CheckpointManager` announce what they commit (`runs.announcing`). A follower
then looks at the storage itself.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from shardckpt.errors import NotFoundError, OptionError, ShardckptError, UrlError
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.runs.leases import held_leases, write_lease
from shardckpt.serve.access.identity import may_read
from shardckpt.serve.openapi import Parameter
from shardckpt.serve.pool import event_stream, on_thread
from shardckpt.serve.problems import DocumentResponse
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.responses import Response

    from shardckpt.runs.leases import HeldLease
    from shardckpt.serve.service import Service

LEASE = (
    Parameter(
        name="url", about="Place of the versions.", required=True, example="gs://bucket/policy"
    ),
    Parameter(
        name="id",
        about="Id of the lease: 16 hexadecimal digits that the reader has drawn.",
        required=True,
    ),
    Parameter(
        name="lease",
        about="The lease as JSON, with steps, holder and version; null removes it.",
        required=True,
    ),
)
_POLL = 0.25
_MOST_STREAMS = 1024
"""Most followers that listen; others look at the storage from time to time."""


def run_at(service: Service, url: Any) -> str:
    """The id of the run at a place that a follower names.

    Raises:
        OptionError: it is not a place.
        NotFoundError: it is outside of the roots that the user may read.
    """
    try:
        ident = service.roots.ident(parse(url))
    except (UrlError, TypeError) as e:
        raise OptionError(f"url={shorten(url)} is not the place of a run.") from e
    if ident is None or not may_read(ident):
        raise NotFoundError("there is no run of that url here.")
    return ident


def announce(service: Service, ident: str) -> None:
    """Tell those who listen to the run of a checkpoint."""
    for news in service.listening.get(ident.rpartition("/")[0], ()):
        news.set()


async def events(service: Service, request: Request) -> Response:
    """Follow a run: an event `version` whenever a checkpoint of it is announced."""
    run = run_at(service, request.query_params.get("url"))
    busy = HTTPException(
        503,
        "too many clients follow runs; look at the storage from time to time.",
        {"Retry-After": "60"},
    )
    return event_stream(
        _follow(service, run), service.listeners, _MOST_STREAMS, busy, service.closing
    )


async def _follow(service: Service, run: str) -> AsyncGenerator[bytes | None]:
    news = asyncio.Event()
    service.listening.setdefault(run, []).append(news)
    try:
        yield b": listening\n\n"
        while True:
            try:
                await asyncio.wait_for(news.wait(), _POLL)
            except TimeoutError:
                yield None
                continue
            news.clear()
            yield f"event: version\ndata: {json.dumps({'run': run})}\n\n".encode()
    finally:
        service.listening[run].remove(news)
        if not service.listening[run]:
            del service.listening[run]


async def lease(service: Service, request: Request) -> Response:
    """Write the lease of a reader, `{"url": …, "id": …, "lease": …}`, or remove it."""
    if service.upkeep is None:
        raise HTTPException(
            403,
            "this service only reads; for leases it is started with --state DIR and --token-file "
            "FILE.",
        )
    try:
        message = await request.json()
        url, ident, document = message["url"], str(message["id"]), message["lease"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise OptionError(
            'a lease is a JSON document {"url": "gs://bucket/policy", "id": "…", "lease": '
            '{"steps": [7], …}}.'
        ) from e
    run = run_at(service, url)
    await on_thread(service.scanner.watch.check, run)
    await on_thread(write_lease, Store.open(service.roots.locate(run)), ident, document)
    return DocumentResponse({"id": ident}, 202)


def readers(service: Service, run: str) -> list[HeldLease]:
    """The readers of a run that hold leases, or none where these cannot be read."""
    try:
        return held_leases(Store.open(service.roots.locate(run)))
    except ShardckptError:
        return []
