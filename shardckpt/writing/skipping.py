"""Tensors that a save leaves out, because a base checkpoint holds them, and where exactly they lie there.

Asked when this process writes, which in a save in the background is not on the thread that trains: nothing that is copied
before depends on the answer. Every process asks for itself and gets the same, by reading one record; so none writes
gigabytes for a checkpoint that cannot be, and whoever commits, later and without the others, finds the answer in their
contents. Whether the base is still the same is looked at once more right before the checkpoint is published.

A base may have left tensors in a base of its own. What is recorded is the checkpoint that holds a tensor itself, so no
reader ever follows more than one step, and what lies between may be deleted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.commit.base_places import base_location, base_url
from shardckpt.errors import DtypeMismatchError, NamesMismatchError, NotFoundError, ShapeMismatchError
from shardckpt.format.structure import Base, InBase, Structure
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.state.names import array_path, piece_path, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.format.structure import TensorRecord
    from shardckpt.io.url import Location
    from shardckpt.plan.pieces import Piece

__all__ = ["left_in_base"]


def left_in_base(structure: Structure, skipped: Iterable[str], checkpoint: Location, base: Location) -> Structure:
    """What a process says of its state, with the tensors that it skips found in the base.

    Args:
        structure: of the process's state.
        skipped: names of its tensors that are left out.
        checkpoint: that is being saved.
        base: where they are.

    Raises:
        NotFoundError: no checkpoint is there.
        NamesMismatchError, ShapeMismatchError, DtypeMismatchError: the base lacks a tensor, or has another one of that name.
    """
    try:
        found = Checkpoint(str(base))
    except NotFoundError as e:
        raise NotFoundError(f"{checkpoint} cannot be saved with skip=, because its base is not there: {e}") from e
    of = _Found(checkpoint, found)
    return Structure(structure.tree, structure.tensors | {name: of.tensor(structure.tensors[name]) for name in skipped})


class _Found:
    """An open base, and how the checkpoint names it and the bases that it has itself."""

    def __init__(self, checkpoint: Location, base: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.base = base
        record = base.record
        self.itself = Base(record.attempt, record.layout, record.compression, base_url(checkpoint, base.location))
        self.its_own: dict[Base, Base] = {}
        """The base's bases: as it names them, and as the checkpoint does."""

    def tensor(self, ours: TensorRecord) -> TensorRecord:
        """A skipped tensor's record, by that of the base."""
        expected = f"{shown(ours.name)}: {self.checkpoint} skips it, with shape {ours.shape} and dtype {ours.dtype.name}, and its base"
        advice = "Save it, or name another base. Nothing was published."
        try:
            theirs = self.base.tensor(ours.name)
        except NamesMismatchError as e:
            raise NamesMismatchError(f"{expected} lacks it: {e} {advice}") from e
        if theirs.shape != ours.shape:
            raise ShapeMismatchError(f"{expected} {self.base.location} has shape {theirs.shape}. {advice}")
        if theirs.dtype != ours.dtype:
            raise DtypeMismatchError(f"{expected} {self.base.location} has dtype {theirs.dtype.name}. {advice}")
        there = InBase(self.itself, theirs.name) if theirs.base is None else replace(theirs.base, base=self._renamed(theirs.base.base))
        return replace(ours, pieces=_pieces(ours.name, theirs), partial=False, base=there)

    def _renamed(self, base: Base) -> Base:
        """A base of the base."""
        if base not in self.its_own:
            self.its_own[base] = replace(base, url=base_url(self.checkpoint, base_location(self.base.location, base)))
        return self.its_own[base]


def _pieces(name: str, theirs: TensorRecord) -> tuple[Piece, ...]:
    """The pieces of the base's tensor, called by our name for it."""
    in_one = [piece.path for piece in theirs.pieces] == [array_path(theirs.name)]
    return tuple(
        replace(piece, path=array_path(name) if in_one else piece_path(name, theirs.shape, piece.start)) for piece in theirs.pieces
    )
