"""The page: what browsers ask for, rendered here, and the sessions of people who have a token."""

from __future__ import annotations

import json
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from shardckpt.errors import FormatError, NamesMismatchError, NotFoundError, ShardckptError
from shardckpt.io.store import Store
from shardckpt.reading.documents import find_node
from shardckpt.reading.inspection.markup import PREFIX, Html, el
from shardckpt.runs.ended import ended
from shardckpt.serve import api, forms
from shardckpt.serve.access.guard import LOGIN
from shardckpt.serve.catalogue.catalogue import MOST_ROWS
from shardckpt.serve.catalogue.query import CheckpointQuery
from shardckpt.serve.forms import PageSession, html, refused, viewer_of
from shardckpt.serve.health import damaged_checkpoints, health, verifications
from shardckpt.serve.jobs import endpoints
from shardckpt.serve.jobs.operations import OPERATIONS
from shardckpt.serve.jobs.rows import STATES
from shardckpt.serve.openapi import PATH, Parameter
from shardckpt.serve.pages.actions import actions_section, import_form, reshard_section
from shardckpt.serve.pages.checkpoint import (
    checkpoint_page,
    found_names,
    plan_form,
    tensor_page,
    tree,
    unreadable_page,
)
from shardckpt.serve.pages.diff import diff_page
from shardckpt.serve.pages.frame import STATIC, Viewer, crumbs, frame, section
from shardckpt.serve.pages.health import health_page, verification_section
from shardckpt.serve.pages.jobs import job_page, jobs_page, jobs_table
from shardckpt.serve.pages.retention import retention_section
from shardckpt.serve.pages.runs import RUN_ORDERS, run_page, run_state, runs_page, storage_page
from shardckpt.serve.pool import on_thread
from shardckpt.serve.problems import text_of
from shardckpt.serve.rhythm import COMMITS
from shardckpt.serve.versions.following import readers
from shardckpt.serve.versions.page import MOST_SHOWN, versions_section

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request

    from shardckpt.serve.service import Service

_Page: TypeAlias = "Callable[[Service, Request, Viewer], str]"
_PAGE_RUNS, _PAGE_STEPS, _PAGE_JOBS = 200, 500, 100
_CURVE_STEPS = 30
_FEW_JOBS, _MOST_VERIFICATIONS = 10, 20
_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


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
        f"/ui/run/{PATH}": _run,
        f"/ui/checkpoint/{PATH}": _checkpoint,
        f"/ui/tensor/{PATH}": _tensor,
        f"/ui/plan/{PATH}": _plan,
    }
    return [
        Route("/static/{name}", _static),
        Route(LOGIN, session.login, methods=["GET", "POST"]),
        Route("/ui/logout", session.logout, methods=["POST"]),
        Route("/ui/jobs/{operation}", partial(forms.start, service), methods=["POST"]),
        Route("/ui/job/{job}/cancel", partial(forms.cancel, service), methods=["POST"]),
        *(Route(path, partial(_render, page, service)) for path, page in pages.items()),
    ]


async def _render(page: _Page, service: Service, request: Request) -> Response:
    try:
        return html(
            await on_thread(
                page,
                service,
                request,
                viewer_of(service, request),
                long=page in (_tensor, _diff, _plan),
            )
        )
    except (ShardckptError, HTTPException) as e:
        # Then no storage is asked: perhaps no thread is free.
        decided = isinstance(e, HTTPException) and e.status_code != 404
        return (
            refused(service, request, e)
            if decided
            else await on_thread(refused, service, request, e)
        )


def _text(request: Request, name: str) -> str | None:
    return Parameter(name=name, about="").parse(request.query_params.getlist(name)) or None


def _url(request: Request) -> str:
    """The url by which a browser has reached the service, for commands on a page.

    Nothing is decided by it.
    """
    return f"{request.scope['scheme']}://{request.headers.get('host', '')}{PREFIX.get()}"


def _runs(service: Service, request: Request, viewer: Viewer) -> str:
    text = _text(request, "text")
    sort = _text(request, "sort") or "run"
    chosen: dict[str, Any] = {
        "text": text,
        "sort": sort if sort in RUN_ORDERS else "run",
        "order": "ascending" if sort == "run" else "descending",
    }
    doc = api.runs(service, **chosen, limit=_PAGE_RUNS, cursor=_text(request, "cursor"))
    for one in doc["runs"]:
        one["recent"] = service.catalogue.recent(one["run"], _CURVE_STEPS)
        one["ended"] = one["run"] in service.scanner.ended
    wrong = len(damaged_checkpoints(service)) + service.catalogue.totals().get("unreadable", 0)
    return runs_page(doc, service.catalogue.sums(text=text), chosen, wrong, viewer)


