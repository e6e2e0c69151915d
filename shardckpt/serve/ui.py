"""The page: what browsers ask for, rendered here, and the sessions of people who have a token."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from anyio import to_thread
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from shardckpt.errors import NamesMismatchError, NotFoundError, OptionError, ShardckptError
from shardckpt.reading.documents import find_node
from shardckpt.reshard.forecast.document import document as forecast_document
from shardckpt.serve import api, problems
from shardckpt.serve.catalogue import MOST_ROWS, CheckpointQuery
from shardckpt.serve.guard import COOKIE, LOGIN, Guard
from shardckpt.serve.openapi import Parameter
from shardckpt.serve.pages.checkpoint import checkpoint_page, diff_page, plan_form, tensor_page
from shardckpt.serve.pages.frame import POLICY, STATIC, crumbs, error_page, frame, login_page
from shardckpt.serve.pages.markup import el
from shardckpt.serve.pages.plan import plan_parts, section
from shardckpt.serve.pages.runs import run_page, runs_page, storage_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from shardckpt.serve.service import Service

_PAGE_STEPS = 500
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


def routes(service: Service) -> list[Route]:
    """The routes of the page."""
    pages: dict[str, Callable[[Service, Request, str | None], str]] = {
        "/": _runs,
        "/ui/runs": _runs,
        "/ui/storage": _storage,
        "/ui/diff": _diff,
        "/ui/run/{path:path}": _run,
        "/ui/checkpoint/{path:path}": _checkpoint,
        "/ui/tensor/{path:path}": _tensor,
        "/ui/plan/{path:path}": _plan,
    }
    return [
        Route("/static/{name}", _static),
        Route(LOGIN, _Session(service).login, methods=["GET", "POST"]),
        Route("/ui/logout", _Session(service).logout, methods=["POST"]),
        *(Route(path, _rendered(service, page)) for path, page in pages.items()),
    ]


def _rendered(service: Service, page: Callable[[Service, Request, str | None], str]) -> Any:
    async def answer(request: Request) -> Response:
        identity = getattr(request.state, "identity", None)
        who = None if service.tokens is None or identity is None else identity.name
        try:
            text = await to_thread.run_sync(page, service, request, who)
        except (ShardckptError, HTTPException) as e:
            said = problems.of_error(e, service.roots)
            return _html(error_page(said.status_code, *problems.words(said)), said.status_code)
        return _html(text)

    return answer


def _html(text: str, status: int = 200) -> HTMLResponse:
    # Lone surrogates in names, which no encoding has, are shown escaped.
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), status, {"Content-Security-Policy": POLICY})


def _text(request: Request, name: str) -> str | None:
    return Parameter(name=name, about="").parse(request.query_params.getlist(name)) or None


def _runs(service: Service, request: Request, who: str | None) -> str:
    text = _text(request, "text")
    return runs_page(api.runs(service, text=text, limit=200, cursor=_text(request, "cursor")), text, who)


def _run(service: Service, request: Request, who: str | None) -> str:
    run = request.path_params["path"]
    query = CheckpointQuery(run=run, descending=True, limit=_PAGE_STEPS, cursor=_text(request, "cursor"))
    entries, following = service.catalogue.checkpoints(query)
    if not entries:
        raise NotFoundError(f"{run}: there is no such run.")
    for entry in entries:
        entry["reason"] = entry["reason"] and service.roots.without_places(entry["reason"])
    return run_page(run, entries[::-1], following, who)


def _storage(service: Service, _request: Request, who: str | None) -> str:
    return storage_page(service.catalogue.runs(limit=MOST_ROWS)[0], who)


def _checkpoint(service: Service, request: Request, who: str | None) -> str:
    ident = service.exactly(request.path_params["path"])
    opened = service.opened.get(ident)
    top = find_node(opened.checkpoint, _text(request, "under"))
    entry = next(iter(service.catalogue.find([ident])), None)
    return checkpoint_page(ident, opened.checkpoint, top, entry, _text(request, "text"), who)


def _tensor(service: Service, request: Request, who: str | None) -> str:
    ident = service.exactly(request.path_params["path"])
    name = _text(request, "name")
    if name is None:
        raise NamesMismatchError(f"{ident}: name= is missing.")
    ckpt = service.opened.get(ident).checkpoint
    found = api.statistics(service, ident, name, budget=16 << 20) if _text(request, "values") else None
    return tensor_page(ident, ckpt, name, api.layout(service, ident, name)["devices"], found, who)


def _diff(service: Service, request: Request, who: str | None) -> str:
    a, b, structure = _text(request, "a"), _text(request, "b"), _text(request, "structure") == "true"
    doc = api.diff(service, a=a, b=b, values=not structure, layouts=False) if a and b else None
    return diff_page(a, b, doc, structure=structure, who=who)


def _plan(service: Service, request: Request, who: str | None) -> str:
    ident = service.exactly(request.path_params["path"])
    asked: dict[str, Any] = {one.name: one.default for one in api.PLAN}
    for name in ("mesh", "preset"):
        asked[name] = _text(request, name)
    asked["rule"] = (_text(request, "rule") or "").split() or None
    per_host = _text(request, "devices_per_host")
    if per_host is not None:
        asked["devices_per_host"] = next(one for one in api.PLAN if one.name == "devices_per_host").parse([per_host])
    form = section("Reshard", plan_form(ident, asked))
    try:
        found = api.forecast_of(service.opened.get(ident).checkpoint, **asked)
    except (OptionError, ShardckptError) as e:
        said = el("p", service.roots.without_places(str(e)), class_="bad", role="alert")
        return frame("Plan", crumbs(ident, checkpoint=True), el("main", el("h1", "Reshard plan"), said, form, id="main"), who=who)
    header, main, footer, flow = plan_parts(found, forecast_document(found))
    parts = (crumbs(ident, checkpoint=True), header, form, el("div", main, id="main"), footer, flow)
    return frame("Plan", *parts, here="/ui/runs", who=who, script="plan.js")


class _Session:
    """Sign in and out."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def login(self, request: Request) -> Response:
        """The form, and what it sends."""
        tokens = self._service.tokens
        if tokens is None:
            return RedirectResponse("/ui/runs", 303)
        if request.method == "GET":
            return _html(login_page(None))
        guard: Guard = request.app.state.guard
        address = "" if request.client is None else request.client.host
        if wait := guard.wait(address):
            return _html(login_page(f"Too many wrong tokens; try again in {wait} s."), 429)
        given = parse_qs((await request.body()).decode("utf-8", "replace")).get("token", [""])[0].strip()
        if tokens.identity(given) is None:
            guard.wrong_token(address)
            return _html(login_page("Nobody has this token."), 403)
        response = RedirectResponse("/ui/runs", 303)
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, tokens.begin_session(given), max_age=12 * 3600, httponly=True, samesite="strict", secure=secure)
        return response

    async def logout(self, request: Request) -> Response:
        """Forget the session."""
        if self._service.tokens is not None:
            self._service.tokens.end_session(request.cookies.get(COOKIE, ""))
        response = RedirectResponse(LOGIN, 303)
        response.delete_cookie(COOKIE)
        return response


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404, "there is no such file.")
    return Response(_file(name), 200, {"Cache-Control": "public, max-age=86400"}, _TYPES[name.rpartition(".")[2]])


@cache
def _file(name: str) -> bytes:
    return resources.files("shardckpt.serve.pages").joinpath(name).read_bytes()
