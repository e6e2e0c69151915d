"""`shardckpt gc` and `shardckpt rm`: removal of unfinished saves, and of checkpoints."""

from __future__ import annotations

import sys
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.screen import Cell, Json, Screen, write_json
from shardckpt.io.streams import is_terminal
from shardckpt.text import count, duration_text, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.commit.remove import Collected

_FAILED = 6
"""Exit status if the storage refused a deletion."""
Grace = Annotated[
    str,
    typer.Option(
        "--grace",
        metavar="TIME",
        help="Keep unfinished saves with a write within this time, as in 90min, 24h or 7d.",
    ),
]


def gc(
    root: Annotated[
        str,
        typer.Argument(
            metavar="ROOT", help="A directory of checkpoints, or one checkpoint: a path or url."
        ),
    ],
    grace: Grace = "24h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only show what would be removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Publish complete saves; remove unfinished ones.

    Checkpoints stay. A complete save that was never published becomes the checkpoint, as with
    `shardckpt commit`. If several saves to one directory are unfinished and one of them has written
    within --grace, all of them stay. A removed save can never be committed. With --grace 0 saves in
    progress are removed too. The exit status is 6 if the storage has refused a deletion.
    """
    from shardckpt.options import parse_duration
    from shardckpt.runs.collecting import collect

    seconds = parse_duration(grace, "--grace")
    collected = collect(root, grace=seconds, dry_run=dry_run)
    if as_json:
        write_json(
            {"dry_run": dry_run, **_document(collected, "removed", "published", "kept", "failed")}
        )
    elif collected:
        screen = Screen()
        screen.show(_lines(screen, collected, "would go" if dry_run else "removed"))
    else:
        typer.echo(f"no unfinished saves at or directly below {root!r}", err=True)
    _end(collected)


def _confirm(question: str) -> bool:
    """Ask on the terminal; the end of its input is a no, and an interrupt stays one."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort as e:
        if not isinstance(e.__context__, EOFError):
            raise
        typer.echo("\nnot confirmed", err=True)
        return False


def rm(
    url: Annotated[str, typer.Argument(metavar="URL", help="A checkpoint: a path or url.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    grace: Grace = "24h",
    as_json: Json = False,
) -> None:
    """Delete a checkpoint permanently.

    Unfinished saves at the same place are removed as by gc. The data of a damaged checkpoint stays
    until it is older than --grace. The exit status is 2 for a checkpoint that is pinned, tagged, or
    needed by a checkpoint beside it, and 1 if you do not confirm.
    """
    from shardckpt.errors import OptionError
    from shardckpt.io.url import parse
    from shardckpt.options import parse_duration
    from shardckpt.runs.collecting import check_exists, delete

    seconds = parse_duration(grace, "--grace")
    if not yes:
        check_exists(url)
        if not is_terminal(sys.stdin):
            raise OptionError(
                "rm asks before it deletes, and standard input is not a terminal; give --yes."
            )
        if not _confirm(f"Delete {visible(url)}?"):
            raise typer.Exit(1)
    collected = delete(url, grace=seconds)
    if as_json:
        write_json({"url": str(parse(url)), **_document(collected, "removed", "kept", "failed")})
    else:
        screen = Screen()
        screen.show([f"deleted  {visible(str(parse(url)))}"])
        if collected:
            screen.show(_lines(screen, collected, "removed"))
    _end(collected)


def _end(collected: Sequence[Collected]) -> None:
    """Exit with the status for storage failures, if there were any."""
    if any(one.outcome == "failed" for one in collected):
        raise typer.Exit(_FAILED)


def _document(collected: Sequence[Collected], *outcomes: str) -> dict[str, Any]:
    return {
        outcome: [
            {
                "url": str(one.location),
                "attempt": one.attempt,
                "idle": one.idle,
                "reason": one.reason,
            }
            for one in collected
            if one.outcome == outcome
        ]
        for outcome in outcomes
    }


def _lines(screen: Screen, collected: Sequence[Collected], removed: str) -> Iterator[str]:
    from shardckpt.commit.remove import UNDER_WAY

    styles = {"removed": "green", "published": "green", "kept": "yellow", "failed": "red"}
    words = {
        "removed": removed,
        "published": "would be published" if removed == "would go" else "published",
    }
    rows = [
        [
            Cell(visible(_place(one)), "bold" if one.outcome == "removed" else ""),
            Cell(words.get(one.outcome, one.outcome), styles[one.outcome]),
            Cell("" if one.idle is None else f"idle {duration_text(one.idle)}", "dim"),
            Cell(visible(one.reason or "")),
        ]
        for one in collected
    ]
    yield from screen.table(rows)
    going, new = (
        sum(one.outcome == outcome for one in collected) for outcome in ("removed", "published")
    )
    yield ""
    also = f", {new:,} {words['published']}" if new else ""
    yield f"{count(going, 'attempt')} {removed}, {len(collected) - going - new:,} kept{also}"
    if any(one.reason == UNDER_WAY for one in collected):
        yield "--grace 0 removes the kept ones, too; use it only if no save is under way."


def _place(one: Collected) -> str:
    """The name of the checkpoint, and of the attempt."""
    name = PurePosixPath(one.location.path).name
    return name if one.attempt is None else f"{name}/{one.attempt}"
