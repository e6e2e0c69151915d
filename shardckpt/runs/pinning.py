"""Pins and tags, which protect a checkpoint from deletion.

Neither a `CheckpointManager` nor `shardckpt rm` deletes a checkpoint that has one.

A tag is a name for people and programs, such as `best`. See `commit.markers` for why a pin that was
set is effective. The marker is read before the commit record, and written on condition that it has
not changed since. So a call that is slow cannot overwrite the marker of a checkpoint that took the
place meanwhile.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.commit.markers import MOST_TAGS, PINNED, TAG, Protection, protection_of
from shardckpt.commit.publish import published_attempt
from shardckpt.commit.remove import renew
from shardckpt.errors import FormatError, NotFoundError, OptionError, StorageError
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.text import shorten

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

_ROUNDS = 20
"""Number of new starts because the marker has changed; each change means that another process made
progress."""
_RESERVED = re.compile(r"main|pinned|superseded|(?:step-)?\d+|[0-9a-f]{40}", re.ASCII)
"""Words of the service: revisions and filters that are not tags."""


def pin(url: str | os.PathLike[str]) -> None:
    """Pin a checkpoint; when this returns, nothing deletes it any more.

    A save that is about to replace it at this moment fails with an error.

    Raises:
        NotFoundError: there is no checkpoint, or it has just been deleted.
        FormatError: its record is damaged.
        StorageError: the storage failed.
    """
    _protect(Store.open(parse(url)), "pin", lambda before: replace(before, pinned=True))


def unpin(url: str | os.PathLike[str]) -> bool:
    """Remove a checkpoint's pin; return whether it was pinned. Its tags stay, and protect it.

    Raises:
        NotFoundError: no checkpoint there.
        FormatError: its record is damaged, and it is tagged, too; or it is not pinned.
        StorageError: the storage failed.
    """
    _, before = _change(
        Store.open(parse(url)), "unpin", lambda before: replace(before, pinned=False)
    )
    return before.pinned


def tag(url: str | os.PathLike[str], name: str) -> None:
    """Put a tag on a checkpoint; when this returns, nothing deletes it any more.

    Args:
        url: the checkpoint: a path or url.
        name: at most 64 letters, digits, dots, dashes and underscores; the first is a letter or a
            digit.

    Raises:
        OptionError: the name is invalid or reserved, or the checkpoint has 32 tags.
        NotFoundError, FormatError, StorageError: as for `pin`.
    """
    check_tag(name)
    store = Store.open(parse(url))

    def tagged(before: Protection) -> Protection:
        tags = tuple(sorted({*before.tags, name}))
        if len(tags) > MOST_TAGS:
            raise OptionError(
                f"{store} has {MOST_TAGS} tags, which is the limit; `shardckpt untag` one first."
            )
        return replace(before, tags=tags)

    _protect(store, "tag", tagged)


def untag(url: str | os.PathLike[str], name: str) -> bool:
    """Remove a tag from a checkpoint; return whether it had the tag.

    Its pin and other tags stay, and protect it.

    Raises:
        OptionError: a tag cannot have this name.
        NotFoundError, FormatError, StorageError: as for `unpin`.
    """
    _check_form(name)

    def untagged(before: Protection) -> Protection:
        return replace(before, tags=tuple(one for one in before.tags if one != name))

    _, before = _change(Store.open(parse(url)), "untag", untagged)
    return name in before.tags


def check_tag(name: str) -> None:
    """Refuse a name that no tag can be given: OptionError."""
    _check_form(name)
    if _RESERVED.fullmatch(name):
        raise OptionError(
            f"the tag {shorten(name)} is reserved (a step, a commit, or a word of the service); "
            "choose another tag."
        )


def _check_form(name: object) -> None:
    if not isinstance(name, str) or not TAG.fullmatch(name):
        raise OptionError(
            f"{shorten(name)} is not a tag; give 1 to 64 letters, digits, dots, dashes and "
            "underscores that begin with a letter or a digit."
        )


def _protect(store: Store, verb: str, change: Callable[[Protection], Protection]) -> None:
    """Change the marker such that it protects, and prove that no deletion has overlooked it."""
    attempt, _ = _change(store, verb, change)
    if renew(store, attempt):
        return
    data, generation = store.read_versioned(PINNED)
    if protection_of(store, data, attempt):
        store.remove(PINNED, generation)
    store.remove_empty()
    raise _nothing(store, verb)


def _change(
    store: Store, verb: str, change: Callable[[Protection], Protection]
) -> tuple[str, Protection]:
    """Change the marker of the checkpoint at a place.

    Return its attempt, and its earlier protection.

    If the commit record is damaged, the marker can only be removed; the attempt is empty then.
    """
    store.check_replaces(verb)
    for _ in range(_ROUNDS):
        data, generation = store.read_versioned(PINNED)
        try:
            attempt = published_attempt(store)
        except FormatError:  # so that a damaged checkpoint can be deleted
            before = protection_of(store, data, None)
            if not before or change(before):
                raise
            if store.remove(PINNED, generation):
                return "", before
            continue
        if attempt is None:
            raise _nothing(store, verb)
        before = protection_of(store, data, attempt)
        after = change(before)
        if not after and (data is None or store.remove(PINNED, generation)):
            return attempt, before
        marker = after.sealed(attempt)
        if data == marker or store.replace(PINNED, marker, generation):
            return attempt, before
    raise StorageError(
        f"cannot write {store.path_of(PINNED)}: other processes keep changing it; try again."
    )


def _nothing(store: Store, verb: str) -> NotFoundError:
    return NotFoundError(
        f"{store}: there is no checkpoint to {verb}; `shardckpt ls` lists the checkpoints."
    )
