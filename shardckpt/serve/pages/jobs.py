"""Pages of all jobs and of one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.reading.inspection.markup import Html, Part, data, el
from shardckpt.serve.pages.actions import again_form, cancel_form, choice
from shardckpt.serve.pages.frame import Viewer, facts, frame, link, more, section, table, when
from shardckpt.text import count, duration_text, file_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_ENDED = ("done", "failed", "cancelled")
_WRITES_CHECKPOINT = ("copy", "reshard", "import")
_SHOWN_ABOVE = ("checkpoint", "run", "from", "to")
_DONE = {
    "pin": "The checkpoint is pinned.",
    "unpin": "The checkpoint is not pinned any more.",
    "tag": "The checkpoint has the tag.",
    "untag": "The checkpoint does not have the tag any more.",
    "delete": "The checkpoint is deleted.",
}


def jobs_page(
    doc: Mapping[str, Any],
    checkpoints: Collection[str],
    asked: Mapping[str, Any],
    states: Sequence[str],
    form: Html | None,
    viewer: Viewer,
) -> str:
    """All jobs, or those in a state, or about a place.

    Args:
        doc: the document of `/v1/jobs`.
        checkpoints: ids of those places that are checkpoints.
        asked: `state` and `subject`, which are None if they were not asked for.
        states: all states.
        form: a form that starts a job.
        viewer: whom it is for.
    """
    fields = [
        el("label", "State ", choice("state", "field-state", ("", *states), asked["state"], "any"))
    ]
    if asked["subject"]:
        fields.append(
            el(
                "label",
                "About ",
                el(
                    "input", type="text", name="subject", value=asked["subject"], id="field-subject"
                ),
            )
        )
    chosen = el("form", fields, el("button", "Show", type="submit"), class_="line", role="search")
    listed = (
        jobs_table(doc["jobs"], checkpoints) if doc["jobs"] else el("p", "There are no such jobs.")
    )
    following = more("/ui/jobs", **asked, before=doc["next"]) if doc["next"] else None
    main = el(
        "main",
        el("h1", "Jobs"),
        section("Start", form) if form else None,
        section("List", chosen, listed, following),
        id="main",
    )
    return frame("Jobs", main, here="/ui/jobs", viewer=viewer)


def jobs_table(docs: Sequence[Mapping[str, Any]], checkpoints: Collection[str]) -> Html:
    """Jobs as a table."""
    heads = (
        *(
            ("Job", True),
            ("Operation", False),
            ("About", False),
            ("State", False),
            ("Progress", False),
        ),
        *(("Started by", False), ("Created", False)),
    )
    rows = [
        (
            el(
                "a",
                data("number", one["number"], f"{one['number']}"),
                href=f"/ui/job/{one['number']}",
            ),
            one["operation"],
            _places(one, checkpoints),
            state_mark(one),
            _progress(one),
            one["who"],
            when(one["created"]),
        )
        for one in docs
    ]
    return table(heads, rows, caption=count(len(rows), "job"), ident="jobs")


def job_page(
    doc: Mapping[str, Any], checkpoints: Collection[str], viewer: Viewer, *, may: bool
) -> str:
    """A job.

    Args:
        doc: its document.
        checkpoints: ids of those of its places that are checkpoints.
        viewer: whom it is for.
        may: whether the viewer may cancel it, and start one like it.
    """
    number, over = doc["number"], doc["state"] in _ENDED
    about, arguments = _facts(doc, checkpoints), _arguments(doc)
    buttons = [cancel_form(number)] if not over and not doc["cancelling"] and may else []
    if doc["state"] in ("failed", "cancelled") and may:
        buttons += [form for form in (again_form(doc["operation"], doc["arguments"]),) if form]
    hint = el(
        "p", "Reload the page to see what has changed.", class_="quiet", id="follow", role="status"
    )
    error = None
    if doc["error"] is not None:
        error = el("p", doc["error"]["message"], class_="bad", role="alert")
    events = None if over else f"/v1/jobs/{number}/events"
    state = section(
        "State",
        el("p", state_mark(doc), role="status"),
        el("p", _progress(doc)) if not over or doc["total"] else None,
        error,
        None if over else hint,
        el("div", buttons, class_="buttons") if buttons else None,
        data_events=events,
    )
    main = el(
        "main",
        el("h1", f"Job {number}: {doc['operation']}"),
        state,
        section("Result", *_result(doc, checkpoints)) if doc["result"] is not None else None,
        section("Facts", facts(about), class_="words"),
        section("Arguments", arguments) if arguments else None,
        id="main",
    )
    crumbs = el(
        "nav",
        el(
            "ol", el("li", el("a", "jobs", href="/ui/jobs")), el("li", f"{number}"), class_="crumbs"
        ),
        aria_label="Place",
    )
    return frame(f"Job {number}", crumbs, main, here="/ui/jobs", viewer=viewer)


def state_mark(doc: Mapping[str, Any]) -> Html:
    """The state of a job in words, with its mark. `service.js` writes the same."""
    text = doc["state"]
    if doc["state"] == "running" and doc["cancelling"]:
        text += ", is being cancelled"
    if doc["waits_for"]:
        text += f": {doc['waits_for']}"
    mark = doc["state"]
    if doc["found_damage"]:
        text, mark = f"{text}, found damage", "unreadable"
    return el("span", text, class_=f"state mark-{mark}", data_job=doc["number"])


def damage_table(damage: Sequence[Mapping[str, Any]], damaged: int) -> Html:
    """Damaged parts of a checkpoint: those that were written down, among all."""
    rows = [
        (one["tensor"] or "–", one["box"] or "–", one["file"] or "–", one["reason"])
        for one in damage
    ]
    heads = (("Tensor", False), ("Box", False), ("File", False), ("Reason", False))
    shown = f"; the first {len(damage):,} of them" if len(damage) < damaged else ""
    return table(heads, rows, caption=f"{count(damaged, 'damaged part')}{shown}", ident="damage")


def place(ident: str, checkpoints: Collection[str]) -> Html:
    """A place: as a link if it is a checkpoint."""
    return link("checkpoint", ident, ident) if ident in checkpoints else el("span", ident)


def _places(doc: Mapping[str, Any], checkpoints: Collection[str]) -> Html:
    to = doc["destination"]
    return el(
        "span",
        place(doc["subject"], checkpoints),
        [" → ", place(to, checkpoints)] if to is not None else None,
    )


def _progress(doc: Mapping[str, Any]) -> Html:
    done, total, number = doc["done"], doc["total"], doc["number"]
    share = f"{100 * done // total} %" if total else ""
    bar = el(
        "progress",
        share,
        value=done if total else None,
        max=total or None,
        hidden=doc["state"] != "running",
        data_job=number,
        aria_label=f"Progress of job {number}",
    )
    return el("span", bar, " ", el("span", share, class_="percent", data_job=number))


def _facts(doc: Mapping[str, Any], checkpoints: Collection[str]) -> list[tuple[str, Part]]:
    written = (
        {doc["destination"]}
        if doc["state"] == "done" and doc["operation"] in _WRITES_CHECKPOINT
        else set()
    )
    shown: list[tuple[str, Part]] = [("About", place(doc["subject"], checkpoints))]
    if doc["destination"] is not None:
        shown.append(("Writes to", place(doc["destination"], {*checkpoints, *written})))
    shown += [("Started by", doc["who"]), ("Created", when(doc["created"]))]
    shown += [
        (title, when(doc[name]))
        for title, name in (("Started", "started"), ("Ended", "ended"))
        if doc[name]
    ]
    return shown + ([("Starts", f"{doc['tries']:,}")] if doc["tries"] > 1 else [])


def _arguments(doc: Mapping[str, Any]) -> Html | None:
    given = {name: value for name, value in doc["arguments"].items() if name not in _SHOWN_ABOVE}
    rows = [(name, el("code", text)) for name, value in given.items() if (text := _text(value))]
    return (
        table(
            (("Name", False), ("Value", False)),
            rows,
            caption="Arguments with their values",
            ident="arguments",
        )
        if rows
        else None
    )


def _text(value: object) -> str:
    if value is None or value is False:
        return ""
    return (
        "yes"
        if value is True
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )


def _result(doc: Mapping[str, Any], checkpoints: Collection[str]) -> list[Html | None]:
    result, operation = doc["result"], doc["operation"]
    if operation == "verify":
        read = f"{count(result['chunks'], 'chunk')}, {file_size(result['bytes'])} were read"
        if result["ok"]:
            return [el("p", el("strong", "ok"), f": {read}; nothing is damaged.", class_="verdict")]
        words = el(
            "p", f"{read}; {count(result['damaged'], 'part')} damaged.", class_="bad", role="alert"
        )
        return [words, damage_table(result["damage"], result["damaged"])]
    parts: list[Html | None] = [el("p", _DONE[operation]) if operation in _DONE else None]
    if operation in _WRITES_CHECKPOINT:
        to = doc["destination"]
        parts.append(el("p", "The new checkpoint is ", place(to, {*checkpoints, to}), "."))
    shown = [
        (_title(name), text) for name, value in result.items() if (text := _number(name, value))
    ]
    parts.append(facts(shown) if shown else None)
    if operation == "retain":
        stay = [f"{name}: {why}" for name, why in result["left"].items()]
        return [*parts, steps_table(result, "steps"), *_list("Steps that stay all the same", stay)]
    for name, title in (
        ("files", "Files"),
        ("notes", "Notes"),
        ("notices", "Notices"),
        ("left", "Data that is left"),
    ):
        parts += _list(title, result.get(name))
    return parts


def steps_table(result: Mapping[str, Any], ident: str) -> Html:
    """The steps that a job `retain` has listed or deleted."""
    rows = [
        (one["name"], data("bytes", one["bytes"], file_size(one["bytes"])))
        for one in result["steps"]
    ]
    caption = (
        f"{count(len(rows), 'step')} "
        f"{'that the rules would delete' if result['dry'] else 'deleted'}"
    )
    return (
        table((("Step", False), ("Stored", True)), rows, caption=caption, ident=ident)
        if rows
        else el("p", f"{caption}.")
    )


def _list(title: str, items: Iterable[object] | None) -> list[Html]:
    texts = [str(one) for one in items or ()]
    return [el("h3", title), el("ul", [el("li", one) for one in texts[:100]])] if texts else []


def _title(name: str) -> str:
    return name.replace("_", " ").removesuffix(" bytes").capitalize()


def _number(name: str, value: object) -> str:
    if type(value) not in (int, float):
        return ""
    assert isinstance(value, int | float)
    if name.endswith("bytes"):
        return file_size(int(value))
    return duration_text(value) if name == "seconds" else f"{value:,}"
