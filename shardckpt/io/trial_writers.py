"""Writers for trials of a place: one here, and the other one in another process or thread."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from shardckpt.errors import ShardckptError, StorageError
from shardckpt.io import locks
from shardckpt.io.failures import child_command, process_advice
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PEER = "from shardckpt.io.trial_writers import serve; serve()"
_PATIENCE = 10
"""Seconds that the other process gets to end, before it is killed."""


def trial_path(store: Store) -> Path:
    """The directory of the trials, of a store on disk."""
    path = store.local_path("")
    assert path is not None
    return path


class TrialWriter:
    """A writer that replaces an object only in the state in which it saw it last."""

    def __init__(self, store: Store, name: str) -> None:
        """Write bytes that begin with `name`."""
        self.store = store
        self._bytes = f"{name} {secrets.token_hex(8)}".encode()
        self._seen = b""

    def look(self, key: str) -> bool:
        """Look at an object; return whether it is there."""
        data, self._seen = self.store.read_versioned(key)
        return data is not None

    def write(self, key: str) -> bool:
        """Write an object as it was seen last; return whether that succeeded."""
        return self.store.replace(key, self._bytes, self._seen)

    def sees(self, key: str) -> bool:
        """Whether an object is found and listed."""
        return self.store.exists(key) and key in self.store.list(key)

    def lock(self, key: str) -> bool:
        """Lock a file for a moment; False if somebody else has locked it."""
        path = trial_path(self.store) / key
        with path.open("r+b") as file:
            try:
                locks.lock_file(file.fileno(), path)
            except BlockingIOError:
                return False
        return True


class OtherWriter(Protocol):
    """A `TrialWriter` that is not on this thread."""

    name: str

    def begin(self, method: str, key: str) -> Callable[[], bool]:
        """Begin to run a method of the other writer.

        The function that is returned waits for the answer.
        """
        ...


class _OnThread:
    name = "a thread"

    def __init__(self, store: Store, pool: ThreadPoolExecutor) -> None:
        self._writer = TrialWriter(store, "peer")
        self._pool = pool

    def begin(self, method: str, key: str) -> Callable[[], bool]:
        return self._pool.submit(getattr(self._writer, method), key).result


class _InProcess:
    name = "another process"

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self, method: str, key: str) -> Callable[[], bool]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([method, key]) + "\n")
            self._process.stdin.flush()
        return self._answer

    def _answer(self) -> bool:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StorageError("the other process ended; see its error above.")
        answer = json.loads(line)
        if isinstance(answer, str):
            raise StorageError(f"in another process: {answer}")
        return bool(answer)


@contextmanager
def open_other_writer(store: Store) -> Iterator[OtherWriter]:
    """The other writer: in another process if one reaches the place, otherwise on a thread."""
    if not store.shared:
        with ThreadPoolExecutor(1) as pool:
            yield _OnThread(store, pool)
        return
    try:
        started = subprocess.Popen(  # noqa: S603
            child_command(_PEER, store.location.url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as e:
        raise StorageError(
            f"{store}: another process, to write there too, cannot be started ({e}). "
            f"{process_advice(e)}"
        ) from e
    with started as process:
        try:
            yield _InProcess(process)
        finally:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                # So that no request of its own is on the way when the objects are deleted.
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


def serve() -> None:
    """The other process: answers lines of method and key until its input ends."""
    writer = TrialWriter(Store.open(sys.argv[1]), "peer")
    for line in sys.stdin:
        method, key = json.loads(line)
        answer: bool | str
        try:
            answer = getattr(writer, method)(key)
        except (ShardckptError, OSError) as e:
            answer = " ".join(str(e).split())
        print(json.dumps(answer), flush=True)  # noqa: T201  (its caller reads that)
