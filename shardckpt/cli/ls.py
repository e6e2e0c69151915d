"""`shardckpt ls`: the checkpoints below a directory."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt.cli.opening import suggesting_import
from shardckpt.cli.screen import Cell, Screen, write_json
from shardckpt.errors import NotFoundError
from shardckpt.excerpt import count, duration_text, excerpt, file_size, shortened, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.reading.catalog import CatalogEntry
    from shardckpt.serve.client import RunEntry

_GAP = 3
_LEAST_ROOM = _LONGEST_METRICS = 40
"""Characters; --json is complete."""


def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A directory of checkpoints, or a checkpoint: a path or url.")] = ".",
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also list unfinished saves and deleted checkpoints.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the checkpoints in a directory."""
    from shardckpt.cli.server import server
    from shardckpt.reading.catalog import CatalogEntry, catalog

    client = server()
    if client is not None:
        with client:
            if root == ".":
                _list_runs(list(client.runs()), as_json=as_json)
                return
            found = list(client.checkpoints(root.strip("/")))
            if not found:
                raise NotFoundError(f"{client.url}: there is no run {excerpt(root)}; `shardckpt --server {client.url} ls` lists the runs.")
        entries = [CatalogEntry.from_json(one) for one in found if everything or one["state"] in ("committed", "unreadable")]
    else:
        with suggesting_import(root):
            entries = catalog(root, everything=everything)
    if as_json:
        write_json({"checkpoints": [entry.to_json() for entry in entries]})
    elif entries:
        screen = Screen()
        screen.show(_lines(screen, entries, root))
    else:
        typer.echo(f"no checkpoints directly below {root!r}" + ("" if everything else "; --all shows unfinished saves"), err=True)


def _list_runs(runs: list[RunEntry], *, as_json: bool) -> None:
    """Print the runs of a service."""
    if as_json:
        write_json({"runs": runs})
        return
    screen = Screen()
    rows = [
        [Cell(heading, "dim", right=0 < i < 4) for i, heading in enumerate(("run", "checkpoints", "last step", "stored", "last commit"))]
    ]
    for one in runs:
        step = "" if one["last_step"] is None else f"{one['last_step']:,}"
        stored = file_size(one["stored_bytes"] or 0)
        numbers = [Cell(text, right=True) for text in (f"{one['checkpoints']:,}", step, stored)]
        created = (one["created"] or "").replace("T", " ").removesuffix("+00:00")
        rows.append([Cell(visible(one["run"]), "bold"), *numbers, Cell(visible(created))])
    screen.show(screen.table(rows, gap=_GAP))


def _lines(screen: Screen, entries: list[CatalogEntry], root: str) -> Iterator[str]:
    metrics, states = any(entry.metrics for entry in entries), any(map(_state, entries))
    last = [heading for heading, there in (("metrics", metrics), ("state", states)) if there]
    headings = ("name", "created", "tensors", "size", "layout", *last)
    rows = [[Cell(heading, "dim", right=heading in {"tensors", "size"}) for heading in headings]]
    room = max(_LEAST_ROOM, screen.width - max(len("name"), *(len(visible(entry.name)) for entry in entries)) - _GAP)
    for entry in entries:
        if entry.state == "committed":
            rows.append(_row(entry, metrics=metrics, states=states))
        else:
            rows.extend(_rows_of_none(entry, len(headings), room))
    yield from screen.table(rows, gap=_GAP)
    if any(entry.state == "uncommitted" for entry in entries):
        yield ""
        if any(entry.committable for entry in entries):
            yield f"shardckpt commit {visible(quote(root))} commits complete saves"
        yield f"shardckpt gc {visible(quote(root))} removes abandoned saves"


def _row(entry: CatalogEntry, *, metrics: bool, states: bool) -> list[Cell]:
    """The table row of a checkpoint."""
    created = "" if entry.created is None else entry.created.replace("T", " ").removesuffix("+00:00")
    cells = [
        Cell(visible(entry.name), "bold"),
        Cell(visible(created)),
        Cell("" if entry.tensors is None else f"{entry.tensors:,}", right=True),
        Cell("" if entry.nbytes is None else file_size(entry.nbytes), right=True),
        Cell(visible(entry.layout or "")),
    ]
    cells += [Cell(_metrics(entry), "cyan")] if metrics else []
    return [*cells, Cell(_state(entry), "yellow")] if states else cells


def _rows_of_none(entry: CatalogEntry, columns: int, room: int) -> Iterator[list[Cell]]:
    """Rows of an entry that is no checkpoint: its name, and the reason wrapped into lines of `room` characters."""
    from textwrap import wrap

    why = _progress(entry) if entry.state == "uncommitted" else visible(entry.reason or "")
    for i, line in enumerate(wrap(f"{entry.state}: {why}", room, break_on_hyphens=False)):
        style = "red" if entry.state == "unreadable" else "yellow"
        yield [Cell("" if i else visible(entry.name)), Cell(line, style), *[Cell("")] * (columns - 2)]


def _metrics(entry: CatalogEntry) -> str:
    """The metrics of a step, truncated to a readable length."""
    shown = [f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in entry.metrics.items()]
    return visible(shortened(" ".join(shown), _LONGEST_METRICS))


def _progress(entry: CatalogEntry) -> str:
    """The progress of an attempt."""
    if not entry.finished or entry.hosts is None:
        facts = ["no host has finished"]
    elif entry.finished < entry.hosts:
        facts = [f"{entry.finished:,} of {count(entry.hosts, 'host')} finished"]
    else:
        facts = [f"{count(entry.hosts, 'host')} finished, none is missing"]
    if entry.idle is not None:
        facts.append(f"nothing written for {duration_text(entry.idle)}")
    return ", ".join(facts)


def _state(entry: CatalogEntry) -> str:
    """Notable facts about a checkpoint; empty for most."""
    from shardckpt.format.structure import BESIDE

    said = (entry.superseded and "superseded", entry.pinned and "pinned", entry.tags and visible(f"tagged {' '.join(entry.tags)}"))
    needed = [f"needs {visible(url.removeprefix(BESIDE))}" for url in entry.bases]
    return ", ".join([*(word for word in said if word), *needed])
