"""The chunk table: the place of each of a host's chunks, and its checksum.

One binary file per host, and one for all hosts, little-endian throughout: a header, then the rows.

```
8 bytes    magic, b"SHCKTAB2"
u32        length of the JSON in bytes
JSON       {"files": [name, …], "arrays": [[path, number of chunks], …], "block": rows of a block}
16 bytes × blocks   the first half of each block's SHA-256
28 bytes × rows     for all chunks, array after array, each array in grid order:
    u64 chunk      position in the array's grid, row-major, ascending within an array
    u32 file       index into "files"; 0xFFFFFFFF: the chunk is an object of its own
    u64 offset     first byte in the file
    u32 length     bytes stored, the codec's 4-byte checksum included
    u32 crc32c     of the stored bytes before that checksum
```

Files are named relative to the attempt. The record has the SHA-256 of the header, and the header
has a digest of each block of rows. So a reader can read and verify any block by itself, and knows
the place and checksum of each chunk: two swapped data files are detected. In the table of all hosts
every array has all chunks of its grid, so a chunk's row number follows from its position.

Half a SHA-256 is as secure as all of it here: to replace a block, an attacker needs another block
with the same digest, which takes 2^128 tries. (To find any two blocks with equal digests is easier,
but only the maker of the checkpoint could use them.)
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import FormatError
from shardckpt.format.documents import check_key
from shardckpt.format.table_rows import ByPath, find_rows, number_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.documents import TableReference

MAGIC = b"SHCKTAB2"
ROW = np.dtype(
    [("chunk", "<u8"), ("file", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("crc", "<u4")]
)
"""One chunk; 28 bytes."""
OWN_OBJECT = 0xFFFFFFFF
"""`file` of a chunk that is an object of its own (plain layout)."""
LARGEST_OFFSET = 1 << 62
"""Largest byte offset that system calls accept."""
BLOCK_ROWS = 128
"""Rows per block in the tables that are written."""
LARGEST_BLOCK = 1 << 12
"""Most rows per block in tables that are read."""
DIGEST_BYTES = 16
_PREFIX = 12
_COLUMNS = tuple((name, ROW[name]) for name in ROW.names or ())


@dataclass(frozen=True, slots=True)
class TableHeader:
    """The header of a chunk table."""

    files: list[str]
    """Data files, relative to the attempt."""
    counts: dict[str, int]
    """Array path → chunks, in the order of the rows."""
    block: int
    """Rows per block; the last block may have fewer."""
    digests: bytes
    """Digests of all blocks, `DIGEST_BYTES` each."""
    nbytes: int
    """Bytes of the header; the rows begin there."""

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return sum(self.counts.values())

    @staticmethod
    def encode(files: Sequence[str], counts: dict[str, int], rows: bytes) -> bytes:
        """Encode the header of a table of those rows."""
        text = json.dumps(
            {"files": files, "arrays": list(counts.items()), "block": BLOCK_ROWS},
            separators=(",", ":"),
        ).encode()
        return b"".join([MAGIC, struct.pack("<I", len(text)), text, _digests(rows, BLOCK_ROWS)])

    @classmethod
    def decode(cls, data: bytes, where: str) -> TableHeader:
        """Parse the header at the start of `data`.

        Args:
            data: the header, and any bytes after it.
            where: the table's url, for messages.

        Raises:
            FormatError: not a chunk table, or it contradicts itself.
        """
        if data[:8] != MAGIC or len(data) < _PREFIX:
            raise FormatError(
                f"{where}: not a chunk table; the checkpoint was written by something else or is "
                "damaged."
            )
        begin = _PREFIX + struct.unpack("<I", data[8:_PREFIX])[0]
        files, counts, block = _read_json(data[_PREFIX:begin], where)
        total = sum(counts.values())
        nbytes = begin + -(-total // block) * DIGEST_BYTES
        if nbytes > len(data):
            raise FormatError(
                f"{where}: {total} chunks need a header of {nbytes} bytes; the damaged chunk "
                f"table has {len(data)}."
            )
        return cls(files, counts, block, data[begin:nbytes], nbytes)

    @classmethod
    def vouched(cls, data: bytes, reference: TableReference, where: str) -> TableHeader:
        """Parse the header at the start of `data`, and check it against a record's reference.

        Raises:
            FormatError: it is not the header that the record refers to.
        """
        reference.check(data[: reference.header], where)
        header = cls.decode(data, where)
        expected = header.nbytes + header.rows * ROW.itemsize
        if (header.nbytes, expected) != (reference.header, reference.size):
            raise FormatError(
                f"{where}: a chunk table for {header.rows} chunks has {expected} bytes and a "
                f"header of {header.nbytes}, but the record says {reference.size} bytes and a "
                f"header of {reference.header}."
            )
        return header

    def read_rows(self, data: bytes | memoryview, first: int, where: str) -> NDArray[np.void]:
        """Parse rows as an array of `ROW`, and check them against the header's digests.

        Args:
            data: complete blocks.
            first: index of the first of these blocks.
            where: the table's url, for messages.

        Raises:
            FormatError: the rows are damaged or invalid.
        """
        digests, begin = _digests(data, self.block), first * DIGEST_BYTES
        expected = self.digests[begin : begin + len(digests)]
        if digests != expected:
            wrong = next(
                i
                for i in range(0, len(digests), DIGEST_BYTES)
                if digests[i:][:DIGEST_BYTES] != expected[i:][:DIGEST_BYTES]
            )
            raise FormatError(
                f"{where}: block {first + wrong // DIGEST_BYTES} of the chunk table is damaged: "
                "its checksum is wrong."
            )
        rows: NDArray[np.void] = np.frombuffer(data, ROW)
        if ((rows["file"] >= len(self.files)) & (rows["file"] != OWN_OBJECT)).any():
            raise FormatError(f"{where}: the chunk table refers to a file that it does not name.")
        if (rows["offset"] > LARGEST_OFFSET).any():
            raise FormatError(
                f"{where}: the chunk table has a chunk at byte {rows['offset'].max()}, beyond the "
                "end of any file."
            )
        return rows


def _digests(rows: bytes | memoryview, block: int) -> bytes:
    view, step = memoryview(rows), block * ROW.itemsize
    return b"".join(
        [
            hashlib.sha256(view[i : i + step]).digest()[:DIGEST_BYTES]
            for i in range(0, len(rows), step)
        ]
    )


def _read_json(data: bytes, where: str) -> tuple[list[str], dict[str, int], int]:
    """Parse the files, the number of chunks of each array, and the rows per block."""
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
        and all(
            isinstance(p, str) and type(n) is int and 0 <= n <= LARGEST_OFFSET
            for p, n in counts.items()
        )
    )
    if not sane:
        raise FormatError(
            f"{where}: the chunk table's header has an invalid file name, or an array twice."
        )
    if type(block) is not int or not 0 < block <= LARGEST_BLOCK:
        raise FormatError(
            f"{where}: the chunk table's header must say 1 to {LARGEST_BLOCK} rows per block."
        )
    for file in files:
        try:
            check_key(file, where)
        except FormatError as e:
            raise FormatError(
                f"{where}: the chunk table's header names a file outside the attempt: {e}"
            ) from e
    return files, counts, block


@dataclass(frozen=True, slots=True)
class ArrayChunks:
    """The chunks of one array, in grid order; one row per chunk."""

    chunk: NDArray[np.uint64]
    """Position in the array's grid, ascending."""
    file: NDArray[np.uint32]
    """Index into the table's files, or `OWN_OBJECT`."""
    offset: NDArray[np.uint64]
    """First byte in the file."""
    length: NDArray[np.uint32]
    """Bytes stored."""
    crc: NDArray[np.uint32]
    """crc32c of the stored bytes without the codec's checksum."""

    @classmethod
    def none(cls) -> ArrayChunks:
        """No chunks."""
        return cls(**{name: np.empty(0, dtype) for name, dtype in _COLUMNS})

    @classmethod
    def of_columns(cls, *columns: NDArray[Any]) -> ArrayChunks:
        """Chunks given as their columns, of any integer types that fit."""
        return cls(
            **{
                name: column.astype(dtype, copy=False)
                for (name, dtype), column in zip(_COLUMNS, columns, strict=True)
            }
        )

    @classmethod
    def of_records(cls, rows: NDArray[np.void]) -> ArrayChunks:
        """Chunks given as an array of `ROW`."""
        return cls(**{name: np.ascontiguousarray(rows[name]) for name, _ in _COLUMNS})

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, int, int, int, int]]) -> ArrayChunks:
        """Few chunks, given as (chunk, file, offset, length, crc), ascending."""
        return cls(
            **{
                name: np.array(column, dtype)
                for (name, dtype), column in zip(_COLUMNS, zip(*rows, strict=True), strict=True)
            }
        )

    @classmethod
    def concatenate(cls, parts: Sequence[ArrayChunks]) -> ArrayChunks:
        """Concatenate the rows of at least one."""
        return cls(
            **{
                name: np.concatenate([getattr(rows, name) for rows in parts])
                for name, _ in _COLUMNS
            }
        )

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.chunk)

    def take(self, row: NDArray[np.int64]) -> ArrayChunks:
        """The chunks in the given rows."""
        return ArrayChunks(**{name: getattr(self, name)[row] for name, _ in _COLUMNS})

    def first_missing(self, num_chunks: int) -> int | None:
        """The first chunk of a grid that the table lacks.

        None if it has all, and then row i is chunk i.

        Cheap however large the grid claims to be, because rows ascend.
        """
        if len(self.chunk) >= num_chunks and (
            num_chunks == 0 or int(self.chunk[num_chunks - 1]) == num_chunks - 1
        ):
            return None
        astray = np.flatnonzero(self.chunk != np.arange(len(self.chunk), dtype=np.uint64))
        return int(astray[0]) if len(astray) else len(self.chunk)


