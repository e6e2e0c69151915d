"""The shared parts of all pages: the document, the navigation, tables and links."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from shardckpt._version import __version__
from shardckpt.reading.inspection.markup import PREFIX, Html, Part, el
from shardckpt.serve.rhythm import time_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardckpt.serve.access.identity import Identity

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src "
    "'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the pages."""
STATIC = ("plan.css", "service.css", "plan.js", "service.js", "icon.svg")
MINUTE = 60
_AREAS = (("Runs", "/ui/runs"), ("Compare", "/ui/diff"), ("Storage", "/ui/storage"))
_AREAS_OF_JOBS = (("Jobs", "/ui/jobs"), ("Health", "/ui/health"))


@dataclass(frozen=True, slots=True)
class Viewer:
    """Somebody who looks at a page."""

    identity: Identity | None = None
    signed_in: bool = False
    """Whether there is a session, which can be ended."""
    jobs: bool = False
    """Whether the service runs jobs."""
    vanished: tuple[tuple[str, str], ...] = ()
    """Roots that have vanished, each with the reason."""

    def may(self, scope: str, ident: str | None = None) -> bool:
        """Whether they may start jobs that need a scope at the root of an id; None: at any root."""
        root = None if ident is None else ident.partition("/")[0]
        return self.jobs and self.identity is not None and self.identity.may(scope, root)


NOBODY = Viewer()


def frame(
    title: str, *parts: Part, here: str = "", viewer: Viewer = NOBODY, script: str = "service.js"
) -> str:
    """A complete page.

    Args:
        title: its title.
        parts: what follows the navigation; one of them is `main`.
        here: the address of the area that it belongs to.
        viewer: whom it is for: decides which areas and which buttons there are.
        script: its script.
    """
    areas = _AREAS + _AREAS_OF_JOBS if viewer.jobs else _AREAS
    links = [
        el("li", el("a", text, href=at, aria_current="page" if at == here else None))
        for text, at in areas
    ]
    leave: Html | None = None
    if viewer.identity is not None and viewer.identity.by_proxy:
        leave = el("p", viewer.identity.name, class_="quiet")
    elif viewer.signed_in and viewer.identity is not None:
        leave = el(
            "form",
            el("button", f"Sign out {viewer.identity.name}", type="submit"),
            method="post",
            action="/ui/logout",
        )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{title} – shardckpt"),
        [el("link", rel="stylesheet", href=f"/static/{name}?{__version__}") for name in STATIC[:2]],
        el("link", rel="icon", href=f"/static/icon.svg?{__version__}", type="image/svg+xml"),
        el("script", Html(""), src=f"/static/{script}?{__version__}", defer=True),
    )
    skip = el("a", "To the content", href="#main", class_="skip")
    nav = el(
        "nav",
        el("a", "shardckpt", href="/ui/runs", class_="brand"),
        el("ul", links),
        leave,
        aria_label="Service",
    )
    shown = viewer.vanished if viewer.identity is not None else ()
    gone = [el("p", f"Root {name}: {why}", class_="bad", role="alert") for name, why in shown]
    return (
        "<!DOCTYPE html>\n"
        + el(
            "html",
            head,
            el("body", skip, nav, gone, *parts),
            lang="en",
            data_prefix=PREFIX.get() or None,
        )
        + "\n"
    )


def link(area: str, ident: str, text: Part, **query: object) -> Html:
    """A link to the page of a run, a checkpoint or a tensor."""
    return el("a", text, href=address(area, ident, **query))


def address(area: str, ident: str, **query: object) -> str:
    """The path of a page."""
    given = {key: value for key, value in query.items() if value is not None}
    return f"/ui/{area}/{quote(ident, errors='surrogatepass')}" + (
        f"?{urlencode(given, errors='surrogatepass')}" if given else ""
    )


def crumbs(ident: str, *, checkpoint: bool, tensor: str | None = None) -> Html:
    """Path to a page: root, run, checkpoint, tensor."""
    run, _, name = ident.rpartition("/") if checkpoint else (ident, "", "")
    run = run or ident
    steps = [el("li", el("a", "runs", href="/ui/runs")), el("li", link("run", run, run))]
    if checkpoint:
        steps.append(el("li", link("checkpoint", ident, name or ident)))
    if tensor is not None:
        steps.append(el("li", tensor))
    return el("nav", el("ol", steps, class_="crumbs"), aria_label="Place")


