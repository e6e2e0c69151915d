"""The HTML page of a plan: the numbers of the JSON document, in the order of a reader's questions.

First the verdict, the costs, and the bytes that restores read with the reshard and without it. Then
the holders of data before and after, the bytes from host to host, and the balance. Then every
tensor, the costliest first, with the rule that decided.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from shardckpt._version import __version__
from shardckpt.layout.text import spec_text
from shardckpt.reading.inspection.figures import tile_grid
from shardckpt.reading.inspection.markup import Html, data, el
from shardckpt.reshard.forecast.words import (
    assumptions,
    factor,
    notice_text,
    rate_text,
    route,
    span_text,
    verdict,
)
from shardckpt.serve.pages.frame import section
from shardckpt.serve.pages.plan_hosts import (
    balance_section,
    flow_section,
    on_one_host,
    one_host_section,
)
from shardckpt.text import count, file_size, shape_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.reshard.forecast.forecast import Forecast

MOST_KINDS = 6
"""Most drawings of layouts: one for each kind of tensor, the kinds with most bytes read first."""


def page(forecast: Forecast, doc: dict[str, Any]) -> str:
    """The page of a plan.

    Args:
        forecast: the plan, for its layouts.
        doc: its document (`reshard.forecast.document`), for all numbers.
    """
    style, script = (
        Html(resources.files(__package__).joinpath(f"plan.{kind}").read_text("utf-8"))
        for kind in ("css", "js")
    )
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; script-src "
        f"'sha256-{_digest(script)}'; base-uri 'none'"
    )
    head = [
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"Reshard plan: {doc['source']['url']}"),
        el("style", style),
    ]
    body = el("body", *plan_parts(forecast, doc), el("script", script))
    return "<!DOCTYPE html>\n" + el("html", el("head", head), body, lang="en") + "\n"


def plan_parts(forecast: Forecast, doc: dict[str, Any]) -> list[Html]:
    """The plan as a header, a main part, a footer, and the data of the heat map for the script."""
    main = el(
        "main",
        _facts(doc),
        _restores(doc),
        _layouts(forecast, doc),
        *(
            [one_host_section(doc)]
            if on_one_host(doc)
            else [flow_section(forecast, doc), balance_section(forecast, doc)]
        ),
        _notices(forecast, doc),
        _tensors(forecast, doc),
    )
    # Inside a script element only `<` could end the element, or begin a comment.
    flow = el(
        "script",
        Html(json.dumps(doc["flow"]).replace("<", "\\u003c")),
        type="application/json",
        id="flow",
    )
    footer = el(
        "footer",
        [el("p", sentence) for sentence in assumptions(doc)],
        el("p", f"Made by shardckpt {__version__}."),
    )
    return [_header(doc), main, footer, flow]


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _header(doc: dict[str, Any]) -> Html:
    source, target = route(doc)
    sides = [
        el(
            "div",
            el("p", "From", class_="quiet"),
            el("p", el("code", doc["source"]["url"])),
            el("p", source),
        ),
        el(
            "div",
            el("p", "To", class_="quiet"),
            el("p", el("code", doc["target"]["url"])) if doc["target"]["url"] else None,
            el("p", target),
        ),
    ]
    return el(
        "header",
        el("h1", "Reshard plan"),
        el("div", sides, class_="route"),
        el("p", verdict(doc), class_="verdict"),
    )


def _facts(doc: dict[str, Any]) -> Html:
    reshard = doc["reshard"]

    def fact(title: str, key: str, text: str, note: str = "") -> Html:
        value = data(f"reshard.{key}", reshard[key], text)
        return el("div", el("dt", title), el("dd", value, el("small", note) if note else None))

    rates = doc["rates"]
    facts = [
        fact(
            "Reads",
            "bytes_read",
            file_size(reshard["bytes_read"]),
            f"{factor(reshard['amplification'])} of what is stored",
        ),
        fact(
            "Writes",
            "bytes_written",
            file_size(reshard["bytes_written"]),
            count(reshard["chunks"], "chunk"),
        ),
        fact(
            "Read requests",
            "requests",
            "not known" if reshard["requests"] is None else f"{reshard['requests']:,}",
        ),
        fact("Files", "files", f"{reshard['files']:,}", "of chunks, about"),
        fact(
            "Peak memory",
            "peak_memory",
            file_size(reshard["peak_memory"]),
            f"of {file_size(reshard['memory_limit'])} allowed",
        ),
        fact(
            "Tasks",
            "tasks",
            f"{reshard['tasks']:,}",
            f"{count(reshard['workers'], 'worker')} on one machine",
        ),
        fact("Time", "seconds", span_text(reshard["seconds"]), rate_text(rates)),
    ]
    return section("Cost of the reshard", el("dl", facts, class_="facts"))


def _restores(doc: dict[str, Any]) -> Html:
    def row(title: str, key: str) -> Html:
        cost = doc[key]
        cells = [
            data(f"{key}.bytes_read", cost["bytes_read"], file_size(cost["bytes_read"])),
            data(f"{key}.amplification", cost["amplification"], factor(cost["amplification"])),
            data(f"{key}.largest_host", cost["largest_host"], file_size(cost["largest_host"])),
            data(f"{key}.mean_host", cost["mean_host"], file_size(cost["mean_host"])),
            data(
                f"{key}.requests",
                cost["requests"],
                "–" if cost["requests"] is None else f"{cost['requests']:,}",
            ),
            data(f"{key}.seconds", cost["seconds"], span_text(cost["seconds"])),
        ]
        return el(
            "tr", el("th", title, scope="row"), [el("td", cell, class_="n") for cell in cells]
        )

    heads = (
        "Read by all hosts",
        "Amplification",
        "Host with most",
        "Mean host",
        "Requests",
        "Time",
    )
    head = el("tr", el("td"), [el("th", text, scope="col", class_="n") for text in heads])
    rows = [row("As it is stored", "restore"), row("After the reshard", "restore_after")]
    needed = data(
        "restore.bytes_needed",
        doc["restore"]["bytes_needed"],
        file_size(doc["restore"]["bytes_needed"]),
    )
    hosts = doc["target"]["hosts"]
    restore, their = ("restores", "its") if hosts == 1 else ("restore", "their")
    caption = el(
        "caption",
        f"{count(hosts, 'host')} {restore} onto the new layout; {their} devices need ",
        needed,
        ".",
    )
    table = el(
        "table", caption, el("thead", head), el("tbody", rows), id="restores", class_="cards"
    )
    return section(
        "Bytes that a restore reads",
        el(
            "div",
            table,
            class_="scroll",
            tabindex=0,
            role="region",
            aria_label="Bytes that a restore reads",
        ),
    )


def _layouts(forecast: Forecast, doc: dict[str, Any]) -> Html:
    """Drawings of the kinds of tensors with most bytes read, before and after."""
    kinds: dict[Any, list[dict[str, Any]]] = {}
    for entry in doc["tensors"]:
        name = entry["name"]
        key = (
            tuple(entry["shape"]),
            entry["dtype"],
            forecast.plan.sources[name].layout,
            forecast.plan.decisions[name].layout,
        )
        kinds.setdefault(key, []).append(entry)
    ranked = sorted(
        kinds.items(), key=lambda kind: -sum(entry["restore_bytes"] for entry in kind[1])
    )
    by_device = on_one_host(doc)
    figures = [
        _kind(forecast, key, entries, by_device=by_device) for key, entries in ranked[:MOST_KINDS]
    ]
    rest = len(ranked) - len(figures)
    note = (
        f"A colour is a {'device' if by_device else 'host'}, numbered where there is room; fine "
        "lines are chunks."
    )
    more = (
        f" The {MOST_KINDS} kinds of tensors with most bytes; {rest:,} more are in the table."
        if rest > 0
        else ""
    )
    return section(
        "Layouts before and after",
        el("p", note + more, class_="quiet"),
        el("div", figures, class_="kinds"),
    )


def _kind(forecast: Forecast, key: Any, entries: list[dict[str, Any]], *, by_device: bool) -> Html:
    shape, dtype, before, after = key
    name = entries[0]["name"]
    source, target = forecast.plan.sources[name], forecast.plan.target.tensors[name]
    nbytes = sum(entry["restore_bytes"] for entry in entries)
    others = f" and {count(len(entries) - 1, 'tensor')} like it" if len(entries) > 1 else ""
    sides = []
    for title, layout, hosts, tensor, plain in (
        ("Now", before, forecast.source_hosts, source, "plain, from the host"),
        ("Then", after, forecast.hosts, target, "whole, on every host"),
    ):
        chunks = tensor.pieces[0].chunks
        grid = tile_grid(
            f"{title}: {name}",
            layout,
            shape,
            None if by_device else hosts.owners.of_devices,
            chunks,
            plain,
        )
        sides.append(
            el(
                "div",
                el("p", f"{title}: {spec_text(layout)}"),
                grid,
                el("p", f"chunks {shape_text(chunks)}", class_="quiet"),
            )
        )
    pair = el(
        "div", sides[0], el("div", "→", class_="arrow", aria_hidden="true"), sides[1], class_="pair"
    )
    caption = el(
        "figcaption",
        f"{shape_text(shape)} {dtype}; a restore reads {file_size(nbytes)} of "
        f"{'them' if others else 'it'}.",
    )
    return el("figure", el("h3", el("code", name), others), pair, caption)


def _notices(forecast: Forecast, doc: dict[str, Any]) -> Html | None:
    items = [f"dtype: {one}" for one in forecast.plan.conversions] + [
        notice_text(notice) for notice in doc["notices"]
    ]
    return (
        section("Notices", el("ul", [el("li", item) for item in items], class_="notices"))
        if items
        else None
    )


_COLUMNS = (
    ("Tensor", None),
    ("Shape", None),
    ("Size", "bytes"),
    ("Now", None),
    ("Then", None),
    ("A restore reads", "restore_bytes"),
    ("Amplification", "restore_amplification"),
    ("After", "restore_after_amplification"),
    ("Rule", None),
)
"""Title of each column, and for numbers the key in the document."""


def _tensors(forecast: Forecast, doc: dict[str, Any]) -> Html:
    heads = [
        el(
            "th",
            el("button", title, type="button"),
            scope="col",
            class_="n" if key else None,
            data_key=key,
            aria_sort="descending" if key == "restore_bytes" else "none",
        )
        for title, key in _COLUMNS
    ]
    table = el(
        "table",
        el("thead", el("tr", heads)),
        el("tbody", list(_rows(forecast, doc))),
        id="tensors",
        class_="cards",
    )
    label = el(
        "label",
        "Show names that contain ",
        el("input", type="search", id="filter", autocomplete="off"),
    )
    status = el("p", "", id="shown", class_="quiet", aria_live="polite")
    return section(
        "Tensors",
        label,
        status,
        el("div", table, class_="scroll", tabindex=0, role="region", aria_label="Tensors"),
    )


def _rows(forecast: Forecast, doc: dict[str, Any]) -> Iterator[Html]:
    words = cache(spec_text)  # tensors share their layouts
    for t in doc["tensors"]:

        def number(what: str, text: str, t: dict[str, Any] = t) -> Html:
            return el("td", el("data", text, value="" if t[what] is None else t[what]))

        cast = "" if t["dtype"] == t["source_dtype"] else f"{t['source_dtype']} → "
        yield el(
            "tr",
            el("td", t["name"]),
            el("td", shape_text(t["shape"]), el("small", cast + t["dtype"])),
            number("bytes", file_size(t["bytes"])),
            el("td", words(forecast.plan.sources[t["name"]].layout)),
            el("td", words(forecast.plan.decisions[t["name"]].layout)),
            number("restore_bytes", file_size(t["restore_bytes"])),
            number("restore_amplification", factor(t["restore_amplification"])),
            number("restore_after_amplification", factor(t["restore_after_amplification"])),
            el(
                "td",
                el("code", t["rule"]) if t["rule"] else None,
                el("small", t["why"]),
                [el("small", n) for n in t["notices"] if n != t["why"]],
            ),
        )
