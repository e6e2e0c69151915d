"""A checkpoint, written as another format for those who do not know ours: `shardckpt.export`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.convert.files.local_files import LocalFiles
from shardckpt.convert.files.object_files import ObjectFiles, begun
from shardckpt.convert.formats.safetensors.hf_configs import config_files, without_others
from shardckpt.convert.formats.safetensors.hf_index import INDEX, is_of_a_model, split
from shardckpt.convert.formats.safetensors.layout import lay_out
from shardckpt.convert.formats.safetensors.target import write_safetensors
from shardckpt.convert.naming.choose import NameOptions, outputs_of
from shardckpt.convert.whole_state import FORMATS, write_state
from shardckpt.errors import AlreadyExistsError, OptionError, out_of_memory_is_typed
from shardckpt.excerpt import excerpt
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.options import check_flag, parse_bytes
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reshard.rules.hf_config import read_config
from shardckpt.state.names import shown

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.convert.files.destination import Destination
    from shardckpt.convert.naming.choose import Patterns
    from shardckpt.convert.naming.ties import Ties
    from shardckpt.io.url import Location
    from shardckpt.reshard.dtype_rules import ConvertedSubtree

__all__ = ["ExportReport", "export", "export_safetensors"]

DEFAULT_MEMORY_LIMIT = 512 << 20
"""Bytes of buffers, unless told otherwise."""
_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export has done."""

    url: str
    """Of what was written: the file, or the directory."""
    files: tuple[str, ...]
    """Their names; that of the directory alone, where it is DCP's or Orbax's."""
    tensors: int
    nbytes: int
    """Of all elements that were written, by this call or an earlier one that was interrupted."""
    read_bytes: int
    """Stored bytes of the checkpoint that this call read."""
    written_bytes: int
    """That this call wrote; of states those of tensors."""
    resumed_bytes: int
    """Of elements that an earlier call had written."""
    notes: tuple[str, ...]
    """What was asked for and is not written as it is, a line each: the format has no place for it."""
    seconds: float
    """That it took."""
    conversions: tuple[ConvertedSubtree, ...] = ()
    """How many tensors `dtype` converts and leaves, by subtree; empty where it was not given."""


@out_of_memory_is_typed
def export(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "torch", "dcp", "orbax"] = "safetensors",
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
    """Write a checkpoint as another format.

    The checkpoint is read once, with memory for a few of its chunks, however large tensors are. Nothing is to be seen under the final
    name before everything is written.

    Args:
        src: the checkpoint: a path or url.
        dst: where to. safetensors: see `export_safetensors`. torch: a file on a local disk; dcp, orbax: a directory there.
        to: which format. "safetensors" holds tensors; "torch", "dcp" and "orbax" hold the state, with its containers and small leaves,
            and begin anew when they were interrupted.
        dtype: what tensors are converted to: a dtype, which leaves integers, tensors without dimensions and state of optimizers as they
            are, or pattern → dtype (docs/reshard.md#dtypes). Elements are rounded to the nearest, ties to even; what is too large becomes
            infinite.
        include: patterns of the names that are exported; None: all.
        exclude: patterns of those that are not.
        memory_limit: bytes of buffers; the process takes up to 128 MiB besides.
        overwrite: replace what is there.
        verify: read back what was written.
        progress: called with bytes of elements written so far, and in all.
        optimizer: the form of a `train_state`'s optimizers in "torch", "dcp" and "orbax". "names", what torch's `set_optimizer_state_dict`
            loads: the default of the first two; "numbers", what `Optimizer.load_state_dict` loads; "flat", what
            `get_optimizer_state_dict(flatten_optimizer_state_dict=True)` makes, for stages of pipelines and other groups.
        choices: what `export_safetensors` takes besides, for that format.

    Returns:
        What was done.

    Raises:
        NotFoundError: no committed checkpoint at `src`.
        AlreadyExistsError: something is at `dst`, and `overwrite` is not set.
        OptionError: an option that cannot be.
        NamesMismatchError: nothing is selected; or two tensors would have one name.
        DtypeError, DtypeMismatchError, StructureMismatchError: something that the format cannot hold, or that cannot be converted.
        BudgetError: the memory limit does not suffice; names it, and what would.
        CorruptionError: stored bytes are damaged or missing; or what was written does not read back.
        ReplacedError: the checkpoint was replaced or deleted meanwhile.
        StorageError: a storage failed, or has no room. MissingExtraError: a package that the format needs is not installed.
    """
    common: dict[str, Any] = {"dtype": dtype, "include": include, "exclude": exclude, "memory_limit": memory_limit}
    common |= {"overwrite": overwrite, "verify": verify, "progress": progress}
    if to == "safetensors":
        if optimizer is not None:
            raise OptionError(
                "export(optimizer=…) is for torch, dcp and orbax: a file of safetensors holds no optimizer that is loaded again."
            )
        return export_safetensors(src, dst, **common, **choices)
    if to not in FORMATS:
        raise OptionError(f"to={excerpt(to)}: give {', '.join(map(repr, ('safetensors', *FORMATS)))}.")
    if choices:
        raise OptionError(f"export(to={to!r}) takes no {min(choices)}=, which is for safetensors; leave it out.")
    began = time.monotonic()
    check_flag(overwrite, "overwrite")
    check_flag(verify, "verify")
    checkpoint, location = Checkpoint(src), parse(dst)
    _refuse_within(location, checkpoint)
    limit = parse_bytes(memory_limit, "memory_limit")
    with reading_takes_threads(src):
        written = write_state(
            checkpoint,
            location,
            to,
            include=include,
            exclude=exclude,
            dtype=dtype,
            optimizer=optimizer,
            limit=limit,
            overwrite=overwrite,
            verify=verify,
            progress=progress or _nobody,
        )
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


