"""`shardckpt export`: a checkpoint written in another format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.exits import going_on_later
from shardckpt.cli.naming_options import (
    AddPrefix,
    Config,
    Exclude,
    Include,
    InvertMapping,
    MappingFile,
    Rename,
    RenameFile,
    StripPrefix,
    TiesText,
    given,
)
from shardckpt.cli.opening import suggesting_import
from shardckpt.cli.reshard_options import Dtypes, parse_dtypes
from shardckpt.cli.screen import Screen, transfer_bar, write_json
from shardckpt.cli.text import conversion_lines
from shardckpt.excerpt import count, file_size, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.convert.export import ExportReport

_OUT = "The destination. safetensors: a file, if the name ends in .safetensors, else a directory; torch: a file; dcp, orbax: a directory."
_NAMED = 5
"""Most notes in the text output."""


def export(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a path or url.")],
    destination: Annotated[str, typer.Argument(metavar="OUT", help=_OUT)],
    *,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="Format of OUT: safetensors, torch, dcp or orbax.")] = "safetensors",
    dtype: Dtypes = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            metavar="FORM",
            help="Keys of optimizer state in torch and dcp: names of parameters (names, the default), their numbers (numbers), or one flat "
            "dict with complete names (flat).",
        ),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="BYTES", help="Write several files of at most this size, as in 5GB, and an index."),
    ] = None,
    strip_prefix: StripPrefix = None,
    rename: Rename = None,
    rename_file: RenameFile = None,
    mapping: MappingFile = None,
    invert_mapping: InvertMapping = False,
    add_prefix: AddPrefix = None,
    ties: TiesText = None,
    config: Config = None,
    memory_limit: Annotated[str, typer.Option("--memory-limit", metavar="BYTES", help="Limit of memory for buffers.")] = "512MiB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing OUT.")] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read back and check what was written.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a checkpoint in another format.

    OUT appears when the export is complete. After an interruption, run the same command again: an export to safetensors continues, others
    start over. Patterns of --dtype match names in OUT.
    """
    chosen: Any = to
    options = given(
        optimizer=optimizer,
        include=include,
        exclude=exclude,
        max_shard_size=max_shard_size,
        strip_prefix=strip_prefix,
        rename=rename,
        rename_file=rename_file,
        mapping=mapping,
        invert_mapping=invert_mapping,
        add_prefix=add_prefix,
        ties=ties,
        config=config,
    )
    again = "continue" if to == "safetensors" else "start over"
    # The imports take long enough to be interrupted.
    with going_on_later(f"run the same command again to {again}"), suggesting_import(source), transfer_bar("exporting") as progress:
        from shardckpt.convert.export import export as run

        report = run(
            source,
            destination,
            to=chosen,
            dtype=parse_dtypes(dtype),
            memory_limit=memory_limit,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
            **options,
        )
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