@dataclass(frozen=True, slots=True)
class Table:
    """A complete table in columns.

    It is in columns because a job's tables have an array for every pair of host and tensor.
    """

    files: list[str]
    """Data files, relative to the attempt."""
    counts: dict[str, int]
    """Array path → chunks, in the order of the rows."""
    rows: ArrayChunks
    """The chunks of all arrays, array after array."""
    _first: dict[str, int] | None = field(default=None, init=False, repr=False, compare=False)
    """Array path → its first row; None: not needed yet."""

    @classmethod
    def of(cls, files: Sequence[str], arrays: Mapping[str, ArrayChunks]) -> Table:
        """The table of those arrays, in that order."""
        columns = {
            name: np.concatenate(
                [np.asarray(getattr(rows, name), dtype) for rows in arrays.values()]
            )
            if arrays
            else np.empty(0, dtype)
            for name, dtype in _COLUMNS
        }
        return cls(
            list(files), {path: len(rows) for path, rows in arrays.items()}, ArrayChunks(**columns)
        )

    @classmethod
    def of_body(cls, header: TableHeader, data: bytes, where: str) -> Table:
        """Make a table from its header and `data`, all of its bytes with the header.

        Args:
            header: its header.
            data: the complete table.
            where: its url, for messages.

        Raises:
            FormatError: the table contradicts itself.
        """
        expected = header.nbytes + header.rows * ROW.itemsize
        if expected != len(data):
            raise FormatError(
                f"{where}: {header.rows} chunks need {expected} bytes, the chunk table has "
                f"{len(data)}."
            )
        return cls.of_rows(
            header,
            ArrayChunks.of_records(header.read_rows(memoryview(data)[header.nbytes :], 0, where)),
            where,
        )

    @classmethod
    def of_rows(cls, header: TableHeader, rows: ArrayChunks, where: str) -> Table:
        """Make a table from its header and all its rows; `where` as for `of_body`."""
        table = cls(header.files, header.counts, rows)
        astray = table._not_after(rows.chunk[1:] <= rows.chunk[:-1])
        if astray is not None:
            raise FormatError(
                f"{where}: the chunks of {astray} are not in grid order, or one is there twice."
            )
        return table

    @classmethod
    def merge(cls, tables: Sequence[Table]) -> Table:
        """One table over all hosts; see `doubled`."""
        if len(filled := [table for table in tables if table.files or table.counts]) == 1:
            return filled[0]
        counts, number = number_rows([table.counts for table in tables])
        files = [file for table in tables for file in table.files]
        bases = [*accumulate((len(table.files) for table in tables), initial=0)][:-1]
        columns = {
            name: np.concatenate(
                [*(getattr(table.rows, name) for table in tables), np.empty(0, dtype)]
            )
            for name, dtype in _COLUMNS
        }
        base = np.repeat(np.array(bases, np.uint64), [len(table.rows) for table in tables])
        own = columns["file"] == OWN_OBJECT
        columns["file"] = np.where(own, OWN_OBJECT, columns["file"] + base).astype("<u4")
        order = np.lexsort((columns["chunk"], number))
        rows = ArrayChunks(**{name: column[order] for name, column in columns.items()})
        return cls(files, counts, rows)

    @property
    def body_bytes(self) -> int:
        """Bytes of the rows at the table's end."""
        return len(self.rows) * ROW.itemsize

    def encode(self) -> bytes:
        """The table's bytes."""
        rows = np.empty(len(self.rows), ROW)
        for name, _ in _COLUMNS:
            rows[name] = getattr(self.rows, name)
        body = rows.tobytes()
        return TableHeader.encode(self.files, self.counts, body) + body

    def is_stored_as(self, data: bytes, reference: TableReference) -> bool:
        """Whether `data` has the digests of this table, which was written with that reference.

        Nothing is parsed.
        """
        header = data[: reference.header]
        digests = -(-len(self.rows) // BLOCK_ROWS) * DIGEST_BYTES
        return (
            len(data) == reference.size
            and hashlib.sha256(header).hexdigest() == reference.sha256
            and _digests(memoryview(data)[reference.header :], BLOCK_ROWS)
            == header[len(header) - digests :]
        )

    def arrays(self) -> Mapping[str, ArrayChunks]:
        """Array path → its chunks, created at each access.

        All these objects would need ten times the memory of the rows, so they are not kept.
        """
        return ByPath(self.counts, self.array)

    def array(self, path: str) -> ArrayChunks:
        """The chunks of one array; none if the table does not have it."""
        begin = self._firsts().get(path, 0)
        part = slice(begin, begin + self.counts.get(path, 0))
        rows = self.rows
        return ArrayChunks(
            rows.chunk[part], rows.file[part], rows.offset[part], rows.length[part], rows.crc[part]
        )

    def chunks_of(self, path: str) -> NDArray[np.uint64]:
        """The positions of the chunks of one array; none if the table does not have it."""
        begin = self._firsts().get(path, 0)
        return self.rows.chunk[begin : begin + self.counts.get(path, 0)]

    def _firsts(self) -> dict[str, int]:
        """Array path → its first row."""
        if self._first is None:
            first = dict(
                zip(self.counts, accumulate(self.counts.values(), initial=0), strict=False)
            )
            object.__setattr__(self, "_first", first)  # complete, for other threads
            return first
        return self._first

    def find(
        self, paths: Sequence[str], array: NDArray[np.int64], chunks: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Rows of chunks; -1 for a chunk that the table lacks.

        Args:
            paths: arrays.
            array: (n,) the chunk's array among those.
            chunks: (n,) the chunk's position in its grid.
        """
        first, count = (
            np.fromiter((known.get(path, 0) for path in paths), np.int64, len(paths))
            for known in (self._firsts(), self.counts)
        )
        return find_rows(self.rows.chunk, first, count, array, chunks)

    def last_chunks(self) -> dict[str, int]:
        """Array path → its last chunk, of arrays that have any."""
        counts = np.fromiter(self.counts.values(), np.int64, len(self.counts))
        last = self.rows.chunk[np.cumsum(counts)[counts > 0] - 1].tolist()
        return dict(zip((path for path, count in self.counts.items() if count), last, strict=True))

    def doubled(self) -> str | None:
        """The path of an array with a duplicate chunk, or None."""
        return self._not_after(self.rows.chunk[1:] == self.rows.chunk[:-1])

    def _not_after(self, wrong: NDArray[np.bool_]) -> str | None:
        """The array of the first row that is wrong in relation to the row before it, or None.

        `wrong[i]` is about row i + 1.

        The first row of an array is never wrong.
        """
        ends = np.cumsum(np.fromiter(self.counts.values(), np.int64, len(self.counts)))
        inside = np.ones(len(wrong), bool)
        inside[ends[(ends > 0) & (ends <= len(wrong))] - 1] = False
        rows = np.flatnonzero(wrong & inside)
        return (
            None
            if not len(rows)
            else list(self.counts)[int(np.searchsorted(ends, rows[0] + 1, side="right"))]
        )
