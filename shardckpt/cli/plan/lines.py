"""A plan in the terminal: verdict, costs, data holders before and after, bytes between hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.cli.info.picture import picture
from shardckpt.cli.screen import Cell, Screen, column_widths
from shardckpt.cli.text import conversion_lines
from shardckpt.errors import NamesMismatchError
from shardckpt.layout.placements import Placements
from shardckpt.layout.text import spec_text
from shardckpt.reshard.forecast.hosts import joined
from shardckpt.reshard.forecast.words import (
    assumptions,
    factor,
    hosts_text,
    notice_text,
    rate_text,
    route,
    span_text,
    verdict,
)
from shardckpt.state.names import shown
from shardckpt.text import clip, count, file_size, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reshard.forecast.forecast import Forecast
    from shardckpt.reshard.options import ReshardOptions
    from shardckpt.reshard.plan import ReshardPlan

MOST_TENSORS = 10
MOST_NOTICES = 8
MOST_HEAT = 24
"""Most rows of the heat map; its columns are limited by the width of the terminal, too."""
MOST_BARS = 16
LONGEST_RULE = LONGEST_SPEC = 40
LEAST_SPEC = 8
_NUMBERS = 33
"""Columns of the numbers in the table of tensors, and of the gaps between them."""
SHADES = " ░▒▓█"
"""Shades of a heat map cell: none for 0 bytes, then one for each quarter of the maximum."""


def lines(screen: Screen, forecast: Forecast, doc: dict[str, Any]) -> Iterator[str]:
    """All lines of the plan."""
    source, target = route(doc)
    begins = [visible(doc["source"]["url"]), *_fold(source, screen.width - 10)]
    ends = [
        *([visible(doc["target"]["url"])] if doc["target"]["url"] else []),
        *_fold(target, screen.width - 10),
    ]
    for what, texts in (("from", begins), ("to", ends)):
        yield from screen.rows(
            [[Cell("" if i else what, "dim"), Cell(text)] for i, text in enumerate(texts)], (8, 0)
        )
    yield ""
    yield from _wrap(screen, verdict(doc), "bold")
    yield ""
    yield from _costs(screen, doc)
    yield ""
    yield from _tensors(screen, forecast, doc)
    yield from conversion_lines(forecast.plan.conversions)
    yield from _picture(screen, forecast, doc)
    yield from _balance(screen, forecast, doc)
    yield from _heat(screen, forecast, doc)
    for notice in doc["notices"][:MOST_NOTICES]:
        yield from _wrap(screen, f"note: {notice_text(notice)}", "yellow")
    if len(doc["notices"]) > MOST_NOTICES:
        yield f"… and {len(doc['notices']) - MOST_NOTICES:,} more notices"
    for sentence in assumptions(doc):
        yield from _wrap(screen, sentence, "dim")


def _fold(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; a longer word has its own line."""
    from textwrap import wrap

    return wrap(text, max(20, width), break_on_hyphens=False, break_long_words=False)


def _wrap(screen: Screen, text: str, style: str) -> Iterator[str]:
    yield from (screen.paint(line, style) for line in _fold(text, screen.width))


def _costs(screen: Screen, doc: dict[str, Any]) -> Iterator[str]:
    """Bytes read and written, by the reshard and by restores without it and after it."""
    reshard = doc["reshard"]
    head = ("", "reads", "writes", "ampl.", "requests", "largest host", "time")
    rows = [[Cell(text, "dim", right=i > 0) for i, text in enumerate(head)]]
    rows.append(_cost_row("reshard", reshard, file_size(reshard["bytes_written"]), ""))
    for name, key in (("restore as is", "restore"), ("restore after", "restore_after")):
        rows.append(_cost_row(name, doc[key], "", file_size(doc[key]["largest_host"])))
    yield from screen.table(rows)
    yield ""
    memory = (
        f"{file_size(reshard['peak_memory'])} of buffers at most, of "
        f"{file_size(reshard['memory_limit'])} allowed"
    )
    work = f"{count(reshard['tasks'], 'task')} for {count(reshard['workers'], 'worker')}"
    made = f"{count(reshard['chunks'], 'chunk')} in about {count(reshard['files'], 'file')}"
    for what, text in (
        ("memory", memory),
        ("work", work),
        ("makes", made),
        ("rates", rate_text(doc["rates"])),
    ):
        if text:
            yield from screen.rows([[Cell(what, "dim"), Cell(text)]], (8, 0))


