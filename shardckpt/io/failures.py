"""Failures of a storage: its errors, threads that cannot start, and forks.

1. `storage_errors` turns errors of TensorStore and the system into our errors, which say what to
   do.
2. `saving_takes_threads` and `reading_takes_threads` do the same for threads that cannot be
   started. As they are around every save and read, they also let threads have the interpreter
   promptly (`threads.prompt_turns`).
3. `begin_use` and `check_fork` refuse a process that was forked after TensorStore was used:
   TensorStore's threads do not exist there, and a call would hang, or end the process.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

# Saves in the background need it, and it cannot be imported during the shutdown.
import shardckpt.io.shutdown
import shardckpt.io.streams  # noqa: F401  (guards the logger)
from shardckpt.errors import (
    CommitError,
    CoordinationError,
    CorruptionError,
    FormatError,
    NotFoundError,
    ShardckptError,
    StorageError,
)
from shardckpt.io.threads import prompt_turns
from shardckpt.text import clip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

_LONGEST = 900
"""Most characters of a place, and of a storage's own text, in a message: a forged record may name a
file of any length."""
_DENIED = ("PERMISSION_DENIED", "Forbidden")
"""Starts of messages about missing permissions, of clients that raise no PermissionError for them:
TensorStore, gcsfs."""
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the system that say that this process, or all, have too many files or no memory."""
PROBE = "shardckpt-answers"
"""Key of an object that nobody has. That there is none, or that this user may not know, are answers
of a storage that works."""
_FULL = "no space left"
_MORE_THREADS = (
    "allow this process more threads (ulimit -u, the container's limit of pids), or end some, and "
    "try again"
)
_NO_THREADS = ("can't start new thread", "can't create new thread")
_ADVICE = {
    **dict.fromkeys(_NO_THREADS, _MORE_THREADS),
    "has no locks": (
        "mount it with locks (Lustre: -o flock; NFS 3: without nolock, and with its lock "
        "service), or choose another place; see the table of file systems in docs/storage.md"
    ),
    "function not implemented": (
        "this file system cannot do that, as one that shows a bucket as files; use the bucket's "
        "own url (s3://…, gs://…), or choose another place"
    ),
    "permission denied": "give this user permission there, or choose another place",
    "attempts failed": (
        "the service did not recover in time; try again later, or raise SHARDCKPT_RETRY_SECONDS"
    ),
    "does not resolve": "check the spelling, the network and the resolver",
    "connections are refused": "check the endpoint's host and port, and that the service runs",
    "explicit deny in a resource-based policy": (
        "the bucket's policy forbids it. If it demands an encryption header, give the bucket "
        "that encryption as its default instead: TensorStore, which writes large indexes, can "
        "send no such header"
    ),
    "no such bucket": "create it, or check its name and the endpoint",
    "bucket does not exist": "create it, or check its name and the endpoint",
    "no such file or directory": (
        "it was removed meanwhile, perhaps by `shardckpt gc` or a deletion; try again"
    ),
    "object name": (
        "an object's whole name has at most 1024 bytes, none of them a control character; choose "
        "a shorter path"
    ),
    "read-only file system": "it is mounted read-only; choose another place",
    _FULL: "the disk is full; make room or choose another place",
    "quota": "the quota of bytes or of files is used up; delete files, or choose another place",
    "not a directory": (
        "a file stands where a directory is needed; give a directory, or choose another place"
    ),
    "cannot list non-directory": "a file stands where a directory is needed; give the directory",
    "file exists": (
        "a file stands where a directory is needed, or a link to nothing; choose another place"
    ),
    "file name too long": (
        "a name on the way is too long for the file system; choose a shorter path"
    ),
    "symbolic links": "a link leads to itself; correct it, or give another path",
    "is not a regular file": "remove what is there, or put the file back from a backup",
    "too many open files": "raise the limit of open files (ulimit -n)",
    "file too large": "the file system or ulimit -f allows no file of that size",
    "input/output error": "the device failed; check the device before you use its data",
    "unable to locate credentials": (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    ),
    "default credentials were not found": (
        "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`"
    ),
    "error performing token request": (
        "set AZURE_STORAGE_ACCOUNT_KEY or other credentials; without them the machine's own "
        "identity is asked for"
    ),
    "account must be specified": (
        "set AZURE_STORAGE_ACCOUNT_NAME, or write abfs://container@account.dfs.core.windows.net/…"
    ),
    "certificate_verify_failed": (
        "name the file of its certificate authority in SSL_CERT_FILE (for S3 in AWS_CA_BUNDLE)"
    ),
    "permission_denied": "give these credentials permission for it, or use others",
    "forbidden": "give these credentials permission for it, or use others",
    "accessdenied": "give these credentials permission for it, or use others",
    "permissionerror": "give these credentials permission for it, or use others",
    "not_found": (
        "it was removed meanwhile, or there is no such bucket; check the bucket's name and the "
        "endpoint"
    ),
}
"""A part of the storage's message, in lower case → what to do. The first match counts.
TensorStore's codes come last, because one code stands for several causes (`PERMISSION_DENIED` also
for a disk that is mounted read-only)."""


