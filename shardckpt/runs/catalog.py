"""Listing the checkpoints in a directory.

A checkpoint is a directory whose `checkpoint.json` names an attempt. Only that record is read, and
only the fields that a list shows are parsed: the tensors of a large record are not. A directory
beside it that is an attempt (`commit.attempts`) is an unfinished save, or the rest of one. All
other files and directories are ignored.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import time
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.commit.assemble import finished_hosts, read_host_record
from shardckpt.commit.attempts import attempts, is_attempt_name, places
from shardckpt.commit.markers import PINNED, SUPERSEDED, Protection, is_superseded, protection
from shardckpt.commit.publish import RECORD, record_digest
from shardckpt.commit.table_reading import read_document
from shardckpt.errors import (
    FormatError,
    MissingDataError,
    NotFoundError,
    ShardckptError,
    StorageError,
)
from shardckpt.format.bases import bases_of
from shardckpt.format.documents import LARGEST_DIMENSION, open_envelope
from shardckpt.io.ages import last_written
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.status import exists
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.io.url import Location, parse
from shardckpt.runs.job import PUBLISHED
from shardckpt.runs.leftover import check_leftover
from shardckpt.text import shorten

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence


State = Literal["committed", "uncommitted", "deleted", "unreadable"]
"""State of a checkpoint or an attempt: published; begun and not published; tombstone; a record that
cannot be read."""

_STEP = re.compile(
    r"(?:(?<![0-9A-Za-z])|(?<=step)|(?<=checkpoint)|(?<=ckpt)|(?<=epoch))\d{1,19}$",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One checkpoint, or one attempt that is not a checkpoint."""

    name: str
    """Name relative to the root; "." for the root itself."""
    location: Location
    """The checkpoint's directory."""
    state: State
    attempt: str | None = None
    """The attempt that the record names, or the unfinished one."""
    created: str | None = None
    """Time of the commit: UTC, ISO 8601, by the committer's clock."""
    began: str | None = None
    """Time at which a `Publisher` began the version; None: another program saved it."""
    layout: str | None = None
    """"packed" or "zarr"."""
    tensors: int | None = None
    nbytes: int | None = None
    """Bytes of all elements."""
    stored_bytes: int | None = None
    """Bytes of all chunks as stored, with padding and checksums, after compression."""
    changed_bytes: int | None = None
    """Bytes of the elements that differ from the version that was published before; of versions
    with differences only."""
    reason: str | None = None
    """Reason of the deletion, or of being unreadable."""
    finished: int | None = None
    """Number of hosts that have finished writing, for an unfinished attempt."""
    hosts: int | None = None
    """Number of hosts of an unfinished attempt. None if no host has finished: only host records
    have this number."""
    committable: bool = False
    """Whether an unfinished attempt lacks only its commit, and no check forbids that
    (`leftover`)."""
    metrics: Mapping[str, float | str] = field(default_factory=dict)
    """A checkpoint's metrics, as given to `CheckpointManager.save(metrics=…)`; non-finite numbers
    are text."""
    bases: tuple[str, ...] = ()
    """Urls of the checkpoints that hold some of a checkpoint's tensors, as in its record: `../0` is
    the checkpoint 0 beside it."""
    pinned: bool = False
    """Whether a checkpoint is pinned. A pin protects it against deletion, and so does a tag."""
    tags: tuple[str, ...] = ()
    """A checkpoint's tags, sorted."""
    superseded: bool = False
    """Whether training went back to a step before this checkpoint."""
    idle: float | None = None
    """Seconds since the last write into an unfinished attempt, by this machine's clock. None if the
    storage keeps no times."""

    @property
    def step(self) -> int | None:
        """The number at the end of the name: 100 of `100`, `step_100`, `epoch100` and `run-b-0100`.

        None of `run-tp4`.
        """
        match = _STEP.search(self.name)
        return int(match[0]) if match else None

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> CatalogEntry:
        """The entry that `to_json` has written, perhaps on another machine."""
        read = {
            "location": parse(doc["url"]),
            "nbytes": doc["bytes"],
            "bases": tuple(doc["bases"]),
            "tags": tuple(doc.get("tags", ())),  # earlier versions wrote none
        }
        plain = {one.name: doc[one.name] for one in fields(cls) if one.name in doc}
        return cls(**{**plain, **read})

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON."""
        return {
            "name": self.name,
            "url": str(self.location),
            "state": self.state,
            "step": self.step,
            "attempt": self.attempt,
            "created": self.created,
            "began": self.began,
            "layout": self.layout,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "stored_bytes": self.stored_bytes,
            "changed_bytes": self.changed_bytes,
            "metrics": dict(self.metrics),
            "reason": self.reason,
            "finished": self.finished,
            "hosts": self.hosts,
            "committable": self.committable,
            "pinned": self.pinned,
            "tags": list(self.tags),
            "superseded": self.superseded,
            "bases": list(self.bases),
            "idle": self.idle,
        }


def catalog(root: str | os.PathLike[str], *, everything: bool = False) -> list[CatalogEntry]:
    """List the checkpoint at `root`, if there is one, and the checkpoints directly below it.

    Args:
        root: A path or url.
        everything: Also list unfinished attempts and deleted checkpoints.

    Returns:
        Entries in natural order of their names (9 before 10), `root` itself first; each checkpoint
        before its unfinished attempts.

    Raises:
        UrlError: `root` is not a valid path or url.
        NotFoundError: There is no such directory.
        StorageError: The storage failed, or is a web server.
    """
    location = parse(root)
    store = Store.open(location)
    if not store.lists:
        raise StorageError(
            f"{location}: a web server does not list what it has; give the url of a checkpoint to "
            "`shardckpt info`."
        )
    children = store.list_children()
    if not children and not exists(store.local_path("")):
        raise NotFoundError(f"{location}: no such directory.")

    def at(named: tuple[str, Store]) -> list[CatalogEntry]:
        name, place = named
        try:
            return entries_at(place, name, place.list_children(), everything=everything)
        except StorageError as e:
            return [CatalogEntry(name, place.location, "unreadable", reason=str(e))]

    with reading_takes_threads(store):
        return [
            entry for entries in map_on_threads(at, places(store, children)) for entry in entries
        ]


def entries_at(
    place: Store, name: str, children: Sequence[str], *, everything: bool
) -> list[CatalogEntry]:
    """The checkpoint at a place, and its other attempts.

    Args:
        place: the place.
        name: name for the entries.
        children: the names directly below the place (`Store.list_children`).
        everything: also list unfinished attempts and deleted checkpoints.

    Raises:
        StorageError: the storage failed.
    """
    data, entry = None, None
    if RECORD in children:
        try:
            data = place.read(RECORD)
            entry = _committed_entry(data, place, name)
        except MissingDataError:  # deleted since the listing
            pass
        except FormatError as e:  # too large to be read
            entry = CatalogEntry(name, place.location, "unreadable", reason=str(e))
    if entry is not None and entry.state != "deleted":
        entry = with_markers(entry, place, children)
    begun = entry is not None and entry.state == "deleted" and entry.reason is None
    entries = (
        [] if entry is None or begun or (entry.state == "deleted" and not everything) else [entry]
    )
    if everything:
        published = None if entry is None else entry.attempt
        digest = record_digest(data)
        entries += [
            _unfinished_entry(place, name, attempt, published, digest)
            for attempt in attempts(place, children)
            if attempt != published
        ]
    return entries


def with_markers(entry: CatalogEntry, place: Store, children: Sequence[str]) -> CatalogEntry:
    """The entry of a checkpoint with its markers as they are now; for `children` see `entries_at`.

    Raises StorageError.
    """
    marks = protection(place, entry.attempt) if PINNED in children else Protection()
    superseded = SUPERSEDED in children and is_superseded(place, entry.attempt)
    return replace(entry, pinned=marks.pinned, tags=marks.tags, superseded=superseded)


def _unfinished_entry(
    place: Store, name: str, attempt: str, published: str | None, digest: str | None
) -> CatalogEntry:
    """The state of an attempt.

    `published` is the attempt that the commit record names now; `digest` is the digest of that
    record.
    """
    inside = place.sub(attempt)
    last = last_written(place, f"{attempt}/")
    finished = finished_hosts(inside)
    hosts, committable = None, False
    # `shardckpt commit` reports what is wrong with the records.
    with contextlib.suppress(ShardckptError):
        if finished:
            first, _ = read_host_record(inside, finished[0])
            hosts = first.hosts
            if finished == list(range(hosts)) and first.prior == digest:
                contents = read_document(inside, first.files.contents)
                metadata = _require(contents.doc, "metadata", dict, name)
                check_leftover(place, attempt, metadata, published)
                committable = True
    return CatalogEntry(
        name,
        place.location,
        "uncommitted",
        attempt,
        finished=len(finished),
        hosts=hosts,
        committable=committable,
        idle=None if last is None else max(0.0, time.time() - last),
    )


def _committed_entry(data: bytes, place: Store, name: str) -> CatalogEntry:
    """The entry of a commit record; "unreadable" if it cannot be parsed."""
    where = place.path_of(RECORD)
    try:
        return _summary(open_envelope(data, where), name, place.location, where)
    except ShardckptError as e:
        return CatalogEntry(name, place.location, "unreadable", reason=str(e))


def _summary(doc: dict[str, Any], name: str, location: Location, where: str) -> CatalogEntry:
    if doc.get("begun") is True:
        # A placeholder: there has never been a checkpoint here.
        return CatalogEntry(name, location, "deleted")
    if "tombstone" in doc:
        return CatalogEntry(
            name, location, "deleted", reason=_require(doc, "tombstone", str, where)
        )
    totals = _require(doc, "totals", dict, where)
    return CatalogEntry(
        name,
        location,
        "committed",
        attempt=_attempt(doc, where),
        created=_time(_require(doc, "created", str, where)),
        began=_began(doc),
        layout=_require(doc, "layout", str, where),
        tensors=_require(totals, "tensors", int, where),
        nbytes=_require(totals, "bytes", int, where),
        stored_bytes=_require(totals, "stored_bytes", int, where),
        changed_bytes=_require(totals, "changed_bytes", int, where)
        if "changed_bytes" in totals
        else None,
        metrics=_metrics(doc),
        bases=tuple(base.url for base in bases_of(doc, where)),
    )


def _metrics(doc: dict[str, Any]) -> dict[str, float | str]:
    """The numeric metrics in a record's metadata; other values are left out."""
    metadata = doc.get("metadata")
    metrics = metadata.get("metrics") if isinstance(metadata, dict) else None
    return {
        name: value if isinstance(value, str) else _as_float(value)
        for name, value in (metrics.items() if isinstance(metrics, dict) else ())
        if (isinstance(value, int | float) and not isinstance(value, bool))
        or value in ("nan", "inf", "-inf")
    }