def _run(service: Service, request: Request, viewer: Viewer) -> str:
    run = request.path_params["path"]
    sums = service.catalogue.sums(run)
    if not sums["checkpoints"]:
        raise NotFoundError(f"{run}: there is no such run.")
    asked = {
        name: _text(request, name)
        for name in ("text", "step", "tag", "metric", "since", "until", "larger", "sort")
    }
    doc = api.checkpoints(
        service,
        run=run,
        state=None,
        **asked,
        order="ascending" if (asked["sort"] or "").startswith("metric:") else "descending",
        limit=_PAGE_STEPS,
        cursor=_text(request, "cursor"),
    )
    recent = service.catalogue.recent(run, COMMITS)
    state = run_state(recent, ended=run in service.scanner.ended)
    newest = service.catalogue.checkpoints(
        CheckpointQuery(run=run, state="committed", descending=True, limit=MOST_SHOWN)
    )[0]
    sections = [
        versions_section(newest, readers(service, run)),
        *_retention(service, run, viewer),
    ]
    return run_page(run, doc["checkpoints"], sums, doc["next"], asked, state, viewer, sections)


def _retention(service: Service, run: str, viewer: Viewer) -> list[Html | None]:
    if service.upkeep is None:
        return []
    try:
        mark = ended(Store.open(service.roots.locate(run)))
    except FormatError:  # a job that marks it again replaces it
        mark = None
    looked = service.upkeep.journal.jobs(state="done", operation="retain", subject=run, limit=1)
    last = next((one for one in looked if one.result is not None), None)
    end = None if mark is None else {"by": mark.by, "when": mark.when}
    ruled = (
        service.upkeep.keeper is not None and service.upkeep.keeper.rules.rule_for(run) is not None
    )
    return [
        retention_section(
            run,
            end,
            None if last is None else endpoints.job_json(service, last),
            viewer,
            ruled=ruled,
        )
    ]


def _storage(service: Service, _request: Request, viewer: Viewer) -> str:
    freed = None
    if service.upkeep is not None and service.upkeep.keeper is not None:
        looked = service.upkeep.journal.jobs(state="done", operation="retain", limit=MOST_ROWS)
        latest = {job.subject: job.result or {} for job in reversed(looked)}
        freed = {run: result["bytes"] for run, result in latest.items() if result.get("dry")}
    return storage_page(
        service.catalogue.runs(limit=MOST_ROWS, sort="size", descending=True)[0],
        service.catalogue.sums(),
        freed,
        viewer,
    )


def _checkpoint(service: Service, request: Request, viewer: Viewer) -> str:
    ident = service.exactly(request.path_params["path"])
    entry = api.entry_of(service, ident)
    try:
        opened = service.opened.get(ident)
    except FormatError as e:
        if service.upkeep is None:
            raise
        deletable = service.upkeep.deletable(ident)
        sections = _upkeep_sections(service, ident, deletable, entry or {}, viewer)
        return unreadable_page(ident, service.roots.without_places(str(e)), viewer, sections)
    top = find_node(opened.checkpoint, _text(request, "under"))
    sections = (
        []
        if top.name
        else _upkeep_sections(service, ident, {"attempt": opened.attempt}, entry or {}, viewer)
    )
    text = _text(request, "text")
    draw = partial(found_names, text=text) if text else tree
    make = partial(draw, ident, opened.checkpoint, top)
    # Of many names it takes long.
    names = make() if text or top.name else opened.part("tree", make, PREFIX.get())
    return checkpoint_page(
        ident, opened.checkpoint, top, entry, text, names, viewer, sections, _url(request)
    )


def _upkeep_sections(
    service: Service, ident: str, deletable: dict[str, str], entry: dict[str, Any], viewer: Viewer
) -> list[Html | None]:
    """The parts of a checkpoint's page about verifications, jobs, and what a viewer may do.

    `deletable` says which checkpoint the page shows, see `Upkeep.deletable`.
    """
    if service.upkeep is None:
        return []
    journal = service.upkeep.journal
    history = verifications(service, ident, limit=_MOST_VERIFICATIONS)
    about = [
        endpoints.job_json(service, one) for one in journal.jobs(subject=ident, limit=_FEW_JOBS)
    ]
    listed = (
        jobs_table(about, _checkpoints_among(service, about))
        if about
        else el("p", "There was no job about it.")
    )
    everything = el(
        "p",
        el(
            "a",
            "All jobs about it",
            href=f"/ui/jobs?{urlencode({'subject': ident}, errors='surrogatepass')}",
        ),
    )
    jobs = section("Jobs", listed, everything if len(about) == _FEW_JOBS else None)
    return [
        verification_section(ident, deletable.get("attempt", ""), history, viewer),
        jobs,
        actions_section(ident, deletable, entry, viewer),
    ]


