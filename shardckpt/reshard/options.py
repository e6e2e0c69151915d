"""The options of a reshard, checked where they are made.

Options name neither source nor destination. The command line makes its flags of them, so nothing
heavy is imported before a value needs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import OptionError
from shardckpt.options import OptionParts, Options, option
from shardckpt.text import Message, named

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from concurrent.futures import Executor

    from shardckpt.layout.mesh import Mesh
    from shardckpt.layout.partition_spec import PartitionSpec
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reshard.rules import Rules

DEFAULT_MEMORY_LIMIT = 512 << 20
"""Default bytes of buffers, over all workers of one machine together."""
DEFAULT_TASK_BYTES = 256 << 20
MOST_WORKERS = 1024


def _parse_mesh(text: str) -> Mesh:
    from shardckpt.reshard.rules import parse_mesh

    return parse_mesh(text)


def parse_dtypes(texts: str | list[str]) -> str | dict[str, str]:
    """A dtype; or pattern → dtype, of texts `PATTERN=DTYPE`.

    A text without a pattern applies to tensors that no pattern matches.

    Raises:
        OptionError: a pattern, or a dtype alone, is given twice.
    """
    if isinstance(texts, str):
        return texts
    pairs = [text.rpartition("=") for text in texts]
    dtypes = {pattern: name for pattern, _, name in pairs}
    if len(dtypes) < len(pairs):
        raise OptionError(
            Message(
                named("dtype", ...),
                ": the same pattern, or a dtype without a pattern, is given twice; give each once.",
            )
        )
    return dtypes


def dtype_option() -> Any:
    """The option `dtype` of reshards, imports and exports."""
    return option(
        "Convert tensors to this dtype: those whose new name matches the pattern, and without a "
        "pattern floating-point tensors except optimizer state and parts of quantized tensors "
        "(docs/reshard.md#dtypes).",
        kind="texts",
        metavar="[PATTERN=]DTYPE",
        served="text",
        parse=parse_dtypes,
    )


def _parse_worker(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if match is None:
        raise OptionError(
            Message(named("worker", text), ": expected K/N, from 0/8 to 7/8 for eight workers.")
        )
    worker, workers = int(match[1]), int(match[2])
    if worker >= workers:
        raise OptionError(
            Message(
                named("worker", text),
                ": K must be less than N; workers count from 0, as in 0/8 to 7/8.",
            )
        )
    return worker, workers


@dataclass(frozen=True, kw_only=True)
class RuleSources(OptionParts):
    """Sources of rules, in order of precedence."""

    rule: Sequence[str] | None = option(
        "Cut tensors that match PATTERN. SPEC has a mesh axis or None per dimension, as in "
        "'**/w1=(None,model)'.",
        kind="texts",
        metavar="PATTERN=SPEC",
        served="texts",
    )
    rules: str | None = option("A TOML or YAML file of rules.", metavar="FILE")
    preset: str | None = option(
        "Built-in rules for a family of models, as in llama/fsdp+tp.",
        metavar="FAMILY",
        served="text",
    )
    hf_config: str | None = option(
        "Use the preset for the model type in this Hugging Face config.json.",
        metavar="FILE",
        flags=("--from-hf-config",),
    )

    def whole(self) -> Rules | None:
        """All rules.

        Raises:
            OptionError, ShardingError: a source is invalid.
        """
        from shardckpt.reshard.rules.rules import combined_rules

        return combined_rules(
            list(self.rule or ()), file=self.rules, preset=self.preset, hf_config=self.hf_config
        )


@dataclass(frozen=True, kw_only=True)
class ReshardOptions(Options):
    """Options of `shardckpt.reshard`. `like` and `unmatched` become part of `rules`."""

    mesh: Mesh | None = option(
        "The new mesh, as in data=2,model=4. Without rules, tensors keep their recorded specs on "
        "it.",
        metavar="AXES",
        served="text",
        example="data=2,model=2",
        parse=_parse_mesh,
    )
    rules: Rules | str | Sequence[str] | Mapping[str, PartitionSpec] | None = option(
        'Layouts by names in the new checkpoint: `Rules`, texts such as "**/w1=(None,model)", or '
        "a dict of pattern → spec.",
        parts=RuleSources,
    )
    like: str | os.PathLike[str] | Checkpoint | None = option(
        "Cut tensors that no rule matches as in this other checkpoint.", metavar="URL"
    )
    unmatched: Literal["replicate", "error"] | None = option(
        "Treatment of tensors that no rule matches: replicate or error; default: as the rules "
        "say, else replicate.",
        metavar="WHAT",
        choices=("replicate", "error"),
    )
    layout: Literal["packed", "zarr"] | None = option(
        "Files of the new checkpoint: packed (few) or zarr (one per chunk); default: as in the "
        "source, or packed.",
        metavar="LAYOUT",
        choices=("packed", "zarr"),
        served="text",
    )
    compression: Literal["zstd", "none"] | None = option(
        "Compression: zstd or none; default: as in the source, or none.",
        metavar="CODEC",
        flags=("--compress",),
        choices=("zstd", "none"),
        served="text",
    )
    dtype: str | Mapping[str, str] | None = dtype_option()
    only: str | Sequence[str] | None = option(
        "Keep only tensors and values whose name in the new checkpoint matches.",
        kind="texts",
        metavar="PATTERN",
        served="texts",
    )
    engine: Executor | str | None = option(
        "The workers: url of a cluster, as in ray://HOST:10001 or dask://HOST:8786, or in Python "
        "an Executor; default: processes on this machine.",
        metavar="URL",
    )
    memory_limit: int | str = option(
        "Limit of memory for the buffers of all workers on one machine together, and on a "
        "cluster of each running task. Each process uses up to 128 MiB more.",
        DEFAULT_MEMORY_LIMIT,
        kind="size",
        metavar="BYTES",
        served="text",
    )
    workers: int | None = option(
        "Tasks at the same time; default: as many as cores and memory allow, or as the cluster "
        "runs.",
        kind="integer",
        metavar="N",
    )
    worker: tuple[int, int] | None = option(
        "Run only this worker's share: worker K of N, counted from 0. You start all N; then "
        "`shardckpt commit` publishes.",
        metavar="K/N",
        parse=_parse_worker,
    )
    task_bytes: int | str = option(
        "Approximate bytes that a task writes. An interruption loses at most one unfinished task "
        "per worker; an interrupted job continues only with the same size.",
        DEFAULT_TASK_BYTES,
        kind="size",
    )
    overwrite: bool = option(
        "Replace a checkpoint that is committed at the destination, unless it is pinned, tagged, "
        "or the base of checkpoints beside it.",
        False,
        served="boolean",
    )
    verify: bool = option("Read back and check what was written.", True)
    progress: Callable[[int, int], None] | None = option(
        "Called with the bytes of elements done, and the total, of this call's share.",
        kind="function",
    )

    def __post_init__(self) -> None:
        """Check every option, and combine `rules`, `like` and `unmatched` into `rules`.

        A checkpoint that `like` names is opened.
        """
        super().__post_init__()
        from shardckpt.layout.mesh import Mesh
        from shardckpt.reshard.dtype_rules import check_dtypes
        from shardckpt.reshard.engines import check_engine
        from shardckpt.state.select import selector

        object.__setattr__(self, "rules", _all_rules(self.rules, self.like, self.unmatched))
        object.__setattr__(self, "like", None)
        object.__setattr__(self, "unmatched", None)
        mesh: Any = self.mesh
        if mesh is not None and not isinstance(mesh, Mesh):
            kind = type(mesh).__name__
            raise OptionError(
                Message(
                    named("mesh", ...),
                    f": a {kind} is not a shardckpt.Mesh; give Mesh(shape, axis_names).",
                )
            )
        if self.task_length <= 0:
            raise OptionError(Message(named("task_bytes", self.task_length), ": must be positive."))
        workers = self.workers
        if workers is not None and (
            not isinstance(workers, int)
            or isinstance(workers, bool)
            or not 0 < workers <= MOST_WORKERS
        ):
            raise OptionError(
                Message(named("workers", workers), f": give a number from 1 to {MOST_WORKERS}.")
            )
        if callable(self.only):
            raise OptionError(
                Message(
                    named("only", ...),
                    ": give patterns; worker processes cannot receive a function.",
                )
            )
        selector(self.only)
        check_dtypes(self.dtype)
        if isinstance(self.dtype, Mapping):  # not every mapping can be pickled
            object.__setattr__(self, "dtype", dict(self.dtype))
        worker: Any = self.worker
        pair = (
            isinstance(worker, tuple) and len(worker) == 2 and all(type(n) is int for n in worker)
        )
        if worker is not None and not (pair and 0 <= worker[0] < worker[1]):
            raise OptionError(
                Message(
                    named("worker", worker), ": give (K, N): this is worker K of N, counted from 0."
                )
            )
        check_engine(self.engine)
        if isinstance(self.engine, str) and worker is not None:
            both = named("engine", self.engine), ", ", named("worker", worker)
            raise OptionError(
                Message(*both, ": a cluster has workers of its own; leave one of the two out.")
            )

    @property
    def decided(self) -> Rules | None:
        """`rules`, combined with `like` and `unmatched`."""
        from shardckpt.reshard.rules import Rules

        assert self.rules is None or isinstance(self.rules, Rules)
        return self.rules

    @property
    def task_length(self) -> int:
        """`task_bytes` in bytes."""
        return self.nbytes("task_bytes")

    @property
    def budget(self) -> int:
        """`memory_limit` in bytes."""
        return self.nbytes("memory_limit")

    def of_job(self) -> ReshardOptions:
        """The options that all workers of a job have, without those of one call.

        They can be pickled.
        """
        return self.part(ReshardOptions, engine=None, worker=None, progress=None)

    def report(self, done: int, total: int) -> None:
        """Report progress to the caller."""
        if self.progress is not None:
            self.progress(done, total)


def _all_rules(
    rules: object, like: str | os.PathLike[str] | Checkpoint | None, unmatched: Any
) -> Rules | None:
    """Combine `rules`, `like` and `unmatched`."""
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reshard.rules import Rule, Rules

    if rules is None and like is None:
        if unmatched is not None:
            without = (
                named("unmatched", ...),
                " is about tensors that no rule matches, and there are no rules; give ",
            )
            raise OptionError(Message(*without, named("rules"), " or ", named("like"), "."))
        return None
    combined = Rules() if rules is None else rules
    if isinstance(combined, Mapping):
        combined = Rules(tuple(Rule(pattern, spec) for pattern, spec in combined.items()))
    elif isinstance(combined, str | Sequence):
        combined = Rules.parse(combined)
    elif not isinstance(combined, Rules):
        raise OptionError(
            Message(
                named("rules", rules),
                ": give shardckpt.Rules, texts such as '**/w1=(None,model)', or a dict.",
            )
        )
    if like is not None:
        other = like if isinstance(like, Checkpoint) else Checkpoint(like)
        combined = combined.then(Rules.like(other.record, str(other.location)))
    return combined if unmatched is None else replace(combined, unmatched=unmatched)
