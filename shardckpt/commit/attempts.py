"""Detection of the directories of save attempts among everything else in a checkpoint's directory.

A directory that counts as an attempt may be deleted some day, so both its name and its contents
must match.

1. An attempt's name is the time at which its run or save began, four random bytes, and a suffix
   from the run.
2. At its top there are only names that saves write there. A directory that is a checkpoint by
   itself (it has a `checkpoint.json`), or that has other files in it, is not an attempt.

The remains of an interrupted deletion, even an empty directory, still count as an attempt.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardckpt.commit.fingerprints import FINGERPRINT
from shardckpt.errors import UrlError
from shardckpt.state.names import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.io.store import Store

RESHARD = "-reshard-"
"""Part of the name of a reshard's attempt, which lays out an earlier save anew; no save's attempt
has it."""

_FOLDED = "-folded-"
"""Part of the name of an attempt that holds the elements of an earlier one anew, after that one's
name."""
_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}(?:[._-][0-9A-Za-z._-]*)?", re.ASCII)
_STEP = re.compile(r"0|[1-9]\d{0,18}", re.ASCII)
LARGEST_STEP = (1 << 63) - 1
"""The largest step number that a run can have: a signed 64-bit integer."""
_PARTS = frozenset(
    {
        "contents/",
        "d/",
        "hosts/",
        "manifest.ocdbt",
        "records/",
        "small",
        "table",
        "zarr/",
        FINGERPRINT,
    }
)
"""All names at the top of an attempt (docs/format.md)."""


def is_attempt(store: Store, name: str) -> bool:
    """Whether a directory of a checkpoint is the attempt of a save, finished or not.

    Args:
        store: the checkpoint's place.
        name: name of a directory from a listing; its contents take one more listing.
    """
    return _NAME.fullmatch(name) is not None and _PARTS.issuperset(store.list_children(f"{name}/"))


def is_attempt_name(name: str) -> bool:
    """Whether the directory of an attempt could have a name."""
    return _NAME.fullmatch(name) is not None


def is_reshard(name: str) -> bool:
    """Whether an attempt of that name is a reshard's.

    Its metadata describes the run of the source, not its own.
    """
    return RESHARD in name


def folded_name(attempt: str, unique: str) -> str:
    """The name of an attempt that holds the elements of another one anew."""
    return f"{unfolded(attempt)}{_FOLDED}{unique}"


def unfolded(attempt: str) -> str:
    """The name of the attempt that first had the elements of an attempt.

    Statements about one of these two attempts hold for the other.
    """
    return attempt.partition(_FOLDED)[0]


def same_elements(attempt: str | None, other: str | None) -> bool:
    """Whether two attempts are the same one, or one holds the elements of the other anew.

    None (not known, or no attempt) is the same as None only.
    """
    if attempt is None or other is None:
        return attempt is other
    return unfolded(attempt) == unfolded(other)


def attempts(store: Store, children: Sequence[str]) -> list[str]:
    """The attempts among the names directly below a checkpoint, in the same order.

    The names are those that `Store.list_children` returns.
    """
    return [
        child[:-1] for child in children if child.endswith("/") and is_attempt(store, child[:-1])
    ]


def step_of(name: str) -> int | None:
    """The step number of a checkpoint directory's name, in plain decimal.

    None: the name is not a step's.
    """
    step = int(name) if _STEP.fullmatch(name) else None
    return step if step is not None and step <= LARGEST_STEP else None


def places(root: Store, children: Sequence[str]) -> Iterator[tuple[str, Store]]:
    """Locations that may hold checkpoints: `root`, called ".", and the directories below it.

    The directories are in natural order.

    Args:
        root: a checkpoint, or a directory of them.
        children: the names directly below it.
    """
    yield ".", root
    for name in sorted((child[:-1] for child in children if child.endswith("/")), key=natural_key):
        if _NAME.fullmatch(name):
            continue  # an attempt holds no checkpoints
        try:
            yield name, root.sub(name)
        except UrlError:
            continue  # no checkpoint of shardckpt can have this name