def _cost_row(name: str, costs: dict[str, Any], written: str, most: str) -> list[Cell]:
    requests = "–" if costs["requests"] is None else f"{costs['requests']:,}"
    texts = (
        file_size(costs["bytes_read"]),
        written,
        factor(costs["amplification"]),
        requests,
        most,
        span_text(costs["seconds"]),
    )
    return [Cell(name), *(Cell(text, right=True) for text in texts)]


def _tensors(screen: Screen, forecast: Forecast, doc: dict[str, Any]) -> Iterator[str]:
    """The costliest tensors."""
    short = max(LEAST_SPEC, (screen.width - screen.width // 3 - _NUMBERS) // 2)
    for longest, rule_below in ((LONGEST_SPEC, False), (LONGEST_SPEC, True), (short, True)):
        rows = [*_tensor_rows(forecast, doc, longest, rule_below=rule_below)]
        if sum(column_widths(rows)) + 2 * len(rows[0]) - 2 <= screen.width:
            break
    yield from screen.table(rows)
    if len(doc["tensors"]) > MOST_TENSORS:
        yield screen.paint(
            f"… and {len(doc['tensors']) - MOST_TENSORS:,} more, with fewer bytes read", "dim"
        )


def _tensor_rows(
    forecast: Forecast, doc: dict[str, Any], longest: int, *, rule_below: bool
) -> Iterator[list[Cell]]:
    """Rows of the table of tensors, with specs of at most `longest` characters.

    Rules in a column, or each below its tensor.
    """
    heads = ("tensor", "now", "then", "reads", "ampl.", "after", *(() if rule_below else ("rule",)))
    yield [Cell(text, "dim", right=2 < i < 6) for i, text in enumerate(heads)]
    for t in doc["tensors"][:MOST_TENSORS]:
        before, after = (
            forecast.plan.sources[t["name"]].layout,
            forecast.plan.decisions[t["name"]].layout,
        )
        rule = Cell(visible(clip(t["rule"], LONGEST_RULE)), "cyan")
        row = [
            Cell(visible(t["name"]), "bold"),
            Cell(clip(spec_text(before), longest), "magenta"),
            Cell(clip(spec_text(after), longest), "magenta"),
            Cell(file_size(t["restore_bytes"]), right=True),
            Cell(factor(t["restore_amplification"]), right=True),
            Cell(factor(t["restore_after_amplification"]), right=True),
        ]
        if not rule_below:
            yield [*row, rule]
            continue
        yield row
        if rule.text:
            yield [rule._replace(text=f"  rule {rule.text}"), *[Cell("")] * (len(row) - 1)]


def _picture(screen: Screen, forecast: Forecast, doc: dict[str, Any]) -> Iterator[str]:
    """The costliest tensor, drawn before and after."""
    if not doc["tensors"]:
        return
    name = doc["tensors"][0]["name"]
    shape = forecast.plan.target.tensors[name].shape
    for when, layout in (
        ("now", forecast.plan.sources[name].layout),
        ("then", forecast.plan.decisions[name].layout),
    ):
        yield ""
        yield screen.paint(f"{visible(name)} {when}: {spec_text(layout)}", "bold")
        if layout is None or isinstance(layout, Placements):
            continue
        yield from picture(screen, layout, shape)


def _balance(screen: Screen, forecast: Forecast, doc: dict[str, Any]) -> Iterator[str]:
    """Bars of the bytes that each target host reads as stored, with a mark for after a reshard."""
    spans = doc["flow"]["target_hosts"]
    step = -(-len(spans) // MOST_BARS)
    grouped_hosts = [
        (spans[i][0], spans[min(i + step, len(spans)) - 1][1]) for i in range(0, len(spans), step)
    ]
    most = max(1, int(forecast.before.read.max(initial=0)), int(forecast.after.read.max(initial=0)))
    names = [hosts_text(span) for span in grouped_hosts]
    width = max(10, min(50, screen.width - max(map(len, names)) - 14))
    yield ""
    grouped = ": the most of them" if step > 1 or len(spans) < forecast.hosts.number else ""
    yield f"Each host reads, as it is stored (█) and after the reshard (│){grouped}"
    for name, (first, stop) in zip(names, grouped_hosts, strict=True):
        before, after = (
            int(reads[first:stop].max(initial=0))
            for reads in (forecast.before.read, forecast.after.read)
        )
        bar = list(("█" * round(before / most * width)).ljust(width + 1))
        at = min(width, round(after / most * width))
        bar[at] = "│"
        yield (
            f"  {name:>{max(map(len, names))}} {screen.paint(''.join(bar), 'cyan')} "
            f"{file_size(before)}"
        )


def _heat(screen: Screen, forecast: Forecast, doc: dict[str, Any]) -> Iterator[str]:
    """Heat map of bytes by the hosts that wrote them (down) and that read them (across)."""
    nbytes = forecast.before.flow.nbytes
    if nbytes.size <= 1:
        return
    rows, writers = joined(nbytes, doc["flow"]["source_hosts"], MOST_HEAT)
    across, readers = joined(
        rows.T, doc["flow"]["target_hosts"], max(4, min(64, (screen.width - 20) // 2))
    )
    cells = across.T
    most = max(1, int(cells.max(initial=0)))
    shades = np.where(cells > 0, 1 + np.minimum((cells * 4 - 1) // most, 3), 0)
    names = [hosts_text(span) for span in writers]
    margin = max(map(len, names))
    first, last = hosts_text(readers[0]), hosts_text(readers[-1])
    yield ""
    yield from _wrap(
        screen,
        "Bytes by the hosts that wrote them (down) and those that read them (across); █ is up to "
        f"{file_size(most)}",
        "",
    )
    yield " " * (margin + 3) + (first if len(readers) == 1 else f"{first} … {last}")
    for name, row in zip(names, shades.tolist(), strict=True):
        yield f"  {name:>{margin}} {screen.paint(''.join(SHADES[k] * 2 for k in row), 'blue')}"
    yield ""


# --- one tensor -----------------------------------------------------------------------------------


def explained(plan: ReshardPlan, checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """The rule that decides on a tensor, and the reason, as JSON.

    Raises:
        NamesMismatchError: there is no such tensor, or the new checkpoint will not have it.
    """
    from shardckpt.reshard.forecast.document import layout_json

    stored = name
    if name not in plan.decisions:  # possibly another name of a tied tensor
        there = checkpoint.tensor(name).name
        stored = next((new for new, tensor in plan.sources.items() if tensor.name == there), "")
    if stored not in plan.decisions:
        raise NamesMismatchError(
            f"--only does not select {shown(name)}; name a tensor that it selects, or leave "
            "--only out."
        )
    decision = plan.decisions[stored]
    return {
        "name": stored,
        "shape": list(plan.target.tensors[stored].shape),
        "source_layout": layout_json(plan.sources[stored].layout),
        "target_layout": layout_json(decision.layout),
        "now": spec_text(plan.sources[stored].layout),
        "then": spec_text(decision.layout),
        "rule": decision.rule,
        "why": decision.why,
        "notices": list(decision.notices),
    }


def explanation(plan: ReshardPlan, options: ReshardOptions, doc: dict[str, Any]) -> Iterator[str]:
    """The explanation as text: every rule that was tried, if there are rules."""
    name = doc["name"]
    if options.decided is not None:
        shapes = {name: tensor.shape for name, tensor in plan.target.tensors.items()}
        itemsize = plan.target.tensors[name].dtype.itemsize
        yield from map(
            visible,
            options.decided.explain(name, shapes, options.mesh, itemsize=itemsize).splitlines(),
        )
        yield ""
    else:
        yield f"{visible(name)}, shape {tuple(doc['shape'])}"
        yield ""
        yield f"why   {visible(doc['why'])}"
        yield from (f"note  {visible(notice)}" for notice in doc["notices"])
    yield f"now   {doc['now']}"
    yield f"then  {doc['then']}"
