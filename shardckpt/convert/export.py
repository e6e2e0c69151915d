"""`shardckpt.export`: write a checkpoint in another format."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.convert.files.local_files import LocalFiles
from shardckpt.convert.files.object_files import ObjectFiles, begun
from shardckpt.convert.formats.safetensors.adapter_files import PeftOptions, plan_adapter_files
from shardckpt.convert.formats.safetensors.hf_configs import without_others
from shardckpt.convert.formats.safetensors.hf_index import INDEX, is_of_a_model
from shardckpt.convert.formats.safetensors.model_files import plan_model_files
from shardckpt.convert.formats.safetensors.target import write_safetensors
from shardckpt.convert.options import DeltaOptions, SafetensorsOptions, StateOptions, ToOptions
from shardckpt.convert.whole_state import FORMATS, write_state
from shardckpt.errors import AlreadyExistsError, OptionError, out_of_memory_is_typed
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.store import Store, kind_of
from shardckpt.io.url import parse
from shardckpt.options import documented, leaves_out_with
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reshard.options import DEFAULT_MEMORY_LIMIT
from shardckpt.state.names import shown
from shardckpt.text import Message, named

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.convert.files.destination import Destination
    from shardckpt.convert.formats.canonical_delta.target import WrittenVersion
    from shardckpt.convert.formats.safetensors.model_files import ModelFiles
    from shardckpt.convert.options import Patterns, Ties
    from shardckpt.io.url import Location
    from shardckpt.reading.naming.mapping import TensorMapping
    from shardckpt.reshard.dtype_rules import ConvertedSubtree

DELTA = "canonical-delta"
"""The format of directories of differences (`formats.canonical_delta`)."""
_SUFFIX = ".safetensors"
_TORCH_FILES = {".pt", ".pth", ".bin", ".ckpt"}
_OTHER_FILES = {".npz", ".npy", ".gguf", ".h5", ".hdf5", ".onnx"}


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export."""

    url: str
    """Location of the file or directory that was written."""
    files: tuple[str, ...]
    """Names of the written files; for DCP and Orbax, only the name of the directory."""
    tensors: int
    """Number of written tensors."""
    nbytes: int
    """Bytes of all written elements, including those that an interrupted call wrote."""
    read_bytes: int
    """Stored bytes of the checkpoint that this call read."""
    written_bytes: int
    """Bytes that this call wrote; for torch, DCP and Orbax, bytes of tensors only."""
    resumed_bytes: int
    """Bytes of elements that an interrupted call wrote."""
    notes: tuple[str, ...]
    """Notes on what was left out or changed, because the format cannot hold it; one line each."""
    seconds: float
    """Wall-clock seconds."""
    conversions: tuple[ConvertedSubtree, ...] = ()
    """For each subtree, how many tensors `dtype` converted and how many it left; empty without
    `dtype`."""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "url": self.url,
            "files": list(self.files),
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "resumed_bytes": self.resumed_bytes,
            "notes": list(self.notes),
            "seconds": self.seconds,
            "conversions": [one.to_json() for one in self.conversions],
        }


