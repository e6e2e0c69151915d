"""`shardckpt reshard`: a checkpoint written anew, as it suits another layout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.commit import commit
from shardckpt.cli.screen import Screen, transfer_bar, write_json
from shardckpt.cli.text import count, file_size, visible
from shardckpt.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.reshard import ReshardReport
    from shardckpt.rules import Rules

__all__ = ["parse_dtypes", "parse_rules", "reshard"]

COMMIT = "commit"
"""In place of a source: not to reshard, but to commit what workers have written."""


def reshard(
    source: Annotated[str, typer.Argument(metavar="SRC", help='The checkpoint to read: a path or url. Or "commit": see --worker.')],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Where the new one goes.")],
    *,
    mesh: Annotated[str | None, typer.Option("--mesh", metavar="AXES", help="The new mesh, as in data=2,model=4.")] = None,
    rule: Annotated[list[str] | None, typer.Option("--rule", metavar="PATTERN=SPEC", help="How tensors are cut; may be repeated.")] = None,
    rules: Annotated[str | None, typer.Option("--rules", metavar="FILE", help="A file of rules, TOML or YAML.")] = None,
    preset: Annotated[str | None, typer.Option("--preset", metavar="FAMILY", help="Rules of a family of models: llama/fsdp+tp.")] = None,
    hf_config: Annotated[str | None, typer.Option("--from-hf-config", metavar="FILE", help="The preset that a config.json names.")] = None,
    like: Annotated[str | None, typer.Option("--like", metavar="URL", help="Lay tensors out as another checkpoint has them.")] = None,
    unmatched: Annotated[
        str | None, typer.Option("--unmatched", metavar="WHAT", help="Tensors without a rule: replicate or error.")
    ] = None,
    layout: Annotated[str | None, typer.Option("--layout", metavar="LAYOUT", help="packed or zarr; by default the source's.")] = None,
    compress: Annotated[str | None, typer.Option("--compress", metavar="CODEC", help="zstd or none; by default the source's.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", metavar="[PATTERN=]DTYPE", help="Convert; floats, or names that match. May be repeated.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="PATTERN", help="Names to keep; may be repeated.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", metavar="URL", help="Who does the work; by default this machine.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", metavar="N", help="Processes at once; by default one per core.")] = None,
    worker: Annotated[str | None, typer.Option("--worker", metavar="K/N", help="Be worker K, from 0, of N, and commit nothing.")] = None,
    memory_limit: Annotated[str, typer.Option("--memory-limit", metavar="BYTES", help="Of buffers, all workers together.")] = "512MiB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read back what was written.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write a checkpoint anew, as it suits another mesh.

    Every element stays what it is, but for what --dtype converts. Interrupted, the same command goes on where it was. SRC is only read.
    """
    if source == COMMIT:
        commit(destination, as_json=as_json)
        return
    from shardckpt.reshard import reshard as run
    from shardckpt.rules import parse_mesh

    choices: dict[str, Any] = {"layout": layout, "compression": compress, "unmatched": unmatched, "engine": engine}
    with transfer_bar("resharding") as progress:
        report = run(
            source,
            destination,
            mesh=None if mesh is None else parse_mesh(mesh),
            rules=parse_rules(rule, rules, preset, hf_config),
            like=like,
            dtype=parse_dtypes(dtype),
            only=only or None,
            workers=workers,
            worker=None if worker is None else parse_worker(worker),
            memory_limit=memory_limit,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
            **choices,
        )
    if as_json:
        write_json(_document(report))
    else:
        screen = Screen()
        screen.show(_lines(screen, report))


def parse_rules(rule: list[str] | None, file: str | None, preset: str | None, hf_config: str | None) -> Rules | None:
    """All rules in the order in which they count: those of the command line, of the file, of the preset; None: there are none."""
    from shardckpt.rules import Rules

    found = [Rules.parse(rule)] if rule else []
    found += [Rules.from_file(file)] if file is not None else []
    found += [Rules.preset(preset)] if preset is not None else []
    found += [Rules.from_hf_config(hf_config)] if hf_config is not None else []
    if not found:
        return None
    together, *others = found
    for more in others:
        together = together.then(more)
    return together


def parse_dtypes(texts: list[str] | None) -> str | dict[str, str] | None:
    """What `--dtype` says: one dtype for all floats, or patterns.

    Raises:
        OptionError: both.
    """
    if not texts:
        return None
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    pairs = [text.rpartition("=") for text in texts]
    if not all(pattern for pattern, _, _ in pairs):
        raise OptionError("--dtype: give one dtype for all floating-point tensors, or PATTERN=DTYPE each time.")
    return {pattern: name for pattern, _, name in pairs}


def parse_worker(text: str) -> tuple[int, int]:
    """What `--worker` says.

    Raises:
        OptionError: not two numbers.
    """
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if found is None:
        raise OptionError(f"--worker {text!r}: write K/N, as in 0/8 to 7/8.")
    return int(found[1]), int(found[2])


def _document(report: ReshardReport) -> dict[str, Any]:
    return {
        "url": report.url,
        "attempt": report.attempt,
        "committed": report.committed,
        "tasks": report.tasks,
        "done_before": report.done_before,
        "bytes": report.nbytes,
        "read_bytes": report.read_bytes,
        "stored_bytes": report.stored_bytes,
        "seconds": report.seconds,
    }


def _lines(screen: Screen, report: ReshardReport) -> Iterator[str]:
    rate = f", {file_size(round(report.nbytes / report.seconds))}/s" if report.committed and not report.done_before else ""
    before = f", {report.done_before:,} done before" if report.done_before else ""
    what = f"{file_size(report.nbytes)} in {count(report.tasks, 'task')}{before}, {report.seconds:.1f} s{rate}"
    word = screen.paint("resharded", "bold green") if report.committed else screen.paint("written", "bold")
    yield f"{word}  {visible(report.url)}: {what}"
    if not report.committed:
        yield f"when all workers are done, shardckpt reshard commit {visible(report.url)} makes it a checkpoint"
