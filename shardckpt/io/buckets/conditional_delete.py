"""Deletion of an S3 object on condition that it still has a known version.

TensorStore 0.1.86 asks S3 for the version, and then deletes whatever object is there. S3 itself accepts `If-Match` on DeleteObject
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
from shardckpt.io.buckets.s3_client import RefusedError, ask

if TYPE_CHECKING:
    from shardckpt.io.url import Location

_OTHER = f'"{"0" * 32}"'
"""An ETag that no object of shardckpt has."""
_REFUSED, _MISSING, _UNKNOWN = 412, 404, 501
_honours: dict[tuple[str, str | None], bool] = {}
"""Bucket and endpoint → whether the service there refuses a deletion whose condition is false."""


def delete_if_match(location: Location, key: str, generation: bytes) -> bool:
    """Delete an object if it still has that generation.

    Args:
        location: a location in a bucket of S3.
        key: key of the object, relative to it.
        generation: TensorStore's generation.

    Returns:
        Whether it was deleted; False if the object changed or is gone, and if the service ignores conditions.

    Raises:
        OSError: the service failed or refused.
    """
    bucket, prefix = location.bucket, location.object_prefix
    assert bucket is not None
    service = bucket, cloud.endpoint_of("s3")
    if service not in _honours:
        _honours[service] = _refuses_others(bucket, prefix)
    return _honours[service] and _deleted(bucket, prefix + key, generation[generation.index(b'"') :].decode())


def _refuses_others(bucket: str, prefix: str) -> bool:
    """Whether the service refuses a deletion whose condition is false."""
    probe = f"{prefix}{PROBE}{secrets.token_hex(8)}"
    ask("put_object", bucket, probe, kind="write", retry=Retry(), Body=b"")
    try:
        return not _deleted(bucket, probe, _OTHER)
    except RefusedError as e:
        if e.status == _UNKNOWN:
            return False
        raise
    finally:
        ask("delete_object", bucket, probe, kind="write", retry=Retry())


def _deleted(bucket: str, name: str, etag: str) -> bool:
    try:
        ask("delete_object", bucket, name, kind="write", retry=Retry(), IfMatch=etag)
    except RefusedError as e:
        if e.status in (_REFUSED, _MISSING):
            return False
        raise
    return True
