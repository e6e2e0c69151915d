"""TensorStore's contexts: one for all places, and one for buckets, which is made anew when their settings or keys change."""

from __future__ import annotations

from collections import deque
from functools import cache, lru_cache, wraps
from itertools import count
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import tensorstore as ts

from shardckpt.errors import StorageError
from shardckpt.io.buckets import cloud

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.io.url import Location

P = ParamSpec("P")
T = TypeVar("T")
_contexts = count()
_stamps: deque[object] = deque(maxlen=1)
"""The stamp of the newest context for buckets."""


def shared_context(location: Location) -> ts.Context:
    """The TensorStore context of this process for a location. In buckets, other settings, or keys that were rotated, make a new one."""
    return _common_context() if location.bucket is None else _context(cloud.context_stamp())


@lru_cache(maxsize=4)
def _context(stamp: object) -> ts.Context:
    _stamps.append(stamp)
    return ts.Context(cloud.context(next(_contexts)))


@cache
def _common_context() -> ts.Context:
    return ts.Context()


def with_new_keys(operation: Callable[P, T]) -> Callable[P, T]:
    """Repeat an operation of TensorStore that failed, if the keys for S3 were rotated meanwhile.

    It gets the same arguments again, so none may be an iterator, which would be used up.
    """

    @wraps(operation)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return operation(*args, **kwargs)
        except StorageError:
            if not _stamps or cloud.context_stamp() == _stamps[-1]:
                raise
            return operation(*args, **kwargs)

    return run
