"""`shardckpt diff`: comparison of two checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.screen import Cell, Json, Screen, progress_bar, write_json
from shardckpt.errors import OptionError
from shardckpt.text import count, file_size, shape_text, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_LINES = 50
"""Most lines of a section in the text output; --json has all."""


def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A checkpoint of any format: a path or url.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare with A.")],
    *,
    structure: Annotated[
        bool,
        typer.Option(
            "--structure", help="Compare all but the elements of tensors; read no tensor."
        ),
    ] = False,
    layout: Annotated[
        bool, typer.Option("--layout", help="Count tensors with another sharding as different.")
    ] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit",
            "--memory",
            metavar="BYTES",
            help="Limit of memory for the elements of both checkpoints (default: 256MiB).",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints bit by bit.

    0.0 and -0.0 differ; a NaN equals a NaN with the same bits. Chunks and compression are not
    compared. The exit status is 1 if the checkpoints differ.
    """
    from shardckpt.cli.opening import open_checkpoint
    from shardckpt.cli.server import server
    from shardckpt.reading.compare import compare
    from shardckpt.reading.documents import comparison_json

    client, notes = server(), list[str]()
    if client is not None:
        if memory_limit is not None:
            raise OptionError(
                "--memory-limit is for a comparison on this machine; the service of --server has "
                "a limit of its own, so give only one of the two."
            )
        with client:
            doc = client.diff(a, b, values=not structure, layouts=layout)
    else:
        first, second = open_checkpoint(a), open_checkpoint(b)
        with progress_bar("comparing") as progress:
            limit = memory_limit or "256MiB"
            comparison = compare(
                first, second, values=not structure, memory_limit=limit, progress=progress
            )
        differences = comparison_json(comparison, structure=structure, layout=layout)
        doc = {"a": str(first.location), "b": str(second.location), **differences}
        notes = [
            f"{side}: {note}" for side, one in (("A", first), ("B", second)) for note in one.notes
        ]
    if as_json:
        write_json(doc)
    else:
        screen = Screen()
        screen.show(_lines(screen, doc, structure=structure, layout=layout))
        screen.show(screen.paint(visible(note), "dim") for note in notes)
    if not doc["equal"]:
        raise typer.Exit(1)


def _lines(screen: Screen, doc: dict[str, Any], *, structure: bool, layout: bool) -> Iterator[str]:
    """A comparison's document as text."""
    yield from _section(
        screen, "only in A", "red", [[Cell(visible(name))] for name in doc["only_a"]]
    )
    yield from _section(
        screen, "only in B", "green", [[Cell(visible(name))] for name in doc["only_b"]]
    )
    yield from _section(
        screen, "changed", "yellow", [_change_row(change) for change in doc["changes"]]
    )
    yield from _section(
        screen, "values differ", "yellow", [_value_row(value) for value in doc["values"] or ()]
    )
    if layout:
        yield from _section(
            screen,
            "laid out otherwise",
            "yellow",
            [_change_row(change) for change in doc["layouts"]],
        )
    elif doc["layouts"]:
        yield screen.paint(
            f"another layout in {count(len(doc['layouts']), 'tensor')}, which counts as no "
            "difference; --layout lists them",
            "dim",
        )
    compared = (
        f"{count(doc['tensors_compared'], 'tensor')}, {file_size(doc['bytes_compared'])}, "
        "compared bit by bit"
    )
    if structure:
        compared = "values were not compared"
    yield (
        (
            screen.paint("equal", "bold green")
            if doc["equal"]
            else screen.paint("different", "bold red")
        )
        + f"  {compared}"
    )


def _section(
    screen: Screen, title: str, style: str, rows: Sequence[Sequence[Cell]]
) -> Iterator[str]:
    """A heading and its rows, or nothing if there are no rows."""
    if not rows:
        return
    yield screen.paint(f"{title} ({len(rows):,})", style)
    yield from screen.table(rows[:MOST_LINES], margin=2)
    if len(rows) > MOST_LINES:
        yield f"  … and {len(rows) - MOST_LINES:,} more; --json lists all"
    yield ""


def _change_row(change: dict[str, Any]) -> list[Cell]:
    aspect = change["aspect"]
    sides = " → ".join(_side_text(change[side], aspect) for side in ("a", "b"))
    return [
        Cell(visible(change["name"])),
        Cell("" if aspect == "layout" else aspect, "dim"),
        Cell(visible(sides)),
    ]


def _side_text(side: str | list[int] | None, aspect: str) -> str:
    if side is None:
        return "by itself" if aspect == "tied" else "plain"
    return side if isinstance(side, str) else shape_text(side)


def _value_row(value: dict[str, Any]) -> list[Cell]:
    facts = []
    if value["largest"] is not None:
        facts.append(f"by up to {float(value['largest']):.6g}")
    if value["nans"]:
        facts.append(f"{value['nans']:,} NaN")
    facts.append(f"first at {value['first']}")
    return [
        Cell(visible(value["name"])),
        Cell(f"{value['differing']:,} of {value['elements']:,}", right=True),
        Cell(", ".join(facts), "dim"),
    ]