def table(
    heads: Sequence[tuple[str, bool]], rows: Iterable[Sequence[Part]], *, caption: str, ident: str
) -> Html:
    """A table whose columns can be sorted; on a phone, each row is a card.

    Args:
        heads: title of each column, and whether it has numbers.
        rows: cells; a cell with an exact value is a `data` element.
        caption: what the table shows.
        ident: id of the element.
    """
    head = [
        el(
            "th",
            el("button", text, type="button"),
            scope="col",
            class_="n" if number else None,
            aria_sort="none",
        )
        for text, number in heads
    ]
    titles = [(text, "n" if number else None) for text, number in heads]
    body = [
        el(
            "tr",
            [
                el("td", cell, class_=n, data_head=text)
                for cell, (text, n) in zip(row, titles, strict=True)
            ],
        )
        for row in rows
    ]
    inner = el(
        "table",
        el("caption", caption),
        el("thead", el("tr", head)),
        el("tbody", body),
        id=ident,
        class_="cards sortable",
    )
    return el("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def section(title: str, *parts: Any, **attributes: Any) -> Html:
    """A section with a heading."""
    ident = f"section-{title.lower().replace(' ', '-')}"
    return el("section", el("h2", title, id=ident), *parts, aria_labelledby=ident, **attributes)


def facts(pairs: Iterable[tuple[str, Part]], style: str = "facts") -> Html:
    """Titles with values."""
    return el(
        "dl", [el("div", el("dt", title), el("dd", value)) for title, value in pairs], class_=style
    )


def search(label: str, name: str, value: str | None, *others: Html) -> Html:
    """A form with one text field, and other fields."""
    field = el(
        "input",
        type="search",
        name=name,
        value=value or "",
        autocomplete="off",
        id=f"field-{name}",
        maxlength=200,
    )
    return el(
        "form",
        el("label", f"{label} ", field),
        others,
        el("button", "Search", type="submit"),
        class_="line",
        role="search",
    )


def more(path: str, **query: object) -> Html:
    """A link to the next page of a list."""
    given = {key: value for key, value in query.items() if value}
    return el(
        "p", el("a", "More", href=f"{path}?{urlencode(given, errors='surrogatepass')}", rel="next")
    )


def when(time: str | None) -> Html | str:
    """A time with its zone, and how long ago it was."""
    known = time_of(time)
    if known is None:
        return time or "–"
    text = f"{known.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
    return el(
        "time",
        ago((dt.datetime.now(dt.UTC) - known).total_seconds()),
        el("small", f" {text}"),
        datetime=time,
    )


def ago(seconds: float) -> str:
    """Age in one unit, in words.

    >>> ago(5), ago(200), ago(9000), ago(200_000), ago(-100)
    ('just now', '3 min ago', '2 h ago', '2 d ago', 'just now')
    """
    return "just now" if seconds < MINUTE else f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """A time in one unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (MINUTE, "min")):
        if seconds >= size:
            return f"{int(seconds // size):,} {unit}"
    return f"{seconds:.0f} s"


def error_page(
    status: int, title: str, detail: str, viewer: Viewer, back: Html | None = None
) -> str:
    """A page that says what went wrong, with a link to go on."""
    link_back = el("p", back or el("a", "All runs", href="/ui/runs"))
    main = el(
        "main",
        el("h1", f"{status} {title}"),
        el("section", el("p", detail, role="alert"), link_back),
        id="main",
    )
    return frame(title, main, viewer=viewer)


def login_page(message: str | None) -> str:
    """The form that begins a session."""
    field = el(
        "input",
        type="password",
        name="token",
        required=True,
        autocomplete="current-password",
        id="token",
    )
    form = el(
        "form",
        el("label", "Token ", field),
        el("button", "Sign in", type="submit"),
        method="post",
        action="/ui/login",
    )
    notice = None if message is None else el("p", message, role="alert", class_="bad")
    hint = el("p", "`shardckpt token` makes tokens.", class_="quiet")
    return frame(
        "Sign in", el("main", el("h1", "Sign in"), el("section", notice, form, hint), id="main")
    )