def _jobs(service: Service, request: Request, viewer: Viewer) -> str:
    given = {name: _text(request, name) for name in ("state", "subject", "before")}
    asked = {
        one.name: one.parse([text])
        for one in endpoints.ENDPOINTS[0].parameters
        if (text := given.get(one.name)) is not None
    }
    doc = endpoints.jobs(
        service,
        **{
            "state": None,
            "operation": None,
            "subject": None,
            "before": None,
            "limit": _PAGE_JOBS,
            **asked,
        },
    )
    chosen = {"state": given["state"], "subject": given["subject"]}
    return jobs_page(
        doc,
        _checkpoints_among(service, doc["jobs"]),
        chosen,
        STATES,
        import_form(viewer),
        viewer,
    )


def _job(service: Service, request: Request, viewer: Viewer) -> str:
    doc = endpoints.job(service, request.path_params["job"])
    operation = OPERATIONS.get(doc["operation"])
    written = doc["destination"] or doc["subject"]
    may = operation is not None and viewer.may(operation.needs(doc["arguments"]), written)
    return job_page(doc, _checkpoints_among(service, [doc]), viewer, may=may)


def _health(service: Service, _request: Request, viewer: Viewer) -> str:
    endpoints.upkeep_of(service)
    return health_page(health(service), viewer)


def _checkpoints_among(service: Service, docs: Sequence[dict[str, Any]]) -> set[str]:
    """The ids of those places of jobs that are checkpoints."""
    places = {
        one[name] for one in docs for name in ("subject", "destination") if one[name] is not None
    }
    return {one["id"] for one in service.catalogue.find(sorted(places))}


def _tensor(service: Service, request: Request, viewer: Viewer) -> str:
    ident = service.exactly(request.path_params["path"])
    name = _text(request, "name")
    if name is None:
        raise NamesMismatchError(f"{ident}: name= is missing.")
    ckpt = service.opened.get(ident).checkpoint
    values = (
        json.loads(api.statistics(service, ident, name, budget=16 << 20))
        if _text(request, "values")
        else None
    )
    return tensor_page(ident, ckpt, name, api.device_boxes(ckpt, name), values, viewer)


def _diff(service: Service, request: Request, viewer: Viewer) -> str:
    a, b, structure = (
        _text(request, "a"),
        _text(request, "b"),
        _text(request, "structure") == "true",
    )
    doc = (
        json.loads(api.diff(service, a=a, b=b, values=not structure, layouts=False))
        if a and b
        else None
    )
    return diff_page(a, b, doc, structure=structure, viewer=viewer)


def _plan(service: Service, request: Request, viewer: Viewer) -> str:
    ident = service.opened.get(service.exactly(request.path_params["path"])).ident
    asked: dict[str, Any] = {one.name: one.default for one in api.PLAN}
    asked |= {name: _text(request, name) for name in ("mesh", "preset")}
    asked["rule"] = (_text(request, "rule") or "").split() or None
    per_host = _text(request, "devices_per_host")
    if per_host is not None:
        asked["devices_per_host"] = next(
            one for one in api.PLAN if one.name == "devices_per_host"
        ).parse([per_host])
    form = section("Reshard", plan_form(ident, asked))
    try:
        parts = json.loads(service.calculations.run("_plan_page", ident, **asked))
    except ShardckptError as e:
        notice = el("p", service.roots.without_places(text_of(e)), class_="bad", role="alert")
        return frame(
            "Plan",
            crumbs(ident, checkpoint=True),
            el("main", el("h1", "Reshard plan"), notice, form, id="main"),
            viewer=viewer,
        )
    header, main, footer, flow = map(Html, parts)
    start = reshard_section(ident, asked, viewer)
    shown = (
        crumbs(ident, checkpoint=True),
        header,
        form,
        el("div", main, id="main"),
        start,
        footer,
        flow,
    )
    return frame("Plan", *shown, here="/ui/runs", viewer=viewer, script="plan.js")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404, "there is no such file.")
    return Response(
        _file(name),
        200,
        {"Cache-Control": "public, max-age=86400"},
        _TYPES[name.rpartition(".")[2]],
    )


@cache
def _file(name: str) -> bytes:
    return resources.files("shardckpt.serve.pages").joinpath(name).read_bytes()
