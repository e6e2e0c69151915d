"""`shardckpt diff`: comparison of two checkpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.screen import Cell, Screen, progress_bar, write_json
from shardckpt.cli.text import count, shape_text, visible
from shardckpt.excerpt import file_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.reading.compare import Aspect, Change, Comparison
    from shardckpt.reading.compare_values import ValueChange

MOST_LINES = 50
"""Most lines of a section in the text output; --json has all."""


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: a path or url.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare with A.")],
    *,
    structure: Annotated[
        bool, typer.Option("--structure", help="Compare only names, shapes, dtypes and small leaves; read no tensor.")
    ] = False,
    layout: Annotated[bool, typer.Option("--layout", help="Count a different layout over devices as a difference, too.")] = False,
    memory_limit: Annotated[
        str, typer.Option("--memory-limit", "--memory", metavar="BYTES", help="Limit of memory for elements.")
    ] = "256MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare two checkpoints, values bit by bit.

    The exit status is 1 if they differ. How tensors are chunked, compressed and packed is not compared.
    """
    from shardckpt.cli.opening import open_checkpoint
    from shardckpt.reading.compare import compare

    first, second = open_checkpoint(a), open_checkpoint(b)
    with progress_bar("comparing") as progress:
        comparison = compare(first, second, values=not structure, memory_limit=memory_limit, progress=progress)
    if as_json:
        write_json({"a": str(first.location), "b": str(second.location), **_document(comparison, structure=structure, layout=layout)})
    else:
        screen = Screen()
        screen.show(_lines(screen, comparison, structure=structure, layout=layout))
    if not comparison.equal(layout=layout):
        raise typer.Exit(1)


def _document(comparison: Comparison, *, structure: bool, layout: bool) -> dict[str, Any]:
    return {
        "equal": comparison.equal(layout=layout),
        "only_a": list(comparison.only_a),
        "only_b": list(comparison.only_b),
        "changes": [_change_document(change) for change in comparison.changes],
        "layouts": [_change_document(change) for change in comparison.layouts],
        "values": None if structure else [_value_document(value) for value in comparison.values],
        "tensors_compared": comparison.tensors_compared,
        "bytes_compared": comparison.bytes_compared,
    }


def _change_document(change: Change) -> dict[str, Any]:
    return {"name": change.name, "aspect": change.aspect, "a": _side_document(change.a), "b": _side_document(change.b)}


def _side_document(side: object) -> object:
    if isinstance(side, tuple):
        return list(side)
    return side if side is None or isinstance(side, str) else _layout_text(side)


def _value_document(value: ValueChange) -> dict[str, Any]:
    finite = value.largest is None or math.isfinite(value.largest)
    return {
        "name": value.name,
        "differing": value.differing,
        "elements": value.size,
        "largest": value.largest if finite else "inf",  # JSON has no infinity
        "nans": value.nans,
        "first": list(value.first),
    }


def _lines(screen: Screen, comparison: Comparison, *, structure: bool, layout: bool) -> Iterator[str]:
    yield from _section(screen, "only in A", "red", [[Cell(visible(name))] for name in comparison.only_a])
    yield from _section(screen, "only in B", "green", [[Cell(visible(name))] for name in comparison.only_b])
    yield from _section(screen, "changed", "yellow", [_change_row(change) for change in comparison.changes])
    yield from _section(screen, "values differ", "yellow", [_value_row(value) for value in comparison.values])
    if layout:
        yield from _section(screen, "laid out otherwise", "yellow", [_change_row(change) for change in comparison.layouts])
    elif comparison.layouts:
        yield screen.paint(
            f"{count(len(comparison.layouts), 'tensor')} laid out otherwise, which is no difference; --layout lists them", "dim"
        )
    compared = f"{count(comparison.tensors_compared, 'tensor')}, {file_size(comparison.bytes_compared)}, compared bit by bit"
    if structure:
        compared = "values were not compared"
    if comparison.equal(layout=layout):
        yield f"{screen.paint('equal', 'bold green')}  {compared}"
    else:
        yield f"{screen.paint('different', 'bold red')}  {compared}"


def _section(screen: Screen, title: str, style: str, rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    """A heading and its rows, or nothing if there are no rows."""
    if not rows:
        return
    yield screen.paint(f"{title} ({len(rows):,})", style)
    for line in screen.table(rows[:MOST_LINES]):
        yield f"  {line}"
    if len(rows) > MOST_LINES:
        yield f"  … and {len(rows) - MOST_LINES:,} more; --json lists all"
    yield ""


def _change_row(change: Change) -> list[Cell]:
    aspect = Cell("" if change.aspect == "layout" else change.aspect, "dim")
    return [
        Cell(visible(change.name)),
        aspect,
        Cell(visible(f"{_side_text(change.a, change.aspect)} → {_side_text(change.b, change.aspect)}")),
    ]


def _side_text(side: object, aspect: Aspect) -> str:
    if isinstance(side, tuple):
        return shape_text(side)
    if isinstance(side, str):
        return side
    return "by itself" if aspect == "tied" else _layout_text(side)


def _layout_text(layout: Any) -> str:
    from shardckpt.cli.layouts import layout_text

    return layout_text(layout)


def _value_row(value: ValueChange) -> list[Cell]:
    facts = []
    if value.largest is not None:
        facts.append(f"by up to {value.largest:.6g}")
    if value.nans:
        facts.append(f"{value.nans:,} NaN")
    facts.append(f"first at {list(value.first)}")
    return [Cell(visible(value.name)), Cell(f"{value.differing:,} of {value.size:,}", right=True), Cell(", ".join(facts), "dim")]
