"""Parser of Orbax's metadata files: containers, leaves, and the layout of each array.

`_METADATA` lists leaves by their paths: each key with its kind (of a sequence, or of a dict), and
the leaf's type. A leaf's name, under which its array is stored, is its keys joined with dots.
Sequences are lists, unless the `value_metadata_tree` in the same file, which Orbax writes only on
request, says tuple. `_sharding` and `array_metadatas/` hold, by name, the sharding of arrays and
the meaning of their elements. (Orbax 0.12.8: `metadata/tree.py`, `tree_rich_types.py`,
`sharding.py`, `array_metadata_store.py`.)
"""

from __future__ import annotations

import base64
import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import FormatError, ShardingError
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding
from shardckpt.state.document import MAX_DEPTH
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

SEQUENCE, DICT = 1, 2
"""Kinds of keys."""
_MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that taking malformed JSON apart can raise."""
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf, as `_METADATA` lists it."""

    name: str
    """Name of its array."""
    kind: str
    """Its `value_type`: "jax.Array", "np.ndarray", "scalar", "string"; "None", "Dict", "List" or
    "Tuple" for an empty value."""
    path: Path = ()
    """Its keys."""
    sequences: tuple[bool, ...] = ()
    """Whether each key belongs to a sequence; otherwise to a dict."""

    @classmethod
    def parse(cls, entry: Any) -> Leaf:
        """Parse an entry; raises one of `_MALFORMED` if it is malformed."""
        keys = [(key["key"], key["key_type"]) for key in entry["key_metadata"]]
        kind = entry["value_metadata"]["value_type"]
        if (
            not all(type(key) is str and which in {SEQUENCE, DICT} for key, which in keys)
            or type(kind) is not str
        ):
            raise ValueError(
                f"the leaf {shorten(entry)} has keys or a type that Orbax does not write"
            )
        if len(keys) > MAX_DEPTH:
            raise ValueError(f"a leaf in {len(keys)} containers, at most {MAX_DEPTH} are expected")
        path = tuple(key for key, _ in keys)
        return cls(".".join(path), kind, path, tuple(which == SEQUENCE for _, which in keys))


@dataclass(frozen=True, slots=True)
class Metadata:
    """A `_METADATA` file."""

    tree: object
    """Dicts, lists and tuples of `Leaf`."""
    zarr3: bool
    """Whether arrays are zarr v3; otherwise v2."""
    stores_all: bool
    """Whether chunks equal to the fill value were stored, too, so that a missing chunk is a lost
    one."""

    @classmethod
    def parse(cls, data: bytes, where: str) -> Metadata:
        """Parse a file.

        Args:
            data: its bytes.
            where: its name, for messages.

        Raises:
            FormatError: the file is malformed.
        """
        doc = parse_json(data, where)
        with _naming_malformed(where):
            leaves = [Leaf.parse(entry) for entry in doc["tree_metadata"].values()]
            rich = doc.get("value_metadata_tree")
            tree = _tree(
                leaves,
                (),
                frozenset() if rich is None else frozenset(_tuples(parse_json(rich, where), ())),
            )
            return cls(
                tree,
                doc.get("use_zarr3") is True,
                doc.get("store_array_data_equal_to_fill_value") is True,
            )


@contextmanager
def _naming_malformed(where: str) -> Iterator[None]:
    """Turn the errors of taking malformed JSON apart into a FormatError that names the file."""
    try:
        yield
    except FormatError:
        raise
    except _MALFORMED as e:
        raise FormatError(
            f"{where} was not written by Orbax ({shorten(str(e))}); replace it with a backup."
        ) from e


