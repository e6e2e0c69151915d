"""An OCDBT database of one leaf: the index beside data files that were written without TensorStore.

OCDBT is TensorStore's copy-on-write B+tree over a key-value store (its "Storage format" is documented with the
driver). A value outside the tree is `(data file, offset, length)`, and any file below the database may be the
data file. So chunks can be appended to files straight from the caller's buffer, in the caller's order and
without a transaction that holds them all in memory; what is left is to write the index:

1. `leaf_node`: all keys and places of a lane in one B+tree leaf (at most 2**20 keys, a limit of TensorStore's).
2. `manifest`: one version whose root is that leaf.

Integers are unsigned LEB128, whole columns of them are encoded at once. Nodes and manifest end in their crc32c.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import crc32c
import numpy as np
import tensorstore as ts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

__all__ = ["MOST_KEYS", "leaf_node", "manifest", "shared_prefixes", "varints"]

MOST_KEYS = 1 << 20
"""Keys that TensorStore accepts in one node."""
_NODE_MAGIC = 0x0CDB20DE
_COMPARED_BYTES = 1 << 22
"""Of keys that are compared at a time, all as long as the longest."""
_MAX_DECODED_NODE_BYTES = 8 << 20
"""TensorStore's default; a hint to writers, readers do not insist on it."""


def leaf_node(keys: Sequence[bytes], files: Sequence[str], file: ArrayLike, offset: ArrayLike, length: ArrayLike) -> bytes:
    """The B+tree leaf that maps each key to its place.

    Args:
        keys: n different keys, in ascending order.
        files: data files, relative to the database.
        file: (n,) index into `files`.
        offset: (n,) first byte.
        length: (n,) bytes.
    """
    assert 0 < len(keys) <= MOST_KEYS, "a leaf holds between one and 2**20 keys"
    paths = [name.encode() for name in files]
    shared = shared_prefixes(keys)
    rest = [keys[0], *(key[n:] for key, n in zip(keys[1:], shared.tolist(), strict=True))]
    body = b"".join(
        [
            b"\0",  # height: a leaf
            # Data file table: prefix lengths, suffix lengths, base path lengths (ours need none), suffixes.
            *(
                varints([len(paths)]),
                varints(np.zeros(len(paths) - 1)),
                varints([len(p) for p in paths]),
                varints(np.zeros(len(paths))),
                *paths,
            ),
            *(varints([len(keys)]), varints(shared), varints([len(r) for r in rest]), *rest),
            varints(length),
            b"\1" * len(keys),  # every value lies outside the node
            varints(file),
            varints(offset),
        ]
    )
    return _framed(_NODE_MAGIC, body)


def manifest(node: str, node_bytes: int, num_keys: int, value_bytes: int) -> bytes:
    """The manifest of a database whose one node is the file `node`."""
    root = {
        "location": f"btreenode::{node}:0:{node_bytes}",
        "statistics": {"num_keys": num_keys, "num_tree_bytes": node_bytes, "num_indirect_value_bytes": value_bytes},
    }
    config = {
        "uuid": secrets.token_hex(16),
        "compression": None,
        "max_inline_value_bytes": 0,
        "max_decoded_node_bytes": _MAX_DECODED_NODE_BYTES,
        "version_tree_arity_log2": 4,
    }
    version = {"generation_number": 1, "commit_time": time.time_ns(), "root": root, "root_height": 0}
    encoded: bytes = ts.ocdbt.undump_manifest({"config": config, "version_tree_nodes": [], "versions": [version]})
    return encoded


def varints(values: ArrayLike) -> bytes:
    """Unsigned LEB128 of each value, one after another.

    >>> varints([0, 127, 128, 300]).hex(" ")
    '00 7f 80 01 ac 02'
    """
    column: NDArray[np.uint64] = np.asarray(values).astype(np.uint64)
    if not len(column):
        return b""
    most = max(1, -(-int(column.max()).bit_length() // 7))
    shifts = np.arange(most, dtype=np.uint64) * np.uint64(7)
    groups = column[:, None] >> shifts
    used = groups > 0
    used[:, 0] = True
    more = np.zeros_like(used)
    more[:, :-1] = used[:, 1:]
    coded: NDArray[np.uint8] = ((groups & np.uint64(127)) | (more.astype(np.uint64) << np.uint64(7))).astype(np.uint8)
    return coded[used].tobytes()


def _framed(magic: int, body: bytes) -> bytes:
    """Magic, length of everything, version 0, no compression, body, crc32c."""
    rest = b"\0\0" + body
    head = magic.to_bytes(4, "big") + (4 + 8 + len(rest) + 4).to_bytes(8, "little")
    framed = head + rest
    checksum: int = crc32c.crc32c(framed)
    return framed + checksum.to_bytes(4, "little")


def shared_prefixes(keys: Sequence[bytes]) -> NDArray[np.int64]:
    """(n - 1,) bytes that each key begins with as the one before it does; keys have no zeros, and two in a row differ.

    >>> shared_prefixes([b"w/c/0", b"w/c/10", b"w/c/2"]).tolist()
    [4, 4]
    """
    counts = np.empty(len(keys) - 1, np.int64)
    longest = max(map(len, keys))
    at_a_time = max(1, _COMPARED_BYTES // longest)
    for first in range(0, len(counts), at_a_time):
        table = np.array(keys[first : first + at_a_time + 1], f"S{longest}").view(np.uint8).reshape(-1, longest)
        counts[first : first + at_a_time] = (table[1:] != table[:-1]).argmax(axis=1)
    return counts