@out_of_memory_is_typed
@leaves_out_with("exclude")
@documented(StateOptions, ToOptions)
def export(  # noqa: D417  (the other arguments are documented where they are declared)
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "peft", "torch", "dcp", "orbax", "canonical-delta"] = "safetensors",
    dtype: str | Mapping[str, str] | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    overwrite: bool = False,
    verify: bool = True,
    progress: Callable[[int, int], None] | None = None,
    optimizer: Literal["names", "numbers", "flat"] | None = None,
    **choices: Any,
) -> ExportReport:
    """Write a checkpoint in another format.

    The export holds a few chunks in memory at a time. `dst` appears when everything is written. An
    interrupted export to safetensors is continued by a call with the same arguments; an export to
    another format starts again from the beginning.

    Args:
        src: path or url of the checkpoint.
        dst: the destination. For safetensors, see `export_safetensors`; for peft, a directory; for
            torch, a file on a local disk; for dcp and orbax, a directory on a local disk; for
            canonical-delta, a directory as for safetensors, and `src` is the place of all versions
            of a `Publisher`.
        options: the other arguments are fields of `AnyExportOptions`.
        choices: further arguments of `export_safetensors`, for `to="safetensors"` and
            canonical-delta only; for the latter also the other fields of `DeltaOptions`.

    Returns:
        The report.

    Raises:
        NotFoundError: there is no committed checkpoint at `src`, or no such version.
        AlreadyExistsError: `dst` exists, and `overwrite` is not set.
        OptionError: an option is invalid.
        NamesMismatchError: nothing is selected; or two tensors would get the same name.
        DtypeError, DtypeMismatchError, StructureMismatchError: the format cannot hold a part of the
            state, or a tensor cannot be converted.
        BudgetError: the memory limit is too low; the message names a limit that suffices.
        CorruptionError: stored bytes are damaged or missing; or the written bytes, read back,
            differ.
        ReplacedError: the checkpoint was replaced or deleted during the export.
        StorageError: a storage failed or is full.
        MissingExtraError: a package that the format needs is not installed.
    """
    given = locals()
    formats = ("safetensors", "peft", *FORMATS, DELTA)
    if not isinstance(to, str) or to not in formats:
        raise OptionError(Message(named("to", to), f": give {', '.join(map(repr, formats))}."))
    _refuse_unknown_options(choices, to)
    if to in {"safetensors", "peft", DELTA}:
        if optimizer is not None:
            advice = (
                " is only for torch, dcp and orbax: no optimizer can load its state from "
                "safetensors; leave it out."
            )
            raise OptionError(Message(named("optimizer", ...), advice))
        common = {name: given[name] for name in StateOptions.declared() if name != "optimizer"}
        if to == DELTA:
            return _export_deltas(src, dst, DeltaOptions(**common, **choices))
        if to == "safetensors":
            return export_safetensors(src, dst, **common, **choices)
    if choices:
        without = Message(named("to", to), " does not have the option ", named(min(choices)))
        raise OptionError(Message(without, ", which is only for safetensors; leave it out."))
    if to == "peft":
        with reading_takes_threads(src):
            return _write_safetensors(
                Checkpoint(src), parse(dst), PeftOptions(**common), plan=plan_adapter_files
            )
    began = time.monotonic()
    options = StateOptions.of(given)
    checkpoint, location = Checkpoint(src), parse(dst)
    _refuse_file_of_others(location, to)
    _refuse_within(location, checkpoint)
    with reading_takes_threads(src):
        written = write_state(checkpoint, location, to, options)
    return ExportReport(
        url=str(location),
        files=(location.name,),
        tensors=written.tensors,
        nbytes=written.nbytes,
        read_bytes=written.read_bytes,
        written_bytes=written.nbytes,
        resumed_bytes=0,
        notes=written.notes,
        seconds=time.monotonic() - began,
        conversions=written.conversions,
    )


def _refuse_unknown_options(choices: Mapping[str, object], to: str) -> None:
    for name, value in choices.items():
        if name not in DeltaOptions.declared():
            without = Message(named("to", to), " does not have the option ", named(name))
            raise OptionError(Message(without, "; leave it out."))
        if to != DELTA and name not in SafetensorsOptions.declared():
            raise OptionError(
                Message(named(name, value), " is only for ", named("to", DELTA), "; leave it out.")
            )