@contextmanager
def storage_errors(action: str, place: object) -> Iterator[None]:
    """Turn errors of TensorStore and the system into `StorageError("cannot ACTION PLACE: …")`."""
    try:
        yield
    except ShardckptError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError) as e:
        raise StorageError(f"cannot {action} {failure_at(place, e)}") from e


def failure_at(place: object, error: Exception) -> str:
    """The end of a message about an error of TensorStore or the system.

    It has the place, the error's own text, and what to do.
    """
    text = _text_of(error, place)
    return f"{clip(str(place), _LONGEST)}: {clip(text, _LONGEST)}; {_advice(text, error, place)}."


def _text_of(error: Exception, place: object) -> str:
    """The text of a storage's error, without its path if that equals `place`."""
    if isinstance(error, OSError) and error.strerror and str(error.filename) == str(place):
        return error.strerror
    if isinstance(error, LookupError):  # its own text is a name or an index alone
        return f"the storage's answer lacks {error}"
    return str(error).replace("\0", "/") or type(error).__name__


def _advice(text: str, error: Exception, place: object) -> str:
    """The advice for a storage's message."""
    if _FULL in text.lower() and _lacks_inodes(getattr(error, "filename", None) or str(place)):
        return (
            "the file system has no inodes left for new files, though bytes may be free; delete "
            "files, or choose another place"
        )
    if isinstance(error, LookupError):
        return "its service does not follow the protocol; check the endpoint"
    return next(
        (what for part, what in _ADVICE.items() if part in text.lower()),
        "see the storage's own message",
    )


def _lacks_inodes(place: str | bytes | int) -> bool:
    """Whether the file system of a path or its nearest parent has no inodes left for this user."""
    if not isinstance(place, str) or not place.startswith("/"):
        return False
    for path in (Path(place), *Path(place).parents):
        with suppress(OSError):
            status = os.statvfs(path)
            # Some file systems have no fixed number, and say 0.
            return status.f_files > 0 and status.f_favail == 0
    return False


def raise_unless_damage(error: ShardckptError, read: Callable[[str], object]) -> None:
    """Raise an error of a verification again, unless it says that data is damaged or missing.

    Nothing is known of the data if this user may not read it, this process lacks files or memory,
    or the storage does not answer. If it fails for this object alone, and answers otherwise, the
    object counts as damaged.

    Args:
        error: an error of reading.
        read: reads an object of the storage that failed, as `Store.read_versioned`.
    """
    if isinstance(error, CorruptionError | FormatError | NotFoundError):
        return
    if isinstance(error, StorageError) and not (is_denied(error) or _has_number(error, *_LACKING)):
        try:
            read(PROBE)
        except StorageError as e:
            if is_denied(e):
                return
        else:
            return
    raise error


