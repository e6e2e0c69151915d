"""`shardckpt import`: a checkpoint of another format written as a shardckpt checkpoint."""

from __future__ import annotations

import sys
from typing import Annotated, Any

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
from shardckpt.cli.reshard import lines
from shardckpt.cli.reshard_options import (
    Dtypes,
    EngineUrl,
    HfConfig,
    Like,
    MemoryLimit,
    MeshText,
    Only,
    Overwrite,
    Preset,
    RulesFile,
    RuleTexts,
    Unmatched,
    Verify,
    Workers,
    WorkerText,
    parse_dtypes,
    parse_rules,
    parse_worker,
)
from shardckpt.cli.screen import Screen, transfer_bar, write_json
from shardckpt.excerpt import visible


def import_(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The source: a file or directory, or its url.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Where the new checkpoint goes: a path or url.")],
    *,
    from_: Annotated[
        str,
        typer.Option("--from", metavar="FORMAT", help="Format of SRC: auto, safetensors, torch, dcp, orbax, megatron, torch_xla or xser."),
    ] = "auto",
    include: Include = None,
    exclude: Exclude = None,
    strip_prefix: StripPrefix = None,
    rename: Rename = None,
    rename_file: RenameFile = None,
    mapping: MappingFile = None,
    invert_mapping: InvertMapping = False,
    add_prefix: AddPrefix = None,
    ties: TiesText = None,
    config: Config = None,
    into: Annotated[
        str | None,
        typer.Option("--into", metavar="NAME", help="Name of the container for the state: with --into model, w becomes model/w."),
    ] = None,
    mesh: MeshText = None,
    rule: RuleTexts = None,
    rules: RulesFile = None,
    preset: Preset = None,
    hf_config: HfConfig = None,
    like: Like = None,
    unmatched: Unmatched = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", metavar="LAYOUT", help="Files of the checkpoint: packed (few, default) or zarr (one per chunk)."),
    ] = None,
    compress: Annotated[str | None, typer.Option("--compress", metavar="CODEC", help="Compression: none (default) or zstd.")] = None,
    dtype: Dtypes = None,
    only: Only = None,
    engine: EngineUrl = None,
    workers: Workers = None,
    worker: WorkerText = None,
    memory_limit: MemoryLimit = "512MiB",
    overwrite: Overwrite = False,
    verify: Verify = True,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Also read pickles: say that you trust the author of SRC. No code of a pickle is run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Convert another format to a checkpoint.

    Elements stay the same, unless --dtype converts them. SRC does not change. After an interruption, the same command continues.
    --include and --exclude match names in SRC; rules, --only and --dtype match the new names.
    """
    if trust_pickle:
        print(
            "warning: --trust-pickle: pickles in SRC are read. Their code is not run; use only a SRC that you trust.",
            file=sys.stderr,
        )
    choices: dict[str, Any] = {"layout": layout, "compression": compress, "unmatched": unmatched, "engine": engine}
    choices |= given(
        include=include,
        exclude=exclude,
        strip_prefix=strip_prefix,
        rename=rename,
        rename_file=rename_file,
        mapping=mapping,
        invert_mapping=invert_mapping,
        add_prefix=add_prefix,
        ties=ties,
        config=config,
    )
    screen = Screen()

    def show(note: str) -> None:
        screen.show([visible(note)])

    # The imports take long enough to be interrupted.
    with going_on_later("run the same command again to continue"), transfer_bar("importing") as progress:
        from shardckpt.convert.importing import import_checkpoint
        from shardckpt.reshard.rules import parse_mesh

        report = import_checkpoint(
            source,
            destination,
            from_=from_,
            into=into,
            mesh=None if mesh is None else parse_mesh(mesh),
            rules=parse_rules(rule, rules, preset, hf_config),
            like=like,
            dtype=parse_dtypes(dtype),
            only=only or None,
            workers=workers,
            worker=parse_worker(worker),
            memory_limit=memory_limit,
            overwrite=overwrite,
            verify=verify,
            trust_pickle=trust_pickle,
            progress=progress,
            on_note=None if as_json else show,
            **choices,
        )
    if as_json:
        write_json(report.to_json())
    else:
        screen.show(lines(screen, report, "imported"))
