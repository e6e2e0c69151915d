"""Pages of all runs, of one run, and of the storage that they use."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from shardckpt.reading.inspection.markup import Html, Part, data, el
from shardckpt.serve.pages.actions import choice
from shardckpt.serve.pages.charts import curve, kind, metric_chart, time_line, words
from shardckpt.serve.pages.frame import (
    Viewer,
    address,
    ago,
    crumbs,
    facts,
    frame,
    link,
    more,
    search,
    section,
    span,
    table,
    when,
)
from shardckpt.serve.rhythm import rhythm_of
from shardckpt.text import count, file_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_METRICS = 6
RUN_ORDERS = {"run": "name", "created": "last commit", "size": "size"}


def runs_page(
    doc: dict[str, Any],
    sums: Mapping[str, int],
    asked: Mapping[str, str | None],
    wrong: int,
    viewer: Viewer,
) -> str:
    """A page of all runs: what is stored in all, new and wrong, and the state of each run.

    Args:
        doc: the document of `/v1/runs`; each run has besides its `recent` commits, and whether it
            has `ended`.
        sums: sums over all of them.
        asked: `text`, `sort` and `order`.
        wrong: number of damaged and unreadable checkpoints.
        viewer: whom it is for.
    """
    rows = []
    for one in doc["runs"]:
        metrics: dict[str, Any] = next(
            (step["metrics"] for step in reversed(one["recent"]) if step["metrics"]), {}
        )
        name = next(iter(metrics), None)
        points = [
            (step["step"], float(step["metrics"][name]))
            for step in one["recent"]
            if step["step"] is not None and name in step["metrics"]
        ]
        drawn = (
            curve(points, name)
            if name and len(points) > 1 and all(isfinite(value) for _, value in points)
            else None
        )
        last = [
            f"{key} {value:.4g} " if isinstance(value, float | int) else f"{key} {value} "
            for key, value in list(metrics.items())[:2]
        ]
        rows.append(
            (
                link("run", one["run"], one["run"]),
                run_state(one["recent"], ended=one["ended"]),
                el("span", last, drawn),
                "–"
                if one["last_step"] is None
                else data("last_step", one["last_step"], f"{one['last_step']:,}"),
                data("checkpoints", one["checkpoints"], f"{one['checkpoints']:,}"),
                data("stored_bytes", one["stored_bytes"], file_size(one["stored_bytes"] or 0)),
                when(one["created"]),
                _remarks(one),
            )
        )
    heads = (
        *(
            ("Run", False),
            ("State", False),
            ("Last metrics", False),
            ("Last step", True),
            ("Checkpoints", True),
            ("Stored", True),
        ),
        *(("Last commit", False), ("Remarks", False)),
    )
    totals: list[tuple[str, Part]] = [
        ("Stored", file_size(sums["stored_bytes"])),
        ("Commits in 24 h", f"{sums['today']:,}"),
        ("Damaged", el("span", f"{wrong:,}", class_="state mark-unreadable") if wrong else "0"),
    ]
    sort = choice("sort", "field-sort", RUN_ORDERS, asked["sort"], "", RUN_ORDERS)
    parts: list[Html | None] = [
        search("Runs whose name contains", "text", asked["text"], el("label", "Sort by ", sort)),
        *_problems(doc, dict(viewer.vanished)),
    ]
    parts.append(
        table(heads, rows, caption=_of(len(rows), sums["runs"], "run"), ident="runs")
        if rows
        else el("p", "There are no runs.")
    )
    parts.append(
        more("/ui/runs", text=asked["text"], sort=asked["sort"], cursor=doc["next"])
        if doc["next"]
        else None
    )
    return frame(
        "Runs",
        el("main", el("h1", "Runs"), section("All runs", facts(totals), *parts), id="main"),
        here="/ui/runs",
        viewer=viewer,
    )


def run_state(recent: Sequence[Mapping[str, Any]], *, ended: bool) -> Html:
    """State of a run in words: it saves, is silent, or has ended."""
    rhythm = rhythm_of(one["created"] for one in recent)
    if ended:
        return el("span", "ended", class_="state mark-superseded")
    if rhythm is None or rhythm.every is None:
        return el("span", "–" if rhythm is None else f"saved {ago(rhythm.since)}")
    if rhythm.silent:
        return el("span", f"silent for {span(rhythm.since)}", class_="state mark-uncommitted")
    return el("span", f"saving every {span(rhythm.every)}", class_="state mark-pinned")


def run_page(
    run: str,
    entries: Sequence[dict[str, Any]],
    sums: Mapping[str, int],
    following: str | None,
    asked: Mapping[str, str | None],
    state: Html,
    viewer: Viewer,
    sections: Sequence[Html | None] = (),
) -> str:
    """A run: its metrics and steps over time, its checkpoints, and further sections.

    Args:
        run: its id.
        entries: checkpoints, in the order that was asked for.
        sums: sums over all of its checkpoints.
        following: cursor of the next page.
        asked: filters and `sort`.
        state: see `run_state`.
        viewer: whom it is for.
        sections: what follows.
    """
    shown, entries = entries, sorted(entries, key=lambda one: one["step"] or 0)
    before = {one["id"]: earlier["id"] for earlier, one in pairwise(entries)}
    names = list(dict.fromkeys(name for one in entries for name in one["metrics"]))
    charts = [metric_chart(name, entries) for name in names[:MOST_METRICS]]
    hidden = len(names) - len(charts)
    legend = el(
        "p",
        [el("span", text, class_=f"legend-mark mark-{name}") for name, text in _LEGEND],
        class_="quiet",
    )
    best = best_steps(entries, names[:MOST_METRICS])
    rows = [
        _row(one, before.get(one["id"]), names[:MOST_METRICS], best.get(one["id"], []))
        for one in shown
    ]
    heads = [("Checkpoint", False), ("Created", False), ("Tensors", True), ("Stored", True)]
    heads += [(name, True) for name in names[:MOST_METRICS]] + [
        ("State", False),
        ("Compare", False),
    ]
    stored, held = file_size(sums["stored_bytes"]), sums["unfinished_bytes"]
    stored += f", {file_size(held)} of it by unfinished saves" if held else ""
    listed = table(
        heads, rows, caption=_of(len(rows), sums["checkpoints"], "checkpoint"), ident="checkpoints"
    )
    main = el(
        "main",
        el("h1", run),
        section(
            "Steps",
            facts(
                [
                    ("State", state),
                    ("Checkpoints", f"{sums['checkpoints']:,}"),
                    ("Stored", stored),
                    ("Pinned", f"{sums['pinned']:,}"),
                ]
            ),
            el("div", time_line(entries), charts, class_="charts"),
            legend,
            el("p", f"{count(hidden, 'more metric')}; the checkpoints have them.", class_="quiet")
            if hidden
            else None,
        ),
        section(
            "Checkpoints",
            el(
                "details",
                el("summary", "Filter and sort"),
                _filters(run, asked, names),
                open=any(asked.values()),
            ),
            listed if rows else el("p", "No checkpoint is like that."),
            more(address("run", run), **asked, cursor=following) if following else None,
        ),
        *sections,
        id="main",
    )
    return frame(run, crumbs(run, checkpoint=False), main, here="/ui/runs", viewer=viewer)


_FILTERS = (
    *(
        ("text", "Name contains", "eval"),
        ("step", "Steps", "100:200"),
        ("tag", "Tag", "best"),
        ("metric", "Metric", "loss<2.5"),
    ),
    *(
        ("since", "Committed since", "2026-01-31"),
        ("until", "until", "2026-02-28"),
        ("larger", "At least", "10GiB"),
    ),
)


def _filters(run: str, asked: Mapping[str, str | None], metrics: Sequence[str]) -> Html:
    """The form that filters and sorts the checkpoints of a run."""
    fields = [
        el(
            "label",
            f"{label} ",
            el(
                "input",
                type="text",
                name=name,
                value=asked[name] or "",
                placeholder=hint,
                id=f"field-{name}",
            ),
        )
        for name, label, hint in _FILTERS
    ]
    orders = {
        "": "step",
        "created": "date",
        "size": "size",
        **{f"metric:{name}": name for name in metrics},
    }
    sort = el("label", "Sort by ", choice("sort", "field-sort", orders, asked["sort"], "", orders))
    return el(
        "form",
        fields,
        sort,
        el("button", "Show", type="submit"),
        action=address("run", run),
        class_="fields",
        role="search",
    )


def storage_page(
    runs: Sequence[dict[str, Any]],
    sums: Mapping[str, int],
    freed: Mapping[str, int] | None,
    viewer: Viewer,
) -> str:
    """The storage that the largest runs use, and what the rules would free of it.

    `freed` has the bytes to free by run. It is None if there are no rules.
    """
    total, rows = sums["stored_bytes"], []
    for one in runs:
        nbytes = one["stored_bytes"] or 0
        share = nbytes / total if total else 0
        bar = el(
            "meter",
            f"{share:.0%}",
            value=f"{share:.4f}",
            min=0,
            max=1,
            aria_label=f"share of {one['run']}",
        )
        each = nbytes // max(1, one["committed"])
        nothing = freed is None or one["run"] not in freed
        rows.append(
            (
                link("run", one["run"], one["run"]),
                data("stored", nbytes, file_size(nbytes)),
                bar,
                f"{one['committed']:,}",
                data("each", each, file_size(each)),
                f"{one['pinned']:,}",
                data("unfinished", one["unfinished_bytes"], file_size(one["unfinished_bytes"])),
                *(
                    ()
                    if freed is None
                    else (
                        "–"
                        if nothing
                        else data("freed", freed[one["run"]], file_size(freed[one["run"]])),
                    )
                ),
            )
        )
    numbers = (
        "Checkpoints",
        "Each",
        "Pinned",
        "Unfinished saves",
        *(() if freed is None else ("Rules free",)),
    )
    heads = (
        ("Run", False),
        ("Stored", True),
        ("Share", False),
        *((name, True) for name in numbers),
    )
    note = el(
        "p",
        "Bytes of chunks as stored. Tensors that a checkpoint left in its base count where they "
        "lie.",
        class_="quiet",
    )
    listed = table(heads, rows, caption=_of(len(rows), sums["runs"], "run"), ident="storage")
    totals = [
        ("Stored", file_size(total)),
        ("By unfinished saves", file_size(sums["unfinished_bytes"])),
        ("Runs", f"{sums['runs']:,}"),
    ]
    totals += [] if freed is None else [("Rules would free", file_size(sum(freed.values())))]
    body = section("By run", facts(totals), note, listed)
    return frame(
        "Storage",
        el("main", el("h1", "Storage"), body, id="main"),
        here="/ui/storage",
        viewer=viewer,
    )


def _of(shown: int, total: int, noun: str) -> str:
    """A number of rows, among how many there are."""
    return count(total, noun) if shown >= total else f"{shown:,} of {count(total, noun)}"


_BETTER = {-1: ("loss", "perplexity", "ppl", "error", "wer"), 1: ("acc", "score", "bleu", "reward")}
"""Words in names of metrics of which less, or more, is better."""
_LEGEND = (
    ("committed", "committed"),
    ("pinned", "pinned or tagged"),
    ("superseded", "superseded"),
    ("uncommitted", "not committed"),
    ("unreadable", "damaged"),
)


def best_steps(entries: Sequence[dict[str, Any]], metrics: Sequence[str]) -> dict[str, list[str]]:
    """Names of the metrics in which a checkpoint is the best, by its id.

    Of metrics whose names say whether less is better.
    """
    best: dict[str, list[str]] = {}
    for name in metrics:
        sign = next(
            (n for n, words in _BETTER.items() if any(word in name.lower() for word in words)), 0
        )
        known = [
            (sign * float(value), one["id"])
            for one in entries
            if (value := one["metrics"].get(name)) is not None
        ]
        if sign and (finite := [one for one in known if isfinite(one[0])]):
            best.setdefault(max(finite)[1], []).append(name)
    return best


def _row(
    one: dict[str, Any], before: str | None, metrics: Sequence[str], best: Sequence[str]
) -> list[Any]:
    values = [one["metrics"].get(name) for name in metrics]
    state = el(
        "span",
        f"{one['state']}{words(one)}" if one["state"] == "committed" else one["state"],
        class_=f"state {kind(one)}",
    )
    return [
        link("checkpoint", one["id"], one["name"]),
        when(one["created"]),
        "–" if one["tensors"] is None else data("tensors", one["tensors"], f"{one['tensors']:,}"),
        "–"
        if one["stored_bytes"] is None
        else data("stored_bytes", one["stored_bytes"], file_size(one["stored_bytes"])),
        *(
            "–" if v is None else v if isinstance(v, str) else data("metric", v, f"{v:.6g}")
            for v in values
        ),
        el(
            "span",
            state,
            " ",
            el("strong", f"best {', '.join(best)}") if best else None,
            el("small", one["reason"] or ""),
        ),
        "" if before is None else _compare(before, one["id"]),
    ]


def _compare(a: str, b: str) -> Html:
    query = urlencode({"a": a, "b": b}, errors="surrogatepass")
    return el("a", "diff", aria_label="compare with the step before", href=f"/ui/diff?{query}")


def _remarks(one: dict[str, Any]) -> Html:
    remarks = [
        (one["pinned"], "pinned", "pinned"),
        (one["uncommitted"], "not committed", "uncommitted"),
        (one["unreadable"] + one["damaged"], "damaged", "unreadable"),
    ]
    gone = el("span", "vanished ", class_="state mark-unreadable") if one["vanished"] else None
    return el(
        "span",
        gone,
        [
            el("span", f"{n:,} {text} ", class_=f"state mark-{name}")
            for n, text, name in remarks
            if n
        ],
    )


def _problems(doc: dict[str, Any], vanished: Mapping[str, str]) -> list[Html]:
    # All pages tell of those.
    unreachable = [one for one in doc["unreachable"].items() if one[0] not in vanished]
    notices = [
        el("p", f"The root {name} cannot be listed now: {why}", class_="bad", role="alert")
        for name, why in unreachable
    ]
    if over := doc["passed_over"]:
        listed = el("ul", [el("li", f"{ident}: {why}") for ident, why in over.items()])
        notices.append(
            el(
                "details",
                el("summary", f"{count(len(over), 'place')} cannot be read"),
                listed,
                class_="bad",
            )
        )
    return (
        notices
        if doc["complete"]
        else [el("p", "The roots are being scanned; more will follow.", role="status"), *notices]
    )
