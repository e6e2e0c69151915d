"""Retention rules, for `keep=` of a `CheckpointManager`; the path of them for users.

See `shardckpt.runs.retention`.
"""

from shardckpt.runs.retention import (
    Best,
    EveryKth,
    KeepAnyOf,
    Latest,
    Retention,
    SavedStep,
    Younger,
    any_of,
    as_retention,
    best,
)

__all__ = [
    "Best",
    "EveryKth",
    "KeepAnyOf",
    "Latest",
    "Retention",
    "SavedStep",
    "Younger",
    "any_of",
    "as_retention",
    "best",
]
