"""An OCDBT database: the index beside data files that were written without TensorStore.

OCDBT is TensorStore's copy-on-write B+tree over a key-value store (its "Storage format" is
documented with the driver). A value outside the tree is `(data file, offset, length)`, and any file
below the database may be the data file. So chunks can be appended to files straight from the
caller's buffer, in the caller's order and without a transaction that holds them all in memory. Then
only the index must be written:

1. `tree`: all keys and places, maybe with some values, in leaves below one inner node; few of them
   in one leaf (`leaf_node`).
2. `manifest`: one version whose root is that node or leaf.

Integers are unsigned LEB128; complete columns are encoded at once. Nodes and manifest end in their
crc32c.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import crc32c
import numpy as np
import tensorstore as ts

from shardckpt.format.stored_chunks import frame_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

Place = tuple[str, int, int]
"""Data file relative to the database, offset of the first byte, bytes."""

MOST_KEYS = 1 << 20
"""Most keys that TensorStore accepts in one node."""
LEAF_KEYS = 1 << 12
"""Most keys in a leaf of a `tree`, so that a reader of few keys reads little."""
LEAF_BYTES = 4 << 20
"""Bytes of keys and values after which a leaf of a `tree` ends."""
_NODE_MAGIC = 0x0CDB20DE
_MANIFEST_MAGIC = 0x0CDB3A2A
_UUID_BYTES = 16
_ZSTD = 1
_MOST_VARINT = 10
"""Most bytes of an encoded 64-bit integer."""
_MISSING = (1 << 64) - 1
"""Length that stands for the root of a tree without keys."""
_NO_FILE = "it refers to a file that its table does not have"
_COMPARED_BYTES = 1 << 22
"""Bytes of keys that are compared at a time, each padded to the longest."""
_MAX_DECODED_NODE_BYTES = 8 << 20
"""TensorStore's default; a hint to writers that readers do not enforce."""
_LARGEST_NODE = 1 << 28
"""Most bytes of a node or manifest in memory, and most of all keys in one. Orbax lets TensorStore
make nodes of 100 MB."""
_LATEST = (1 << 63) - 1
"""The latest time that a manifest can have, in nanoseconds: in the year 2262, which a clock may
have passed."""


def leaf_node(
    keys: Sequence[bytes],
    files: Sequence[str],
    file: ArrayLike,
    offset: ArrayLike,
    length: ArrayLike,
    inside: Sequence[bytes | None] | None = None,
) -> bytes:
    """The B+tree leaf that maps each key to its value, as bytes.

    Args:
        keys: n different keys, in ascending order.
        files: data files, relative to the database.
        file: (n,) index into `files`.
        offset: (n,) offset of the first byte.
        length: (n,) bytes.
        inside: n entries: a value that the node itself contains, or None for a value in a file.
            None: all are in files. A node with values is compressed.
    """
    assert 0 < len(keys) <= MOST_KEYS, "a leaf holds between one and 2**20 keys"
    values = [value for value in inside or () if value is not None]
    in_file = (
        np.ones(len(keys), bool)
        if inside is None
        else np.array([value is None for value in inside])
    )
    lengths, files_of, offsets = (np.array(column, np.int64) for column in (length, file, offset))
    lengths[~in_file] = list(map(len, values))
    paths = [name.encode() for name in files]
    shared = shared_prefixes(keys)
    rest = [key[n:] for key, n in zip(keys, [0, *shared.tolist()], strict=True)]
    body = b"".join(
        [
            b"\0",  # height: a leaf
            # Data file table: prefix lengths, suffix lengths, base path lengths (0 here), suffixes.
            *(
                varints([len(paths)]),
                varints(np.zeros(max(0, len(paths) - 1))),
                varints([len(p) for p in paths]),
                varints(np.zeros(len(paths))),
                *paths,
            ),
            *(varints([len(keys)]), varints(shared), varints([len(r) for r in rest]), *rest),
            varints(lengths),
            in_file.astype(np.uint8).tobytes(),
            varints(files_of[in_file]),
            varints(offsets[in_file]),
            *values,
        ]
    )
    return _frame(_NODE_MAGIC, body, compress=bool(values))


