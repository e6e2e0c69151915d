"""The header of a chunk table: what the table holds, and what each block of its rows must hash to.

Whoever has the header, by its digest in a record, can read any block by itself and know that it is the one that was
written. See `table` for the file as a whole.

```
8 bytes    magic, b"SHCKTAB2"
u32        length of the JSON in bytes
JSON       {"files": [name, …], "arrays": [[path, number of chunks], …], "block": rows of a block}
16 bytes × blocks   the first half of each block's SHA-256
```

Half a SHA-256 is as good as the whole here: who exchanges a block needs another one of the same digest, which takes
2^128 tries. (Finding any two that agree is easier, but only who makes the checkpoint could use them.)
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import FormatError
from shardckpt.format.keys import check_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardckpt.format.record import TableReference

__all__ = ["BLOCK_ROWS", "LARGEST_OFFSET", "OWN_OBJECT", "ROW", "TableHeader", "check_sizes"]

MAGIC = b"SHCKTAB2"
ROW = np.dtype([("chunk", "<u8"), ("file", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("crc", "<u4")])
"""One chunk; 28 bytes."""
OWN_OBJECT = 0xFFFFFFFF
"""`file` of a chunk that is an object of its own (plain layout)."""
LARGEST_OFFSET = 1 << 62
"""Bytes; larger ones do not fit the system's calls."""
BLOCK_ROWS = 128
"""Rows of a block in the tables that are written."""
LARGEST_BLOCK = 1 << 12
"""Rows of a block in tables that are read."""
LARGEST_HEADER = 1 << 30
"""Bytes; it is read at once."""
LARGEST_TABLE = 16 << 30
"""Bytes."""
DIGEST_BYTES = 16
_PREFIX = 12


@dataclass(frozen=True, slots=True)
class TableHeader:
    """The header of a chunk table."""

    files: list[str]
    """Data files, relative to the attempt."""
    counts: dict[str, int]
    """Array path → chunks, in the order of the rows."""
    block: int
    """Rows of a block; the last one may have fewer."""
    digests: bytes
    """Of all blocks, `DIGEST_BYTES` each."""
    nbytes: int
    """Its own length: where the rows begin."""

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return sum(self.counts.values())

    @staticmethod
    def encode(files: Sequence[str], counts: dict[str, int], rows: bytes) -> bytes:
        """The header of a table of those rows."""
        text = json.dumps({"files": files, "arrays": list(counts.items()), "block": BLOCK_ROWS}, separators=(",", ":")).encode()
        return b"".join([MAGIC, struct.pack("<I", len(text)), text, _digests(rows, BLOCK_ROWS)])

    @classmethod
    def decode(cls, data: bytes, where: str) -> TableHeader:
        """Read the header that `data` begins with.

        Args:
            data: the header, and anything behind it.
            where: the table's url, for messages.

        Raises:
            FormatError: not a chunk table, or one that contradicts itself.
        """
        if data[:8] != MAGIC or len(data) < _PREFIX:
            raise FormatError(f"{where}: not a chunk table; the checkpoint was written by something else or is damaged.")
        begin = _PREFIX + struct.unpack("<I", data[8:_PREFIX])[0]
        files, counts, block = _read_json(data[_PREFIX:begin], where)
        total = sum(counts.values())
        nbytes = begin + -(-total // block) * DIGEST_BYTES
        if nbytes > len(data):
            raise FormatError(f"{where}: {total} chunks need a header of {nbytes} bytes, the chunk table has {len(data)}.")
        return cls(files, counts, block, data[begin:nbytes], nbytes)

    @classmethod
    def vouched(cls, data: bytes, reference: TableReference, where: str) -> TableHeader:
        """The header that `data` begins with, if it is the one that a record refers to.

        Raises:
            FormatError: it is not.
        """
        reference.check(data[: reference.header], where)
        header = cls.decode(data, where)
        expected = header.nbytes + header.rows * ROW.itemsize
        if (header.nbytes, expected) != (reference.header, reference.size):
            raise FormatError(
                f"{where}: {header.rows} chunks need {expected} bytes, {header.nbytes} of them before the rows; "
                f"the record says {reference.size}, {reference.header} of them before the rows."
            )
        return header

    def read_rows(self, data: bytes | memoryview, first: int, where: str) -> NDArray[np.void]:
        """Rows as an array of `ROW`, compared with what was written.

        Args:
            data: whole blocks.
            first: which block is the first of them.
            where: the table's url, for messages.

        Raises:
            FormatError: they are not what was written, or say what cannot be.
        """
        digests, begin = _digests(data, self.block), first * DIGEST_BYTES
        expected = self.digests[begin : begin + len(digests)]
        if digests != expected:
            wrong = next(i for i in range(0, len(digests), DIGEST_BYTES) if digests[i:][:DIGEST_BYTES] != expected[i:][:DIGEST_BYTES])
            raise FormatError(f"{where}: block {first + wrong // DIGEST_BYTES} of the chunk table is not what was written; it is damaged.")
        rows: NDArray[np.void] = np.frombuffer(data, ROW)
        if ((rows["file"] >= len(self.files)) & (rows["file"] != OWN_OBJECT)).any():
            raise FormatError(f"{where}: the chunk table refers to a file that it does not name.")
        if (rows["offset"] > LARGEST_OFFSET).any():
            raise FormatError(f"{where}: the chunk table has a chunk at byte {rows['offset'].max()}, where no file reaches.")
        return rows


def check_sizes(reference: TableReference, where: str) -> None:
    """Raise FormatError where a record gives a table sizes that are not read; `where` is the table's url."""
    if not reference.header <= min(reference.size, LARGEST_HEADER) or reference.size > LARGEST_TABLE:
        raise FormatError(f"{where}: the record gives the chunk table {reference.size} bytes, {reference.header} of them its header.")


def _digests(rows: bytes | memoryview, block: int) -> bytes:
    view, step = memoryview(rows), block * ROW.itemsize
    return b"".join([hashlib.sha256(view[i : i + step]).digest()[:DIGEST_BYTES] for i in range(0, len(rows), step)])


def _read_json(data: bytes, where: str) -> tuple[list[str], dict[str, int], int]:
    """The files, the number of chunks of each array, and the rows of a block."""
    try:
        header = json.loads(data)
        files, listing, block = header["files"], header["arrays"], header["block"]
        counts = {path: count for path, count in listing}  # noqa: C416  (a malformed pair must fail here)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise FormatError(f"{where}: the chunk table's header is unreadable ({e}).") from e
    sane = (
        isinstance(files, list)
        and all(isinstance(f, str) for f in files)
        and len(counts) == len(listing)
        and all(isinstance(p, str) and type(n) is int and 0 <= n <= LARGEST_OFFSET for p, n in counts.items())
    )
    if not sane:
        raise FormatError(f"{where}: the chunk table's header names something that is no file, or an array twice.")
    if type(block) is not int or not 0 < block <= LARGEST_BLOCK:
        raise FormatError(f"{where}: the chunk table's blocks have from 1 to {LARGEST_BLOCK} rows; the header says otherwise.")
    for file in files:
        try:
            check_key(file, where)
        except FormatError as e:
            raise FormatError(f"{where}: the chunk table's header names a file outside the attempt: {e}") from e
    return files, counts, block
