"""Trials of a place: what saves, commits, collections and exports need of it, tried there.

1. `examine` makes a directory of its own below the place, `.doctor-…`, and removes it again, also
   after Ctrl-C.
2. A *trial* tries one ability. Where two writers are needed, one is another process. It is a thread
   where no other process reaches the place.
3. A *promise* of docs/storage.md holds if all trials that it depends on have worked.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardckpt.errors import ShardckptError, StorageError
from shardckpt.io import locks
from shardckpt.io.ages import storage_now
from shardckpt.io.buckets.uploading import SMALLEST, open_upload
from shardckpt.io.datafile import free_bytes
from shardckpt.io.failures import storage_errors
from shardckpt.io.status import exists
from shardckpt.io.store import Store
from shardckpt.io.trial_writers import TrialWriter, open_other_writer, trial_path
from shardckpt.text import duration_text, file_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.io.trial_writers import OtherWriter
    from shardckpt.io.url import Location

ROUNDS = 10
"""Races of two writers for one object, in each trial."""
BYTES = 8 << 20
"""Bytes that are written and read to measure the rate."""


class LackError(Exception):
    """The place has not got an ability, and says so."""


class WrongError(Exception):
    """The place does something else than its ability promises."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of the trial of one ability."""

    name: str
    outcome: Literal["works", "lacks", "fails", "skipped"]
    """`lacks`: the place says that it has no such ability. `skipped`: a trial that it needs did not
    work."""
    detail: str


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise of shardckpt, and whether it holds at the place."""

    name: str
    text: str
    needs: tuple[str, ...]
    """Names of trials."""
    spares: tuple[str, ...] = ()
    """Names of trials whose ability may be lacking, but may not be wrong."""
    needed: bool = True
    """Whether checkpoints cannot do without it."""


PROMISES = (
    Promise("restore", "checkpoints that are there are restored", ("look",)),
    Promise(
        "save",
        "a save is complete or not visible, and of two saves one commits",
        ("write", "list", "create"),
    ),
    Promise(
        "replace",
        "overwriting, rm, gc, pins and retention are safe beside other processes",
        ("write", "replace", "delete"),
        ("remove",),
    ),
    Promise(
        "hosts", "several processes save one checkpoint", ("write", "list", "processes", "locks")
    ),
    Promise(
        "durable",
        "what is saved survives the process, and a crash of the machine",
        ("write", "processes", "sync", "rename"),
    ),
    Promise("clean", "a deleted checkpoint leaves nothing", ("delete", "remove"), needed=False),
    Promise("grace", "gc spares what is younger than its grace period", ("clock",), needed=False),
    Promise(
        "reuse",
        "a reshard takes over unchanged files without reading them",
        ("copies",),
        needed=False,
    ),
    Promise("exports", "exports are written there", ("exports",), needed=False),
    Promise(
        "stock", "TensorStore opens checkpoints of the packed layout", ("driver",), needed=False
    ),
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All trials of a place."""

    location: Location
    trials: tuple[Trial, ...]
    left: str | None
    """The directory of the trials, if it could not be removed."""

    def holds(self, promise: Promise) -> bool:
        """Whether all trials that a promise depends on have worked.

        Some are made on disks alone.
        """
        outcomes = {trial.name: trial.outcome for trial in self.trials}
        spared = all(outcomes[name] in ("works", "lacks") for name in promise.spares)
        return spared and all(outcomes.get(name, "works") == "works" for name in promise.needs)

    @property
    def ok(self) -> bool:
        """Whether all promises that checkpoints need hold, and nothing was left behind."""
        return self.left is None and all(
            map(self.holds, (promise for promise in PROMISES if promise.needed))
        )


def examine(url: Location | str | os.PathLike[str]) -> Diagnosis:
    """Try a place; leaves nothing behind.

    Raises:
        UrlError: the location cannot be used as a storage.
        MissingExtraError: a package that the object store needs is not installed.
        StorageError: the place cannot be opened.
    """
    store = Store.open(url)
    name = f".doctor-{secrets.token_hex(6)}"
    left: list[str] = []
    with _removed_afterwards(store, name, left):
        trials = tuple(_trials(store, store.sub(name)))
    return Diagnosis(store.location, trials, left[0] if left else None)


@contextmanager
def _removed_afterwards(store: Store, name: str, left: list[str]) -> Iterator[None]:
    """Remove the directory of the trials afterwards.

    On disk, this also removes the directories above it that did not exist before. Where nothing can
    be written, nothing is removed.
    """
    if not store.writable:
        yield
        return
    path = store.local_path("")
    missing = (
        [] if path is None else [above for above in (path, *path.parents) if not exists(above)]
    )

    def remove() -> None:
        try:
            store.sub(name).delete_prefix()
        except StorageError:
            own = store.local_path(name)
            left[:] = [] if own is not None and not exists(own) else [store.path_of(name)]
        for above in missing:
            with suppress(OSError):
                above.rmdir()

    try:
        yield
    finally:
        try:
            remove()
        except KeyboardInterrupt:  # a second one
            remove()
            raise