def tree(
    name: str,
    keys: Sequence[bytes],
    files: Sequence[str],
    rows: NDArray[np.int64],
    inside: Sequence[bytes | None],
    begin: int = 0,
) -> tuple[bytes, bytes]:
    """The B+tree that maps each key to its value: one leaf, or leaves below one inner node.

    Returns its nodes, one after another, and its manifest.

    Args:
        name: the file of all nodes, relative to the database.
        keys: n different keys, in ascending order.
        files: data files, relative to the database.
        rows: (n, 3) index into `files`, offset of the first byte, and bytes, for values in a file.
        inside: n entries: a value that a leaf itself contains, or None for a value in a file.
        begin: offset of the first node in its file.
    """
    outside = np.array([value is None for value in inside])
    used = np.cumsum(
        [len(key) + len(value or b"") for key, value in zip(keys, inside, strict=True)]
    )
    children: list[_Child] = []
    nodes: list[bytes] = []
    first, offset = 0, begin
    while first < len(keys):
        full = int(np.searchsorted(used, used[first] + LEAF_BYTES, "right"))
        here = slice(first, max(first + 1, min(first + LEAF_KEYS, full)))
        numbers, file = np.unique(rows[here, 0], return_inverse=True)
        in_use = [files[number] for number in numbers.tolist()] if outside[here].any() else []
        node = leaf_node(keys[here], in_use, file, rows[here, 1], rows[here, 2], inside[here])
        nodes.append(node)
        value_bytes = int(rows[here, 2][outside[here]].sum())
        children.append(_Child(keys[first], offset, len(node), len(keys[here]), value_bytes))
        first, offset = here.stop, offset + len(node)
    value_bytes = sum(child.value_bytes for child in children)
    if len(nodes) == 1:
        return nodes[0], manifest(name, len(nodes[0]), len(keys), value_bytes, offset=begin)
    root = _inner_node(name, children)
    encoded = manifest(
        name, len(root), len(keys), value_bytes, offset=offset, below=offset - begin, height=1
    )
    return b"".join([*nodes, root]), encoded


class _Child(NamedTuple):
    """A leaf, as its parent tells of it."""

    key: bytes
    """Its first key."""
    offset: int
    nbytes: int
    num_keys: int
    value_bytes: int


def _inner_node(name: str, children: Sequence[_Child]) -> bytes:
    """The node above leaves that are all in the file `name`.

    No leaf is given a prefix that its keys lack.
    """
    keys = [child.key for child in children]
    shared = shared_prefixes(keys)
    rest = [key[n:] for key, n in zip(keys, [0, *shared.tolist()], strict=True)]
    none = np.zeros(len(keys))
    sizes = [child.nbytes for child in children]
    body = b"".join(
        [
            b"\1",  # height
            *(varints([1]), varints([len(name.encode())]), varints([0]), name.encode()),
            *(varints([len(keys)]), varints(shared), varints([len(r) for r in rest])),
            *(varints(none), *rest),
            *(varints(none), varints([child.offset for child in children]), varints(sizes)),
            # Keys, bytes of nodes, and bytes of values outside nodes, at and below each child.
            *(
                varints([child.num_keys for child in children]),
                varints(sizes),
                varints([child.value_bytes for child in children]),
            ),
        ]
    )
    return _frame(_NODE_MAGIC, body)


def manifest(
    node: str,
    node_bytes: int,
    num_keys: int,
    value_bytes: int,
    *,
    offset: int = 0,
    below: int = 0,
    height: int = 0,
) -> bytes:
    """The manifest of a database.

    Args:
        node: the file with the root, relative to the database.
        node_bytes: bytes of the root.
        num_keys: number of keys.
        value_bytes: bytes of all values outside the nodes.
        offset: offset of the root.
        below: bytes of all other nodes.
        height: height of the root above the leaves.
    """
    root = {
        "location": f"btreenode::{node}:{offset}:{node_bytes}",
        "statistics": {
            "num_keys": num_keys,
            "num_tree_bytes": below + node_bytes,
            "num_indirect_value_bytes": value_bytes,
        },
    }
    config = {
        "uuid": secrets.token_hex(16),
        "compression": None,
        "max_inline_value_bytes": 0,
        "max_decoded_node_bytes": _MAX_DECODED_NODE_BYTES,
        "version_tree_arity_log2": 4,
    }
    version = {
        "generation_number": 1,
        "commit_time": min(time.time_ns(), _LATEST),
        "root": root,
        "root_height": height,
    }
    encoded: bytes = ts.ocdbt.undump_manifest(
        {"config": config, "version_tree_nodes": [], "versions": [version]}
    )
    return encoded


