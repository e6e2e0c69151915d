"""Reader of Orbax checkpoints, without Orbax and without JAX.

A checkpoint is a directory that holds a tree (`orbax.tree`), or *items* in subdirectories, each of
which is a tree, a JSON document, or items again. The step directories of a `CheckpointManager` are
such checkpoints. If a checkpoint has a single unnamed item (`default`; `state` in Orbax's interface
version 1), this item is the state; otherwise the items are members of the state.

Unfinished checkpoints are refused: a directory is unfinished if its name says so, or, where
directories cannot be renamed (`gs://`, `s3://`), if the file that is written last is missing.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

from shardckpt.convert.files.file_version import identity_below
from shardckpt.convert.formats.orbax.documents import FINISHED, METADATA, MSGPACK, STEP
from shardckpt.convert.formats.orbax.metadata import parse_json
from shardckpt.convert.formats.orbax.tree import read_tree
from shardckpt.convert.placed import place_tensors
from shardckpt.errors import FormatError, NotFoundError, UncommittedError
from shardckpt.io.store import Store
from shardckpt.state.names import natural_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.convert.files.file_version import Candidate
    from shardckpt.convert.placed import Foreign
    from shardckpt.io.url import Location

_STEP_V1 = "orbax.checkpoint"
"""`STEP` in Orbax's interface version 1."""
_UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the name of a directory that is still being written."""
_JSON = "metadata"
_METRICS = "metrics"
"""The item of a `CheckpointManager` with the metrics by which it chooses the best step: JSON in a
file of the same name."""
_DEEPEST = 2
"""Most directories around an item: random keys are items of an item."""
_STEP_NAME = re.compile(r"(?:.+_)?\d+/")
"""Directories of a `CheckpointManager`: a step, possibly with a prefix or leading zeros."""
_MOST_STEPS = 20
"""Most steps in a message."""
_MOST_ITEMS = 50
"""Most subdirectories that are searched to detect a checkpoint without a file of its own."""
_MSGPACK_MAPS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
"""First bytes of a dict in msgpack. TensorFlow has a text file named `checkpoint`, too."""


def looks_like(candidate: Candidate) -> str | None:
    """The signs of an Orbax checkpoint, or of a directory of them, in words.

    None: there are none.
    """
    names = candidate.names
    if not names:
        return None
    place = Store.open(candidate.location)
    if _is_unfinished(candidate.location.name):
        return "an Orbax checkpoint that is not finished, by its name"
    if _is_checkpoint(place, names):
        return (
            "an Orbax checkpoint, by "
            f"{next(name for name in (_STEP_V1, STEP, METADATA, MSGPACK) if name in names)}"
        )
    if _steps(place, names):
        return "steps of an Orbax CheckpointManager"
    below = [name for name in names if name.endswith("/")][:_MOST_ITEMS]
    looks = [partial(place.exists, name + METADATA) for name in below]
    items = compress(below, place.read_together(looks))
    item = next((name for name in items if not place.exists(name + STEP)), None)
    return None if item is None else f"an Orbax checkpoint, by {item}{METADATA}"


def open_foreign(location: Location, *, trust_pickle: bool = False) -> Foreign:  # noqa: ARG001  # there is none
    """Open an Orbax checkpoint.

    It is a tree, a checkpoint of items, or one step of a `CheckpointManager`.

    Raises:
        FormatError: it is malformed.
        NotFoundError: it is a directory of steps; give the path of one.
        UncommittedError: it was not finished, or is still being written.
        CorruptionError, MissingDataError: files are damaged or missing.
        DtypeError: an array's elements cannot be stored.
        StorageError: the storage failed or refused.
    """
    place = Store.open(location)
    names = place.list_children()
    _check_finished(place, names)
    identity = identity_below(place)
    if not _is_checkpoint(place, names):
        steps = _steps(place, names)
        if steps:
            listed = ("…, " if len(steps) > _MOST_STEPS else "") + ", ".join(steps[-_MOST_STEPS:])
            raise NotFoundError(
                f"{location} holds steps of a CheckpointManager: {listed}. Give one of them, for "
                f"example {location}/{steps[-1]}."
            )
    notes: list[str] = []
    state = _item(place, notes, 0)
    if state is None:
        raise FormatError(
            f"{location}: not an Orbax checkpoint ({METADATA} is missing); give the directory of "
            "a step or an item."
        )
    if METADATA not in names and MSGPACK not in names and isinstance(state, dict):
        unnamed = "state" if _STEP_V1 in names else "default"
        state = state[unnamed] if list(state) == [unnamed] else state
    return place_tensors(
        state,
        "orbax",
        location,
        identity,
        notes,
        _metadata(place, names),
        partial(identity_below, place),
    )


def _item(place: Store, notes: list[str], depth: int) -> object:
    """The contents of a place: a tree, JSON, or a dict of items; None: nothing known."""
    names = place.list_children()
    if depth and STEP in names:
        return None  # a separate checkpoint beside others
    if METADATA in names or MSGPACK in names:
        return read_tree(place, names, notes)
    if _JSON in names:
        return parse_json(place.read(_JSON), place.path_of(_JSON))
    items: dict[str, object] = {}
    for name in (
        name.removesuffix("/") for name in names if name.endswith("/") and depth < _DEEPEST
    ):
        if _is_unfinished(name):
            raise UncommittedError(
                f"{place}/{name} was not finished, or is still being written; import another step."
            )
        if not depth and name == _METRICS and place.exists(f"{_METRICS}/{_METRICS}"):
            continue  # metrics become metadata
        item = _item(place.sub(name), notes, depth + 1)
        if item is None:
            notes.append(f"{place}/{name} is left behind: it is neither a tree nor JSON.")
        else:
            items[name] = item
    return items or None


def _is_checkpoint(place: Store, names: Sequence[str]) -> bool:
    """Whether the files of the place itself, not below it, show a checkpoint or a tree."""
    if METADATA in names or STEP in names or _STEP_V1 in names:
        return True
    return (
        MSGPACK in names
        and place.is_longer(MSGPACK, 0)
        and place.read(MSGPACK, 0, 1)[0] in _MSGPACK_MAPS
    )


def _steps(place: Store, names: Sequence[str]) -> list[str]:
    """The steps of a `CheckpointManager`, in order, if the last one is a checkpoint."""
    steps = sorted(
        (name.removesuffix("/") for name in names if _STEP_NAME.fullmatch(name)), key=natural_key
    )
    if not steps:
        return []
    last = place.sub(steps[-1])
    below = last.list_children()
    is_one = _is_checkpoint(last, below) or any(
        name.endswith("/") and last.exists(name + METADATA) for name in below
    )
    return steps if is_one else []


def _is_unfinished(name: str) -> bool:
    return _UNFINISHED in name


def _check_finished(place: Store, names: list[str]) -> None:
    """Raise UncommittedError if the checkpoint was not finished."""
    where = place.location
    if _is_unfinished(where.name):
        raise UncommittedError(
            f"{where} was not finished, or is still being written; import another step."
        )
    if place.has_paths or FINISHED in names or not _is_checkpoint(place, names):
        return
    above = where.parent  # the file is in the item's directory or in its checkpoint's
    if above is None or not Store.open(above).exists(FINISHED):
        raise UncommittedError(
            f"{where} was not finished, or is still being written: {FINISHED} is missing. Import "
            "another step. If you know that this one is complete, write an empty file of that "
            "name there."
        )


def _metadata(place: Store, names: list[str]) -> dict[str, Any]:
    """Further metadata of the checkpoint: custom metadata of its users, and metrics."""
    further: dict[str, Any] = {}
    if STEP in names:
        doc = parse_json(place.read(STEP), place.path_of(STEP))
        further["custom_metadata"] = doc.get("custom_metadata") if isinstance(doc, dict) else None
    key = f"{_METRICS}/{_METRICS}"
    if f"{_METRICS}/" in names and place.exists(key):
        further["metrics"] = parse_json(place.read(key), place.path_of(key))
    return {name: value for name, value in further.items() if value}
