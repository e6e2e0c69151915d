"""Recognizing the directories of save attempts among everything else in a checkpoint's directory.

What is taken for an attempt may be removed one day, so both must agree.

1. An attempt is called by the time at which its run or save began and four random bytes, and what a run appends.
2. At its top lies nothing but what saves write there. So a directory that is a checkpoint by itself (it has a
   `checkpoint.json`), or into which somebody has put something of their own, is none.

What an interrupted removal leaves, down to an empty directory, still is one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardckpt.errors import UrlError
from shardckpt.state.names import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.io.store import Store

__all__ = ["LARGEST_STEP", "RESHARD", "attempts", "is_attempt", "is_reshard", "places", "step_of"]

RESHARD = "-reshard-"
"""In the name of an attempt that lays out anew what an earlier save has written, and not in that of a save."""

_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}(?:[._-][0-9A-Za-z._-]*)?", re.ASCII)
_STEP = re.compile(r"0|[1-9]\d{0,18}", re.ASCII)
LARGEST_STEP = (1 << 63) - 1
"""The largest step number that a run can have: a signed 64-bit integer."""
_PARTS = frozenset({"contents/", "d/", "hosts/", "manifest.ocdbt", "records/", "small", "table", "zarr/"})
"""All that lies at the top of an attempt (docs/format.md)."""


def is_attempt(store: Store, name: str) -> bool:
    """Whether a directory of a checkpoint is what a save, finished or not, has written into.

    Args:
        store: the checkpoint's place.
        name: of a directory that a listing showed there; one listing more says what lies in it.
    """
    return _NAME.fullmatch(name) is not None and _PARTS.issuperset(store.list_children(f"{name}/"))


def is_reshard(name: str) -> bool:
    """Whether an attempt of that name is a reshard's: what its metadata says of a run is the source's, and no word of this one."""
    return RESHARD in name


def attempts(store: Store, children: Sequence[str]) -> list[str]:
    """The attempts among the names directly below a checkpoint (`Store.list_children`), in their order."""
    return [child[:-1] for child in children if child.endswith("/") and is_attempt(store, child[:-1])]


def step_of(name: str) -> int | None:
    """The step whose checkpoint's directory has that name: the number in plain decimal; None: it is no step's."""
    step = int(name) if _STEP.fullmatch(name) else None
    return step if step is not None and step <= LARGEST_STEP else None


def places(root: Store, children: Sequence[str]) -> Iterator[tuple[str, Store]]:
    """Where checkpoints may lie: `root` itself, called ".", and the directories below it in natural order.

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
            continue  # a name that no checkpoint of ours can have
