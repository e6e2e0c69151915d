"""Coordination of a job's processes: an exchange at the start, and short messages afterwards.

`base` has the public `Coordinator`, the coordinator of a single process, and the search for the
job's store. `agreement` is the protocol by which processes agree through any key-value store, and
`devices` is the information that they exchange. `executing` carries the protocol out with a store.
`outcomes` has a call that all processes make. `torch_store` and `jax_client` are the stores that a
job already has. `calls` limits the wait for a store that does not answer, and `waiting` has the log
message of long waits. This package imports torch or jax only if the program has. The saving and
restoring layers import this package; it imports only `world` and `errors`.
"""

from shardckpt.frameworks.coordination.base import (
    Coordinator,
    SingleProcess,
    check_coordinator,
    coordinator_of,
)
from shardckpt.frameworks.coordination.calls import SilentStoreError
from shardckpt.frameworks.coordination.outcomes import (
    check_answered,
    check_outcomes,
    first_failure,
    heard_by_all,
    on_all_processes,
    share_failure,
)
from shardckpt.frameworks.coordination.waiting import ALL_MUST_CALL, WaitNotice

__all__ = [
    "ALL_MUST_CALL",
    "Coordinator",
    "SilentStoreError",
    "SingleProcess",
    "WaitNotice",
    "check_answered",
    "check_coordinator",
    "check_outcomes",
    "coordinator_of",
    "first_failure",
    "heard_by_all",
    "on_all_processes",
    "share_failure",
]
