"""`shardckpt ls`: the checkpoints below a directory."""

from __future__ import annotations

from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shardckpt.cli.screen import Cell, Json, Screen, write_json
from shardckpt.cli.text import time_text
from shardckpt.errors import NotFoundError, StorageError
from shardckpt.text import clip, count, duration_text, file_size, shorten, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.convert.detect import Detected
    from shardckpt.runs.below import RunSummary
    from shardckpt.runs.catalog import CatalogEntry
    from shardckpt.serve.client import RunEntry

_GAP = 3
_LEAST_ROOM = _LONGEST_METRICS = 40
"""Characters; --json is complete."""


def ls(
    root: Annotated[
        str,
        typer.Argument(
            metavar="ROOT", help="A directory of checkpoints, or a checkpoint: a path or url."
        ),
    ] = ".",
    everything: Annotated[
        bool,
        typer.Option("--all", "-a", help="Also list unfinished saves and deleted checkpoints."),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints in a directory.

    The runs in it are listed too, each with its newest step, and checkpoints of other formats; in a
    bucket only if there are no checkpoints.
    """
    from shardckpt.cli.server import server
    from shardckpt.runs.catalog import CatalogEntry

    client = server()
    if client is not None:
        with client:
            if root == ".":
                _list_runs(list(client.runs()), client.url, as_json=as_json)
                return
            checkpoints = list(client.checkpoints(root.strip("/")))
            if not checkpoints:
                raise NotFoundError(
                    f"{client.url}: there is no run {shorten(root)}; `shardckpt --server "
                    f"{client.url} ls` lists the runs."
                )
        entries = [
            CatalogEntry.from_json(one)
            for one in checkpoints
            if everything or one["state"] in ("committed", "unreadable")
        ]
        if as_json:
            write_json(
                {"checkpoints": [entry.to_json() for entry in entries], "runs": [], "foreign": []}
            )
        else:
            screen = Screen()
            screen.show(_lines(screen, entries, root))
        return
    _list_directory(root, everything=everything, as_json=as_json)


def _list_directory(root: str, *, everything: bool, as_json: bool) -> None:
    """Print what a directory has: checkpoints, or runs; and checkpoints of other formats."""
    from shardckpt.convert.detect import detect_below
    from shardckpt.io.store import kind_of
    from shardckpt.io.url import parse
    from shardckpt.runs.below import runs_below
    from shardckpt.runs.catalog import catalog

    location = parse(root)
    runs: list[RunSummary] = []
    try:
        entries = catalog(root, everything=everything)
    except (NotFoundError, StorageError):  # a file of another format is not a directory
        entries, others = [], detect_below(location)
        if not others:
            raise
    else:
        known = {entry.name for entry in entries}
        # In a bucket, looking takes several requests for each name.
        near = kind_of(location).near
        runs = runs_below(root, known) if near or not known else []
        known |= {one.run for one in runs}
        others = detect_below(location, known) if near or not known else {}
    if as_json:
        foreign = [
            {"name": name, "format": detected.format, "seen": detected.seen}
            for name, detected in others.items()
        ]
        documents = [entry.to_json() for entry in entries]
        write_json(
            {"checkpoints": documents, "runs": [asdict(one) for one in runs], "foreign": foreign}
        )
        return
    if not (entries or runs or others):
        typer.echo(
            f"no checkpoints directly below {root!r}"
            + ("" if everything else "; --all shows unfinished saves"),
            err=True,
        )
        return
    screen = Screen()
    tables = [
        _lines(screen, entries, root) if entries else (),
        _run_lines(screen, [cast("RunEntry", asdict(one)) for one in runs]) if runs else (),
        _other_lines(screen, others) if others else (),
    ]
    for i, table in enumerate(table for table in tables if table):
        screen.show(["", *table] if i else table)


def _list_runs(runs: list[RunEntry], server: str, *, as_json: bool) -> None:
    """Print the runs of a service."""
    if as_json:
        write_json({"checkpoints": [], "runs": runs, "foreign": []})
    elif runs:
        screen = Screen()
        screen.show(_run_lines(screen, runs))
    else:
        typer.echo(f"no runs at {visible(server)}", err=True)


def _run_lines(screen: Screen, runs: Sequence[RunEntry]) -> Iterator[str]:
    """A table of runs."""
    rows = [
        [
            Cell(heading, "dim", right=0 < i < 4)
            for i, heading in enumerate(
                ("run", "checkpoints", "last step", "stored", "last commit")
            )
        ]
    ]
    for one in runs:
        step = "" if one["last_step"] is None else f"{one['last_step']:,}"
        stored = file_size(one["stored_bytes"] or 0)
        numbers = [Cell(text, right=True) for text in (f"{one['checkpoints']:,}", step, stored)]
        created = time_text(one["created"] or "")
        rows.append([Cell(visible(one["run"]), "bold"), *numbers, Cell(created)])
    yield from screen.table(rows, gap=_GAP)


def _other_lines(screen: Screen, others: dict[str, Detected]) -> Iterator[str]:
    """A table of checkpoints of other formats."""
    rows = [[Cell(heading, "dim") for heading in ("name", "format", "seen")]]
    rows += [
        [
            Cell(visible(name), "bold"),
            Cell(detected.format, "green"),
            Cell(visible(detected.seen), "dim"),
        ]
        for name, detected in others.items()
    ]
    yield from screen.table(rows, gap=_GAP)


def _lines(screen: Screen, entries: list[CatalogEntry], root: str) -> Iterator[str]:
    metrics, states = any(entry.metrics for entry in entries), any(map(_state, entries))
    last = [heading for heading, there in (("metrics", metrics), ("state", states)) if there]
    headings = ("name", "created", "tensors", "size", "layout", *last)
    rows = [[Cell(heading, "dim", right=heading in {"tensors", "size"}) for heading in headings]]
    room = max(
        _LEAST_ROOM,
        screen.width - max(len("name"), *(len(visible(entry.name)) for entry in entries)) - _GAP,
    )
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
        yield (
            f"shardckpt gc {visible(quote(root))} removes abandoned saves, a day after their last "
            "write"
        )


def _row(entry: CatalogEntry, *, metrics: bool, states: bool) -> list[Cell]:
    """The table row of a checkpoint."""
    cells = [
        Cell(visible(entry.name), "bold"),
        Cell(time_text(entry.created or "")),
        Cell("" if entry.tensors is None else f"{entry.tensors:,}", right=True),
        Cell("" if entry.nbytes is None else file_size(entry.nbytes), right=True),
        Cell(visible(entry.layout or "")),
    ]
    cells += [Cell(_metrics(entry), "cyan")] if metrics else []
    return [*cells, Cell(_state(entry), "yellow")] if states else cells


def _rows_of_none(entry: CatalogEntry, columns: int, room: int) -> Iterator[list[Cell]]:
    """Rows of an entry that is not a checkpoint: its name, and the wrapped reason.

    The reason is wrapped into lines of `room` characters.
    """
    from textwrap import wrap

    why = _progress(entry) if entry.state == "uncommitted" else visible(entry.reason or "")
    for i, line in enumerate(wrap(f"{entry.state}: {why}", room, break_on_hyphens=False)):
        style = "red" if entry.state == "unreadable" else "yellow"
        yield [
            Cell("" if i else visible(entry.name)),
            Cell(line, style),
            *[Cell("")] * (columns - 2),
        ]


def _metrics(entry: CatalogEntry) -> str:
    """The metrics of a step, truncated to a readable length."""
    shown = [
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in entry.metrics.items()
    ]
    return visible(clip(" ".join(shown), _LONGEST_METRICS))


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
    from shardckpt.format.bases import BESIDE
    from shardckpt.text import few

    remarks = (
        entry.superseded and "superseded",
        entry.pinned and "pinned",
        entry.tags and visible(f"tagged {' '.join(entry.tags)}"),
    )
    names = [visible(url.removeprefix(BESIDE)) for url in entry.bases]
    needed = [f"needs {few(names, 3)}"] if names else []
    return ", ".join([*(word for word in remarks if word), *needed])