def _export_deltas(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], options: DeltaOptions
) -> ExportReport:
    """The versions of a publisher, each as a directory; with `follow`, this does not return."""
    from shardckpt.convert.formats.canonical_delta.target import write_deltas

    def full(checkpoint: Checkpoint, place: Location) -> ExportReport:
        return _write_safetensors(
            checkpoint, place, options.part(SafetensorsOptions, overwrite=False)
        )

    began, location = time.monotonic(), parse(dst)
    _place(location, split_up=False)  # a wrong place is refused before anything is deleted there
    versions: list[WrittenVersion] = []
    # It holds a lease and a lock.
    with (
        reading_takes_threads(src),
        closing(write_deltas(parse(src), location, options, full)) as written,
    ):
        for version in written:
            if options.on_version is not None:
                options.on_version(version)
            versions = [*([] if options.follow else versions), version]
    return ExportReport(
        url=str(location),
        files=tuple(version.url.rpartition("/")[2] for version in versions),
        tensors=sum(version.tensors for version in versions),
        nbytes=sum(version.nbytes for version in versions),
        read_bytes=sum(version.read_bytes for version in versions),
        written_bytes=sum(version.written_bytes for version in versions),
        resumed_bytes=0,
        notes=() if versions else ("No version is newer than the last one there.",),
        seconds=time.monotonic() - began,
    )


