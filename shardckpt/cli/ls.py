"""`shardckpt ls`: the checkpoints below a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.screen import Cell, Screen, write_json
from shardckpt.cli.text import file_size, visible

if TYPE_CHECKING:
    from shardckpt.catalog import CatalogEntry

__all__ = ["ls"]


def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A directory of checkpoints: a path or url.")] = ".",
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also unfinished attempts and deleted checkpoints.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List the checkpoints below a directory."""
    from shardckpt.catalog import catalog

    entries = catalog(root, everything=everything)
    if as_json:
        write_json({"checkpoints": [_document(entry) for entry in entries]})
    elif entries:
        screen = Screen()
        screen.show(screen.table(_rows(entries), gap=3))
    else:
        typer.echo(f"no checkpoints directly below {root!r}" + ("" if everything else "; --all shows unfinished attempts"), err=True)


def _document(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "url": str(entry.location),
        "state": entry.state,
        "step": entry.step,
        "attempt": entry.attempt,
        "created": entry.created,
        "layout": entry.layout,
        "tensors": entry.tensors,
        "bytes": entry.nbytes,
        "stored_bytes": entry.stored_bytes,
        "reason": entry.reason,
    }


def _rows(entries: list[CatalogEntry]) -> list[list[Cell]]:

    headings = ("name", "created", "tensors", "size", "layout", "state")
    rows = [[Cell(heading, "dim", right=heading in ("tensors", "size")) for heading in headings]]
    for entry in entries:
        state = entry.state if entry.attempt is None or entry.state == "committed" else f"{entry.state} {entry.attempt}"
        if entry.reason is not None:
            state += f": {entry.reason}"
        rows.append(
            [
                Cell(visible(entry.name), "bold" if entry.state == "committed" else "dim"),
                Cell(visible((entry.created or "").replace("T", " ").removesuffix("+00:00"))),
                Cell("" if entry.tensors is None else f"{entry.tensors:,}", right=True),
                Cell("" if entry.nbytes is None else file_size(entry.nbytes), right=True),
                Cell(visible(entry.layout or "")),
                Cell("" if entry.state == "committed" else visible(state), "red" if entry.state == "unreadable" else "yellow"),
            ]
        )
    if all(entry.state == "committed" for entry in entries):
        rows = [row[:-1] for row in rows]
    return rows
