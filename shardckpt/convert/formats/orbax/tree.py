"""Reader of one tree of an Orbax checkpoint.

1. `_METADATA` lists the leaves (`orbax.metadata`). In older checkpoints the msgpack file
   `checkpoint` lists them, or holds the values of some of them (`orbax.aggregate`).
2. Arrays lie in one OCDBT database (`manifest.ocdbt`) or each in its own directory, as zarr v2 or
   v3. They become tensors.
3. Scalars are arrays without dimensions, too; they and texts (`_strings.json`) are small leaves,
   and are read at once.
4. `_sharding` and `array_metadatas/` hold the layout of arrays, and the generator of random keys.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.convert.files.file_version import FileVersion
from shardckpt.convert.foreign import ForeignPart
from shardckpt.convert.formats.orbax.aggregate import read_aggregate
from shardckpt.convert.formats.orbax.documents import (
    ARRAY_METADATAS,
    MANIFEST,
    METADATA,
    MSGPACK,
    SHARDINGS,
    STRINGS,
    pointer_keys,
)
from shardckpt.convert.formats.orbax.metadata import (
    Leaf,
    Metadata,
    key_generators,
    parse_json,
    shardings,
)
from shardckpt.convert.placed import PlacedTensor, VersionedArray, place_array
from shardckpt.errors import FormatError, MissingDataError, ShardingError, UncommittedError
from shardckpt.io.foreign_arrays import open_arrays
from shardckpt.io.threads import map_on_threads
from shardckpt.layout.box import Box
from shardckpt.state.names import shown
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardckpt.io.foreign_arrays import ForeignArray
    from shardckpt.io.store import Store
    from shardckpt.layout.sharding import Sharding

_EMPTY: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
    "NamedTuple": lambda: None,
}
"""Types of leaves without contents; Orbax, too, reads an empty named tuple as None."""


def read_tree(place: Store, names: list[str], notes: list[str]) -> object:
    """Read the tree at a place: containers, small leaves and tensors.

    Args:
        place: its directory.
        names: the names in this directory.
        notes: messages are added here.

    Raises:
        FormatError, CorruptionError, MissingDataError: files are malformed or missing.
        DtypeError: an array's elements cannot be stored.
        UncommittedError: the save was not finished.
    """
    # Every save writes this file again.
    version = FileVersion(place, METADATA if METADATA in names else MSGPACK)
    tree, zarr3, stores_all = _describe(place, names)
    leaves = list(_leaves(tree))
    stored = _stored(leaves)
    others = {name.rstrip("/") for name in names} - set(stored)
    if (
        MANIFEST not in names
        and stored
        and any(name.startswith("ocdbt.process_") for name in others)
    ):
        raise UncommittedError(
            f"{place}: the save did not finish: the parts of its processes were not merged "
            f"({MANIFEST} is missing); import another."
        )
    twice = [name for name, count in Counter(stored).items() if count > 1]
    if twice:
        raise FormatError(
            f"{place}: two leaves are stored as {shown(twice[0])}, so one of them has been lost; "
            "save them under other keys."
        )
    if stored and not stores_all:
        notes.append(
            f"{place}: written by an Orbax that does not store chunks of zeros; a chunk that is "
            "missing is read as zeros."
        )
    arrays = open_arrays(
        place,
        stored,
        "zarr3" if zarr3 else "zarr",
        ocdbt=MANIFEST in names,
        fill_missing=not stores_all,
    )
    scalars = [leaf.name for leaf in leaves if leaf.kind == "scalar"]
    values = dict(
        zip(scalars, map_on_threads(lambda name: _scalar(arrays[name]), scalars), strict=True)
    )
    values |= _strings(place, [leaf.name for leaf in leaves if leaf.kind == "string"])
    layouts = (
        shardings(place.read(SHARDINGS), place.path_of(SHARDINGS)) if SHARDINGS in names else {}
    )
    generators = _generators(place) if f"{ARRAY_METADATAS}/" in names else {}

    def value(leaf: object) -> object:
        if isinstance(leaf, np.ndarray):
            return place_array(leaf)
        if not isinstance(leaf, Leaf):
            return leaf
        if leaf.kind in _EMPTY:
            return _EMPTY[leaf.kind]()
        if leaf.name in values:
            return values[leaf.name]
        array = VersionedArray(arrays[leaf.name], version)
        return _tensor(array, layouts.get(leaf.name), generators.get(leaf.name))

    return _map(tree, value)


def array_names(place: Store) -> list[str]:
    """The names of the arrays of a tree; none if there is no tree, or it is malformed."""
    try:
        return _stored(_leaves(_describe(place, place.list_children())[0]))
    except FormatError:
        return []


def _stored(leaves: Iterable[Leaf]) -> list[str]:
    """The names of the leaves that have an array."""
    return [leaf.name for leaf in leaves if leaf.kind not in {*_EMPTY, "string"}]


def _describe(place: Store, names: list[str]) -> tuple[object, bool, bool]:
    """The tree of `Leaf`s or values of the msgpack file; whether arrays are zarr v3.

    Whether all chunks were stored.
    """
    aggregate = (
        read_aggregate(place.read(MSGPACK), place.path_of(MSGPACK)) if MSGPACK in names else None
    )
    if METADATA not in names:
        return aggregate, False, False
    metadata = Metadata.parse(place.read(METADATA), place.path_of(METADATA))

    def filled(leaf: object) -> object:
        node = aggregate
        for key, sequence in (
            zip(leaf.path, leaf.sequences, strict=True) if isinstance(leaf, Leaf) else ()
        ):
            if isinstance(node, dict):
                node = node.get(key, leaf)
            elif sequence and isinstance(node, (list, tuple)) and int(key) < len(node):
                node = node[int(key)]
            else:
                return leaf
        return leaf if isinstance(node, (Leaf, dict, list, tuple)) else node

    return (
        (metadata.tree if aggregate is None else _map(metadata.tree, filled)),
        metadata.zarr3,
        metadata.stores_all,
    )


def _tensor(place: VersionedArray, layout: Sharding | None, generator: str | None) -> PlacedTensor:
    array = place.array
    if layout is not None:
        try:
            layout.parts(len(array.shape))
        except ShardingError:
            layout = None
    return PlacedTensor(
        array.shape,
        array.dtype,
        (ForeignPart.whole(array.shape, array.chunks),),
        layout,
        meaning=None if generator is None else f"jax.key:{generator}",
        places=(place,),
    )


def _scalar(array: ForeignArray) -> object:
    """The only element of an array, as a Python value, as in Orbax."""
    if array.shape:
        raise FormatError(
            f"{array.place}: a scalar is stored as an array of shape {array.shape}; replace it "
            "with a backup."
        )
    return array.read(Box((), ())).item()


def _strings(place: Store, names: Iterable[str]) -> dict[str, object]:
    """Texts by name."""
    names_of_texts = list(names)
    where = place.path_of(STRINGS)
    doc = parse_json(place.read(STRINGS), where) if names_of_texts else None
    texts: dict[str, object] = {}
    for name in names_of_texts:
        text = doc
        for key in pointer_keys(name):
            text = text.get(key) if isinstance(text, dict) else None
        if not isinstance(text, str):
            raise MissingDataError(
                f"{where}: expected a text at {shown(name)}, found {shorten(text)}; replace it "
                "with a backup."
            )
        texts[name] = text
    return texts


def _generators(place: Store) -> dict[str, str]:
    """Array name → generator of the random keys in it, from the files of all processes."""
    generators: dict[str, str] = {}
    for name in place.list_children(f"{ARRAY_METADATAS}/"):
        key = f"{ARRAY_METADATAS}/{name}"
        generators |= key_generators(place.read(key), place.path_of(key))
    return generators


def _leaves(node: object) -> Iterator[Leaf]:
    """The `Leaf`s of a tree: values that are stored elsewhere."""
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, (dict, list, tuple)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _leaves(child)


def _map(node: object, value: Callable[[object], object]) -> object:
    """The same containers with each leaf replaced by `value(leaf)`."""
    if isinstance(node, dict):
        return {key: _map(child, value) for key, child in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(_map(child, value) for child in node)
    return value(node)
