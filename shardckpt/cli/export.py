"""`shardckpt export`: a checkpoint written in another format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.exits import going_on_later
from shardckpt.cli.opening import suggesting_import
from shardckpt.cli.options import takes
from shardckpt.cli.screen import Screen, transfer_bar, write_json
from shardckpt.cli.text import conversion_lines
from shardckpt.convert.options import AnyExportOptions
from shardckpt.text import count, file_size, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.convert.export import ExportReport

_OUT = "The destination. safetensors: a file, if the name ends in .safetensors, else a directory; torch: a file; dcp, orbax: a directory."
_NAMED = 5
"""Most notes in the text output."""


@takes(AnyExportOptions)
def export(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a path or url.")],
    destination: Annotated[str, typer.Argument(metavar="OUT", help=_OUT)],
    *,
    given: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a checkpoint in another format.

    OUT appears when the export is complete. After an interruption, run the same command again: an export to safetensors continues, others
    start over. Patterns of --dtype match names in OUT.
    """
    again = "continue" if given["to"] == "safetensors" else "start over"
    # The imports take long enough to be interrupted.
    with going_on_later(f"run the same command again to {again}"), suggesting_import(source), transfer_bar("exporting") as progress:
        from shardckpt.convert.export import export as run

        report = run(source, destination, **AnyExportOptions.arguments(given), progress=progress)
    if as_json:
        write_json(report.to_json())
    else:
        screen = Screen()
        screen.show(_lines(screen, report))


def _lines(screen: Screen, report: ExportReport) -> Iterator[str]:
    rate = "" if report.resumed_bytes else f", {file_size(round(report.nbytes / report.seconds))}/s"
    before = f", {file_size(report.resumed_bytes)} of them before" if report.resumed_bytes else ""
    what = f"{count(report.tensors, 'tensor')}, {file_size(report.nbytes)}{before}, {report.seconds:.1f} s{rate}"
    place = report.url if report.url.endswith(f"/{report.files[-1]}") else f"{report.url}/{report.files[-1]}"
    yield f"{screen.paint('exported', 'bold green')}  {visible(place)}: {what}"
    yield from conversion_lines(report.conversions)
    for line in report.notes[:_NAMED]:
        yield f"note      {visible(line)}"
    if len(report.notes) > _NAMED:
        yield f"note      {len(report.notes) - _NAMED:,} more; --json has all"
