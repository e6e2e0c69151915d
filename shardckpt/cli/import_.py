"""`shardckpt import`: a checkpoint of another format written as a shardckpt checkpoint."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from shardckpt.cli.exits import going_on_later
from shardckpt.cli.options import takes
from shardckpt.cli.reshard import lines
from shardckpt.cli.screen import Json, Screen, transfer_bar, write_json
from shardckpt.convert.options import ImportOptions
from shardckpt.text import visible


@takes(ImportOptions)
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="The source: a file or directory, or its url.")
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="Where the new checkpoint goes: a path or url.")
    ],
    *,
    given: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Convert another format to a checkpoint.

    Elements stay the same, unless --dtype converts them. SRC does not change. After an
    interruption, the same command continues. --include and --exclude match names in SRC; rules,
    --only and --dtype match the new names.
    """
    if given["trust_pickle"]:
        print(
            "warning: --trust-pickle: metadata in pickles of SRC is believed. Nothing in them is "
            "called; import only a SRC that you trust.",
            file=sys.stderr,
        )
    screen = Screen()

    def show(note: str) -> None:
        screen.show([visible(note)])

    # The imports take long enough to be interrupted.
    with (
        going_on_later("run the same command again to continue"),
        transfer_bar("importing") as progress,
    ):
        from shardckpt.convert.importing import import_checkpoint

        arguments = ImportOptions.arguments(given)
        report = import_checkpoint(
            source, destination, **arguments, progress=progress, on_note=None if as_json else show
        )
    if as_json:
        write_json(report.to_json())
    else:
        screen.show(lines(screen, report, "imported"))
