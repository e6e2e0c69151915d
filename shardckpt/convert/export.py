"""A checkpoint, written as another format for those who do not know ours: `shardckpt.export`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardckpt.checkpoint import Checkpoint
from shardckpt.convert.choosing import choose
from shardckpt.convert.local_files import LocalFiles
from shardckpt.convert.safetensors_layout import lay_out
from shardckpt.convert.to_safetensors import write_safetensors
from shardckpt.convert.whole_state import FORMATS, write_state
from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt
from shardckpt.io.url import parse
from shardckpt.options import check_flag, parse_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from shardckpt.convert.choosing import Patterns

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
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write a checkpoint's tensors as another format.

    The checkpoint is read once, with memory for a few of its chunks, however large tensors are. Nothing is to be seen under the final
    name before everything is written. Interrupted, and called again with the same arguments, it goes on where it was.

    Args:
        src: the checkpoint: a path or url.
        dst: where to: the path of a file, `….safetensors`, or of a directory, where it is `model.safetensors`. For states the path of
            the file that torch loads, or of the directory that DCP or Orbax does.
        to: which format. "safetensors" holds tensors; "torch", "dcp" and "orbax" hold the state, with its containers and small leaves,
            and begin anew when they were interrupted.
        dtype: what floating-point tensors are converted to, or pattern → dtype. Elements are rounded to the nearest, ties to even;
            what is too large becomes infinite.
        include: patterns of the names that are exported; None: all.
        exclude: patterns of those that are not.
        memory_limit: bytes of buffers; the process takes up to 128 MiB besides.
        overwrite: replace a file that is there.
        verify: read back what was written.
        metadata: texts for the file's header.
        progress: called with bytes of elements written so far, and in all.

    Returns:
        What was done.

    Raises:
        NotFoundError: no committed checkpoint at `src`.
        AlreadyExistsError: there is a file at `dst`, and `overwrite` is not set.
        OptionError: an option that cannot be.
        NamesMismatchError: nothing is selected; or two tensors would have one name.
        DtypeError, DtypeMismatchError: a tensor of a dtype that the format has not, or that cannot be converted.
        BudgetError: the memory limit does not suffice; names it, and what would.
        CorruptionError: stored bytes are damaged or missing; or what was written does not read back.
        ReplacedError: the checkpoint was replaced or deleted meanwhile.
        StorageError: a storage failed, or has no room.
    """
    began = time.monotonic()
    if to != "safetensors" and to not in FORMATS:
        raise OptionError(f"export(to={excerpt(to)}): give one of {', '.join(map(repr, ('safetensors', *FORMATS)))}.")
    if to in FORMATS and metadata is not None:
        raise OptionError(f"export(to={to!r}, metadata=…): this format has no header for texts; put them into the state.")
    check_flag(overwrite, "overwrite")
    check_flag(verify, "verify")
    limit = parse_bytes(memory_limit, "memory_limit")
    checkpoint, location = Checkpoint(src), parse(dst)
    if to in FORMATS:
        state = write_state(
            checkpoint,
            location,
            to,
            include=include,
            exclude=exclude,
            dtype=dtype,
            limit=limit,
            overwrite=overwrite,
            verify=verify,
            progress=progress or (lambda _done, _total: None),
        )
        return ExportReport(
            url=str(location),
            files=(location.name,),
            tensors=state.tensors,
            nbytes=state.nbytes,
            read_bytes=state.read_bytes,
            written_bytes=state.nbytes,
            resumed_bytes=0,
            notes=state.notes,
            seconds=time.monotonic() - began,
        )
    if location.local is None:
        raise OptionError(f"{location}: give a path on a local disk.")
    path = location.local if location.local.suffix == _SUFFIX else location.local / f"model{_SUFFIX}"
    outputs, notes = choose(checkpoint, include, exclude, dtype)
    file = lay_out(outputs, metadata)
    written = write_safetensors(
        checkpoint,
        [file],
        LocalFiles(path.parent, [path.name], overwrite=overwrite),
        limit=limit,
        verify=verify,
        progress=progress or (lambda _done, _total: None),
    )
    return ExportReport(
        url=str(location),
        files=(path.name,),
        tensors=len(outputs),
        nbytes=sum(output.nbytes for output in outputs),
        read_bytes=written.read_bytes,
        written_bytes=written.written_bytes,
        resumed_bytes=written.resumed_bytes,
        notes=tuple(notes),
        seconds=time.monotonic() - began,
    )


def export_safetensors(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: str | Mapping[str, str] | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    overwrite: bool = False,
    verify: bool = True,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write a checkpoint's tensors as one safetensors file; see `export`."""
    return export(
        src,
        dst,
        to="safetensors",
        dtype=dtype,
        include=include,
        exclude=exclude,
        memory_limit=memory_limit,
        overwrite=overwrite,
        verify=verify,
        metadata=metadata,
        progress=progress,
    )
