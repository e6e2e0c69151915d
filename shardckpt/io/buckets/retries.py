"""Count of the retries of requests to object stores since this process began.

TensorStore retries requests that fail temporarily, and counts the retries for each kind of storage.
"""

from __future__ import annotations

import tensorstore as ts

__all__ = ["storage_retries"]

_COUNTS = ("/tensorstore/kvstore/gcs/retries", "/tensorstore/kvstore/s3/retries")


def storage_retries() -> int:
    """Number of retries, for all object stores together."""
    return sum(int(metric["values"][0]["value"]) for name in _COUNTS for metric in ts.experimental_collect_matching_metrics(name))
