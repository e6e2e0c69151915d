"""A checkpoint of another format, written as one of shardckpt's: `shardckpt.import_checkpoint`.

An import is a reshard whose source is a foreign checkpoint: the same plan by rules, tasks, memory limit, workers, resumption and commit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.convert.detect import AUTO, detect, module_of
from shardckpt.convert.foreign_source import ForeignSpec
from shardckpt.convert.naming.choose import NameOptions
from shardckpt.errors import NotFoundError, OptionError, out_of_memory_is_typed
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.file_version import file_at
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import check_flag
from shardckpt.reshard.execute import ReshardReport, all_rules, run_job
from shardckpt.reshard.options import DEFAULT_MEMORY_LIMIT, DEFAULT_TASK_BYTES, ReshardOptions

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from shardckpt.convert.naming.choose import Patterns
    from shardckpt.convert.naming.mapping import Mapping as NamesMapping
    from shardckpt.convert.naming.ties import Ties
    from shardckpt.layout.mesh import Mesh
    from shardckpt.layout.partition_spec import PartitionSpec
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reshard.rules import Rules

__all__ = ["ImportReport", "import_checkpoint"]


@dataclass(frozen=True, slots=True)
class ImportReport(ReshardReport):
    """What an import has done: as a `ReshardReport`, and what was read."""

    format: str
    """The name of the source's format."""
    notes: tuple[str, ...]
    """What was seen, and what is left behind, in a line each."""


