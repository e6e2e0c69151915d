"""The zarr arrays of a checkpoint that TensorStore alone can open, and where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.commit.base_places import base_location
from shardckpt.errors import FormatError
from shardckpt.state.names import array_path, piece_path

if TYPE_CHECKING:
    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import TensorRecord
    from shardckpt.io.url import Location


def compression(record: CheckpointRecord, t: TensorRecord) -> str | None:
    """The form of a tensor's chunks."""
    return record.compression if t.base is None else t.base.base.compression


def stock_array(
    location: Location, record: CheckpointRecord, t: TensorRecord
) -> tuple[Location, str, str, str]:
    """Checkpoint, attempt, array's path and layout of a tensor's first piece.

    Raises:
        FormatError: the chunks are differences from those of another checkpoint.
    """
    piece = t.pieces[0]
    if compression(record, t) == "difference":
        raise FormatError(
            f"{location}: its chunks are differences from those of another version, which "
            "TensorStore cannot read; use zarr_store(), or reshard it to a checkpoint of its own."
        )
    if t.base is None:
        return location, record.attempt, piece.path, record.layout
    whole = piece.path == array_path(t.name)
    path = array_path(t.base.name) if whole else piece_path(t.base.name, t.shape, piece.start)
    return base_location(location, t.base.base), t.base.base.attempt, path, t.base.base.layout
