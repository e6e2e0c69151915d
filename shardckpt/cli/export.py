"""`shardckpt export`: a checkpoint, written as another format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.reshard_options import Dtypes, parse_dtypes
from shardckpt.cli.screen import Screen, transfer_bar, write_json
from shardckpt.cli.text import count, file_size, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.convert.export import ExportReport

__all__ = ["export"]

_NAMED = 5
"""Notes that are shown."""


def export(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a path or url.")],
    destination: Annotated[str, typer.Argument(metavar="OUT", help="Where to, as in model.safetensors.")],
    *,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="Which format: safetensors, torch, dcp or orbax.")] = "safetensors",
    dtype: Dtypes = None,
    include: Annotated[list[str] | None, typer.Option("--include", metavar="PATTERN", help="Names to export; may be repeated.")] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Names to leave out; may be repeated.")] = None,
    memory_limit: Annotated[str, typer.Option("--memory-limit", metavar="BYTES", help="Of buffers.")] = "512MiB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read back what was written.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write a checkpoint's tensors as one file of another format.

    Nothing is to be seen under the name OUT before the file is whole. Interrupted, the same command goes on where it was.
    """
    from shardckpt.convert.export import export as run

    chosen: Any = to
    with transfer_bar("exporting") as progress:
        report = run(
            source,
            destination,
            to=chosen,
            dtype=parse_dtypes(dtype),
            include=include or None,
            exclude=exclude or None,
            memory_limit=memory_limit,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
        )
    if as_json:
        write_json(_document(report))
    else:
        screen = Screen()
        screen.show(_lines(screen, report))


def _document(report: ExportReport) -> dict[str, Any]:
    return {
        "url": report.url,
        "files": list(report.files),
        "tensors": report.tensors,
        "bytes": report.nbytes,
        "read_bytes": report.read_bytes,
        "written_bytes": report.written_bytes,
        "resumed_bytes": report.resumed_bytes,
        "notes": list(report.notes),
        "seconds": report.seconds,
    }


def _lines(screen: Screen, report: ExportReport) -> Iterator[str]:
    rate = "" if report.resumed_bytes else f", {file_size(round(report.nbytes / report.seconds))}/s"
    before = f", {file_size(report.resumed_bytes)} of them before" if report.resumed_bytes else ""
    what = f"{count(report.tensors, 'tensor')}, {file_size(report.nbytes)}{before}, {report.seconds:.1f} s{rate}"
    yield f"{screen.paint('exported', 'bold green')}  {visible(report.url)}: {what}"
    for line in report.notes[:_NAMED]:
        yield f"note      {visible(line)}"
    if len(report.notes) > _NAMED:
        yield f"note      {len(report.notes) - _NAMED:,} more; --json has all"
