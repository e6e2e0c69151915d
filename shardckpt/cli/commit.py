"""`shardckpt commit`: publishing saves that are complete but not yet committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt.cli.screen import Cell, Json, Screen, write_json
from shardckpt.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.runs.committing import Outcome

_STYLES = {"committed": "green", "incomplete": "yellow", "overtaken": "yellow", "refused": "red"}


def commit(
    root: Annotated[
        str,
        typer.Argument(metavar="ROOT", help="A checkpoint, or a directory of them: a path or url."),
    ],
    as_json: Json = False,
) -> None:
    """Commit saves whose data is complete.

    A save is a checkpoint only after its commit. If the process that commits dies before that, but
    all hosts have written their data, this command commits. At each place it commits the newest
    complete save. The exit status is 1 if it found uncommitted saves and could commit none.
    """
    from shardckpt.runs.committing import commit as commit_all

    outcomes = commit_all(root)
    if as_json:
        write_json({"attempts": [_document(one) for one in outcomes]})
    elif outcomes:
        screen = Screen()
        screen.show(_lines(screen, outcomes))
    else:
        typer.echo(f"no unfinished saves at or directly below {root!r}", err=True)
    if outcomes and not any(one.state == "committed" for one in outcomes):
        raise typer.Exit(1)


def _document(one: Outcome) -> dict[str, str | None]:
    return {
        "name": one.name,
        "url": str(one.location),
        "attempt": one.attempt,
        "state": one.state,
        "reason": one.reason or None,
    }


def _lines(screen: Screen, outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield from screen.table(
        [
            [
                Cell(visible(one.name), "bold" if one.state == "committed" else ""),
                Cell(f"({visible(one.attempt)})", "dim"),
                Cell(one.state, _STYLES[one.state]),
                Cell(visible(one.reason)),
            ]
            for one in outcomes
        ],
    )
