"""Deletion of an S3 object on condition that it still has a known version.

S3 accepts `If-Match` on DeleteObject
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-deletes.html). Some compatible services ignore
the header and delete the object all the same. So each bucket is tested once per process: an object of our own is deleted with a
condition that is false.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from shardckpt.io.buckets import cloud
from shardckpt.io.buckets.listing import PROBE
from shardckpt.io.buckets.retry import Retry
from shardckpt.io.buckets.s3_client import RefusedError

if TYPE_CHECKING:
    from shardckpt.io.buckets.s3_client import S3Bucket

_OTHER = f'"{"0" * 32}"'
"""An ETag that no object of shardckpt has."""
_REFUSED, _MISSING, _UNKNOWN = 412, 404, 501
_honours: dict[tuple[str, str | None], bool] = {}
"""Bucket and endpoint → whether the service there refuses a deletion whose condition is false."""


def delete_if_match(bucket: S3Bucket, name: str, etag: str) -> bool:
    """Delete an object if it still has that ETag.

    Returns:
        Whether it was deleted; False if the object changed or is gone, and if the service ignores conditions.

    Raises:
        OSError: the service failed or refused.
    """
    service = bucket.name, cloud.endpoint_of("s3")
    if service not in _honours:
        _honours[service] = _refuses_others(bucket, name.rpartition("/")[0])
    return _honours[service] and _deleted(bucket, name, etag)


def _refuses_others(bucket: S3Bucket, folder: str) -> bool:
    """Whether the service refuses a deletion whose condition is false."""
    probe = f"{folder}/{PROBE}{secrets.token_hex(8)}".removeprefix("/")
    bucket.write(probe, [])
    try:
        return not _deleted(bucket, probe, _OTHER)
    except RefusedError as e:
        if e.status == _UNKNOWN:
            return False
        raise
    finally:
        bucket.delete(probe)


def _deleted(bucket: S3Bucket, name: str, etag: str) -> bool:
    try:
        bucket.ask("delete_object", name, kind="write", retry=Retry(), IfMatch=etag)
    except RefusedError as e:
        if e.status in (_REFUSED, _MISSING):
            return False
        raise
    return True
