"""The endpoints that start, list, follow and cancel jobs, and the history of verifications."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from shardckpt.errors import NotFoundError, OptionError
from shardckpt.serve import health
from shardckpt.serve.catalogue.catalogue import MOST_ROWS
from shardckpt.serve.jobs.operations import OPERATIONS
from shardckpt.serve.jobs.rows import STATES
from shardckpt.serve.openapi import Endpoint, Parameter
from shardckpt.serve.pool import event_stream, on_thread
from shardckpt.serve.problems import RETRY, DocumentResponse, check_type
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.responses import Response

    from shardckpt.serve.jobs.operations import Operation
    from shardckpt.serve.jobs.rows import JobRow
    from shardckpt.serve.jobs.upkeep import Upkeep
    from shardckpt.serve.service import Service

_KEY = re.compile(r"[\x21-\x7e]{1,200}", re.ASCII)
_NUMBER = re.compile(r"[1-9]\d{0,15}", re.ASCII)
_EVENTS_POLL = 0.25
_MOST_STREAMS = 64


def jobs(
    service: Service,
    *,
    state: str | None,
    operation: str | None,
    subject: str | None,
    before: int | None,
    limit: int,
) -> dict[str, Any]:
    """List jobs, the latest first."""
    upkeep = upkeep_of(service)
    page = upkeep.journal.jobs(
        state=state, operation=operation, subject=subject, before=before, limit=limit
    )
    following = page[-1].number if len(page) == limit else None
    return {"jobs": [job_json(service, one) for one in page], "next": following}


def job(service: Service, number: str) -> dict[str, Any]:
    """Describe a job: its state, progress, result or error."""
    return job_json(service, upkeep_of(service).journal.job(job_number(number)))


def verifications(service: Service, *, checkpoint: str | None, limit: int) -> dict[str, Any]:
    """List verifications, the latest first: by scrubs and by jobs."""
    upkeep_of(service)
    return {
        "verifications": [
            one.to_json() for one in health.verifications(service, checkpoint, limit=limit)
        ]
    }


def scrub(service: Service) -> dict[str, Any]:
    """Describe the scrub: its period and rate, and how much is due."""
    scrubber = upkeep_of(service).scrubber
    if scrubber is None:
        raise NotFoundError("this service does not scrub; it is started with --scrub 30d for that.")
    return scrubber.status()


def job_json(service: Service, row: JobRow) -> dict[str, Any]:
    """A job as JSON, without the places of roots; `waits_for` says why it is not started yet."""
    doc = row.to_json() | {
        "waits_for": None,
        "found_damage": bool((row.result or {}).get("damaged")),
    }
    if row.state == "queued":
        doc["waits_for"] = upkeep_of(service).runner.waits_for.get(row.number)
    if row.result is not None and "url" in row.result:
        doc["result"] = {**row.result, "url": service.roots.without_places(row.result["url"])}
    if row.result is not None and "damage" in row.result:
        doc["result"] = {
            **row.result,
            "damage": health.damage_without_places(service, row.result["damage"]),
        }
    if row.error is not None:
        doc["error"] = {**row.error, "message": service.roots.without_places(row.error["message"])}
    return doc


def upkeep_of(service: Service) -> Upkeep:
    """The upkeep of this service.

    Raises:
        HTTPException: this service only reads.
    """
    if service.upkeep is None:
        raise HTTPException(
            403,
            "this service only reads; for jobs it is started with --state DIR and --token-file "
            "FILE.",
        )
    return service.upkeep


def job_number(text: str) -> int:
    """The number of a job in a path.

    Raises:
        NotFoundError: it is none.
    """
    if not _NUMBER.fullmatch(text):
        raise NotFoundError(f"there is no job {shorten(text)}.")
    return int(text)


def operation_of(name: str) -> Operation:
    """An operation by its name.

    Raises:
        NotFoundError: there is none.
    """
    operation = OPERATIONS.get(name)
    if operation is None:
        raise NotFoundError(
            f"there is no operation {shorten(name)}; there are {', '.join(OPERATIONS)}."
        )
    return operation


def key_of(text: str) -> str:
    """An idempotency key.

    Raises:
        OptionError: it is none.
    """
    if not _KEY.fullmatch(text):
        raise OptionError("an idempotency key has 1 to 200 visible ASCII characters.")
    return text


async def start(service: Service, request: Request) -> Response:
    """Answer a POST that starts a job."""
    operation = operation_of(request.path_params["operation"])
    upkeep, who = upkeep_of(service), request.state.identity
    check_type(request, "a JSON object", "application/json")
    key = (
        None
        if "idempotency-key" not in request.headers
        else key_of(request.headers["idempotency-key"])
    )
    try:
        given = json.loads(await request.body())
    except (ValueError, RecursionError) as e:
        raise OptionError(f"the body is not valid JSON ({e}).") from e
    if not isinstance(given, dict):
        raise OptionError("the body is not a JSON object.")
    row, new = await on_thread(upkeep.start_job, who, operation, given, key)
    return DocumentResponse(
        job_json(service, row), 202 if new else 200, {"Location": f"/v1/jobs/{row.number}"}
    )


async def cancel(service: Service, request: Request) -> Response:
    """Answer a POST that cancels a job."""
    upkeep, number = upkeep_of(service), job_number(request.path_params["job"])
    row = await on_thread(upkeep.cancel, request.state.identity, number)
    return DocumentResponse(job_json(service, row), 202)


async def events(service: Service, request: Request) -> Response:
    """Follow a job: an event `job` with its JSON whenever it has changed, until it has ended."""
    upkeep, number = upkeep_of(service), job_number(request.path_params["job"])
    first = await on_thread(upkeep.journal.job, number)
    busy = HTTPException(
        503,
        "too many clients follow jobs; ask for the job itself from time to time.",
        RETRY,
    )
    return event_stream(
        _follow(service, upkeep, first), service.streams, _MOST_STREAMS, busy, service.closing
    )


async def _follow(service: Service, upkeep: Upkeep, row: JobRow) -> AsyncGenerator[bytes | None]:
    sent = ""
    while True:
        text = json.dumps(job_json(service, row))
        yield f"event: job\ndata: {text}\n\n".encode() if text != sent else None
        if row.is_over:
            return
        sent = text
        await asyncio.sleep(_EVENTS_POLL)
        row = await on_thread(upkeep.journal.job, row.number)


_LIMIT = Parameter(
    name="limit", kind="integer", about="Most rows.", least=1, most=MOST_ROWS, default=100
)
ENDPOINTS = (
    Endpoint(
        "/v1/jobs",
        jobs,
        (
            Parameter(name="state", about="State.", choices=STATES),
            Parameter(name="operation", about="Operation.", choices=tuple(OPERATIONS)),
            Parameter(
                name="subject",
                about="Id of a checkpoint, run or place that jobs are about, or write to.",
            ),
            Parameter(name="before", kind="integer", about="The `next` of the last page.", least=1),
            _LIMIT,
        ),
    ),
    Endpoint("/v1/jobs/{job}", job, ()),
    Endpoint(
        "/v1/verifications",
        verifications,
        (Parameter(name="checkpoint", about="Id of a checkpoint."), _LIMIT),
    ),
    Endpoint("/v1/scrub", scrub, ()),
)
