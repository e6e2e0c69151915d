"""The names of the files of an Orbax checkpoint, and its JSON documents as an export writes them.

An Orbax checkpoint is a directory of zarr arrays, one for each tensor and each number of the state,
and of JSON documents beside them (as observed in the output of orbax-checkpoint 0.12):

    _METADATA                  for each place in the state: the keys that lead there, and the type
                               of its value
    _CHECKPOINT_METADATA       Orbax's handler for the checkpoint, and the times when writing began
                               and ended
    _sharding                  by array, in base64, the sharding with which it is restored by
                               default
    _strings.json              the texts of the state
    array_metadatas/process_0  by array, the kind of JAX's random keys in it, if any
    commit_success.txt         marks the checkpoint as complete

An array's name is its keys as text, joined with dots. `int` keys become text, and lists and tuples
both become lists. A container that loses all its leaves becomes an empty one.

A text is found by a JSON pointer (RFC 6901): its name with "/" before it. So a "/" in a key leads
into an object, and a "~" in a key is valid only before 0 or 1.

Pure: nodes in, JSON out.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.convert.formats.orbax.metadata import DICT, SEQUENCE
from shardckpt.convert.small_leaves import check_text_keys, find_unsupported
from shardckpt.errors import DtypeError, FormatError, NamesMismatchError, StructureMismatchError
from shardckpt.format.documents import check_key
from shardckpt.layout.dtypes import of_numpy
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.state.document import Branch, Small, Tensor, Tied, leaves_of
from shardckpt.state.names import shown
from shardckpt.state.unflatten import decode_leaf
from shardckpt.text import Message, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.dtypes import DType
    from shardckpt.state.document import Node

METADATA = "_METADATA"
STEP = "_CHECKPOINT_METADATA"
"""File in the directory of every checkpoint, whatever its items are."""
SHARDINGS = "_sharding"
STRINGS = "_strings.json"
ARRAY_METADATAS = "array_metadatas"
FINISHED = "commit_success.txt"
RESERVED = (METADATA, STEP, SHARDINGS, STRINGS, ARRAY_METADATAS, FINISHED)
"""Names of Orbax's own files and directories."""
MANIFEST, DATABASE = "manifest.ocdbt", "d"
"""Names of the file and the directory of a database that has all arrays."""
_PROCESS_PART = re.compile(r"ocdbt\.process_\w*")
"""Matches the directory of one process's arrays, which Orbax merges when the save is finished."""
MSGPACK = "checkpoint"
"""A file in which old releases of Orbax stored the tree and small arrays; Orbax opens anything of
this name as a file."""
_HANDLERS = "orbax.checkpoint._src.handlers."
_LONGEST_NAME = 255
"""Most bytes of a directory's name."""
_NO_POINTER = re.compile(r"~0(?![01])|~u")
"""Matches a leaf's name if one of its keys has a "~" or a lone surrogate that no JSON pointer can
express."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_RANDOM_KEY = "jax.key:"
"""Prefix of the meaning of a tensor of random keys."""


@dataclass(frozen=True, slots=True)
class OrbaxEntry:
    """A place in the state: a tensor, a small leaf or an empty container."""

    keys: tuple[tuple[str, int], ...]
    """Text and kind of each key that leads to the place."""
    what: str
    """Orbax's type name of the value."""
    tensor: str | None = None
    """Stored name of the tensor at the place."""
    value: object = None
    """The small leaf at the place."""
    key_kind: str | None = None
    """Kind of JAX's random keys in the tensor, if any."""

    @property
    def name(self) -> str:
        """Name of the array."""
        return ".".join(text for text, _ in self.keys)

    @property
    def path(self) -> tuple[str | int, ...]:
        """The keys; keys of lists and tuples as numbers."""
        return tuple(int(text) if kind == SEQUENCE else text for text, kind in self.keys)


def entries(
    tree: Node, left: Mapping[str, str], tensors: Mapping[str, TensorRecord], where: str
) -> list[OrbaxEntry]:
    """All places of a state, in order.

    Args:
        tree: the state.
        left: names of small leaves to leave out. In lists None replaces them.
        tensors: tensors by name.
        where: location of the checkpoint, for messages.

    Raises:
        StructureMismatchError: the state is not a dict, list or tuple with contents.
        NamesMismatchError: two arrays would have one name, or a name that no directory can have.
    """
    check_text_keys(tree, where, "Orbax")
    meanings = {leaf.name: leaf.meaning for leaf in leaves_of(tree) if isinstance(leaf, Tensor)}
    listing = list(_entries(tree, (), left, tensors, meanings)) if isinstance(tree, Branch) else []
    if not any(entry.keys for entry in listing):
        raise StructureMismatchError(
            f"{where}: Orbax stores only a dict, list or tuple that is not empty; export to "
            "another format."
        )
    _check_names(listing, where)
    return listing


