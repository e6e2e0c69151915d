"""Which checkpoints lie directly below a directory?

A checkpoint is a directory whose `checkpoint.json` names an attempt. Only that record is read, and of it only
what a list shows: a record of many tensors is not turned into tensors. A directory without one is an unfinished
save if an attempt (a directory with host records or data) lies in it, and otherwise none of our business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import FormatError, MissingDataError, NotFoundError, ShardckptError, StorageError, UrlError
from shardckpt.fields import LARGEST_DIMENSION
from shardckpt.io.commit import RECORD
from shardckpt.io.store import Store
from shardckpt.io.url import Location, parse
from shardckpt.names import natural_key
from shardckpt.record import open_envelope

if TYPE_CHECKING:
    import os

__all__ = ["CatalogEntry", "State", "catalog"]

State = Literal["committed", "uncommitted", "deleted", "unreadable"]
"""Of a checkpoint or an attempt: published; begun and not published; tombstone; a record that cannot be read."""

_ATTEMPT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*/", re.ASCII)
_STAMP = re.compile(r"\d{8}T\d{6}-", re.ASCII)
_HOST = re.compile(r"\d{5}(?:/|\.json$)", re.ASCII)
_STEP = re.compile(r"(?<!\d)\d{1,18}$", re.ASCII)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One checkpoint, or one attempt that is none."""

    name: str
    """Relative to the root; "." for the root itself."""
    location: Location
    """Of the checkpoint's directory."""
    state: State
    attempt: str | None = None
    """The attempt that the record names, or the unfinished one."""
    created: str | None = None
    """UTC, ISO 8601, by the committer's clock."""
    layout: str | None = None
    """"packed" or "zarr"."""
    tensors: int | None = None
    nbytes: int | None = None
    """Bytes of all elements."""
    stored_bytes: int | None = None
    """Bytes of all chunks, with padding and checksums, compressed if they are."""
    reason: str | None = None
    """Why it was deleted or cannot be read."""

    @property
    def step(self) -> int | None:
        """The number at the end of the name: 100 of `100`, `step_100` and `run-b-0100`."""
        found = _STEP.search(self.name)
        return int(found[0]) if found else None


def catalog(root: str | os.PathLike[str], *, everything: bool = False) -> list[CatalogEntry]:
    """List the checkpoints directly below `root`, or `root` itself where it is one.

    Args:
        root: A path or url.
        everything: Also list unfinished attempts and deleted checkpoints.

    Returns:
        Entries in natural order of their names (9 before 10); a checkpoint before its unfinished attempts.

    Raises:
        UrlError: `root` is no place.
        NotFoundError: There is no such directory.
    """
    location = parse(root)
    store = Store.open(location)
    names = store.list_children()
    if not names and (location.local is None or not location.local.exists()):
        raise NotFoundError(f"{location}: no such directory.")
    found = _entries(store, ".", names, everything)
    if not found:
        for name in sorted((name.removesuffix("/") for name in names if name.endswith("/")), key=natural_key):
            found += _below(store, name, everything)
    return found


def _below(store: Store, name: str, everything: bool) -> list[CatalogEntry]:
    """What lies in a directory below the root."""
    try:
        place = store.sub(name)
    except UrlError:
        return []  # a name that no checkpoint of ours can have
    try:
        return _entries(place, name, place.list_children(), everything)
    except StorageError as e:
        return [CatalogEntry(name, place.location, "unreadable", reason=str(e))]


def _entries(place: Store, name: str, children: list[str], everything: bool) -> list[CatalogEntry]:
    """The checkpoint at a place, and its other attempts."""
    entries = []
    if RECORD in children:
        entry = _committed(place, name)
        if entry is not None and (everything or entry.state != "deleted"):
            entries.append(entry)
    if everything:
        published = entries[0].attempt if entries else None
        attempts = (child.removesuffix("/") for child in children if _is_attempt(place, child))
        entries += [CatalogEntry(name, place.location, "uncommitted", attempt) for attempt in attempts if attempt != published]
    return entries


def _is_attempt(place: Store, child: str) -> bool:
    """Whether a directory is what a save writes into: it has hosts' records or data, or a zarr group and such a name."""
    if not _ATTEMPT.fullmatch(child):
        return False
    try:
        inside = place.list_children(child)
        if "zarr/" in inside and _STAMP.match(child):
            return True
        return any(_HOST.match(file) for name in ("records/", "hosts/") if name in inside for file in place.list_children(child + name))
    except StorageError:
        return False


def _committed(place: Store, name: str) -> CatalogEntry | None:
    """What the commit record says, or None where it went away in between."""
    where = place.path_of(RECORD)
    try:
        return _summary(open_envelope(place.read(RECORD), where), name, place.location, where)
    except MissingDataError:
        return None
    except ShardckptError as e:
        return CatalogEntry(name, place.location, "unreadable", reason=str(e))


def _summary(doc: dict[str, Any], name: str, location: Location, where: str) -> CatalogEntry:
    if "tombstone" in doc:
        return CatalogEntry(name, location, "deleted", reason=_typed(doc, "tombstone", str, where))
    totals = _typed(doc, "totals", dict, where)
    return CatalogEntry(
        name,
        location,
        "committed",
        attempt=_typed(doc, "attempt", str, where),
        created=_typed(doc, "created", str, where),
        layout=_typed(doc, "layout", str, where),
        tensors=_typed(totals, "tensors", int, where),
        nbytes=_typed(totals, "bytes", int, where),
        stored_bytes=_typed(totals, "stored_bytes", int, where),
    )


def _typed(doc: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = doc.get(key)
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= LARGEST_DIMENSION):
        raise FormatError(f"{where}: {key!r} is no {kind.__name__} that a checkpoint could have; the record was not written by shardckpt.")
    return value
