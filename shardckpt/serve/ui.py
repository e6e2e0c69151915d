"""The page: what browsers ask for, rendered here, and the sessions of people who have a token."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlencode

from anyio import to_thread
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from shardckpt.commit.ended import ended
from shardckpt.errors import FormatError, NamesMismatchError, NotFoundError, OptionError, ShardckptError
from shardckpt.io.store import Store
from shardckpt.reading.documents import find_node
from shardckpt.reading.naming.mapping_file import PRESETS
from shardckpt.reshard.forecast.document import document as forecast_document
from shardckpt.serve import api, forms
from shardckpt.serve.catalogue import MOST_ROWS, CheckpointQuery
from shardckpt.serve.forms import PageSession, html, refused, viewer_of
from shardckpt.serve.guard import LOGIN
from shardckpt.serve.health import health, verifications, with_verifications
from shardckpt.serve.jobs import endpoints
from shardckpt.serve.jobs.operations import OPERATIONS
from shardckpt.serve.jobs.rows import STATES
from shardckpt.serve.openapi import Parameter
from shardckpt.serve.pages.actions import actions_section, import_form, reshard_section
from shardckpt.serve.pages.checkpoint import checkpoint_page, diff_page, plan_form, tensor_page, unreadable_page
from shardckpt.serve.pages.frame import STATIC, Viewer, crumbs, frame
from shardckpt.serve.pages.health import health_page, verification_section
from shardckpt.serve.pages.jobs import job_page, jobs_page, jobs_table
from shardckpt.serve.pages.markup import Html, el
from shardckpt.serve.pages.plan import plan_parts, section
from shardckpt.serve.pages.retention import retention_section
from shardckpt.serve.pages.runs import run_page, runs_page, storage_page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request

    from shardckpt.serve.service import Service

_Page: TypeAlias = "Callable[[Service, Request, Viewer], str]"
_PAGE_STEPS, _PAGE_JOBS = 500, 100
_FEW_JOBS, _MOST_VERIFICATIONS = 10, 20
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


def routes(service: Service) -> list[Route]:
    """The routes of the page."""
    session = PageSession(service)
    pages: dict[str, _Page] = {
        "/": _runs,
        "/ui/runs": _runs,
        "/ui/storage": _storage,
        "/ui/diff": _diff,
        "/ui/jobs": _jobs,
        "/ui/job/{job}": _job,
        "/ui/health": _health,
        "/ui/run/{path:path}": _run,
        "/ui/checkpoint/{path:path}": _checkpoint,
        "/ui/tensor/{path:path}": _tensor,
        "/ui/plan/{path:path}": _plan,
    }
    return [
        Route("/static/{name}", _static),
        Route(LOGIN, session.login, methods=["GET", "POST"]),
        Route("/ui/logout", session.logout, methods=["POST"]),
        Route("/ui/jobs/{operation}", _posted(service, forms.start), methods=["POST"]),
        Route("/ui/job/{job}/cancel", _posted(service, forms.cancel), methods=["POST"]),
        *(Route(path, _rendered(service, page)) for path, page in pages.items()),
    ]


def _rendered(service: Service, page: _Page) -> Any:
    async def answer(request: Request) -> Response:
        try:
            text = await to_thread.run_sync(page, service, request, viewer_of(service, request))
        except (ShardckptError, HTTPException) as e:
            return refused(service, request, e)
        return html(text)

    return answer


def _posted(service: Service, form: Callable[[Service, Request], Awaitable[Response]]) -> Any:
    async def answer(request: Request) -> Response:
        return await form(service, request)

    return answer


def _text(request: Request, name: str) -> str | None:
    return Parameter(name=name, about="").parse(request.query_params.getlist(name)) or None


def _runs(service: Service, request: Request, viewer: Viewer) -> str:
    text = _text(request, "text")
    return runs_page(api.runs(service, text=text, limit=200, cursor=_text(request, "cursor")), text, viewer)


def _run(service: Service, request: Request, viewer: Viewer) -> str:
    run = request.path_params["path"]
    query = CheckpointQuery(run=run, descending=True, limit=_PAGE_STEPS, cursor=_text(request, "cursor"))
    found, following = service.catalogue.checkpoints(query)
    if not found:
        raise NotFoundError(f"{run}: there is no such run.")
    entries = with_verifications(service, found)
    for entry in entries:
        entry["reason"] = entry["reason"] and service.roots.without_places(entry["reason"])
    return run_page(run, entries[::-1], following, viewer, _retention(service, run, viewer))


def _retention(service: Service, run: str, viewer: Viewer) -> list[Html | None]:
    if service.upkeep is None:
        return []
    try:
        mark = ended(Store.open(service.roots.locate(run)))
    except FormatError:  # a job that marks it again replaces it
        mark = None
    last = next(iter(service.upkeep.journal.jobs(state="done", operation="retain", subject=run, limit=1)), None)
    said = None if mark is None else {"by": mark.by, "when": mark.when}
    ruled = service.upkeep.keeper is not None and service.upkeep.keeper.rules.rule_for(run) is not None
    return [retention_section(run, said, None if last is None else endpoints.job_json(service, last), viewer, ruled=ruled)]


def _storage(service: Service, _request: Request, viewer: Viewer) -> str:
    freed = None
    if service.upkeep is not None and service.upkeep.keeper is not None:
        looked = service.upkeep.journal.jobs(state="done", operation="retain", limit=MOST_ROWS)
        latest = {job.subject: job.result or {} for job in reversed(looked)}
        freed = {run: result["bytes"] for run, result in latest.items() if result.get("dry")}
    return storage_page(service.catalogue.runs(limit=MOST_ROWS)[0], freed, viewer)


def _checkpoint(service: Service, request: Request, viewer: Viewer) -> str:
    ident = service.exactly(request.path_params["path"])
    entry = api.entry_of(service, ident)
    try:
        opened = service.opened.get(ident)
    except FormatError as e:
        if service.upkeep is None:
            raise
        sections = _upkeep_sections(service, ident, "", entry or {}, viewer)
        return unreadable_page(ident, service.roots.without_places(str(e)), viewer, sections)
    top = find_node(opened.checkpoint, _text(request, "under"))
    sections = [] if top.name else _upkeep_sections(service, ident, opened.attempt, entry or {}, viewer)
    return checkpoint_page(ident, opened.checkpoint, top, entry, _text(request, "text"), viewer, sections)


def _upkeep_sections(service: Service, ident: str, attempt: str, entry: dict[str, Any], viewer: Viewer) -> list[Html | None]:
    """The parts of a checkpoint's page about verifications, jobs, and what a viewer may do."""
    if service.upkeep is None:
        return []
    journal = service.upkeep.journal
    found = verifications(service, ident, limit=_MOST_VERIFICATIONS)
    about = [endpoints.job_json(service, one) for one in journal.jobs(subject=ident, limit=_FEW_JOBS)]
    listed = jobs_table(about, _checkpoints_among(service, about), "jobs") if about else el("p", "There was no job about it.")
    everything = el("p", el("a", "All jobs about it", href=f"/ui/jobs?{urlencode({'subject': ident}, errors='surrogatepass')}"))
    jobs = section("Jobs", listed, everything if len(about) == _FEW_JOBS else None)
    return [verification_section(attempt, found), jobs, actions_section(ident, attempt, entry, viewer)]