def _began(doc: dict[str, Any]) -> str | None:
    metadata = doc.get("metadata")
    published = metadata.get(PUBLISHED) if isinstance(metadata, dict) else None
    began = published.get("began") if isinstance(published, dict) else None
    return _time(began) if isinstance(began, str) else None


def _as_float(value: float) -> float | str:
    """A number, unless it is an integer that no float is near to: then an infinity, as text."""
    try:
        float(value)
    except OverflowError:
        return "inf" if value > 0 else "-inf"
    return value


def _attempt(doc: dict[str, Any], where: str) -> str:
    attempt: str = _require(doc, "attempt", str, where)
    if not is_attempt_name(attempt):
        raise FormatError(
            f"{where}: 'attempt' is {shorten(attempt)}, which no attempt is called; the record "
            "was not written by shardckpt."
        )
    return attempt


def _time(text: str) -> str | None:
    """A time as records have it; None: the text is another one."""
    try:
        return (
            text if text.isascii() and dt.datetime.fromisoformat(text).tzinfo is not None else None
        )
    except ValueError:
        return None


def _require(doc: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = doc.get(key)
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= LARGEST_DIMENSION):
        raise FormatError(
            f"{where}: {key!r} is not a valid {kind.__name__}; the record was not written by "
            "shardckpt."
        )
    return value
