"""Pages of all runs, of one run, and of the storage that they use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from shardckpt.excerpt import count, file_size
from shardckpt.serve.pages.charts import kind, metric_chart, time_line, words
from shardckpt.serve.pages.frame import Viewer, address, crumbs, facts, frame, link, more, search, table, when
from shardckpt.serve.pages.markup import Html, data, el
from shardckpt.serve.pages.plan import section

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_METRICS = 6


def runs_page(doc: dict[str, Any], text: str | None, viewer: Viewer) -> str:
    """All runs."""
    rows = [
        (
            link("run", one["run"], one["run"]),
            data("checkpoints", one["checkpoints"], f"{one['checkpoints']:,}"),
            "–" if one["last_step"] is None else data("last_step", one["last_step"], f"{one['last_step']:,}"),
            data("stored_bytes", one["stored_bytes"], file_size(one["stored_bytes"] or 0)),
            when(one["created"]),
            _remarks(one),
        )
        for one in doc["runs"]
    ]
    heads = (("Run", False), ("Checkpoints", True), ("Last step", True), ("Stored", True), ("Last commit", False), ("Remarks", False))
    parts: list[Html | None] = [search("Runs whose name contains", "text", text), *_problems(doc)]
    parts.append(table(heads, rows, caption=count(len(rows), "run"), ident="runs") if rows else el("p", "There are no runs."))
    parts.append(more("/ui/runs", text=text, cursor=doc["next"]) if doc["next"] else None)
    return frame("Runs", el("main", el("h1", "Runs"), section("All runs", *parts), id="main"), here="/ui/runs", viewer=viewer)


def run_page(
    run: str, entries: Sequence[dict[str, Any]], following: str | None, viewer: Viewer, sections: Sequence[Html | None] = ()
) -> str:
    """A run: its metrics and steps over time, its checkpoints, and further sections."""
    names = list(dict.fromkeys(name for one in entries for name in one["metrics"]))
    charts = [metric_chart(name, entries) for name in names[:MOST_METRICS]]
    hidden = len(names) - len(charts)
    legend = el("p", [el("span", text, class_=f"legend-mark mark-{name}") for name, text in _LEGEND], class_="quiet")
    rows = [_row(one, entries[i - 1]["id"] if i else None, names[:MOST_METRICS]) for i, one in enumerate(entries)]
    heads = [("Checkpoint", False), ("Created", False), ("Tensors", True), ("Stored", True)]
    heads += [(name, True) for name in names[:MOST_METRICS]] + [("State", False), ("Compare", False)]
    stored, pinned = sum(one["stored_bytes"] or 0 for one in entries), sum(one["pinned"] for one in entries)
    listed = table(heads, reversed(rows), caption=count(len(rows), "checkpoint"), ident="checkpoints")
    main = el(
        "main",
        el("h1", run),
        section(
            "Steps",
            facts([("Checkpoints", f"{len(entries):,}"), ("Stored", file_size(stored)), ("Pinned", f"{pinned:,}")]),
            el("div", time_line(entries), charts, class_="charts"),
            legend,
            el("p", f"{count(hidden, 'more metric')}; the checkpoints have them.", class_="quiet") if hidden else None,
        ),
        section("Checkpoints", listed, more(address("run", run), cursor=following) if following else None),
        *sections,
        id="main",
    )
    return frame(run, crumbs(run, checkpoint=False), main, here="/ui/runs", viewer=viewer)


def storage_page(runs: Sequence[dict[str, Any]], freed: Mapping[str, int] | None, viewer: Viewer) -> str:
    """The storage that each run uses, and what the rules would free of it (`freed`, by run; None: there are no rules)."""
    ranked = sorted(runs, key=lambda one: -(one["stored_bytes"] or 0))
    total = sum(one["stored_bytes"] or 0 for one in ranked)
    rows = []
    for one in ranked:
        nbytes = one["stored_bytes"] or 0
        share = nbytes / total if total else 0
        bar = el("meter", f"{share:.0%}", value=f"{share:.4f}", min=0, max=1, aria_label=f"share of {one['run']}")
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
                *(() if freed is None else ("–" if nothing else data("freed", freed[one["run"]], file_size(freed[one["run"]])),)),
            )
        )
    heads = (
        ("Run", False),
        ("Stored", True),
        ("Share", False),
        ("Checkpoints", True),
        ("Each", True),
        ("Pinned", True),
        *(() if freed is None else (("Rules free", True),)),
    )
    note = el("p", "Bytes of chunks as stored. Tensors that a checkpoint left in its base count where they lie.", class_="quiet")
    listed = table(heads, rows, caption=count(len(rows), "run"), ident="storage")
    said = [("Stored", file_size(total)), ("Runs", f"{len(ranked):,}")]
    said += [] if freed is None else [("Rules would free", file_size(sum(freed.values())))]
    body = section("By run", facts(said), note, listed)
    return frame("Storage", el("main", el("h1", "Storage"), body, id="main"), here="/ui/storage", viewer=viewer)


_LEGEND = (
    ("committed", "committed"),
    ("pinned", "pinned or tagged"),
    ("superseded", "superseded"),
    ("uncommitted", "not committed"),
    ("unreadable", "damaged"),
)


def _row(one: dict[str, Any], before: str | None, metrics: Sequence[str]) -> list[Any]:
    values = [one["metrics"].get(name) for name in metrics]
    state = el("span", f"{one['state']}{words(one)}" if one["state"] == "committed" else one["state"], class_=f"state {kind(one)}")
    return [
        link("checkpoint", one["id"], one["name"]),
        when(one["created"]),
        "–" if one["tensors"] is None else data("tensors", one["tensors"], f"{one['tensors']:,}"),
        "–" if one["stored_bytes"] is None else data("stored_bytes", one["stored_bytes"], file_size(one["stored_bytes"])),
        *("–" if v is None else v if isinstance(v, str) else data("metric", v, f"{v:.6g}") for v in values),
        el("span", state, el("small", one["reason"]) if one["reason"] else None),
        "" if before is None else _compare(before, one["id"]),
    ]


def _compare(a: str, b: str) -> Html:
    query = urlencode({"a": a, "b": b}, errors="surrogatepass")
    return el("a", "diff", aria_label="compare with the step before", href=f"/ui/diff?{query}")


def _remarks(one: dict[str, Any]) -> Html:
    said = [
        (one["pinned"], "pinned", "pinned"),
        (one["uncommitted"], "not committed", "uncommitted"),
        (one["unreadable"] + one["damaged"], "damaged", "unreadable"),
    ]
    return el("span", [el("span", f"{n:,} {text} ", class_=f"state mark-{name}") for n, text, name in said if n])


def _problems(doc: dict[str, Any]) -> list[Html]:
    unreachable = doc["unreachable"].items()
    found = [el("p", f"The root {name} cannot be listed now: {why}", class_="bad", role="alert") for name, why in unreachable]
    return found if doc["complete"] else [el("p", "The roots are being scanned; more will follow.", role="status"), *found]
