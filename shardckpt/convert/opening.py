"""`shardckpt.open`: a checkpoint of any format, open for reading where it lies.

A place without a commit record is opened by the readers that imports use. Nothing is converted,
copied or written. Python pickles are interpreted, and nothing in them is called
(`formats/torch/unpickling.py`), so looking needs no confirmation; an import, whose result others
will trust, asks for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.commit.publish import RECORD
from shardckpt.convert.detect import detect_known
from shardckpt.convert.foreign_source import ForeignSpec
from shardckpt.convert.hub_cache import hub_snapshot
from shardckpt.errors import (
    FormatError,
    NotFoundError,
    OptionError,
    ShardckptError,
    StorageError,
    UncommittedError,
)
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint

if TYPE_CHECKING:
    import os


def open(url: str | os.PathLike[str]) -> Checkpoint:  # noqa: A001  (shardckpt.open, as in gzip.open)
    """Open a checkpoint for reading: a committed one of shardckpt, or one of another format.

    The other formats are those of docs/import.md: safetensors, torch, DCP, Orbax, Megatron,
    torch_xla and zarr. Their checkpoints are read where they lie; `Checkpoint.format` names the
    format. Nothing in a pickle is run.

    Raises:
        NotFoundError: there is no checkpoint.
        UncommittedError: a save began there and did not finish.
        FormatError: the commit record, or the other format's metadata, is damaged.
        VersionError: the format is newer than this version of shardckpt.
    """
    location = parse(url)
    try:
        return Checkpoint(location)
    except UncommittedError:
        raise
    except (NotFoundError, StorageError) as e:
        try:
            if Store.open(location).exists(RECORD):  # a checkpoint that was deleted
                raise e from None
            snapshot = hub_snapshot(location) or location
            detected = detect_known(snapshot)
        except (NotFoundError, StorageError) as other:
            # Nothing is there: the first error is more helpful.
            raise (e if Store.open(location).lists else other) from None
        except OptionError as several:
            # It is there and could not be read, so the first error is the cause.
            if RECORD in Store.open(snapshot).list_children():
                raise e from None
            raise FormatError(
                f"{several.message.without_stop()}; `shardckpt import --from` reads the one that "
                "you choose."
            ) from e
        if detected is None:
            raise
    try:
        return ForeignSpec(str(snapshot), detected.format, trust_pickle=True).open()
    except ShardckptError as e:
        e.add_note(f"{snapshot} was taken for {detected.format}: {detected.seen}.")
        raise