@out_of_memory_is_typed
def export_safetensors(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: str | Mapping[str, str] | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    strip_prefix: str | None = None,
    rename: str | Sequence[str] = (),
    rename_file: str | os.PathLike[str] | None = None,
    mapping: str | os.PathLike[str] | None = None,
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
    """Write a checkpoint's tensors as safetensors: one file, or several and an index, as Hugging Face has them.

    The checkpoint is read once, with memory for a few of its chunks, however large tensors are. Nothing is to be seen under the final
    name before everything is written. Interrupted, and called again with the same arguments, it goes on where it was.

    A tensor's name is made of the keys on the way to it, joined by dots; then come the renamings, in the order of the arguments here.

    Args:
        src: the checkpoint: a path or url.
        dst: where to: a file, whose name ends in ".safetensors", or a directory, for `model.safetensors` or what `max_shard_size` makes
            of it. On a local disk, `gs://` or `s3://`.
        dtype: what tensors are converted to: a dtype, or pattern of new names → dtype, as in `export`.
        include: patterns of the names, as the checkpoint has them, that are exported; None: all.
        exclude: patterns of those that are not.
        strip_prefix: what names begin with, and shall not any more.
        rename: `s/regex/replacement/`, one or several.
        rename_file: JSON, TOML or YAML: old name → new name, or null to leave a tensor out.
        mapping: what is joined, split or transposed (docs/mapping.md): a file, or the name of a mapping that comes along.
        invert_mapping: read the mapping from its `to` to its `from`.
        add_prefix: what all names begin with in the end.
        ties: tied tensors "once", or as "copies"; "auto": copies where `config` says that the model does not tie.
        config: the model's `config.json`; in a directory it is written beside the weights, instead of the one that an import kept.
        max_shard_size: bytes of tensors per file, as in "5GB"; None: one file.
        memory_limit: bytes of buffers; the process takes up to 128 MiB besides.
        overwrite: replace what is there; in a directory, all files of the model that it held.
        verify: read back what was written to a disk. (An object store compares checksums by itself.)
        metadata: texts for the files' headers.
        progress: called with bytes of elements written so far, and in all.

    Returns:
        What was done.

    Raises:
        NotFoundError: no committed checkpoint at `src`.
        AlreadyExistsError: there is a file at `dst`, or another model in that directory, and `overwrite` is not set.
        OptionError: an option that cannot be, a file of names that cannot be read, or a rule that matches nothing.
        NamesMismatchError: nothing is selected; or two tensors would have one name.
        ShapeMismatchError: tensors that a mapping does not suit.
        DtypeError, DtypeMismatchError: a tensor of a dtype that the format has not, or that cannot be converted.
        BudgetError: the memory limit does not suffice; names it, and what would.
        CorruptionError: stored bytes are damaged or missing; or what was written does not read back.
        ReplacedError: the checkpoint was replaced or deleted meanwhile.
        StorageError: a storage failed, or has no room.
    """
    began = time.monotonic()
    check_flag(overwrite, "overwrite")
    check_flag(verify, "verify")
    limit = parse_bytes(memory_limit, "memory_limit")
    names = NameOptions(
        include=include,
        exclude=exclude,
        strip_prefix=strip_prefix,
        rename=rename,
        rename_file=rename_file,
        mapping=mapping,
        invert=invert_mapping,
        add_prefix=add_prefix,
        dtype=dtype,
        ties=ties,
        config=config,
    )
    checkpoint, location = Checkpoint(src), parse(dst)
    _refuse_within(location, checkpoint)
    directory, single = _place(location, split_up=max_shard_size is not None)
    outputs = outputs_of(checkpoint.record.structure, names, str(checkpoint.location))
    tensors = {output.name: output for output in outputs.tensors}
    dealt = split({name: output.nbytes for name, output in tensors.items()}, max_shard_size)
    files = [lay_out([tensors[name] for name in some], metadata) for some in dealt.files.values()]
    index = dealt.index(sum(prod(output.shape) for output in outputs.tensors))
    written_as = [single] if single is not None else [*dealt.files, *([INDEX] if index is not None else [])]
    configs: dict[str, bytes] = {}
    there: list[str] = []
    if single is None:
        configs = config_files(checkpoint.metadata, None if config is None else read_config(config)[1])
        configs, there = (configs, []) if overwrite else without_others(configs, directory, written_as[-1])
    written_as = [*configs, *written_as]
    obsolete = [] if single is not None else _obsolete(directory, written_as, overwrite=overwrite)
    with reading_takes_threads(src):
        written = write_safetensors(
            checkpoint,
            files,
            _destination(directory, written_as, obsolete, overwrite=overwrite, memory=limit // 4),
            limit=limit,
            verify=verify,
            first=list(configs.values()),
            last=None if index is None else index.encode(),
            progress=progress or _nobody,
        )
    return ExportReport(
        url=str(location),
        files=tuple(written_as),
        tensors=len(outputs.tensors),
        nbytes=sum(output.nbytes for output in outputs.tensors),
        read_bytes=written.read_bytes,
        written_bytes=written.written_bytes,
        resumed_bytes=written.resumed_bytes,
        notes=(*outputs.notes, *(f"{name} is there already, and stays as it is." for name in there)),
        seconds=time.monotonic() - began,
        conversions=outputs.conversions,
    )


def _nobody(_done: int, _total: int) -> None:
    """Nobody watches."""


def _place(location: Location, *, split_up: bool) -> tuple[Location, str | None]:
    """The directory that is written into, and the name of the file where one is asked for by its name."""
    if location.local is None and location.bucket is None:
        raise OptionError(f"{location}: safetensors files are written to a local disk, gs:// or s3://.")
    above = location.parent
    if not location.name.endswith(_SUFFIX):
        return location, None
    if split_up:
        raise OptionError(f"{location}: max_shard_size= makes several files; give a directory for them, not the name of one.")
    assert above is not None, "a file is below something"
    return above, location.name


def _obsolete(directory: Location, names: Sequence[str], *, overwrite: bool) -> list[str]:
    """Files of another model that is in the directory, and that readers would take for this one's."""
    others = [name for name in Store.open(directory).list_children() if is_of_a_model(name) and name not in names]
    if others and directory.local is None:
        left = begun(directory, names[-1])  # which goes anyway
        others = [name for name in others if name not in left]
    if others and not overwrite:
        raise AlreadyExistsError(
            f"{directory} holds another model: {shown(others[0])} is there; choose another directory, or replace it with overwrite=True."
        )
    return others


def _destination(directory: Location, names: Sequence[str], obsolete: Sequence[str], *, overwrite: bool, memory: int) -> Destination:
    if directory.local is not None:
        return LocalFiles(directory.local, names, overwrite=overwrite, obsolete=obsolete)
    return ObjectFiles(directory, names, overwrite=overwrite, memory=1 << (memory.bit_length() - 1), obsolete=obsolete)


def _refuse_within(location: Location, checkpoint: Checkpoint) -> None:
    """A checkpoint's directory is its own: what lies there may be overwritten, and is deleted with it."""
    if location.is_within(checkpoint.location):
        raise OptionError(f"{location} lies in the checkpoint that is exported, {checkpoint.location}; choose a place outside of it.")
