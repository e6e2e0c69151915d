"""`shardckpt ls`: the checkpoints below a directory."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.bases import BESIDE
from shardckpt.cli.duration import duration_text
from shardckpt.cli.opening import suggesting_import
from shardckpt.cli.screen import Cell, Screen, write_json
from shardckpt.cli.text import count, file_size, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.catalog import CatalogEntry

__all__ = ["ls"]


def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A directory of checkpoints: a path or url.")] = ".",
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also unfinished attempts and deleted checkpoints.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List the checkpoints below a directory."""
    from shardckpt.catalog import catalog

    with suggesting_import(root):
        entries = catalog(root, everything=everything)
    if as_json:
        write_json({"checkpoints": [_document(entry) for entry in entries]})
    elif entries:
        screen = Screen()
        screen.show(_lines(screen, entries, root))
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
        "finished": entry.finished,
        "hosts": entry.hosts,
        "committable": entry.committable,
        "pinned": entry.pinned,
        "superseded": entry.superseded,
        "bases": list(entry.bases),
        "idle": entry.idle,
    }


def _lines(screen: Screen, entries: list[CatalogEntry], root: str) -> Iterator[str]:
    headings = ("name", "created", "tensors", "size", "layout", "state")
    rows = [[Cell(heading, "dim", right=heading in {"tensors", "size"}) for heading in headings], *map(_row, entries)]
    if not any(_state(entry) for entry in entries):
        rows = [row[:-1] for row in rows]
    yield from screen.table(rows, gap=3)
    for entry in entries:
        if entry.reason is not None:
            yield ""
            yield f"{screen.paint(visible(entry.name), 'bold')} is {entry.state}: {visible(entry.reason)}"
    unfinished = [entry for entry in entries if entry.state == "uncommitted"]
    if unfinished:
        yield ""
        for entry in unfinished:
            yield f"{screen.paint(visible(f'{entry.name}/{entry.attempt}'), 'bold')}: {_progress(entry)}"
            if entry.committable:
                yield f"  shardckpt commit {visible(quote(str(entry.location)))} makes it a checkpoint"
        yield f"shardckpt gc {visible(quote(root))} removes what nobody finishes"


def _progress(entry: CatalogEntry) -> str:
    """How far an attempt has come."""
    if not entry.finished or entry.hosts is None:
        facts = ["no host has finished"]
    elif entry.finished < entry.hosts:
        facts = [f"{entry.finished:,} of {count(entry.hosts, 'host')} finished"]
    else:
        facts = [f"{count(entry.hosts, 'host')} finished, none is missing"]
    if entry.idle is not None:
        facts.append(f"nothing written for {duration_text(entry.idle)}")
    return ", ".join(facts)


def _row(entry: CatalogEntry) -> list[Cell]:
    committed = entry.state == "committed"
    # An attempt that was never committed has no time but in its name.
    created = entry.created.replace("T", " ").removesuffix("+00:00") if entry.created else f"({entry.attempt})" if entry.attempt else ""
    return [
        Cell(visible(entry.name), "bold" if committed else ""),
        Cell(visible(created), "" if committed else "dim"),
        Cell("" if entry.tensors is None else f"{entry.tensors:,}", right=True),
        Cell("" if entry.nbytes is None else file_size(entry.nbytes), right=True),
        Cell(visible(entry.layout or "")),
        Cell(_state(entry), "red" if entry.state == "unreadable" else "yellow"),
    ]


def _state(entry: CatalogEntry) -> str:
    """What is to be said of an entry; nothing of a checkpoint that is like most."""
    said = (entry.state != "committed" and entry.state, entry.superseded and "superseded", entry.pinned and "pinned")
    needed = [f"needs {visible(url.removeprefix(BESIDE))}" for url in entry.bases]
    return ", ".join([*(word for word in said if word), *needed])