@out_of_memory_is_typed
def import_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    from_: str = AUTO,
    mesh: Mesh | None = None,
    rules: Rules | str | Sequence[str] | Mapping[str, PartitionSpec] | None = None,
    like: str | os.PathLike[str] | Checkpoint | None = None,
    layout: Literal["packed", "zarr"] | None = None,
    compression: Literal["zstd", "none"] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    only: str | Sequence[str] | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    strip_prefix: str | None = None,
    rename: str | Sequence[str] = (),
    rename_file: str | os.PathLike[str] | None = None,
    mapping: str | os.PathLike[str] | NamesMapping | None = None,
    invert_mapping: bool = False,
    add_prefix: str = "",
    ties: Ties = "auto",
    config: str | os.PathLike[str] | None = None,
    into: str | None = None,
    engine: Executor | str | None = None,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    workers: int | None = None,
    worker: tuple[int, int] | None = None,
    task_bytes: int | str = DEFAULT_TASK_BYTES,
    overwrite: bool = False,
    verify: bool = True,
    trust_pickle: bool = False,
    unmatched: Literal["replicate", "error"] | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> ImportReport:
    """Write a checkpoint of another format as one of shardckpt's, bit for bit the same, but for what `dtype` converts.

    It needs no devices, and memory for a few chunks only. Interrupted and called again with the same arguments it goes on where it
    was. The source is only read; one that changes meanwhile is an error.

    Args:
        src: the checkpoint to read, a path or url; see docs/import.md for what is known.
        dst: where the new one goes.
        from_: its format; "auto": the one that is found.
        mesh: the devices that specs refer to.
        rules: how each tensor is laid out, by its name in the new checkpoint, as in `reshard`. None: as the format has recorded it,
            most of which record nothing.
        like: another checkpoint: tensors that no rule means are laid out as there.
        layout: "packed" (the default) or "zarr".
        compression: "zstd" or "none" (the default).
        dtype: what tensors are converted to: a dtype, or pattern → dtype, as in `reshard`.
        only: the names that the new checkpoint has: a pattern, or several.
        include: the source's names that are taken: a pattern, or several (docs/mapping.md has this option and those that follow).
        exclude: of those, the names that are not.
        strip_prefix: what names begin with, and shall not any more.
        rename: `s/regex/replacement/`, one or several; all leaves are renamed, tensors or not.
        rename_file: JSON, TOML or YAML: old name → new name, or null.
        mapping: which tensors are joined, split or transposed: a file, or the name of a mapping that comes along.
        invert_mapping: read the mapping from its `to` to its `from`.
        add_prefix: what the names of all tensors begin with in the end.
        ties: tied tensors stay tied ("auto", "once"), or become "copies"; "auto": copies where `config` says that the model does not tie.
        config: the model's `config.json`.
        into: where in the new state the source's goes: "model" makes it `{"model": …}`. None: it is the state.
        engine: who does the work, as in `reshard`.
        memory_limit: bytes of buffers, as in `reshard`.
        workers: how many tasks are done at once, as in `reshard`.
        worker: (K, N): this call is worker K of N, as in `reshard`.
        task_bytes: about what a task writes.
        overwrite: replace a checkpoint that is committed there.
        verify: read back what was written.
        trust_pickle: read what a format says in a pickle alone. It is read by a machine that runs nothing (`unpickling`), and only of
            files whose maker you trust.
        unmatched: what becomes of tensors that no rule means; None: as `rules` has it, and else "replicate".
        progress: called with bytes of elements done so far, and in all.
        on_note: called with each of the report's notes, before anything is written.

    Returns:
        What was read, and what was done.

    Raises:
        NotFoundError: nothing lies at `src`.
        FormatError: it is no format that is known, or does not make sense; says what was looked for and found.
        MissingDataError, CorruptionError: a part of it is gone or damaged.
        ReplacedError: it was changed while it was being read.
        AlreadyExistsError: a checkpoint is committed at `dst`, and `overwrite` is not set.
        OptionError, ShardingError, NamesMismatchError, ShapeMismatchError, DtypeMismatchError, LeafError: what is asked for cannot be
            made of it.
        BudgetError: the memory limit does not suffice; names it, and what would.
        MissingExtraError: a package that the format or the engine needs is not installed.
        CommitError, CoordinationError, StorageError: as in `reshard`.
    """
    options = ReshardOptions(
        mesh=mesh,
        rules=all_rules(rules, like, unmatched),
        layout=layout,
        compression=compression,
        dtype=dtype,
        only=only,
        memory_limit=memory_limit,
        workers=workers,
        task_bytes=task_bytes,
        overwrite=overwrite,
        verify=verify,
    )
    check_flag(trust_pickle, "trust_pickle")
    names = NameOptions(
        include=include,
        exclude=exclude,
        strip_prefix=strip_prefix,
        rename=rename,
        rename_file=rename_file,
        mapping=mapping,
        invert=invert_mapping,
        add_prefix=add_prefix,
        ties=ties,
        config=config,
    )
    spec, seen = _found(src, dst, from_, trust_pickle=trust_pickle, into=into, names=names)
    source = spec.open()
    notes = (*seen, *source.notes)
    if on_note is not None:
        for note in notes:
            on_note(note)
    with reading_takes_threads(src):
        report = run_job(spec, dst, options, engine=engine, worker=worker, progress=progress, found=source)
    done: dict[str, Any] = {field.name: getattr(report, field.name) for field in fields(ReshardReport)}
    return ImportReport(**done, format=spec.format, notes=notes)


def _found(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], from_: str, *, trust_pickle: bool, into: str | None, names: NameOptions
) -> tuple[ForeignSpec, tuple[str, ...]]:
    """Which checkpoint is meant, and how it was told."""
    location = parse(src)
    if location.resolved == parse(dst).resolved:
        raise OptionError(f"{location}: the new checkpoint would be written into what is read; choose another place for it.")
    if from_ == AUTO:
        detected = detect(location)
        name, seen = detected.format, (f"{detected.format}: {detected.seen}", *(f"not read: {other}" for other in detected.others))
    else:
        module_of(from_)
        if file_at(location) is None and not Store.open(location).list_children():
            raise NotFoundError(f"{location}: there is no file, and nothing in a directory of that name.")
        name, seen = from_, ()
    return ForeignSpec(str(location), name, trust_pickle, into, names), seen