def varints(values: ArrayLike) -> bytes:
    """Unsigned LEB128 of each value, one after another.

    >>> varints([0, 127, 128, 300]).hex(" ")
    '00 7f 80 01 ac 02'
    """
    column: NDArray[np.uint64] = np.asarray(values).astype(np.uint64)
    if not len(column):
        return b""
    most = -(-int(column.max()).bit_length() // 7)
    if most <= 1:
        return column.astype(np.uint8).tobytes()
    shifts = np.arange(most, dtype=np.uint64) * np.uint64(7)
    groups = column[:, None] >> shifts
    used = groups > 0
    used[:, 0] = True
    more = np.zeros_like(used)
    more[:, :-1] = used[:, 1:]
    coded: NDArray[np.uint8] = (
        (groups & np.uint64(127)) | (more.astype(np.uint64) << np.uint64(7))
    ).astype(np.uint8)
    return coded[used].tobytes()


def _frame(magic: int, body: bytes, *, compress: bool = False) -> bytes:
    """Magic, length of everything, version 0, kind of compression, body, crc32c."""
    rest = b"\0" + (bytes([_ZSTD]) + _zstd().encode(body) if compress else b"\0" + body)
    head = magic.to_bytes(4, "big") + (4 + 8 + len(rest) + 4).to_bytes(8, "little")
    framed = head + rest
    checksum: int = crc32c.crc32c(framed)
    return framed + checksum.to_bytes(4, "little")


def shared_prefixes(keys: Sequence[bytes]) -> NDArray[np.int64]:
    """(n - 1,) lengths of the common prefix of each key and the key before it.

    Keys have no NULs, and adjacent keys differ.

    >>> shared_prefixes([b"w/c/0", b"w/c/10", b"w/c/2"]).tolist()
    [4, 4]
    """
    counts = np.empty(len(keys) - 1, np.int64)
    longest = max(map(len, keys))
    at_a_time = max(1, _COMPARED_BYTES // longest)
    for first in range(0, len(counts), at_a_time):
        compared = np.array(keys[first : first + at_a_time + 1], f"S{longest}")
        table = compared.view(np.uint8).reshape(-1, longest)
        counts[first : first + at_a_time] = (table[1:] != table[:-1]).argmax(axis=1)
    return counts


@dataclass(frozen=True, slots=True)
class Version:
    """The root of one version of a database."""

    node: Place | None
    """The root node; None: the version has no keys."""
    num_keys: int
    num_tree_bytes: int
    num_indirect_value_bytes: int
    """Bytes of the values outside the nodes."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a tree. Keys and prefixes lack the node's own prefix."""

    children: list[tuple[bytes, Place]]
    """For an inner node: the common prefix of all keys below each child, and the child."""
    values: Iterator[tuple[bytes, Place]]
    """For a leaf: keys of the values outside the nodes, ascending."""
    inside: Iterator[tuple[bytes, bytes]]
    """For a leaf: keys of the values that it contains, ascending, with these."""


def read_manifest(encoded: bytes) -> list[Version]:
    """The versions in a manifest, the newest last.

    Like `ts.ocdbt.dump`, which leaks part of its result (0.1.86).

    Raises:
        ValueError: not a manifest, or its versions lie in other files.
    """
    read = _Reader(_unframe(_MANIFEST_MAGIC, encoded))
    read.bytes(_UUID_BYTES)
    if read.varint() != 0:
        raise ValueError("OUT_OF_RANGE: the versions are in other files")
    read.varint()  # most bytes of a value in a node
    read.varint()  # most bytes of a node
    read.bytes(1)  # arity of the version tree
    if read.varint() == _ZSTD:
        read.bytes(4)  # compression level
    files = read.files()
    count = read.varint()
    if not count:
        raise ValueError("DATA_LOSS: it has no version")
    read.varints(count)  # generations
    read.bytes(count)  # heights
    places = read.places(files, count)
    statistics = zip(*(read.varints(count).tolist() for _ in range(3)), strict=True)
    return [Version(place, *numbers) for place, numbers in zip(places, statistics, strict=True)]


def read_node(encoded: bytes) -> Node:
    """Parse a node of a tree; like `ts.ocdbt.dump`, without its memory leak.

    Raises:
        ValueError: not a node. Iterating over its values may raise it too.
    """
    read = _Reader(_unframe(_NODE_MAGIC, encoded))
    (height,) = read.bytes(1)
    files = read.files()
    count = read.varint()
    shared = np.append(np.zeros(min(1, count), np.uint64), read.varints(max(0, count - 1)))
    rest = read.varints(count)
    common = read.varints(count).tolist() if height else []
    keys = _decode_prefixed(shared, rest, read.bytes(sum(rest.tolist())))
    if height:
        below = zip(keys, common, read.places(files, count), strict=True)
        return Node(
            [(key[:n], place) for key, n, place in below if place is not None], iter(()), iter(())
        )
    length = read.varints(count)
    outside = np.frombuffer(read.bytes(count), np.uint8) == 1
    file, offset = (read.varints(int(outside.sum())).tolist() for _ in range(2))
    if max(file, default=-1) >= len(files):
        raise ValueError(_NO_FILE)
    places = zip(map(files.__getitem__, file), offset, length[outside].tolist(), strict=True)
    listed = list(keys) if not outside.all() else keys
    inside = (
        zip(compress(listed, ~outside), map(read.bytes, length[~outside].tolist()), strict=True)
        if listed is not keys
        else iter(())
    )
    return Node([], zip(compress(listed, outside), places, strict=True), inside)


def _decode_prefixed(
    shared: NDArray[np.uint64], rest: NDArray[np.uint64], suffixes: bytes
) -> Iterator[bytes]:
    """Decode texts given by suffix and by length of the prefix shared with the previous text."""
    _check_room(sum(shared.tolist()) + sum(rest.tolist()))
    text, at = b"", 0
    for prefix, length in zip(shared.tolist(), rest.tolist(), strict=True):
        if prefix > len(text):
            raise ValueError("a key shares more bytes with the previous key than that key has")
        text, at = text[:prefix] + suffixes[at : at + length], at + length
        yield text


class _Reader:
    """Reads the columns of a node or manifest, one after another; raises ValueError at its end."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def bytes(self, nbytes: int) -> bytes:
        """The next bytes."""
        self._at += nbytes
        if self._at > len(self._body):
            raise ValueError("OUT_OF_RANGE: it ends in the middle of a column")
        return self._body[self._at - nbytes : self._at]

    def varints(self, count: int) -> NDArray[np.uint64]:
        """A column of integers."""
        if count > min(MOST_KEYS, len(self._body) - self._at):
            raise ValueError(f"OUT_OF_RANGE: it says that a column has {count} numbers")
        if count < 16:  # fewer are not worth the setting up of arrays
            return np.array([self.varint() for _ in range(count)], np.uint64)
        coded = np.frombuffer(
            self._body,
            np.uint8,
            offset=self._at,
            count=min(_MOST_VARINT * count, len(self._body) - self._at),
        )
        ends = np.flatnonzero(coded < 128)[:count] + 1
        starts = np.append(np.zeros(min(1, count), np.int64), ends[:-1])
        if len(ends) < count or (ends - starts > _MOST_VARINT).any():
            raise ValueError("OUT_OF_RANGE: it ends in the middle of a number")
        nbytes = int(ends[-1]) if count else 0
        self._at += nbytes
        nth = np.arange(nbytes) - np.repeat(starts, ends - starts)
        groups = (coded[:nbytes] & 127).astype(np.uint64) << (7 * nth).astype(np.uint64)
        numbers: NDArray[np.uint64] = np.add.reduceat(groups, starts) if count else groups
        return numbers

    def varint(self) -> int:
        """An integer."""
        number = 0
        for shift in range(0, 7 * _MOST_VARINT, 7):
            byte = self.bytes(1)[0]
            number |= (byte & 127) << shift
            if byte < 128:
                return number % (1 << 64)
        raise ValueError("OUT_OF_RANGE: it ends in the middle of a number")

    def files(self) -> list[str]:
        """A table of data files, relative to the database."""
        count = self.varint()
        shared = np.append(np.zeros(min(1, count), np.uint64), self.varints(max(0, count - 1)))
        rest = self.varints(count)
        self.varints(count)  # length of the base path in each name
        names = _decode_prefixed(shared, rest, self.bytes(sum(rest.tolist())))
        return [name.decode() for name in names]

    def places(self, files: list[str], count: int) -> list[Place | None]:
        """A column of places of nodes; None for a tree without keys."""
        rows = zip(*(self.varints(count).tolist() for _ in range(3)), strict=True)
        places: list[Place | None] = []
        for file, offset, length in rows:
            if length != _MISSING and file >= len(files):
                raise ValueError(_NO_FILE)
            places.append(None if length == _MISSING else (files[file], offset, length))
        return places


def _unframe(magic: int, encoded: bytes) -> bytes:
    """Inverse of `_frame`, with decompression if needed."""
    size = int.from_bytes(encoded[4:12], "little")
    if len(encoded) < 18 or int.from_bytes(encoded[:4], "big") != magic or size != len(encoded):
        raise ValueError("it is not such a file, or is incomplete")
    if crc32c.crc32c(encoded[:-4]) != int.from_bytes(encoded[-4:], "little"):
        raise ValueError("its checksum is wrong")
    version, compression, body = encoded[12], encoded[13], encoded[14:-4]
    if version or compression not in (0, _ZSTD):
        raise ValueError(f"version {version} with compression {compression} is not known here")
    if not compression:
        return body
    _check_room(frame_limit(body))
    try:
        decoded: bytes = _zstd().decode(body)
    except RuntimeError as e:
        raise ValueError(f"it cannot be decompressed ({e})") from e
    return decoded


def _check_room(nbytes: int) -> None:
    if nbytes > _LARGEST_NODE:
        raise ValueError(f"it has {nbytes} bytes in memory, at most {_LARGEST_NODE} are expected")


def _zstd() -> Any:
    from numcodecs import Zstd

    return Zstd()
