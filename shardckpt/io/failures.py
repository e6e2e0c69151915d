"""What a storage says when it fails, as an error of ours that says what to do."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardckpt.errors import ShardckptError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_denied", "storage_errors"]

_DENIED = ("permission denied", "permission_denied", "read-only file system", "forbidden", "accessdenied")
"""Parts of the messages of storages that refuse a caller's rights, in lower case."""

_ADVICE = {
    "permission denied": "give this user the right to write there",
    "retry attempts failed": "the service did not recover in time; try again later, or raise SHARDCKPT_RETRY_SECONDS",
    "no such bucket": "create it, or check its name and the endpoint",
    "bucket does not exist": "create it, or check its name and the endpoint",
    "no such file or directory": "it was removed meanwhile, perhaps by `shardckpt gc` or a deletion; begin again",
    "invalid gcs object name": "an object's whole name has at most 1024 bytes, none of them a control character; choose a shorter path",
    "invalid s3 object name": "an object's whole name has at most 1024 bytes; choose a shorter path",
    "read-only file system": "it is mounted read-only; choose another place",
    "no space left": "the disk is full; make room or choose another place",
    "quota": "the quota is used up; make room or choose another place",
    "not a directory": "a file stands where a directory is needed; choose another place",
    "file exists": "a file stands where a directory is needed; choose another place",
    "file name too long": "a name on the way is too long for the file system; choose a shorter path",
    "too many open files": "raise the limit of open files (ulimit -n)",
    "file too large": "the file system or ulimit -f allows no file of that size",
    "input/output error": "the device failed; check it before you trust what it holds",
    "unable to locate credentials": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "default credentials were not found": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    "permission_denied": "give these credentials the right to do that there, or use others",
    "forbidden": "give these credentials the right to do that there, or use others",
    "accessdenied": "give these credentials the right to do that there, or use others",
    "permissionerror": "give these credentials the right to do that there, or use others",
    "not_found": "what it needs is not there: it was removed meanwhile, or there is no such bucket; check its name and the endpoint",
}
"""A part of the storage's message, in lower case → what to do. The first that is found counts: TensorStore's codes come last,
since one of them stands for several causes (`PERMISSION_DENIED` for a disk that is mounted read-only)."""


@contextmanager
def storage_errors(action: str, place: object) -> Iterator[None]:
    """Turn what TensorStore and the system raise into `StorageError("cannot <action> <place>: …")`."""
    try:
        yield
    except ShardckptError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError) as e:
        said = str(e).replace("\0", "/") or type(e).__name__
        advice = next((what for part, what in _ADVICE.items() if part in said.lower()), "see the storage's own message")
        raise StorageError(f"cannot {action} {place}: {said}; {advice}.") from e


def is_denied(error: StorageError) -> bool:
    """Whether the storage refused an operation for lack of rights, so that trying it again is of no use."""
    said = str(error.__cause__ or error).lower()
    return any(part in said for part in _DENIED)
