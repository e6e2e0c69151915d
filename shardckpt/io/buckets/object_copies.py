"""Server-side copies of objects: no bytes are downloaded or uploaded.

1. Google Cloud Storage *rewrites* an object. Within one location and storage class that is
   immediate for any size. If bytes must move, the service responds with a token, and the request is
   repeated until it is done.
2. S3 *copies* an object of up to 5 GiB in one request. Our data files have at most 256 MiB, and no
   other object is larger.

Each request takes some milliseconds without work in this process, so several run at once, within
the rate limit of writes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardckpt.io.buckets.bucket import open_bucket
from shardckpt.io.failures import storage_errors
from shardckpt.io.threads import run_on_threads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.io.store import Store

AT_ONCE = 16
"""Copies in progress at a time."""


def can_copy(source: Store, target: Store) -> bool:
    """Whether both places are in buckets of one service (maybe in different buckets)."""
    return (
        source.location.bucket is not None is not target.location.bucket
        and source.location.scheme == target.location.scheme
    )


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
    run_on_threads(keys, [partial(_copy, source, target)] * AT_ONCE, "shardckpt-copy")


def _copy(source: Store, target: Store, keys: tuple[str, str]) -> None:
    old, new = keys
    cannot: NotImplementedError | None = None
    with storage_errors("copy", f"{source.path_of(old)} to {target.path_of(new)}"):
        names = source.location.object_prefix + old, target.location.object_prefix + new
        try:
            open_bucket(source.location).copy(names[0], open_bucket(target.location), names[1])
        except NotImplementedError as e:
            cannot = e
    if cannot is not None:
        raise NotImplementedError(
            f"{target}: the service cannot copy objects ({cannot})"
        ) from cannot
