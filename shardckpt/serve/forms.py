"""The forms of the page: they sign people in and out, and start and cancel jobs.

A form that changes something must come from a page of this service: `guard` compares `Origin`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response

from shardckpt.errors import OptionError, ShardckptError
from shardckpt.reading.inspection.markup import PREFIX, Html, el
from shardckpt.serve import problems
from shardckpt.serve.access.guard import COOKIE, LOGIN, Guard, address_of
from shardckpt.serve.access.identity import note, only_readable
from shardckpt.serve.jobs.endpoints import job_number, key_of, operation_of, upkeep_of
from shardckpt.serve.pages.actions import CONFIRM, KEY, RECORD
from shardckpt.serve.pages.frame import POLICY, Viewer, error_page, link, login_page
from shardckpt.serve.pool import on_thread
from shardckpt.text import visible

if TYPE_CHECKING:
    from starlette.requests import Request

    from shardckpt.serve.openapi import Parameter
    from shardckpt.serve.service import Service

_MOST_FIELDS, _LONGEST_KEY = 300, 100


def html(text: str, status: int = 200, retry: str | None = None) -> HTMLResponse:
    """A page as a response; `retry`: seconds after which to ask again."""
    headers = {"Content-Security-Policy": POLICY} | (
        {} if retry is None else {"Retry-After": retry}
    )
    # Lone surrogates in names, which no encoding has, are shown escaped.
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), status, headers)


def viewer_of(service: Service, request: Request) -> Viewer:
    """Whom a page is for."""
    identity = getattr(request.state, "identity", None)
    gone = tuple(sorted(only_readable(service.scanner.watch.vanished).items()))
    signed_in = service.tokens is not None and identity is not None and not identity.by_proxy
    return Viewer(identity, signed_in=signed_in, jobs=service.upkeep is not None, vanished=gone)


def refused(
    service: Service,
    request: Request,
    error: ShardckptError | HTTPException,
    back: Html | None = None,
) -> HTMLResponse:
    """The page that says what went wrong."""
    problem = problems.of_request(service.roots, service.scanner.watch, request, error)
    page = error_page(
        problem.status_code, *problems.words(problem), viewer_of(service, request), back
    )
    return html(page, problem.status_code, problem.headers.get("Retry-After"))


class PageSession:
    """Sign in and out."""

    def __init__(self, service: Service) -> None:
        """Nobody is signed in yet."""
        self._service = service

    async def login(self, request: Request) -> Response:
        """The form, and what it sends."""
        tokens = self._service.tokens
        if tokens is None:
            return RedirectResponse("/ui/runs", 303)
        if request.method != "POST":
            return html(login_page(None))
        guard: Guard = request.app.state.guard
        given = (
            parse_qs((await request.body()).decode("utf-8", "replace"))
            .get("token", [""])[0]
            .strip()
        )
        who = tokens.identity(given)
        note(who=None if who is None else who.name)
        if who is None:
            if given and tokens.has_expired(given):
                return html(login_page("This token has expired."), 403)
            if given and (wait := guard.wrong_token(address_of(request))):
                return html(login_page(f"Too many wrong tokens; try again in {wait} s."), 429)
            return html(login_page("Nobody has this token."), 403)
        response = RedirectResponse("/ui/runs", 303)
        secure = request.scope["scheme"] == "https"
        path, secret = PREFIX.get() or "/", tokens.begin_session(given)
        response.set_cookie(
            COOKIE,
            secret,
            max_age=12 * 3600,
            path=path,
            httponly=True,
            samesite="strict",
            secure=secure,
        )
        return response

    async def logout(self, request: Request) -> Response:
        """Forget the session."""
        if self._service.tokens is not None:
            self._service.tokens.end_session(request.cookies.get(COOKIE, ""))
        response = RedirectResponse(LOGIN, 303)
        response.delete_cookie(COOKIE, path=PREFIX.get() or "/")
        return response


async def start(service: Service, request: Request) -> Response:
    """Start the job that a form asks for, and lead to its page."""
    body = await request.body()
    return await on_thread(_start, service, request, body)


async def cancel(service: Service, request: Request) -> Response:
    """Cancel a job, and lead to its page."""
    return await on_thread(_cancel, service, request)


def _start(service: Service, request: Request, body: bytes) -> Response:
    back = None
    try:
        upkeep, fields = upkeep_of(service), _fields(request, body)
        ident = fields.get("checkpoint", [""])[0]
        if ident:
            back = link("checkpoint", ident, f"Back to {ident}")
        operation = operation_of(request.path_params["operation"])
        # The key includes the form's contents: an edited form starts a new job.
        form_key, digest = key_of(fields.pop(KEY, [""])[0]), hashlib.sha256(body).hexdigest()
        key = f"{form_key[:_LONGEST_KEY]}.{digest[:16]}"
        record = None
        if operation.name == "delete":
            record = _check_delete(fields, ident)
        given = {
            parameter.name: parameter.parse(_values(parameter, fields.pop(parameter.name, [])))
            for parameter in operation.parameters
        }
        job, _ = upkeep.start_job(
            request.state.identity, operation, given | fields, key, record=record
        )
    except (ShardckptError, HTTPException) as e:
        return refused(service, request, e, back)
    return RedirectResponse(f"/ui/job/{job.number}", 303)


def _check_delete(fields: dict[str, list[str]], ident: str) -> str | None:
    """Take the fields that are not parameters out of the form of a deletion.

    Return the digest of the record that is to be deleted; None: the form names the attempt.

    Raises OptionError.
    """
    if fields.pop(CONFIRM, [""])[0].strip() != visible(ident).strip():
        raise OptionError(f"nothing was deleted: type {ident} to confirm that it is to be deleted.")
    record = fields.pop(RECORD, [None])[0]
    if record is None and "attempt" not in fields:
        raise OptionError(
            "nothing was deleted: the form does not say which checkpoint its page showed; load the "
            "page again."
        )
    return record


def _cancel(service: Service, request: Request) -> Response:
    back = None
    try:
        number = job_number(request.path_params["job"])
        back = el("a", f"Back to job {number}", href=f"/ui/job/{number}")
        upkeep_of(service).cancel(request.state.identity, number)
    except (ShardckptError, HTTPException) as e:
        return refused(service, request, e, back)
    return RedirectResponse(f"/ui/job/{number}", 303)


def _fields(request: Request, body: bytes) -> dict[str, list[str]]:
    """The fields of a form, without those that are empty."""
    problems.check_type(request, "a form", "application/x-www-form-urlencoded")
    try:
        return parse_qs(
            body.decode("ascii"), encoding="utf-8", errors="strict", max_num_fields=_MOST_FIELDS
        )
    except ValueError as e:
        raise OptionError(f"the body is not a form ({e}).") from e


def _values(parameter: Parameter, given: list[str]) -> list[str]:
    """The values of a parameter: of one that takes several, each line is one."""
    if parameter.kind != "texts":
        return given
    return [line.strip() for text in given for line in text.splitlines() if line.strip()]