def parse_json(data: bytes | str, where: str) -> Any:
    """Parse a JSON document.

    Raises:
        FormatError: the document is not valid JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise FormatError(
            f"{where} is not JSON: {shorten(str(e))}; replace it with a backup."
        ) from e


def _tree(leaves: list[Leaf], path: Path, tuples: frozenset[Path]) -> object:
    """The container or leaf at a path, from all leaves at and below it."""
    depth = len(path)
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        # A leaf at the path itself, beside others below it, means that the container was empty when
        # it was first saved.
        if len(leaf.path) > depth:
            groups.setdefault(leaf.path[depth], []).append(leaf)
    if not groups:
        if len(leaves) > 1:
            raise ValueError(f"{leaves[0].name!r} is listed {len(leaves)} times")
        return leaves[0] if leaves else {}
    if len({leaf.sequences[depth] for group in groups.values() for leaf in group}) > 1:
        raise ValueError(f"{'.'.join(path)!r} is both a sequence and a dict")
    children = {key: _tree(group, (*path, key), tuples) for key, group in groups.items()}
    if not next(iter(groups.values()))[0].sequences[depth]:
        return children
    if set(children) != {str(i) for i in range(len(children))}:
        raise ValueError(
            f"{'.'.join(path)!r} is a sequence, but has the indices {sorted(children)}"
        )
    items = [children[str(i)] for i in range(len(children))]
    return tuple(items) if path in tuples else items


def _tuples(node: Any, path: Path) -> Iterator[Path]:
    """The paths of tuples in a `value_metadata_tree`.

    Named tuples are dicts of their fields, in Orbax and here.
    """
    if len(path) > MAX_DEPTH:
        raise ValueError(f"a leaf in more than {MAX_DEPTH} containers")
    category = node.get("category") if isinstance(node, dict) else None
    children: list[tuple[str, Any]] = []
    if category == "custom" and node["clazz"] == "tuple":
        yield path
        children = [(str(i), child) for i, child in enumerate(node["entries"])]
    elif category == "namedtuple":
        children = [(entry["key"], entry["value"]) for entry in node["entries"]]
    elif category is None and isinstance(node, (dict, list)):
        children = (
            list(node.items())
            if isinstance(node, dict)
            else [(str(i), child) for i, child in enumerate(node)]
        )
    for key, child in children:
        yield from _tuples(child, (*path, key))


def shardings(data: bytes, where: str) -> dict[str, Sharding]:
    """Array name → sharding, from a `_sharding` file.

    Only shardings over a mesh, so none for a single device.

    Raises:
        FormatError: the file is malformed.
    """
    doc = parse_json(data, where)
    by_name: dict[str, Sharding] = {}
    known: dict[str, Sharding | None] = {}  # many arrays have the same text
    with _naming_malformed(where):
        for name, text in doc.items():
            if text not in known:
                known[text] = _sharding(parse_json(text, where))
            sharding = known[text]
            if sharding is not None:
                by_name[base64.urlsafe_b64decode(name).decode()] = sharding
    return by_name


def _sharding(doc: dict[str, Any]) -> Sharding | None:
    """The sharding of a document.

    None unless it is over a mesh and can be expressed as a `Sharding`.
    """
    if doc.get("sharding_type") != "NamedSharding":
        return None
    devices = doc.get("device_mesh")
    ids = None if devices is None else _device_ids(devices["mesh"])
    try:
        mesh = Mesh(doc["shape"], doc["axis_names"], ids)
        return Sharding(
            mesh,
            PartitionSpec(
                *(tuple(part) if isinstance(part, list) else part for part in doc["partition_spec"])
            ),
        )
    except ShardingError:
        return None


def _device_ids(nested: Any) -> list[int]:
    """The ids of devices in nested lists, in row-major order."""
    return (
        [nested["id"]]
        if isinstance(nested, dict)
        else [number for part in nested for number in _device_ids(part)]
    )


def key_generators(data: bytes, where: str) -> dict[str, str]:
    """Array name → generator of the random keys in the array, from a file of `array_metadatas/`.

    Raises:
        FormatError: the file is malformed.
    """
    with _naming_malformed(where):
        entries = [entry["array_metadata"] for entry in parse_json(data, where)["array_metadatas"]]
        extras = {entry["param_name"]: entry.get("ext_metadata") or {} for entry in entries}
        return {
            name: extra["random_key_impl"]
            for name, extra in extras.items()
            if "random_key_impl" in extra
        }
