"""The sections of a plan's page about hosts: the bytes from host to host, and the balance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.reading.inspection.markup import Html, data, el
from shardckpt.reshard.forecast.words import hosts_text
from shardckpt.serve.pages.figures import LEVELS, balance, heat_map, ribbons
from shardckpt.serve.pages.frame import section
from shardckpt.text import count, file_size

if TYPE_CHECKING:
    from shardckpt.reshard.forecast.forecast import Forecast

MOST_FLOW_ROWS = 40
"""Most rows of the table beside the heat map: the pairs of hosts with most bytes."""


def on_one_host(doc: dict[str, Any]) -> bool:
    """Whether no bytes go from host to host."""
    return bool(doc["source"]["hosts"] == doc["target"]["hosts"] == 1)


def one_host_section(doc: dict[str, Any]) -> Html:
    """The section about hosts for a plan with one host."""
    before, after = (file_size(doc[key]["bytes_read"]) for key in ("restore", "restore_after"))
    devices = count(doc["target"]["devices"], "device")
    text = (
        f"One host wrote everything, and one host, with {devices}, restores it: it reads {before} "
        f"as it is stored, and {after} after the reshard. No byte goes from host to host."
    )
    hint = (
        "With --devices-per-host, a plan for several hosts shows which bytes go where, and who "
        "reads most."
    )
    return section("Hosts", el("p", text), el("p", hint, class_="quiet"))


def flow_section(forecast: Forecast, doc: dict[str, Any]) -> Html:
    """The bytes from host to host: a map of all pairs, ribbons, and a table."""
    flow, nbytes = doc["flow"], forecast.before.flow.nbytes
    writers, readers = flow["source_hosts"], flow["target_hosts"]
    squares = [el("rect", x=k, width=1, height=1, class_=f"h{k}") for k in range(LEVELS)]
    legend = el(
        "svg", squares, viewBox=f"0 0 {LEVELS} 1", preserveAspectRatio="none", aria_hidden="true"
    )
    rows = []
    for at in np.argsort(-nbytes, axis=None, kind="stable")[:MOST_FLOW_ROWS]:
        i, j = (int(k) for k in np.unravel_index(at, nbytes.shape))
        if nbytes[i, j]:
            moved = el(
                "td",
                data(f"flow.bytes.{i}.{j}", int(nbytes[i, j]), file_size(int(nbytes[i, j]))),
                class_="n",
            )
            rows.append(
                el("tr", el("td", hosts_text(writers[i])), el("td", hosts_text(readers[j])), moved)
            )
    heads = el(
        "tr",
        el("th", "Wrote", scope="col"),
        el("th", "Reads", scope="col"),
        el("th", "Bytes", scope="col", class_="n"),
    )
    shown = f"The {len(rows):,} pairs with most bytes of {int((nbytes > 0).sum()):,}."
    table = el(
        "details",
        el("summary", "As a table"),
        el("table", el("caption", shown), el("thead", heads), el("tbody", rows)),
    )
    heat = el(
        "figure",
        el(
            "p",
            f"Down: who wrote, {hosts_text((0, writers[-1][1]))}. Across: who would read. Point "
            "at a cell, or use the arrow keys on it.",
            class_="quiet",
        ),
        heat_map(nbytes, writers, readers),
        el(
            "div",
            el("span", hosts_text(readers[0])),
            el("span", hosts_text(readers[-1])),
            class_="axis-x",
        ),
        el(
            "div",
            el("span", "nothing"),
            legend,
            el("span", file_size(int(nbytes.max(initial=0)))),
            class_="legend",
        ),
        el("output", "", id="cell", aria_live="polite"),
        table,
    )
    who = (
        "who wrote each chunk is read from the chunk tables"
        if flow["exact"]
        else "each host of a box is taken to have written its share"
    )
    note = el("p", f"Bytes that a restore of what is stored now reads; {who}.", class_="quiet")
    return section(
        "Flow between hosts",
        note,
        el("div", el("figure", ribbons(nbytes, writers, readers)), heat, class_="two flow"),
    )


def balance_section(forecast: Forecast, doc: dict[str, Any]) -> Html:
    """The bytes that each host reads, before and after."""
    keys = el(
        "p",
        el("span", "as it is stored", class_="key"),
        el("span", "after the reshard", class_="key after"),
        class_="quiet",
    )
    spans = doc["flow"]["target_hosts"]
    grouped = (
        " Where hosts share a bar it is that of the one with most."
        if len(spans) < doc["target"]["hosts"]
        else ""
    )
    ends = el(
        "div", el("span", hosts_text(spans[0])), el("span", hosts_text(spans[-1])), class_="axis-x"
    )
    highest = file_size(
        int(max(forecast.before.read.max(initial=0), forecast.after.read.max(initial=0)))
    )
    figure = el("figure", balance(forecast.before.read, forecast.after.read, spans), ends)
    return section(
        "Balance over the target hosts",
        el("p", f"Bytes that each host reads, up to {highest}.{grouped}", class_="quiet"),
        figure,
        keys,
    )
