"""`shardckpt.import_checkpoint`: write a checkpoint of another format as one of shardckpt's.

An import is a reshard whose source is a foreign checkpoint, with the same plan by rules, tasks,
memory limit, workers, resumption and commit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.convert.detect import AUTO, detect, module_of
from shardckpt.convert.files.file_version import file_at
from shardckpt.convert.foreign_source import ForeignSpec
from shardckpt.convert.hub_cache import hub_snapshot
from shardckpt.convert.options import ImportOptions
from shardckpt.errors import NotFoundError, OptionError, out_of_memory_is_typed
from shardckpt.format.documents import is_choice
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import documented
from shardckpt.reshard.execute import ReshardReport, run_job
from shardckpt.reshard.options import DEFAULT_MEMORY_LIMIT, DEFAULT_TASK_BYTES

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from shardckpt.convert.options import Patterns, Ties
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
@documented(ImportOptions)
def import_checkpoint(  # noqa: D417  (the other arguments are documented where they are declared)
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

    Elements stay the same bit for bit, except for tensors that `dtype` converts. An import needs no
    devices, and holds a few chunks in memory at a time. After an interruption, a call with the same
    arguments continues it. The source is only read.

    Names of the source are selected and changed first (docs/mapping.md); rules, `only` and `dtype`
    match the new names. Without rules, tensors get the layouts that the source has recorded (Orbax
    only), and others become plain.

    Args:
        src: the checkpoint to read, a path or url; docs/import.md lists the formats.
        dst: path or url of the new checkpoint.
        options: the other arguments are the fields of `ImportOptions`.

    Returns:
        The report.

    Raises:
        NotFoundError: there is nothing at `src`.
        FormatError: the format is unknown, or the source is malformed; for an unknown format, the
            message lists the known formats and the files that were found.
        MissingDataError, CorruptionError: a part of the source is missing or damaged.
        ReplacedError: the source changed during the import.
        AlreadyExistsError: a checkpoint is committed at `dst`, and `overwrite` is not set.
        OptionError, ShardingError, NamesMismatchError, ShapeMismatchError, DtypeMismatchError,
            LeafError: the options do not fit the source.
        BudgetError: the memory limit is too low; the message names a limit that suffices.
        MissingExtraError: a package that the format or the engine needs is not installed.
        CommitError, CoordinationError, StorageError: as in `reshard`.
    """
    options = ImportOptions.of(locals())
    location, destination = parse(src), parse(dst)
    snapshot = hub_snapshot(location)
    if destination.resolved == location.resolved or (
        snapshot is not None and destination.is_within(snapshot)
    ):
        raise OptionError(
            f"{location}: the new checkpoint would be written into the source; choose another "
            "place for it."
        )
    location = snapshot or location
    format_name, signs = _format_at(location, from_)
    spec = ForeignSpec(str(location), format_name, trust_pickle, into, options.names())
    source = spec.open()
    notes = (*signs, *source.notes)
    if on_note is not None:
        for note in notes:
            on_note(note)
    with reading_takes_threads(src):
        report = run_job(spec, dst, options, source)
    of_reshard: dict[str, Any] = {
        field.name: getattr(report, field.name) for field in fields(ReshardReport)
    }
    return ImportReport(**of_reshard, format=format_name, notes=notes)


def _format_at(location: Location, from_: str) -> tuple[str, tuple[str, ...]]:
    """The name of the source's format, and the signs by which it was detected."""
    if is_choice(from_, (AUTO,)):
        detected = detect(location)
        return detected.format, (
            f"{detected.format}: {detected.seen}",
            *(f"not read: {other}" for other in detected.others),
        )
    module_of(from_)
    place = Store.open(location)
    if file_at(location) is None and place.lists and not place.list_children():
        raise NotFoundError(
            f"{location}: there is no such file, and no directory of that name with files in it; "
            "check the path."
        )
    return from_, ()
