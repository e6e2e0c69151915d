"""Location of a base checkpoint, and the check that it is still the same checkpoint.

1. A base below the same directory as the checkpoint, such as an earlier step of one run, is named
   by a relative path: both may be moved and copied together. Any other base is named by its full
   url. A relative path goes up exactly one level.
2. A base must have the same scheme as the checkpoint that names it; otherwise it is neither written
   nor read. Endpoints and credentials come from the environment, never from a record. So a foreign
   record can neither send our credentials anywhere, nor turn a read of a bucket into a read of this
   disk.
3. A base is opened like any checkpoint: its `checkpoint.json` must be a commit record that names
   the expected attempt, or nothing of it is read. The base must hold the tensor itself, with the
   same shape, dtype and chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from shardckpt.commit.attempts import same_elements
from shardckpt.commit.publish import RECORD
from shardckpt.errors import (
    CommitError,
    FormatError,
    MissingDataError,
    OptionError,
    ShardckptError,
    UrlError,
    extend,
    of_one_tensor,
)
from shardckpt.format.bases import BESIDE
from shardckpt.format.record import CheckpointRecord, parse_checkpoint
from shardckpt.io.status import exists
from shardckpt.io.store import Store
from shardckpt.io.url import UNQUOTED, parse
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.format.bases import Base
    from shardckpt.format.structure import Structure, TensorRecord
    from shardckpt.io.url import Location
    from shardckpt.plan.pieces import Piece


_PUT_BACK = "put the base back to that place"


def check_base(checkpoint: Location, base: Location) -> None:
    """Refuse a location that cannot be a checkpoint's base, by its name alone.

    The storage is not accessed.

    Raises:
        OptionError: the base is in another kind of storage, or is the checkpoint itself.
    """
    if base.scheme != checkpoint.scheme:
        raise OptionError(
            f"{checkpoint}: its base {base} is in another kind of storage, which readers of the "
            f"checkpoint may be unable to reach; copy the base to {checkpoint.scheme}://, or save "
            "without skip=."
        )
    if base == checkpoint:
        raise OptionError(
            f"{checkpoint}: a checkpoint cannot be its own base; save it with skip=(), or name "
            "another base."
        )


def base_url(checkpoint: Location, base: Location) -> str:
    """The url with which a checkpoint names a base; on a disk, links are followed.

    Raises:
        OptionError: as for `check_base`.
    """
    # With links resolved first: if `latest` links to 10, the record must name 10.
    for at, base_at in ((checkpoint.resolved, base.resolved), (checkpoint, base)):
        check_base(at, base_at)
        above = at.parent
        if above is not None and base_at.path.startswith(f"{above.path.rstrip('/')}/"):
            return BESIDE + quote(base_at.path[len(above.path.rstrip("/")) + 1 :], safe=UNQUOTED)
    return base.url


def base_location(checkpoint: Location, base: Base) -> Location:
    """The location of a base that a checkpoint's record names.

    Raises:
        FormatError: the name cannot be a base's.
    """
    try:
        if base.url.startswith(BESIDE):
            below = unquote(base.url.removeprefix(BESIDE), errors="strict")
            # A checkpoint reached through a link may have its base beside the link or beside the
            # target.
            parents = [place.parent for place in dict.fromkeys([checkpoint, checkpoint.resolved])]
            places = [parent.join(below) for parent in parents if parent is not None]
        else:
            places = [place for place in [parse(base.url)] if place.scheme == checkpoint.scheme]
    except (UrlError, UnicodeDecodeError) as e:
        raise FormatError(
            f"{checkpoint}: its record names {base.url!r} as a base, which is not valid: {e}"
        ) from None
    if not places:
        raise of_one_tensor(
            FormatError(
                f"{checkpoint}: its base {base.url!r} is in another kind of storage, and is "
                "therefore not read; copy the checkpoint to the storage of its base."
            )
        )
    return next((place for place in places if exists(place.join(RECORD).local_path)), places[0])


def chain_places(checkpoint: Location, chain: Iterable[Base]) -> frozenset[Location]:
    """The locations of a checkpoint's chain, besides which its readers visit none.

    Raises FormatError.
    """
    return frozenset(base_location(checkpoint, base) for base in chain)


def base_record(
    checkpoint: Location, base: Base, of: str, advice: str = _PUT_BACK
) -> tuple[Store, CheckpointRecord]:
    """Open a base.

    Args:
        checkpoint: the checkpoint that names the base.
        base: the base as the record names it.
        of: the tensor whose elements are needed, for messages.
        advice: what to do if the base is gone, for messages.

    Returns:
        The place of the base's attempt, and its commit record.

    Raises:
        MissingDataError: the base is gone, or another attempt is there now.
        FormatError: the location holds no checkpoint, or a damaged one.
    """
    place = base_location(checkpoint, base)
    store = Store.open(place)
    need = (
        f"{of}: {checkpoint} stores {'differences from' if base.contents else 'it in its base'} "
        f"{place}"
    )
    try:
        record = parse_checkpoint(store.read(RECORD), f"{store}/{RECORD}")
    except MissingDataError:
        record = None
    except FormatError as e:
        extend(e, before=f"{need}, which cannot be read: ")
        raise
    identity = f"attempt {base.attempt}" if base.attempt else f"contents {base.contents[:12]}…"
    if not isinstance(record, CheckpointRecord):
        was = (
            "no checkpoint is there"
            if record is None
            else f"the base was deleted ({record.reason})"
        )
        raise of_one_tensor(MissingDataError(f"{need} ({identity}), and {was}; {advice}."))
    if not is_that(record, base):
        another = f"another checkpoint has taken its place (attempt {record.attempt})"
        raise of_one_tensor(MissingDataError(f"{need} ({identity}), and {another}; {advice}."))
    if not base.contents and (record.layout, record.compression) != (base.layout, base.compression):
        raise FormatError(
            f"{need}, and their records disagree about layout or compression; one of them was not "
            "written by shardckpt."
        )
    return store.sub(record.attempt), record


def is_that(record: CheckpointRecord, base: Base) -> bool:
    """Whether a commit record is that of a base: of its attempt, or with its contents."""
    if base.contents:
        return record.fingerprint is not None and record.fingerprint.sha256 == base.contents
    return same_elements(record.attempt, base.attempt)


def holder(
    checkpoint: Location, tensor: TensorRecord, base: Base, name: str, record: CheckpointRecord
) -> TensorRecord:
    """The record of the tensor in an open base that holds a tensor's elements.

    For a tensor stored as a difference, the tensor in the base holds the elements that it differs
    from.

    Args:
        checkpoint: the checkpoint that names the base.
        tensor: the tensor's record there.
        base: the base as the record names it.
        name: the tensor's name in the base.
        record: the base's commit record.

    Raises:
        FormatError: the base does not hold the tensor that the checkpoint's record describes.
    """
    stored = record.structure.tensors.get(name)
    if (
        stored is not None
        and stored.base is None
        and (stored.shape, stored.dtype, _cuts(stored))
        == (tensor.shape, tensor.dtype, _cuts(tensor))
    ):
        return stored
    raise FormatError(
        f"{shown(tensor.name)}: by the record of {checkpoint}, its base {base.url} has this "
        f"tensor as {shown(name)}, with shape {tensor.shape} and dtype {tensor.dtype.name}, but "
        "the base has no such tensor; one of the two checkpoints was not written by shardckpt, "
        "or by a faulty version."
    )


def piece_before(
    checkpoint: Location, tensor: TensorRecord, piece: Piece, record: CheckpointRecord
) -> Piece:
    """The piece of the earlier version of a tensor that a piece's chunks differ from.

    Raises:
        FormatError: the earlier version does not have such a piece.
    """
    stored = record.structure.tensors.get(tensor.name)
    if stored is not None and may_differ(tensor, stored) and piece in stored.pieces:
        return piece
    raise FormatError(
        f"{shown(tensor.name)}: by the record of {checkpoint}, its chunks differ from those of "
        f"attempt {record.attempt}, which has no such tensor or other chunks; one of the two "
        "checkpoints was not written by shardckpt."
    )


def may_differ(tensor: TensorRecord, earlier: TensorRecord | None) -> bool:
    """Whether chunks of a tensor can be stored as differences from those of its earlier version."""
    return (
        earlier is not None
        and earlier.base is None
        and (tensor.shape, tensor.dtype) == (earlier.shape, earlier.dtype)
    )


def has_array(version: Structure, tensor: TensorRecord, piece: Piece) -> bool:
    """Whether a version stores the same array of a tensor."""
    there = version.tensors.get(tensor.name)
    return there is not None and may_differ(tensor, there) and piece in there.pieces


def check_bases(checkpoint: Location, record: CheckpointRecord, replaces: str | None) -> None:
    """Check just before a checkpoint is published that all of its bases are there and unchanged.

    A deletion between this check and the publication is not noticed.

    Args:
        checkpoint: the checkpoint to be published.
        record: its record.
        replaces: the attempt that is published there now, and would be removed.

    Raises:
        CommitError: a base is gone or changed, or is the checkpoint that would be replaced, reached
            by another name.
    """
    of = {
        tensor.base.base: name
        for name, tensor in record.structure.tensors.items()
        if tensor.base is not None
    }
    first = next(
        (name for name, tensor in record.structure.tensors.items() if tensor.difference), ""
    )
    for base, name in {
        **dict.fromkeys(record.structure.chain[:1], first),
        **of,
    }.items():  # it has checked its own chain
        if base.attempt and same_elements(base.attempt, replaces):
            raise CommitError(
                f"{shown(name)}: {checkpoint} stores it in its base {base.url}, but this save "
                "would replace that base (or a copy of it); save with another base, or without "
                "skip=. Nothing was published."
            )
        try:
            base_record(checkpoint, base, shown(name), "save with another base, or without skip=")
        except ShardckptError as e:
            raise CommitError(f"{e} Nothing was published.") from e


def _cuts(tensor: TensorRecord) -> list[object]:
    return [(piece.start, piece.shape, piece.chunks) for piece in tensor.pieces]
