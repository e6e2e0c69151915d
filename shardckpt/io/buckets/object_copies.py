"""Server-side copies of objects: no bytes are downloaded or uploaded.

1. Google Cloud Storage *rewrites* an object. Within one location and storage class that is immediate for any size. If
   bytes must move, the service responds with a token, and the request is repeated until it is done.
2. S3 *copies* an object of up to 5 GiB in one request. Our data files have at most 256 MiB, and no other object is larger.

Each request takes some milliseconds without work in this process, so several run at once, within the rate limit of writes.
"""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import islice
from typing import TYPE_CHECKING, Any

from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.retry import Retry
from shardckpt.io.failures import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.io.store import Store

AT_ONCE = 16
"""Copies in progress at a time."""
_UNKNOWN = (405, 501)
"""HTTP statuses for a request that a service does not know."""
_LISTED = 1000
"""Copies that are submitted before their results are awaited."""


def can_copy(source: Store, target: Store) -> bool:
    """Whether both places are in buckets of one service (maybe in different buckets)."""
    return source.location.bucket is not None is not target.location.bucket and source.location.scheme == target.location.scheme


def copy_objects(source: Store, target: Store, keys: Iterable[tuple[str, str]]) -> None:
    """Copy objects and replace existing ones; all are durable when this returns.

    Args:
        source: location of the first key of each pair.
        target: location of the second key of each pair.
        keys: pairs of source key and target key.

    Raises:
        NotImplementedError: the service cannot copy.
        StorageError: the storage failed or refused.
    """
    with ThreadPoolExecutor(AT_ONCE, "shardckpt-copy") as pool:
        pairs = iter(keys)
        while some := list(islice(pairs, _LISTED)):
            copies = [pool.submit(_copy, source, target, old, new) for old, new in some]
            try:
                wait(copies, return_when=FIRST_EXCEPTION)
            finally:
                begun = [copy for copy in copies if not copy.cancel()]
            for copy in begun:
                copy.result()


def _copy(source: Store, target: Store, old: str, new: str) -> None:
    filesystem = cloud.filesystem(target.location.scheme)
    ask = _rewrite if target.location.scheme == "gs" else _copy_object
    found, made = ((at.location.bucket, at.location.object_prefix + key) for at, key in ((source, old), (target, new)))
    cloud.wait_for_rate("write")
    try:
        Retry().call(lambda: ask(filesystem, found, made), cloud.is_passing)
    except Exception as e:  # the clients' own exceptions, which have no common base class
        if cloud.status_of(e) in _UNKNOWN:
            raise NotImplementedError(f"{target}: the service cannot copy objects ({e})") from e
        with storage_errors("copy", f"{source.path_of(old)} to {target.path_of(new)}"):
            raise OSError(f"{type(e).__name__}: {e}") from e


def _rewrite(filesystem: Any, found: tuple[str | None, str], made: tuple[str | None, str]) -> None:
    """https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
    token: dict[str, str] = {}
    while True:
        headers = {"Content-Type": "application/json"}
        answer = filesystem.call("POST", "b/{}/o/{}/rewriteTo/b/{}/o/{}", *found, *made, headers=headers, json_out=True, **token)
        if answer["done"]:
            return
        token = {"rewriteToken": answer["rewriteToken"]}


def _copy_object(filesystem: Any, found: tuple[str | None, str], made: tuple[str | None, str]) -> None:
    """https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html."""
    source = {"Bucket": found[0], "Key": found[1]}
    filesystem.call_s3("copy_object", Bucket=made[0], Key=made[1], CopySource=source)
