"""`shardckpt fold`: versions of a publisher, so that late followers read few differences."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt.cli.screen import Cell, Json, Screen, write_json
from shardckpt.text import count, file_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.versions.folding import Folded


def fold(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="The place of all versions of a Publisher: a path or url."
        ),
    ],
    most: Annotated[
        int,
        typer.Option(
            "--most",
            metavar="COUNT",
            help="Differences that a reader of any version applies at most.",
        ),
    ] = 8,
    as_json: Json = False,
) -> None:
    """Fold the newest versions of a publisher.

    A version that differs from the one before gets an earlier base, and keeps its contents, pins
    and tags. So a late follower reads an anchor and at most --most differences. A publisher does
    this by itself, unless it was given catch_up=None.
    """
    from shardckpt.io.url import parse
    from shardckpt.versions.folding import fold

    done = fold(url, most=most)
    if as_json:
        write_json({"url": str(parse(url)), "most": most, "folded": [asdict(one) for one in done]})
    else:
        screen = Screen()
        screen.show(_lines(screen, done, most))


def _lines(screen: Screen, done: Sequence[Folded], most: int) -> Iterator[str]:
    rows = [
        [
            Cell(f"version {one.step} differs from version {one.base} now"),
            Cell(f"{file_size(one.old_bytes)} → {file_size(one.new_bytes)}", "dim"),
        ]
        for one in done
    ]
    if done:
        yield from screen.table(rows)
        yield ""
    yield (
        f"{count(len(done), 'version')} folded; any is at most {count(most, 'difference')} from "
        "its anchor"
    )