def _attempt(name: str, trial: Callable[[], str]) -> Trial:
    try:
        return Trial(name, "works", trial())
    except LackError as e:
        return Trial(name, "lacks", str(e))
    except (ShardckptError, WrongError, OSError) as e:
        return Trial(name, "fails", " ".join(str(e).split()))


def _trials(place: Store, store: Store) -> Iterator[Trial]:
    """All trials, below a place; none after the first ones if those do not work."""
    local = store.local_path("") is not None
    alone: dict[str, Callable[[], str]] = {
        "list": lambda: _list(store),
        "delete": lambda: _delete(store),
        "remove": lambda: _remove(store),
        "clock": lambda: _clock(store),
        "copies": lambda: _copies(store),
        "exports": lambda: _exports(store),
        "driver": lambda: _driver(store),
        "space": lambda: _space(store),
        "rate": lambda: _rate(store),
        **({"sync": lambda: _sync(store), "rename": lambda: _rename(store)} if local else {}),
    }
    with_peer = {
        "create": lambda own, peer: _race(own, peer, new=True),
        "replace": lambda own, peer: _race(own, peer, new=False),
        "processes": _processes,
        **({"locks": lambda _own, peer: _locks(store, peer)} if local else {}),
    }
    looked = _attempt("look", lambda: _look(place))
    yield looked
    written = (
        _attempt("write", lambda: _write(store))
        if looked.outcome == "works"
        else Trial("write", "skipped", "look did not work")
    )
    yield written
    if written.outcome != "works":
        yield from (Trial(name, "skipped", "write did not work") for name in (*alone, *with_peer))
        return
    yield from (_attempt(name, trial) for name, trial in alone.items())
    own = TrialWriter(store, "own")
    with open_other_writer(store) as peer:
        yield from (
            _attempt(name, lambda trial=trial: trial(own, peer))  # type: ignore[misc]
            for name, trial in with_peer.items()
        )


# --- trials; each returns what it saw, and raises a WrongError, a LackError or the error of the
# storage


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise WrongError(text)


def _look(store: Store) -> str:
    return (
        "a checkpoint is there"
        if store.exists("checkpoint.json")
        else "no checkpoint is there; looking is allowed"
    )


def _write(store: Store) -> str:
    if not store.writable:
        raise LackError("the place is read only")
    data = secrets.token_bytes(1000)
    store.write("written/key", data)
    _expect(store.read("written/key") == data, "an object that was written is read differently")
    _expect(
        store.read("written/key", 10, 20) == data[10:20], "a range of an object is read differently"
    )
    _expect(
        store.size("written/key") == len(data),
        "the size of an object is another one than was written",
    )
    return "an object is read as it was written, whole and in part"


def _list(store: Store) -> str:
    if not store.lists:
        raise LackError("nothing can be listed")
    for i in range(3):
        store.write(f"listed/{i}", b"")
        _expect(
            f"listed/{i}" in store.list("listed/"),
            "a listing lacks an object that was written just before",
        )
    _expect(
        store.list_children("listed/") == ["0", "1", "2"],
        "a listing of one level differs from what was written",
    )
    return "each object is listed at once"


def _delete(store: Store) -> str:
    store.write("deleted/key", b"")
    store.delete("deleted/key")
    _expect(not store.exists("deleted/key"), "an object is there after its deletion")
    _expect(not store.list("deleted/"), "an object is listed after its deletion")
    return "a deleted object is gone at once"


def _remove(store: Store) -> str:
    store.create("removed", b"first")
    _, first = store.read_versioned("removed")
    store.write("removed", b"second")
    _, second = store.read_versioned("removed")
    _expect(not store.remove("removed", first), "an object that had changed was deleted")
    if not store.remove("removed", second):
        raise LackError(
            "no deletion depends on the version; the record of a deleted checkpoint stays"
        )
    return "an object is deleted only if it is unchanged"


def _clock(store: Store) -> str:
    if not store.keeps_times:
        raise LackError("the place keeps no times of writes")
    ahead = storage_now(store) - time.time()
    return (
        f"it differs from this machine's by {duration_text(abs(ahead))}; ages are measured by the "
        "place's own clock"
    )


