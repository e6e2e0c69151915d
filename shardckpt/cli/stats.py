"""`shardckpt stats`: statistics of a checkpoint's elements, or of two with the largest changes."""

from __future__ import annotations

from dataclasses import asdict
from math import isnan
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.screen import Cell, Json, Screen, progress_bar, write_json
from shardckpt.text import count, few, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_LINES = 200
"""Most tensors in the text output; --json has all."""
MOST_CHANGES = 30
BARS = " ▁▂▃▄▅▆▇█"
_PROFILE = 10
"""Columns of a tensor's histogram in the table."""
_WIDTH = 40
"""Columns of the longest bar of the histogram of all."""
_ROWS = 20


def stats(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A checkpoint of any format: a path or url.")
    ],
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER",
            help="Another checkpoint, to be set beside it with the largest changes.",
        ),
    ] = None,
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERN",
            help="Only tensors that match, as in model/**/bias; may be repeated.",
        ),
    ] = None,
    memory_limit: Annotated[
        str,
        typer.Option(
            "--memory-limit", "--memory", metavar="BYTES", help="Limit of memory for elements."
        ),
    ] = "256MiB",
    as_json: Json = False,
) -> None:
    """Show extremes, norms and histograms of elements.

    All elements are read; NaN and infinite elements are counted. The bars are a histogram between
    minimum and maximum, of each tensor and of all together. With OTHER, tensors are listed by the
    norm of their change, relative to the norm in URL.
    """
    from shardckpt.cli.opening import open_checkpoint
    from shardckpt.reading.inspection.statistics import state_statistics

    first = open_checkpoint(url)
    second = None if other is None else open_checkpoint(other)
    with progress_bar("reading") as progress:
        statistics = state_statistics(
            first, second, only=only, memory_limit=memory_limit, progress=progress
        )
    left_out = [{"name": name, "reason": reason} for name, reason in statistics.left_out.items()]
    doc: dict[str, Any] = {
        "url": str(first.location),
        **statistics.to_json(),
        "left_out": left_out,
        "other": None,
    }
    if second is not None:
        changes = [asdict(change) for change in statistics.changes]
        for change in changes:  # JSON has no infinity
            change |= {
                key: _json_number(value)
                for key, value in change.items()
                if isinstance(value, float)
            }
        doc["other"] = {"url": str(second.location), **statistics.to_json(1), "changes": changes}
    if as_json:
        write_json(doc)
    else:
        screen = Screen()
        screen.show(_lines(screen, doc) if second is None else _beside(screen, doc))


def _lines(screen: Screen, doc: dict[str, Any]) -> Iterator[str]:
    """Statistics of one checkpoint as text: of each tensor, and of all."""
    heads = ("tensor", "min", "max", "mean", "std", "norm", "zeros", "")
    rows = [[Cell(head, "dim", right=0 < i < len(heads) - 1) for i, head in enumerate(heads)]]
    rows += [_row(one) for one in doc["tensors"][:MOST_LINES]]
    yield from screen.table(rows)
    if len(doc["tensors"]) > MOST_LINES:
        yield f"… and {len(doc['tensors']) - MOST_LINES:,} more; --json lists all"
    yield ""
    yield from _all(screen, doc)
    yield from _left_out(doc)


def _all(screen: Screen, doc: dict[str, Any]) -> Iterator[str]:
    total = doc["all"]
    facts = [f"{name} {_number(total[name])}" for name in ("min", "max", "mean", "std", "norm")]
    counted = f"{count(total['read'], 'element')} of {count(len(doc['tensors']), 'tensor')}"
    yield (
        f"{screen.paint('all', 'bold')}  {counted}: {', '.join(facts)}, "
        f"{_share(total['zeros'], total['read'])} zeros"
    )
    if total["nans"] or total["infinities"]:
        yield screen.paint(
            f"{total['nans']:,} NaN and {total['infinities']:,} infinite", "bold red"
        )
    yield from _histogram(screen, total)


