"""The snapshot of a model in Hugging Face's cache.

The model's directory there has `refs/`, `blobs/` and `snapshots/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import FormatError
from shardckpt.io.store import Store
from shardckpt.text import few

if TYPE_CHECKING:
    from shardckpt.io.url import Location

_SNAPSHOTS, _MAIN = "snapshots", "refs/main"
_LONGEST_NAME = 255


def hub_snapshot(location: Location) -> Location | None:
    """The snapshot that `refs/main` names in a model's directory of the cache, or its only one.

    None: it is not such a directory.

    Raises:
        FormatError: there are several snapshots, and `refs/main` names none of them.
        StorageError: the storage failed or refused.
    """
    place = Store.open(location)
    if (
        not place.lists
        or not place.has_directory()
        or not {f"{_SNAPSHOTS}/", "refs/"} <= set(place.list_children())
    ):
        return None
    inside = place.sub(_SNAPSHOTS)
    names = [name.removesuffix("/") for name in inside.list_children() if name.endswith("/")]
    main = ""
    if place.exists(_MAIN) and not place.is_longer(_MAIN, _LONGEST_NAME):
        main = place.read(_MAIN).decode("ascii", "replace").strip()
    if main in names:
        return inside.sub(main).location
    if len(names) == 1:
        return inside.sub(names[0]).location
    raise FormatError(
        f"{location} holds {len(names)} snapshots of a model ({few(names)}); give the path of one "
        "of them."
    )
