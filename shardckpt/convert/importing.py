"""`shardckpt.import_checkpoint`: write a checkpoint of another format as one of shardckpt's.

An import is a reshard whose source is a foreign checkpoint, with the same plan by rules, tasks, memory limit, workers, resumption and
commit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.convert.detect import AUTO, detect, module_of
from shardckpt.convert.files.file_version import file_at
from shardckpt.convert.foreign_source import ForeignSpec
from shardckpt.convert.naming.choose import NameOptions
from shardckpt.errors import NotFoundError, OptionError, out_of_memory_is_typed
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import check_flag
from shardckpt.reshard.execute import ExecutionOptions, ReshardReport, all_rules, run_job
from shardckpt.reshard.options import DEFAULT_MEMORY_LIMIT, DEFAULT_TASK_BYTES, ReshardOptions

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from shardckpt.convert.naming.choose import Patterns, Ties
    from shardckpt.io.url import Location
    from shardckpt.layout.mesh import Mesh
    from shardckpt.layout.partition_spec import PartitionSpec
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.naming.mapping import TensorMapping
    from shardckpt.reshard.rules import Rules


@dataclass(frozen=True, slots=True)
class ImportReport(ReshardReport):
    """The result of an import: a `ReshardReport` with the source's format and notes."""

    format: str
    """Name of the source's format."""
    notes: tuple[str, ...]
    """Notes on what was found, and on what was left out; one line each."""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {"format": self.format, "notes": list(self.notes), **ReshardReport.to_json(self)}


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
    mapping: str | os.PathLike[str] | TensorMapping | None = None,
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
    """Convert a checkpoint of another format to a shardckpt checkpoint.

    Elements stay the same bit for bit, except for tensors that `dtype` converts. An import needs no devices, and holds a few chunks in
    memory at a time. After an interruption, a call with the same arguments continues it. The source is only read.

    Args:
        src: the checkpoint to read, a path or url; docs/import.md lists the formats.
        dst: path or url of the new checkpoint.
        from_: format of the source, such as "safetensors" or "dcp"; "auto": detect it.
        mesh: the devices that specs refer to.
        rules: layouts by names in the new checkpoint, as in `reshard`. None: layouts that the source has recorded (Orbax only); other
            tensors become plain.
        like: another checkpoint: its layouts apply to tensors that no rule matches.
        layout: "packed" (the default) or "zarr".
        compression: "zstd" or "none" (the default).
        dtype: the dtype to convert tensors to, or pattern → dtype, as in `reshard`.
        only: patterns of new names to keep; None: all.
        include: patterns of the source's names to import; None: all. docs/mapping.md describes this and the next options.
        exclude: patterns of the source's names to leave out.
        strip_prefix: a prefix to remove from names.
        rename: `s/regex/replacement/`, one or several, for tensors and all other leaves.
        rename_file: JSON, TOML or YAML: old name → new name, or null to leave a leaf out.
        mapping: rules that join, split or transpose tensors: a file, or the name of a built-in mapping.
        invert_mapping: apply the mapping from its `to` to its `from`.
        add_prefix: a prefix to add to the names of all tensors, after the other options.
        ties: "once": tied tensors stay tied; "copies": each name gets a tensor of its own; "auto": "copies" if `config` says that the
            model ties nothing, otherwise "once".
        config: the model's `config.json`, or its directory.
        into: key below which the imported state is put: "model" makes `{"model": …}`. None: the imported state is the new state.
        engine: executor of the tasks, as in `reshard`.
        memory_limit: bytes of buffers, as in `reshard`.
        workers: number of tasks done at once, as in `reshard`.
        worker: (K, N): this call is worker K of N, as in `reshard`.
        task_bytes: approximate bytes that a task writes.
        overwrite: replace a checkpoint that is committed there, unless it is pinned, tagged, or the base of checkpoints beside it.
        verify: read back the written bytes.
        trust_pickle: read metadata that a format stores only in a pickle. Set this only for files from a source that you trust,
            although the reader of pickles runs no code.
        unmatched: treatment of tensors that no rule matches; None: the setting of `rules`, or "replicate".
        progress: called with the bytes of elements done so far, and the total.
        on_note: called with each note of the report before anything is written.

    Returns:
        The report.

    Raises:
        NotFoundError: there is nothing at `src`.
        FormatError: the format is unknown, or the source is malformed; for an unknown format, the message lists the known formats and
            the files that were found.
        MissingDataError, CorruptionError: a part of the source is missing or damaged.
        ReplacedError: the source changed during the import.
        AlreadyExistsError: a checkpoint is committed at `dst`, and `overwrite` is not set.
        OptionError, ShardingError, NamesMismatchError, ShapeMismatchError, DtypeMismatchError, LeafError: the options do not
            fit the source.
        BudgetError: the memory limit is too low; the message names a limit that suffices.
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
        invert_mapping=invert_mapping,
        add_prefix=add_prefix,
        ties=ties,
        config=config,
    )
    location = parse(src)
    if location.resolved == parse(dst).resolved:
        raise OptionError(f"{location}: the new checkpoint would be written into the source; choose another place for it.")
    format_name, signs = _format_at(location, from_)
    spec = ForeignSpec(str(location), format_name, trust_pickle, into, names)
    source = spec.open()
    notes = (*signs, *source.notes)
    if on_note is not None:
        for note in notes:
            on_note(note)
    with reading_takes_threads(src):
        report = run_job(spec, dst, options, ExecutionOptions(engine, worker, progress), source)
    of_reshard: dict[str, Any] = {field.name: getattr(report, field.name) for field in fields(ReshardReport)}
    return ImportReport(**of_reshard, format=format_name, notes=notes)


def _format_at(location: Location, from_: str) -> tuple[str, tuple[str, ...]]:
    """The name of the source's format, and the signs by which it was detected."""
    if from_ == AUTO:
        detected = detect(location)
        return detected.format, (f"{detected.format}: {detected.seen}", *(f"not read: {other}" for other in detected.others))
    module_of(from_)
    if file_at(location) is None and not Store.open(location).list_children():
        raise NotFoundError(f"{location}: there is no such file, and no directory of that name with files in it; check the path.")
    return from_, ()
