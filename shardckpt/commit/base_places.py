"""The place of a base checkpoint, and the check that it is still the checkpoint that it was.

1. A base that lies below the same directory as the checkpoint, as the steps of one run do, is named relative to it: both may
   be moved and copied together. Any other is named by its whole url. A relative name goes up once and never further.
2. A base has the scheme of the checkpoint that names it, or it is neither written nor read. A record has no say in endpoints
   and credentials, those are the environment's; so one that somebody else made cannot send ours anywhere, nor turn a read
   of a bucket into one of this disk.
3. It is opened as any checkpoint is: its `checkpoint.json` must be a commit record and name the attempt that was named, or
   nothing of it is read. And it must hold the tensor itself, of the same shape and dtype and cut the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from shardckpt.commit.publish import RECORD
from shardckpt.errors import CommitError, FormatError, MissingDataError, OptionError, ShardckptError, UrlError
from shardckpt.format.record import CheckpointRecord, parse_checkpoint
from shardckpt.format.structure import BESIDE
from shardckpt.io.store import Store
from shardckpt.io.url import UNQUOTED, parse
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from shardckpt.format.structure import Base, TensorRecord
    from shardckpt.io.url import Location

__all__ = ["base_location", "base_record", "base_url", "check_base", "check_bases", "holder"]


_READ_WITHOUT = "put the base back to that place, or leave the tensor out with only= (an export: exclude=)"


def check_base(checkpoint: Location, base: Location) -> None:
    """Refuse what cannot be a checkpoint's base, by its name alone: no storage is asked.

    Raises:
        OptionError: the base is in another kind of storage, or is the checkpoint itself.
    """
    if base.scheme != checkpoint.scheme:
        raise OptionError(
            f"{checkpoint}: its base {base} is in another kind of storage, and whoever reads the one could not be sure to reach the "
            f"other; copy the base to {checkpoint.scheme}://, or save without skip=."
        )
    if base == checkpoint:
        raise OptionError(f"{checkpoint}: a checkpoint cannot be its own base; save it with skip=(), or name another base.")


def base_url(checkpoint: Location, base: Location) -> str:
    """How a checkpoint names a base; on a disk, links are followed.

    Raises:
        OptionError: as `check_base` does.
    """
    # Without links first: where `latest` leads to 10, it is 10 that must stay.
    for ours, theirs in ((checkpoint.resolved, base.resolved), (checkpoint, base)):
        check_base(ours, theirs)
        above = ours.parent
        if above is not None and theirs.path.startswith(f"{above.path.rstrip('/')}/"):
            return BESIDE + quote(theirs.path[len(above.path.rstrip("/")) + 1 :], safe=UNQUOTED)
    return base.url


def base_location(checkpoint: Location, base: Base) -> Location:
    """The place that a checkpoint's record means.

    Raises:
        FormatError: it is none that a base could have.
    """
    try:
        if base.url.startswith(BESIDE):
            below = unquote(base.url.removeprefix(BESIDE), errors="strict")
            # A checkpoint that was linked from elsewhere has its base beside it in one of the two places.
            parents = [place.parent for place in dict.fromkeys([checkpoint, checkpoint.resolved])]
            places = [parent.join(below) for parent in parents if parent is not None]
        else:
            places = [place for place in [parse(base.url)] if place.scheme == checkpoint.scheme]
    except (UrlError, UnicodeDecodeError) as e:
        raise FormatError(f"{checkpoint}: its record names {base.url!r} as a base, which cannot be: {e}") from None
    if not places:
        raise FormatError(f"{checkpoint}: its record names {base.url!r} as a base, which is in another kind of storage than it is itself.")
    return next((place for place in places if place.local is not None and (place.local / RECORD).exists()), places[0])


def base_record(checkpoint: Location, base: Base, of: str, advice: str = _READ_WITHOUT) -> tuple[Store, CheckpointRecord]:
    """Open a base.

    Args:
        checkpoint: that names it.
        base: as it is named.
        of: whose elements are wanted, for messages.
        advice: what to do if it is not there, likewise.

    Returns:
        The place of the base's attempt, and its commit record.

    Raises:
        MissingDataError: it is gone, or another attempt is there now.
        FormatError: it is no checkpoint, or damaged.
    """
    place = base_location(checkpoint, base)
    store = Store.open(place)
    wanted = f"{of}: {checkpoint} has left it in its base {place}"
    try:
        found = parse_checkpoint(store.read(RECORD), f"{store}/{RECORD}")
    except MissingDataError:
        found = None
    except FormatError as e:
        raise type(e)(f"{wanted}, which cannot be read: {e}") from e
    if not isinstance(found, CheckpointRecord):
        was = "no checkpoint is there" if found is None else f"that was deleted ({found.reason})"
        raise MissingDataError(f"{wanted} (attempt {base.attempt}), and {was}; {advice}.")
    if found.attempt != base.attempt:
        raise MissingDataError(
            f"{wanted} (attempt {base.attempt}), and another checkpoint has taken its place (attempt {found.attempt}); {advice}."
        )
    if (found.layout, found.compression) != (base.layout, base.compression):
        raise FormatError(f"{wanted}, and their records disagree about layout or compression; one of them was not written by shardckpt.")
    return store.sub(found.attempt), found


def holder(checkpoint: Location, tensor: TensorRecord, found: CheckpointRecord) -> TensorRecord:
    """The record, in an open base, of the tensor that lies there.

    Raises:
        FormatError: the base does not hold what the checkpoint says.
    """
    assert tensor.base is not None
    theirs = found.structure.tensors.get(tensor.base.name)
    if (
        theirs is not None
        and theirs.base is None
        and (theirs.shape, theirs.dtype, _cuts(theirs)) == (tensor.shape, tensor.dtype, _cuts(tensor))
    ):
        return theirs
    raise FormatError(
        f"{shown(tensor.name)}: {checkpoint} says that its base {tensor.base.base.url} holds it as {shown(tensor.base.name)}, with shape "
        f"{tensor.shape} and dtype {tensor.dtype.name}, which is not so; one of the two was not written by shardckpt, or by a broken one."
    )


def check_bases(checkpoint: Location, record: CheckpointRecord, replaces: str | None) -> None:
    """Just before a checkpoint is published: all of its bases are there, and are what they were.

    Whoever deletes one between this and the publication is not seen.

    Args:
        checkpoint: that would be published.
        record: that it would have.
        replaces: the attempt that is published there now, which would be removed.

    Raises:
        CommitError: one is not, or is what would be replaced, reached by another name.
    """
    of = {tensor.base.base: name for name, tensor in record.structure.tensors.items() if tensor.base is not None}
    for base, name in of.items():
        if base.attempt == replaces:
            raise CommitError(
                f"{shown(name)}: {checkpoint} has left it in its base {base.url}, which is what it would replace, or a copy of that; save "
                f"with another base, or without skip=. Nothing was published."
            )
        try:
            base_record(checkpoint, base, shown(name), "save with another base, or without skip=")
        except ShardckptError as e:
            raise CommitError(f"{e} Nothing was published.") from e


def _cuts(tensor: TensorRecord) -> list[object]:
    return [(piece.start, piece.shape, piece.chunks) for piece in tensor.pieces]