def _jobs(service: Service, request: Request, viewer: Viewer) -> str:
    given = {name: _text(request, name) for name in ("state", "subject", "before")}
    asked = {one.name: one.parse([text]) for one in endpoints.ENDPOINTS[0].parameters if (text := given.get(one.name)) is not None}
    doc = endpoints.jobs(service, **{"state": None, "operation": None, "subject": None, "before": None, "limit": _PAGE_JOBS, **asked})
    chosen = {"state": given["state"], "subject": given["subject"]}
    return jobs_page(doc, _checkpoints_among(service, doc["jobs"]), chosen, STATES, import_form(PRESETS, viewer), viewer)


def _job(service: Service, request: Request, viewer: Viewer) -> str:
    doc = endpoints.job(service, request.path_params["job"])
    operation = OPERATIONS[doc["operation"]]
    may_cancel = viewer.may("operate") and viewer.may(operation.scope)
    return job_page(
        doc,
        _checkpoints_among(service, [doc]),
        may_cancel=may_cancel,
        may_start=viewer.may(operation.needs(doc["arguments"])),
        viewer=viewer,
    )


def _health(service: Service, _request: Request, viewer: Viewer) -> str:
    endpoints.upkeep_of(service)
    return health_page(health(service), viewer)


def _checkpoints_among(service: Service, docs: Sequence[dict[str, Any]]) -> set[str]:
    """The ids of those places of jobs that are checkpoints."""
    places = {one[name] for one in docs for name in ("subject", "destination") if one[name] is not None}
    return {one["id"] for one in service.catalogue.find(sorted(places))}


def _tensor(service: Service, request: Request, viewer: Viewer) -> str:
    ident = service.exactly(request.path_params["path"])
    name = _text(request, "name")
    if name is None:
        raise NamesMismatchError(f"{ident}: name= is missing.")
    ckpt = service.opened.get(ident).checkpoint
    found = api.statistics(service, ident, name, budget=16 << 20) if _text(request, "values") else None
    return tensor_page(ident, ckpt, name, api.layout(service, ident, name)["devices"], found, viewer)


def _diff(service: Service, request: Request, viewer: Viewer) -> str:
    a, b, structure = _text(request, "a"), _text(request, "b"), _text(request, "structure") == "true"
    doc = api.diff(service, a=a, b=b, values=not structure, layouts=False) if a and b else None
    return diff_page(a, b, doc, structure=structure, viewer=viewer)


def _plan(service: Service, request: Request, viewer: Viewer) -> str:
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
        return frame("Plan", crumbs(ident, checkpoint=True), el("main", el("h1", "Reshard plan"), said, form, id="main"), viewer=viewer)
    header, main, footer, flow = plan_parts(found, forecast_document(found))
    start = reshard_section(ident, asked, viewer)
    parts = (crumbs(ident, checkpoint=True), header, form, el("div", main, id="main"), start, footer, flow)
    return frame("Plan", *parts, here="/ui/runs", viewer=viewer, script="plan.js")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404, "there is no such file.")
    return Response(_file(name), 200, {"Cache-Control": "public, max-age=86400"}, _TYPES[name.rpartition(".")[2]])


@cache
def _file(name: str) -> bytes:
    return resources.files("shardckpt.serve.pages").joinpath(name).read_bytes()
