"""The chunk table: where a host put each of its chunks, and what they hold.

One binary file per host, little-endian throughout:

```
8 bytes    magic, b"SHCKTAB1"
u32        length of the header in bytes
header     JSON: {"files": [name, …], "arrays": [[path, number of chunks], …]}
columns    for all chunks, array after array, each array in grid order:
           u64 chunk      position in the array's grid, row-major, ascending within an array
           u32 file       index into "files"; 0xFFFFFFFF: the chunk is an object of its own
           u64 offset     first byte in the file
           u32 length     bytes stored, the codec's 4-byte checksum included
           u32 crc32c     of the stored bytes before that checksum
```

Files are named relative to the attempt. The host's record holds the table's size and SHA-256, so a reader that
goes by the table knows for each chunk the place and the contents: two swapped data files do not pass.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardckpt.errors import FormatError
from shardckpt.io.url import check_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["OWN_OBJECT", "ArrayChunks", "decode_table", "encode_table", "merge_tables"]

MAGIC = b"SHCKTAB1"
OWN_OBJECT = 0xFFFFFFFF
"""`file` of a chunk that is an object of its own (plain layout)."""
LARGEST_OFFSET = 1 << 62
"""Bytes; larger ones do not fit the system's calls."""
_COLUMNS = (("chunk", "<u8"), ("file", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("crc", "<u4"))
_ROW_BYTES = sum(np.dtype(t).itemsize for _, t in _COLUMNS)
_Scalar = TypeVar("_Scalar", bound=np.generic)


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
    """crc32c of the stored bytes, without the codec's own checksum."""

    @classmethod
    def none(cls) -> ArrayChunks:
        """No chunks."""
        return cls(**{name: np.empty(0, dtype) for name, dtype in _COLUMNS})

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, int, int, int, int]]) -> ArrayChunks:
        """Few chunks, given as (chunk, file, offset, length, crc), ascending."""
        return cls(**{name: np.array(column, dtype) for (name, dtype), column in zip(_COLUMNS, zip(*rows, strict=True), strict=True)})

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.chunk)

    def first_missing(self, num_chunks: int) -> int | None:
        """The first of a grid's chunks that the table does not have; None where it has all, and row i is chunk i.

        Cheap however large the grid claims to be, because rows ascend.
        """
        if len(self.chunk) >= num_chunks and (num_chunks == 0 or int(self.chunk[num_chunks - 1]) == num_chunks - 1):
            return None
        astray = np.flatnonzero(self.chunk != np.arange(len(self.chunk), dtype=np.uint64))
        return int(astray[0]) if len(astray) else len(self.chunk)

    def find(self, chunk: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of those chunks, -1 where the table has none."""
        if not len(self.chunk):
            return np.full(len(chunk), -1, np.int64)
        wanted = chunk.astype(np.uint64)
        row = np.minimum(np.searchsorted(self.chunk, wanted), len(self.chunk) - 1)
        found: NDArray[np.int64] = np.where(self.chunk[row] == wanted, row, -1)
        return found

    def row(self, chunk: int) -> int:
        """Row of one chunk, -1 where the table has none."""
        row = int(np.searchsorted(self.chunk, np.uint64(chunk)))
        return row if row < len(self.chunk) and int(self.chunk[row]) == chunk else -1


def encode_table(files: Sequence[str], arrays: Mapping[str, ArrayChunks]) -> bytes:
    """The table's bytes; `arrays` in the order in which they are stored."""
    header = json.dumps(
        {"files": list(files), "arrays": [[path, len(rows)] for path, rows in arrays.items()]}, separators=(",", ":")
    ).encode()
    columns = [
        np.concatenate([np.asarray(getattr(rows, name), dtype) for rows in arrays.values()]) if arrays else np.empty(0, dtype)
        for name, dtype in _COLUMNS
    ]
    return b"".join([MAGIC, struct.pack("<I", len(header)), header, *(c.tobytes() for c in columns)])


def decode_table(data: bytes, where: str) -> tuple[list[str], dict[str, ArrayChunks]]:
    """Files and arrays of a table.

    Args:
        data: the whole table.
        where: its url, for messages.

    Raises:
        FormatError: not a chunk table, or one that contradicts itself.
    """
    if data[:8] != MAGIC or len(data) < 12:
        raise FormatError(f"{where}: not a chunk table; the checkpoint was written by something else or is damaged.")
    begin = 12 + struct.unpack("<I", data[8:12])[0]
    files, counts = _header(data[12:begin], where)
    total = sum(counts.values())
    if begin + total * _ROW_BYTES != len(data):
        raise FormatError(f"{where}: {total} chunks need {begin + total * _ROW_BYTES} bytes, the chunk table has {len(data)}.")
    columns = {}
    for name, dtype in _COLUMNS:
        columns[name] = np.frombuffer(data, dtype, total, begin)
        begin += total * np.dtype(dtype).itemsize
    if total and (columns["file"][columns["file"] != OWN_OBJECT] >= len(files)).any():
        raise FormatError(f"{where}: the chunk table refers to a file that it does not name.")
    if (columns["offset"] > LARGEST_OFFSET).any():
        raise FormatError(f"{where}: the chunk table has a chunk at byte {columns['offset'].max()}, where no file reaches.")
    arrays, row = {}, 0
    for path, count in counts.items():
        rows = ArrayChunks(**{name: column[row : row + count] for name, column in columns.items()})
        if count > 1 and not (rows.chunk[1:] > rows.chunk[:-1]).all():
            raise FormatError(f"{where}: the chunks of {path} are not in grid order, or one is there twice.")
        arrays[path] = rows
        row += count
    return files, arrays


def _header(data: bytes, where: str) -> tuple[list[str], dict[str, int]]:
    """The files, and the number of chunks of each array."""
    try:
        header = json.loads(data)
        files, listing = header["files"], header["arrays"]
        counts = {path: count for path, count in listing}  # noqa: C416  (a malformed pair must fail here)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise FormatError(f"{where}: the chunk table's header is unreadable ({e}).") from e
    sane = (
        isinstance(files, list)
        and all(isinstance(f, str) for f in files)
        and len(counts) == len(listing)
        and all(isinstance(p, str) and isinstance(n, int) and not isinstance(n, bool) and n >= 0 for p, n in counts.items())
    )
    if not sane:
        raise FormatError(f"{where}: the chunk table's header names something that is no file, or an array twice.")
    for file in files:
        try:
            check_key(file, where)
        except FormatError as e:
            raise FormatError(f"{where}: the chunk table's header names a file outside the attempt: {e}") from e
    return files, counts


def merge_tables(tables: Sequence[tuple[list[str], dict[str, ArrayChunks]]]) -> tuple[list[str], dict[str, ArrayChunks]]:
    """One table over all hosts.

    Raises:
        FormatError: two hosts wrote the same chunk.
    """
    if len(tables) == 1:
        return tables[0]
    files: list[str] = []
    parts: dict[str, list[ArrayChunks]] = {}
    for names, arrays in tables:
        base = len(files)
        files.extend(names)
        for path, rows in arrays.items():
            file = np.where(rows.file == OWN_OBJECT, OWN_OBJECT, rows.file.astype(np.uint64) + base).astype(np.uint32)
            parts.setdefault(path, []).append(ArrayChunks(rows.chunk, file, rows.offset, rows.length, rows.crc))
    merged = {}
    for path, several in parts.items():
        order = np.argsort(np.concatenate([p.chunk for p in several]), kind="stable")

        def column(name: str, several: list[ArrayChunks] = several, order: NDArray[np.intp] = order) -> NDArray[_Scalar]:
            return np.concatenate([getattr(p, name) for p in several])[order]

        rows = ArrayChunks(**{name: column(name) for name, _ in _COLUMNS})
        if len(rows) > 1 and (rows.chunk[1:] == rows.chunk[:-1]).any():
            raise FormatError(f"{path}: two hosts wrote the same chunk; the checkpoint's records contradict each other.")
        merged[path] = rows
    return files, merged
