"""Command-line options of `plan`, `reshard` and `import`: the new layout, its storage, and the workers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt.errors import OptionError

if TYPE_CHECKING:
    from shardckpt.reshard.rules import Rules

MeshText = Annotated[str | None, typer.Option("--mesh", metavar="AXES", help="The new mesh, as in data=2,model=4.")]
RuleTexts = Annotated[
    list[str] | None,
    typer.Option("--rule", metavar="PATTERN=SPEC", help="Cut matching tensors like this, as in '**/w1=(None,model)'; may be repeated."),
]
RulesFile = Annotated[str | None, typer.Option("--rules", metavar="FILE", help="A TOML or YAML file of rules.")]
Preset = Annotated[
    str | None, typer.Option("--preset", metavar="FAMILY", help="Built-in rules for a family of models, as in llama/fsdp+tp.")
]
HfConfig = Annotated[
    str | None, typer.Option("--from-hf-config", metavar="FILE", help="A Hugging Face config.json, to choose the preset by its model type.")
]
Like = Annotated[str | None, typer.Option("--like", metavar="URL", help="Cut tensors without a rule as in another checkpoint.")]
Unmatched = Annotated[str | None, typer.Option("--unmatched", metavar="WHAT", help="Tensors without a rule: replicate (default) or error.")]
StoredAs = Annotated[
    str | None,
    typer.Option(
        "--layout", metavar="LAYOUT", help="Files of the new checkpoint: packed (few) or zarr (one per chunk); default: as in SRC."
    ),
]
Compress = Annotated[str | None, typer.Option("--compress", metavar="CODEC", help="Compression: zstd or none; default: as in SRC.")]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="[PATTERN=]DTYPE",
        help="Convert tensors that match; without PATTERN, floating-point tensors except optimizer state; may be repeated.",
    ),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="PATTERN", help="Write only tensors whose new name matches; may be repeated.")
]
Workers = Annotated[int | None, typer.Option("--workers", metavar="N", help="Processes at the same time; default: one per core.")]
MemoryLimit = Annotated[
    str, typer.Option("--memory-limit", metavar="BYTES", help="Limit of memory for the buffers of all workers together.")
]
EngineUrl = Annotated[str | None, typer.Option("--engine", metavar="URL", help="A cluster, as in ray://HOST:10001; default: this machine.")]
WorkerText = Annotated[
    str | None,
    typer.Option("--worker", metavar="K/N", help="Write only part K (from 0) of N; after all parts, run `shardckpt commit DST`."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint at DST.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Read back and check what was written.")]


def parse_rules(rule: list[str] | None, file: str | None, preset: str | None, hf_config: str | None) -> Rules | None:
    """All rules in order of precedence: from the command line, from the file, from the preset; None if there are none."""
    from shardckpt.reshard.rules.rules import combined_rules

    return combined_rules(rule, file=file, preset=preset, hf_config=hf_config)


def parse_dtypes(texts: list[str] | None) -> dict[str, str] | None:
    """The value of `--dtype`: pattern → dtype; a dtype alone applies to tensors that no pattern matches (`reshard.dtype_rules`).

    Raises:
        OptionError: a pattern, or a dtype alone, is given twice.
    """
    if not texts:
        return None
    pairs = [text.rpartition("=") for text in texts]
    found = {pattern: name for pattern, _, name in pairs}
    if len(found) < len(pairs):
        raise OptionError("--dtype: the same pattern, or a dtype without a pattern, is given twice; give each once.")
    return found


def parse_worker(text: str | None) -> tuple[int, int] | None:
    """The worker's number and the number of workers, from `--worker`.

    Raises:
        OptionError: the text is not two numbers, or the first is not less than the second.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if found is None:
        raise OptionError(f"--worker {text!r}: expected K/N, from 0/8 to 7/8 for eight workers.")
    worker, workers = int(found[1]), int(found[2])
    if worker >= workers:
        raise OptionError(f"--worker {text}: K must be less than N; workers count from 0, as in 0/8 to 7/8.")
    return worker, workers