def _copies(store: Store) -> str:
    path = store.local_path("")
    if path is not None:
        store.write("linked", b"bytes")
        os.link(path / "linked", path / "link")
        _expect(
            (path / "link").read_bytes() == b"bytes", "a hard link has other bytes than its file"
        )
        return "hard links"
    if not store.copies_from(store):
        raise LackError("the place does not copy by itself")
    store.write("copied", b"bytes")
    store.copy_from(store, [("copied", "copy")])
    _expect(store.read("copy") == b"bytes", "a copy has other bytes than its object")
    return "copies by the service"


def _exports(store: Store) -> str:
    if store.local_path("") is not None:
        return "files are written in place"
    if not store.uploads_in_parts:
        raise LackError("no uploads in parts, so that export and its relatives cannot write there")
    with open_upload(store.location.join("export"), part_bytes=SMALLEST) as upload:
        try:
            upload.write(b"bytes")
            upload.finish()
        except BaseException:
            with suppress(StorageError):
                upload.abort()
            raise
    _expect(store.read("export") == b"bytes", "an upload in parts is read differently")
    return "uploads in parts"


def _driver(store: Store) -> str:
    if not store.has_driver:
        raise LackError("TensorStore has no driver; layout='zarr' is for zarr-python")
    with storage_errors("read", store.path_of("written/key")):
        state = store.kvstore().read("written/key").result().state
    _expect(state == "value", "TensorStore does not see an object that was written")
    return "TensorStore sees the same objects"


def _space(store: Store) -> str:
    free = free_bytes(store)
    _expect(free is None or free > 0, "no space is left")
    return "not limited, as far as the place says" if free is None else f"{file_size(free)} free"


def _rate(store: Store) -> str:
    data = secrets.token_bytes(BYTES)
    begun = time.perf_counter()
    store.write("rate", data)
    written = time.perf_counter()
    _expect(store.read("rate") == data, "a large object is read differently")
    read = time.perf_counter()
    return (
        f"{file_size(BYTES)} written at {_per_second(written - begun)}, read at "
        f"{_per_second(read - written)}, on one thread"
    )


def _per_second(seconds: float) -> str:
    return f"{file_size(int(BYTES / max(seconds, 1e-9)))}/s"


def _sync(store: Store) -> str:
    path = trial_path(store)
    for target, flags in ((path / "written/key", os.O_RDWR), (path, os.O_RDONLY | os.O_DIRECTORY)):
        fd = os.open(target, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return "files and directories are synced"


def _rename(store: Store) -> str:
    path = trial_path(store)
    (path / "old").write_bytes(b"old")
    (path / "new").write_bytes(b"new")
    (path / "new").replace(path / "old")
    _expect((path / "old").read_bytes() == b"new", "a rename did not replace the file")
    return "a rename replaces a file"


def _race(own: TrialWriter, peer: OtherWriter, *, new: bool) -> str:
    """Let both write one object that they saw in one state: missing, or with the same bytes."""
    if not new and not own.store.replaces:
        raise LackError(
            "its client cannot replace an object only if it is unchanged; checkpoints are "
            "created, and stay"
        )
    for i in range(ROUNDS):
        key = f"race/{'new' if new else 'old'}-{i}"
        if not new:
            own.store.write(key, b"before")
        for there in (own.look(key), peer.begin("look", key)()):
            _expect(
                there != new,
                f"one of two writers did not see the object that is there (round {i + 1})",
            )
        other = peer.begin("write", key)
        won = [own.write(key), other()]
        state = "missing" if new else "unchanged"
        _expect(
            won.count(True) == 1,
            f"{won.count(True)} of two writers of one {state} object succeeded (round {i + 1})",
        )
        holder = own.store.read(key).partition(b" ")[0]
        _expect(
            holder == (b"own" if won[0] else b"peer"),
            f"the object has not the bytes of the writer that succeeded (round {i + 1})",
        )
        own.store.delete(key)
        _expect(not own.write(key) or new, f"a deleted object was replaced (round {i + 1})")
        own.store.delete(key)
    return (
        f"exactly one of two writers succeeded in each of {ROUNDS} races; the other is {peer.name}"
    )


def _processes(own: TrialWriter, peer: OtherWriter) -> str:
    store = own.store
    if not store.shared:
        raise LackError(f"no other process reaches the place; {store.sharing_advice}")
    store.write("shared", b"")
    _expect(
        peer.begin("sees", "shared")(),
        f"another process does not see an object that was written; {store.sharing_advice}",
    )
    return "another process sees each object at once"


def _locks(store: Store, peer: OtherWriter) -> str:
    path = trial_path(store) / "locked"
    path.write_bytes(b"")
    with path.open("r+b") as file:
        locks.lock_file(file.fileno(), path)
        _expect(not peer.begin("lock", "locked")(), "two processes held one lock")
    _expect(peer.begin("lock", "locked")(), "a lock that was released stayed held")
    return (
        "a lock of one process excludes another one on this machine; other machines are not tried"
    )