def _histogram(screen: Screen, one: dict[str, Any]) -> Iterator[str]:
    """A histogram with one bar in each line."""
    counts, edges = _join_bins(one["histogram"], one["edges"], _ROWS)
    if len(counts) < 2:
        return
    yield ""
    names = [_number(edge) for edge in edges[:-1]]
    margin, most = max(map(len, names)), max(counts)
    for name, n in zip(names, counts, strict=True):
        eighths = round(n / most * _WIDTH * 8)
        bar = "█" * (eighths // 8) + ("" if eighths % 8 == 0 else "▏▎▍▌▋▊▉"[eighths % 8 - 1])
        yield (
            f"  {name:>{margin}} {screen.paint(bar or ('▏' if n else ''), 'cyan')} "
            f"{screen.paint(f'{n:,}', 'dim')}"
        )


def _row(one: dict[str, Any]) -> list[Cell]:
    cells = [Cell(visible(one["name"]), "bold")]
    cells += [
        Cell(_number(one[name]), right=True) for name in ("min", "max", "mean", "std", "norm")
    ]
    cells.append(Cell(_share(one["zeros"], one["read"]), right=True))
    if one["nans"] or one["infinities"]:
        wrong = [
            f"{one[name]:,} {word}"
            for name, word in (("nans", "NaN"), ("infinities", "infinite"))
            if one[name]
        ]
        return [*cells, Cell(", ".join(wrong), "bold red")]
    return [*cells, Cell(_profile(one), "cyan")]


def _profile(one: dict[str, Any]) -> str:
    """A histogram in one line."""
    counts, _ = _join_bins(one["histogram"], one["edges"], _PROFILE)
    if len(counts) < 2:
        return ""
    most = max(counts)
    return "".join(BARS[0 if not n else max(1, round(n / most * (len(BARS) - 1)))] for n in counts)


def _join_bins(
    counts: Sequence[int], edges: Sequence[float], most: int
) -> tuple[list[int], list[float]]:
    """A histogram with at most so many bins: neighbours are joined."""
    group = max(1, -(-len(counts) // most))
    joined = [sum(counts[i : i + group]) for i in range(0, len(counts), group)]
    return joined, [*edges[:-1:group], *edges[-1:]]


def _beside(screen: Screen, doc: dict[str, Any]) -> Iterator[str]:
    """Two checkpoints beside each other, the largest changes first."""
    other = doc["other"]
    tensors = {one["name"]: one for one in doc["tensors"]}
    theirs = {one["name"]: one for one in other["tensors"]}
    heads = ("tensor", "change", "largest", "norm", "mean", "std")
    rows = [[Cell(head, "dim", right=i > 0) for i, head in enumerate(heads)]]
    changed = [change for change in other["changes"] if change["largest"]]
    for change in changed[:MOST_CHANGES]:
        name = change["name"]
        cells = [
            Cell(visible(name), "bold"),
            Cell(_percent(change["relative"]), "yellow", right=True),
        ]
        cells.append(Cell(_number(change["largest"]), right=True))
        cells += [
            Cell(_both(tensors[name][key], theirs[name][key]), right=True)
            for key in ("norm", "mean", "std")
        ]
        rows.append(cells)
    if changed:
        yield from screen.table(rows)
    if len(changed) > MOST_CHANGES:
        yield f"… and {len(changed) - MOST_CHANGES:,} more, with smaller changes; --json lists all"
    unchanged = len(other["changes"]) - len(changed)
    yield (
        f"{count(len(changed), 'tensor')} changed, {unchanged:,} unchanged"
        if changed
        else f"{count(unchanged, 'tensor')} unchanged"
    )
    yield from _left_out(doc)


def _left_out(doc: dict[str, Any]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for one in doc["left_out"]:
        by_reason.setdefault(one["reason"], []).append(one["name"])
    for reason, names in by_reason.items():
        yield visible(f"left out: {few(names, 2)}: {reason}")


def _number(value: float | str | None) -> str:
    return "–" if value is None else f"{float(value):.4g}"


def _both(one: float | None, other: float | None) -> str:
    a, b = _number(one), _number(other)
    return a if a == b else f"{a} → {b}"


def _share(n: int, of: int) -> str:
    """A part of a whole in percent: "0" only for none, and "100%" only for all."""
    if not n or n == of:
        return "100%" if n else "0"
    return f"{min(max(n / of * 100, 0.1), 99.9):.1f}%"


def _percent(value: float | str | None) -> str:
    if value is None:
        return "from 0"
    return "–" if isnan(float(value)) else f"{float(value) * 100:.3g}%"


def _json_number(value: float) -> float | str:
    return value if abs(value) < float("inf") else "nan" if value != value else "inf"  # noqa: PLR0124
