"""Tensors that a save leaves out because a base checkpoint has them, and their places there.

The base is read when this process writes. For a save in the background this is not on the training
thread, because the copy step does not depend on the result. Every process reads the base's record
itself and gets the same result. So no process writes gigabytes for a checkpoint that cannot be
committed, and a process that commits later finds the result in the hosts' contents. Just before the
checkpoint is published, the base is checked once more.

A base may have left tensors in a base of its own. The record names the checkpoint that holds the
tensor itself, so no reader follows more than one step, and checkpoints in between may be deleted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.commit.base_places import base_location, base_url
from shardckpt.errors import (
    DtypeMismatchError,
    NamesMismatchError,
    NotFoundError,
    ShapeMismatchError,
)
from shardckpt.format.bases import Base, InBase
from shardckpt.format.structure import Structure
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.format.structure import TensorRecord
    from shardckpt.io.url import Location


def left_in_base(
    structure: Structure, skipped: Iterable[str], checkpoint: Location, base: Location
) -> Structure:
    """A process's structure with the tensors that it skips found in the base.

    Args:
        structure: structure of the process's state.
        skipped: names of the tensors to leave out.
        checkpoint: the checkpoint that is being saved.
        base: location of the base.

    Raises:
        NotFoundError: the base does not exist.
        NamesMismatchError, ShapeMismatchError, DtypeMismatchError: the base lacks a tensor, or has
            one with another shape or dtype.
    """
    try:
        checkpoint_of_base = Checkpoint(base)
    except NotFoundError as e:
        raise NotFoundError(
            f"{checkpoint} cannot be saved with skip=, because its base is not there: {e}"
        ) from e
    of = _Found(checkpoint, checkpoint_of_base)
    return Structure(
        structure.tree,
        structure.tensors | {name: of.tensor(structure.tensors[name]) for name in skipped},
    )


class _Found:
    """An open base, and the names that the checkpoint uses for it and for its own bases."""

    def __init__(self, checkpoint: Location, base: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.base = base
        record = base.record
        self.itself = Base(
            record.attempt, record.layout, record.compression, base_url(checkpoint, base.location)
        )
        self.its_own: dict[Base, Base] = {}
        """The base's own bases: as the base names them → as the checkpoint names them."""

    def tensor(self, skipped: TensorRecord) -> TensorRecord:
        """A skipped tensor's record, made from the base's record."""
        expected = (
            f"{shown(skipped.name)}: {self.checkpoint} skips it, with shape {skipped.shape} and "
            f"dtype {skipped.dtype.name}, and its base"
        )
        advice = "Save it, or name another base. Nothing was published."
        try:
            theirs = self.base.tensor(skipped.name)
        except NamesMismatchError as e:
            raise NamesMismatchError(f"{expected} lacks it: {e} {advice}") from e
        if theirs.shape != skipped.shape:
            raise ShapeMismatchError(
                f"{expected} {self.base.location} has shape {theirs.shape}. {advice}"
            )
        if theirs.dtype != skipped.dtype:
            raise DtypeMismatchError(
                f"{expected} {self.base.location} has dtype {theirs.dtype.name}. {advice}"
            )
        there = (
            InBase(self.itself, theirs.name)
            if theirs.base is None
            else replace(theirs.base, base=self._renamed(theirs.base.base))
        )
        return replace(
            skipped, pieces=theirs.pieces_called(skipped.name), partial=False, base=there
        )

    def _renamed(self, base: Base) -> Base:
        """A base of the base, as the checkpoint names it."""
        if base not in self.its_own:
            self.its_own[base] = replace(
                base, url=base_url(self.checkpoint, base_location(self.base.location, base))
            )
        return self.its_own[base]