@out_of_memory_is_typed
@leaves_out_with("exclude")
@documented(SafetensorsOptions)
def export_safetensors(  # noqa: D417  (as above)
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: str | Mapping[str, str] | None = None,
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
    max_shard_size: int | str | None = None,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    overwrite: bool = False,
    verify: bool = True,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write a checkpoint's tensors as safetensors files.

    The export holds a few chunks in memory at a time. Files appear when they are complete. After an
    interruption, a call with the same arguments continues the export.

    A tensor's name is its keys, joined by dots. Then `strip_prefix`, `rename_file`, `rename`,
    `mapping` and `add_prefix` change it, in this order (docs/mapping.md). Patterns of `dtype` match
    the new names.

    Args:
        src: path or url of the checkpoint.
        dst: the destination, on a local disk, `gs://` or `s3://`. A name that ends in
            ".safetensors" is a file. Any other name is a directory, for `model.safetensors`, or for
            several files and an index with `max_shard_size`.
        options: the other arguments are the fields of `SafetensorsOptions`.

    Returns:
        The report.

    Raises:
        NotFoundError: there is no committed checkpoint at `src`.
        AlreadyExistsError: there is a file at `dst`, or another model in that directory, and
            `overwrite` is not set.
        OptionError: an option is invalid, a file of names cannot be read, or a rule matches
            nothing.
        NamesMismatchError: nothing is selected; or two tensors would get the same name.
        ShapeMismatchError: tensors do not fit a mapping.
        DtypeError, DtypeMismatchError: the format lacks a tensor's dtype, or the tensor cannot be
            converted.
        BudgetError: the memory limit is too low; the message names a limit that suffices.
        CorruptionError: stored bytes are damaged or missing; or the written bytes, read back,
            differ.
        ReplacedError: the checkpoint was replaced or deleted during the export.
        StorageError: a storage failed or is full.
    """
    options = SafetensorsOptions.of(locals())
    with reading_takes_threads(src):
        return _write_safetensors(Checkpoint(src), parse(dst), options)


def _refuse_file_of_others(location: Location, to: str) -> None:
    """Raise OptionError if a destination is named like a file of another format.

    A directory of DCP or Orbax may be named as a file of torch that ends in ".ckpt": Lightning
    names them so.
    """
    suffix = PurePosixPath(location.name).suffix.lower()
    named_for = {_SUFFIX: "safetensors", **dict.fromkeys(_TORCH_FILES, "torch")}.get(suffix)
    choose = {
        "safetensors": f"choose a name that ends in {_SUFFIX}, or one without {suffix} for a "
        "directory.",
        "torch": "choose a name that ends in .pt.",
    }.get(to, f"choose a name without {suffix} for the directory.")
    if suffix in _OTHER_FILES:
        raise OptionError(
            f"{location} is named like a file of another format ({suffix}), which is not written; "
            f"{choose}"
        )
    if named_for not in {None, to} and not (to in {"dcp", "orbax"} and suffix == ".ckpt"):
        advice = Message(
            f"{location} is named like a file of {named_for}, and the format is {to}; give ",
            named("to", named_for),
        )
        raise OptionError(Message(advice, f", or {choose}"))


def _write_safetensors(
    checkpoint: Checkpoint,
    location: Location,
    options: SafetensorsOptions,
    *,
    plan: Callable[..., ModelFiles] = plan_model_files,
) -> ExportReport:
    began = time.monotonic()
    _refuse_file_of_others(location, "peft" if plan is plan_adapter_files else "safetensors")
    _refuse_within(location, checkpoint)
    directory, single = _place(location, split_up=options.max_shard_size is not None)
    model = plan(checkpoint, options)
    file_names = (
        [single]
        if single is not None
        else [*model.weights, *([] if model.index is None else [INDEX])]
    )
    configs: dict[str, bytes] = {}
    kept: list[str] = []
    if single is None:
        configs = dict(model.configs)
        if not options.overwrite:
            configs, kept = without_others(configs, directory, file_names[-1])
    file_names = [*configs, *file_names]
    obsolete: Callable[[], Sequence[str]] = tuple
    # An adapter may lie beside its base model: PEFT reads no other weights than the adapter's.
    if single is None and plan is not plan_adapter_files:
        obsolete = partial(_obsolete, directory, file_names, overwrite=options.overwrite)
    obsolete()  # another model is refused at once, and again before the files get their names
    written = write_safetensors(
        checkpoint,
        list(model.weights.values()),
        _destination(directory, file_names, obsolete, options),
        limit=options.budget,
        verify=options.verify,
        first=list(configs.values()),
        last=model.index,
        progress=options.report_progress,
    )
    return ExportReport(
        url=str(location),
        files=tuple(file_names),
        tensors=len(model.outputs.tensors),
        nbytes=sum(output.nbytes for output in model.outputs.tensors),
        read_bytes=written.read_bytes,
        written_bytes=written.written_bytes,
        resumed_bytes=written.resumed_bytes,
        notes=(*model.notes, *(f"{name} is there already, and stays as it is." for name in kept)),
        seconds=time.monotonic() - began,
        conversions=model.outputs.conversions,
    )


def _place(location: Location, *, split_up: bool) -> tuple[Location, str | None]:
    """The directory to write into, and the file's name if `location` names a file."""
    kind = kind_of(location)
    if not (kind.has_paths or kind.uploads_in_parts):
        raise OptionError(
            f"{location}: safetensors files are written to a local disk, gs:// or s3://."
        )
    above = location.parent
    if not location.name.endswith(_SUFFIX):
        return location, None
    if split_up:
        advice = " makes several files; give a directory for them, not the name of one."
        raise OptionError(Message(f"{location}: ", named("max_shard_size"), advice))
    assert above is not None, "a file is below something"
    return above, location.name


def _obsolete(directory: Location, names: Sequence[str], *, overwrite: bool) -> list[str]:
    """Files of another model in the directory, which readers would mistake for this one's."""
    others = [
        name
        for name in Store.open(directory).list_children()
        if is_of_a_model(name) and name not in names
    ]
    if others and kind_of(directory).uploads_in_parts:
        left = begun(directory, names[-1])  # the export removes these anyway
        others = [name for name in others if name not in left]
    if others and not overwrite:
        there = (
            f"{directory} holds another model: {shown(others[0])} is there; choose another "
            "directory, or replace it with "
        )
        raise AlreadyExistsError(Message(there, named("overwrite", True), "."))
    return others


def _destination(
    directory: Location,
    names: Sequence[str],
    obsolete: Callable[[], Sequence[str]],
    options: SafetensorsOptions,
) -> Destination:
    if (path := directory.local_path) is not None:
        return LocalFiles(path, names, overwrite=options.overwrite, obsolete=obsolete)
    memory = 1 << max(0, (options.budget // 4).bit_length() - 1)
    return ObjectFiles(
        directory, names, overwrite=options.overwrite, memory=memory, obsolete=obsolete
    )


def _refuse_within(location: Location, checkpoint: Checkpoint) -> None:
    """Refuse a destination inside the checkpoint.

    The destination could overwrite the checkpoint's files, and would be deleted with the
    checkpoint.
    """
    if location.is_within(checkpoint.location):
        raise OptionError(
            f"{location} is inside the checkpoint that is exported, {checkpoint.location}; choose "
            "another place."
        )