def causes(error: BaseException | None, *, implicit: bool = False) -> Iterator[BaseException]:
    """Yield an error, the error that it was raised from, and so on.

    `implicit`: or, where none is named, the error that was handled when it was raised.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # an error may be its own cause
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if implicit else None)


def is_denied(error: StorageError) -> bool:
    """Whether the storage refused an operation for lack of permission: a retry is useless."""
    return _has_number(error, errno.EROFS) or any(
        isinstance(one, PermissionError) or str(one).startswith(_DENIED) for one in causes(error)
    )


def is_full(error: StorageError) -> bool:
    """Whether a disk has no room for what was written, or this user has used up the quota."""
    return _has_number(error, errno.ENOSPC, errno.EDQUOT)


def _has_number(error: StorageError, *numbers: int) -> bool:
    """Whether an error of the system with one of these numbers is among the causes."""
    return any(isinstance(one, OSError) and one.errno in numbers for one in causes(error))


# --- threads


def is_shutting_down() -> bool:
    """Whether the interpreter is shutting down."""
    main = threading.main_thread()
    # Until Python 3.12, Ctrl-C amid `is_alive` marks the main thread as ended, for good.
    stopped: bool | None = getattr(main, "_is_stopped", None)
    return not main.is_alive() if stopped is None else stopped


def reading_takes_threads(place: object) -> AbstractContextManager[None]:
    """Report threads that cannot be started as errors of the read.

    The returned context goes around the code that reads from a place.

    Raises:
        StorageError: in place of the RuntimeError of a thread that cannot be started.
    """

    def as_error(why: str) -> StorageError:
        advice = (
            "Read before the program ends, not in a function that `atexit` calls."
            if is_shutting_down()
            else _THREAD_ADVICE
        )
        return StorageError(f"cannot read {place}: {why}. {advice}")

    return _threads_or(as_error)


def saving_takes_threads(place: object) -> AbstractContextManager[None]:
    """Report threads that cannot be started as errors of the save.

    The returned context goes around the code that saves to a place.

    Raises:
        CommitError: in place of the RuntimeError of a thread that cannot be started.
    """
    return _threads_or(
        lambda why: CommitError(f"{place}: the save was given up: {why}. {_THREAD_ADVICE}")
    )


_THREAD_ADVICE = f"{_MORE_THREADS.capitalize()}."
_THREAD_MESSAGES = (*_NO_THREADS, "cannot schedule new futures")


@contextmanager
def _threads_or(as_error: Callable[[str], ShardckptError]) -> Iterator[None]:
    """Raise `as_error(why)` in place of the RuntimeError of a thread that cannot be started.

    See `prompt_turns`, too.
    """
    try:
        with prompt_turns():
            yield
    except RuntimeError as e:
        if isinstance(e, ShardckptError) or not (
            is_shutting_down() or str(e).startswith(_THREAD_MESSAGES)
        ):
            raise
        raise as_error(
            f"{'Python is shutting down and' if is_shutting_down() else 'Python'} starts no "
            f"threads any more ({e})"
        ) from e


def child_command(code: str, *arguments: str) -> list[str]:
    """The command that runs Python code in a process that finds this one's modules, and no others.

    By itself, a new interpreter first looks in the working directory, which may be somebody's
    checkpoint.
    """
    paths = []
    for path in sys.path:
        with suppress(FileNotFoundError):  # a removed working directory
            paths.append(path or os.getcwd())  # noqa: PTH109
    begin = f"import sys; sys.path[:] = {[one for one in paths if isinstance(one, str)]!r}"
    return [sys.executable, "-P", "-c", f"{begin}; {code}", *arguments]


def process_advice(error: OSError | EOFError) -> str:
    """Advice where a process cannot be started."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "Raise the limit of open files (ulimit -n), and try again."
    return (
        "Allow this user more processes (ulimit -u, the container's limit of pids), or end some, "
        "and try again."
    )


# --- forks

_used = False
"""Whether this process, or a process that it was forked from, has used TensorStore."""
_forked = False
"""Whether this process was forked from a process that had used TensorStore."""


def _note_fork() -> None:
    global _forked  # noqa: PLW0603  (of this process)
    _forked = _used


os.register_at_fork(after_in_child=_note_fork)


def begin_use(place: object) -> None:
    """Note that a storage is about to be used; raises what `check_fork` raises."""
    global _used  # noqa: PLW0603  (of this process)
    check_fork(place)
    _used = True


def check_fork(place: object) -> None:
    """Refuse to work in a process that was forked after TensorStore was used.

    Raises:
        CoordinationError: this process was forked from one that had used shardckpt.
    """
    if _forked:
        raise CoordinationError(
            f"{place}: this process was forked from one that had used shardckpt, whose threads do "
            "not exist here; start it with "
            'multiprocessing.get_context("spawn"), or fork before the first checkpoint is read '
            "or written."
        )
