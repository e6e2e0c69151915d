"""`shardckpt export`: a checkpoint written in another format."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.exits import going_on_later
from shardckpt.cli.opening import suggesting_import
from shardckpt.cli.options import takes
from shardckpt.cli.screen import Json, Screen, transfer_bar, write_json, write_text
from shardckpt.cli.text import conversion_lines
from shardckpt.convert.options import AnyExportOptions
from shardckpt.text import count, file_size, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.convert.export import ExportReport
    from shardckpt.convert.formats.canonical_delta.target import WrittenVersion

_OUT = (
    "The destination. safetensors: a file, if the name ends in .safetensors, else a directory; "
    "torch: a file; dcp, orbax, canonical-delta: a directory."
)
_NAMED = 5
"""Most notes in the text output."""


@takes(AnyExportOptions)
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="The checkpoint: a path or url; canonical-delta: the place of a publisher's "
            "versions.",
        ),
    ],
    destination: Annotated[str, typer.Argument(metavar="OUT", help=_OUT)],
    *,
    given: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Write a checkpoint in another format.

    OUT appears when the export is complete. After an interruption, run the same command again:
    exports to safetensors and canonical-delta continue, others start over. Patterns of --dtype
    match names in OUT. With --follow each version is printed when it is written; with --json, as
    one JSON document a line.
    """
    again = "continue" if given["to"] in ("safetensors", "canonical-delta") else "start over"
    more: dict[str, Any] = {"on_version": partial(_say, as_json)} if given["follow"] else {}
    # The imports take long enough to be interrupted.
    with (
        going_on_later(f"run the same command again to {again}"),
        suggesting_import(source),
        transfer_bar("exporting") as progress,
    ):
        from shardckpt.convert.export import export as run

        report = run(
            source, destination, **AnyExportOptions.arguments(given), **more, progress=progress
        )
    if as_json:
        write_json(report.to_json())
    else:
        screen = Screen()
        screen.show(_lines(screen, report))


def _say(as_json: bool, version: WrittenVersion) -> None:
    """Print a version that was written."""
    if as_json:
        write_text(json.dumps(version.to_json()) + "\n", flush=True)
    else:
        size = f"{count(version.tensors, 'tensor')}, {file_size(version.written_bytes)}"
        Screen().show([f"written   {visible(version.url)}: step {version.step}, {size}"])


def _lines(screen: Screen, report: ExportReport) -> Iterator[str]:
    rate = "" if report.resumed_bytes else f", {file_size(round(report.nbytes / report.seconds))}/s"
    before = f", {file_size(report.resumed_bytes)} of them before" if report.resumed_bytes else ""
    what = (
        f"{count(report.tensors, 'tensor')}, {file_size(report.nbytes)}{before}, "
        f"{report.seconds:.1f} s{rate}"
    )
    last = report.files[-1] if report.files else ""
    place = report.url if report.url.endswith(f"/{last}") else f"{report.url}/{last}"
    yield f"{screen.paint('exported', 'bold green')}  {visible(place)}: {what}"
    yield from conversion_lines(report.conversions)
    for line in report.notes[:_NAMED]:
        yield f"note      {visible(line)}"
    if len(report.notes) > _NAMED:
        yield f"note      {len(report.notes) - _NAMED:,} more; --json has all"