def _entries(
    node: Node,
    keys: tuple[tuple[str, int], ...],
    left: Mapping[str, str],
    tensors: Mapping[str, TensorRecord],
    meanings: Mapping[str, str | None],
) -> Iterator[OrbaxEntry]:
    if isinstance(node, Branch):
        kind, empty = (DICT if node.form == "dict" else SEQUENCE), True
        for key, child in zip(node.keys, node.children, strict=True):
            for entry in _entries(child, (*keys, (str(key), kind)), left, tensors, meanings):
                empty = False
                yield entry
        if empty:
            yield OrbaxEntry(keys, node.form.capitalize())
    elif isinstance(node, Tensor | Tied):
        what = "np.ndarray" if sharding_json(tensors[node.stored]) is None else "jax.Array"
        meaning = meanings[node.stored] or ""
        yield OrbaxEntry(
            keys,
            what,
            tensor=node.stored,
            key_kind=meaning.removeprefix(_RANDOM_KEY) if meaning.startswith(_RANDOM_KEY) else None,
        )
    elif node.name in left:
        if keys[-1][1] == SEQUENCE:
            yield OrbaxEntry(keys, "None")
    else:
        assert isinstance(node, Small), "leaves of other kinds are left out"
        value = decode_leaf(node)
        yield OrbaxEntry(
            keys,
            "None" if value is None else "string" if isinstance(value, str) else "scalar",
            value=value,
        )


def left_by_orbax(tree: Node) -> dict[str, str]:
    """The leaves that Orbax cannot store, by name, with the reason."""
    left = find_unsupported(tree, _refusal)
    texts = (
        leaf
        for leaf in leaves_of(tree)
        if isinstance(leaf, Small) and leaf.name not in left and _NO_POINTER.search(leaf.name)
    )
    reason = (
        "Orbax finds no text below a key with a lone surrogate, or a ~ that is not followed by 0 "
        "or 1"
    )
    return left | {leaf.name: reason for leaf in texts if isinstance(decode_leaf(leaf), str)}


def _refusal(value: object) -> str | None:
    """The reason why Orbax cannot store a small leaf; None: it can."""
    if isinstance(value, str):
        return (
            None
            if value.isascii() or not _SURROGATE.search(value)
            else "Orbax stores no text with lone surrogates"
        )
    if value is None:
        return None
    if isinstance(value, np.generic):
        try:
            known = not of_numpy(value.dtype).as_bits
        except DtypeError:
            known = False
        return None if known else f"Orbax stores no {type(value).__name__} of numpy"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return "Orbax stores no int of more than 64 bits"
    return None if isinstance(value, int | float) else f"Orbax stores no {type(value).__name__}"


def _check_names(listing: list[OrbaxEntry], where: str) -> None:
    texts = {entry.name for entry in listing if entry.what == "string"}
    arrays = [
        entry.name
        for entry in listing
        if entry.tensor is not None or entry.what in ("scalar", "string")
    ]
    twice = next((name for name, count in Counter(arrays).items() if count > 1), None)
    if twice is not None:
        reason = (
            f"{where}: two names become {shown(twice)} in Orbax, which joins keys with dots; "
            "leave one out with "
        )
        raise NamesMismatchError(Message(reason, named("exclude"), "."))
    stored = set(arrays) - texts
    for name in arrays:
        if name in stored:
            _check_directory(name, where)
        # "a/b" lies in the directory of "a", beside the files of array "a"; the text "a/b" would
        # lie inside the text "a".
        inside = "the directory of another array" if name in stored else "another text"
        if any(outer in (stored if name in stored else texts) for outer in _outer(name)):
            reason = (
                f"{where}: the directory of {shown(name)} would be inside {inside}; leave one of "
                "the two out with "
            )
            raise NamesMismatchError(Message(reason, named("exclude"), "."))


def is_of_orbax(name: str) -> bool:
    """Whether Orbax itself writes a file or directory of this name beside those of arrays."""
    return name in (*RESERVED, MSGPACK, MANIFEST) or bool(_PROCESS_PART.fullmatch(name))


