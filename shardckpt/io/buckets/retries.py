"""Counting the requests that an object store was sent again, since this process began.

TensorStore repeats requests that fail in passing, and keeps count of them for each kind of storage.
"""

from __future__ import annotations

import tensorstore as ts

__all__ = ["storage_retries"]

_COUNTS = ("/tensorstore/kvstore/gcs/retries", "/tensorstore/kvstore/s3/retries")


def storage_retries() -> int:
    """Requests that were repeated, to all object stores together."""
    return sum(int(metric["values"][0]["value"]) for name in _COUNTS for metric in ts.experimental_collect_matching_metrics(name))