def _check_directory(name: str, where: str) -> None:
    first = name.partition("/")[0]
    if is_of_orbax(first):
        raise NamesMismatchError(
            f"{where}: {shown(name)} is the name of a file of Orbax itself; export it under "
            "another name."
        )
    try:
        check_key(name, where)
    except FormatError as e:
        raise NamesMismatchError(
            f"Orbax stores each array in a directory of its name: {e}"
        ) from None
    if any(len(part.encode()) > _LONGEST_NAME for part in name.split("/")):
        raise NamesMismatchError(
            f"{where}: Orbax needs a directory for {shown(name)}, and its name may have at most "
            f"{_LONGEST_NAME} bytes; rename it."
        )


def _outer(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def pointer_keys(name: str) -> list[str]:
    """The keys of a text's name, which Orbax treats as a JSON pointer."""
    return [key.replace("~1", "/").replace("~0", "~") for key in name.split("/")]


def strings(listing: list[OrbaxEntry]) -> dict[str, Any]:
    """The document `_strings.json`."""
    root: dict[str, Any] = {}
    for entry in listing:
        if entry.what == "string":
            *outer, last = pointer_keys(entry.name)
            inner = root
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = entry.value
    return root


def sharding_json(tensor: TensorRecord) -> dict[str, Any] | None:
    """The sharding of a tensor as Orbax writes a NamedSharding; None if JAX has no equal sharding.

    JAX divides a dimension only into equal parts. Orbax restores an array without a sharding as a
    numpy array, unless the caller gives one.
    """
    layout = (
        tensor.layout.as_sharding(tensor.shape)
        if isinstance(tensor.layout, Placements)
        else tensor.layout
    )
    if not isinstance(layout, Sharding) or any(
        n % parts for n, parts in zip(tensor.shape, layout.parts(len(tensor.shape)), strict=True)
    ):
        return None
    if 0 in tensor.shape:
        return None
    mesh = layout.mesh
    devices = np.array([{"id": int(i)} for i in mesh.devices.reshape(-1)], object).reshape(
        mesh.shape
    )
    return {
        "sharding_type": "NamedSharding",
        "shape": list(mesh.shape),
        "axis_names": list(mesh.axis_names),
        "axis_types": ["AxisType.Auto"] * mesh.ndim,
        "partition_spec": layout.spec.to_json(),
        "device_mesh": {"mesh": devices.tolist()},
    }


def shardings(listing: list[OrbaxEntry], tensors: Mapping[str, TensorRecord]) -> dict[str, str]:
    """The document `_sharding`."""
    written = {}
    for entry in listing:
        sharding = None if entry.tensor is None else sharding_json(tensors[entry.tensor])
        if sharding is not None:
            written[base64.urlsafe_b64encode(entry.name.encode()).decode()] = json.dumps(sharding)
    return written


def metadata(listing: list[OrbaxEntry]) -> dict[str, Any]:
    """The document `_METADATA`."""
    tree = {}
    for entry in listing:
        empty = entry.tensor is None and entry.what not in ("scalar", "string")
        tree[str(tuple(text for text, _ in entry.keys))] = {
            "key_metadata": [{"key": text, "key_type": kind} for text, kind in entry.keys],
            "value_metadata": {"value_type": entry.what, "skip_deserialize": empty},
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def array_metadatas(
    listing: list[OrbaxEntry], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The document `array_metadatas/process_0`.

    Args:
        listing: all places.
        shapes: chunk shape of each tensor, by stored name.
    """
    written = []
    for entry in listing:
        if entry.tensor is not None:
            ext = None if entry.key_kind is None else {"random_key_impl": entry.key_kind}
            shape = list(shapes[entry.tensor])
            written.append(
                {
                    "array_metadata": {
                        "param_name": entry.name,
                        "write_shape": shape,
                        "chunk_shape": shape,
                        "ext_metadata": ext,
                    }
                }
            )
    return {"array_metadatas": written}


def checkpoint_metadata(listing: list[OrbaxEntry], began: int, ended: int) -> dict[str, Any]:
    """The document `_CHECKPOINT_METADATA`.

    Args:
        listing: all places.
        began: time when writing began, in nanoseconds since 1970.
        ended: time when it ended.
    """
    texts = any(entry.what == "string" for entry in listing)  # the standard handler refuses texts
    handler = (
        "pytree_checkpoint_handler.PyTreeCheckpointHandler"
        if texts
        else "standard_checkpoint_handler.StandardCheckpointHandler"
    )
    return {
        "item_handlers": _HANDLERS + handler,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": began,
        "commit_timestamp_nsecs": ended,
        "custom_metadata": {},
    }


def scalar_dtype(value: object) -> DType:
    """The dtype in which a number is stored."""
    return of_numpy(np.asarray(value).dtype)
