"""A zarr-python store over a checkpoint of either layout; it verifies each chunk before zarr-python sees it.

zarr-python reads keys and bytes through a `Store`. `CheckpointStore` differs from others:

1. `zarr.json` documents are made from the commit record, never read from the storage.
2. Chunks come from a `ChunkReader`: found with the chunk table, compared with its checksums.
3. Missing chunks are errors. A store returns None for a key without bytes, and zarr-python then fills with zeros.
   This store returns None only for keys that belong to no chunk.

Names become nested groups at their slashes. A tensor that is stored in pieces appears as the arrays of its pieces.
"""

from __future__ import annotations

import asyncio
import json
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from shardckpt.errors import OptionError
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES, chunk_object_key, group_json, parent_groups, zarr_documents
from shardckpt.io.store import Store as Place
from shardckpt.reading.reader import open_reader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from zarr.core.buffer import Buffer, BufferPrototype

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import TensorRecord
    from shardckpt.io.url import Location
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.based_reader import BasedReader
    from shardckpt.reading.reader import ChunkReader


DOCUMENT = "zarr.json"


class CheckpointStore(Store):
    """A committed checkpoint as a zarr group, read-only: `zarr.open_group(ckpt.zarr_store(), mode="r")`."""

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, record: CheckpointRecord, reader: ChunkReader | BasedReader) -> None:
        """Show the checkpoint of a commit record; `reader` reads its chunks, also those in bases."""
        super().__init__(read_only=True)
        self._record = record
        self._reader = reader
        self._arrays: dict[str, tuple[TensorRecord, Piece]] = {p.path: (t, p) for t in record.structure.tensors.values() for p in t.pieces}
        documents = dict(zarr_documents(record.structure, record.compression, in_bases=True))
        groups = {path: group_json() for path in parent_groups(documents)}
        self._documents = {**groups, **documents}
        self._documents[""] = group_json(members={path: document for path, document in self._documents.items() if path})
        self._children: dict[str, list[str]] = {path: [] for path in groups}
        for path in self._documents:
            if path:
                parent, _, name = path.rpartition("/")
                self._children[parent].append(name)

    def with_read_only(self, read_only: bool = False) -> CheckpointStore:
        """Return the store itself; OptionError if a writable one is requested."""
        if not read_only:
            self._check_writable()
        return self

    def __eq__(self, value: object) -> bool:
        """Whether both show the same attempt of the same place; attempt names are never reused."""
        return isinstance(value, CheckpointStore) and (self._place, self._record.attempt) == (value._place, value._record.attempt)

    __hash__ = None  # type: ignore[assignment]  # like zarr's own stores

    def __reduce__(self) -> tuple[Callable[..., CheckpointStore], tuple[Location, CheckpointRecord]]:
        """Pickle place and record; the unpickled store reads the chunk tables again."""
        return _reopened, (self._place, self._record)

    def __repr__(self) -> str:
        """Location of the attempt."""
        return f"<CheckpointStore {self._place}>"

    @property
    def _place(self) -> Location:
        """Location of the attempt."""
        return self._reader._store.location  # noqa: SLF001  (pickling and comparing are the only uses)

    # --- reading ----------------------------------------------------------------------------------------------------

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """The bytes of a document or of a chunk, or a part of them; None for a key that names neither.

        Raises:
            MissingDataError: a chunk is gone.
            CorruptionError: a chunk is damaged; checked for parts of chunks too.
        """
        document = self._document(key)
        if document is not None:
            data = json.dumps(document).encode()
        else:
            found = self._chunk(key)
            if found is None:
                return None
            tensor, piece, position = found
            data = await asyncio.to_thread(self._reader.stored_chunk, tensor.name, tensor.dtype.storage, piece, position)
        return prototype.buffer.from_bytes(_part(data, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Call `get` for several keys and ranges."""
        return list(await asyncio.gather(*(self.get(key, prototype, byte_range) for key, byte_range in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Whether the checkpoint has such a document or chunk, according to its record, in which every chunk of a grid exists."""
        return self._document(key) is not None or self._chunk(key) is not None

    async def getsize(self, key: str) -> int:
        """Bytes of a document or chunk; a compressed chunk is read for that. FileNotFoundError if there is none."""
        found = self._chunk(key)
        compression = found and (self._record if found[0].base is None else found[0].base.base).compression
        if found is None or compression is not None:
            return await super().getsize(key)
        tensor, piece, _ = found
        return prod(piece.chunks) * tensor.dtype.storage.itemsize + CHECKSUM_BYTES

    # --- listing ----------------------------------------------------------------------------------------------------

    async def list(self) -> AsyncIterator[str]:
        """All keys."""
        for key in self._keys(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All keys that start with `prefix`."""
        for key in self._keys(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below a path."""
        path = prefix.strip("/")
        if path in self._children:
            yield DOCUMENT
            for name in self._children[path]:
                yield name
            return
        found = self._array(path)
        if found is None:
            return
        _, piece, rest = found
        if not rest:
            yield DOCUMENT
            if piece.num_chunks:
                yield "c"
            return
        index = _index(rest, piece.grid[: len(rest) - 1])
        if index is not None and len(index) < len(piece.grid):
            for i in range(piece.grid[len(index)]):
                yield str(i)

    def _keys(self, prefix: str) -> Iterator[str]:
        """All keys that start with `prefix`."""
        for path in self._documents:
            key = _join(path, DOCUMENT)
            if key.startswith(prefix):
                yield key
        for path, (_, piece) in self._arrays.items():
            chunks = f"{path}/c"
            if chunks.startswith(prefix) or prefix.startswith(chunks):
                keys = (chunk_object_key(piece, position) for position in range(piece.num_chunks))
                yield from (key for key in keys if key.startswith(prefix))

    # --- keys -------------------------------------------------------------------------------------------------------

    def _document(self, key: str) -> dict[str, Any] | None:
        """The document with that key, or None."""
        path, _, name = key.rpartition("/")
        return self._documents.get(path) if name == DOCUMENT else None

    def _array(self, path: str) -> tuple[TensorRecord, Piece, Sequence[str]] | None:
        """The array that a path leads into, and the rest of the path. Arrays are never nested."""
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            found = self._arrays.get("/".join(parts[:end]))
            if found is not None:
                return *found, parts[end:]
        return None

    def _chunk(self, key: str) -> tuple[TensorRecord, Piece, int] | None:
        """The chunk with that key: tensor, array, position in grid order; None if there is none."""
        found = self._array(key)
        if found is None:
            return None
        tensor, piece, rest = found
        index = _index(rest, piece.grid)
        if index is None:
            return None
        position = 0
        for i, n in zip(index, piece.grid, strict=True):
            position = position * n + i
        return tensor, piece, position

    # --- refusing to write ------------------------------------------------------------------------------------------

    def _check_writable(self) -> NoReturn:
        raise OptionError(f"{self._place}: a checkpoint is read-only; open it with mode='r', or copy what you want to change.")

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse: OptionError."""
        del key, value
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refuse: OptionError."""
        del key
        self._check_writable()


def _reopened(place: Location, record: CheckpointRecord) -> CheckpointStore:
    """Open a store of the attempt at a place, after unpickling."""
    return CheckpointStore(record, open_reader(Place.open(place), record))


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _index(parts: Sequence[str], grid: tuple[int, ...]) -> list[int] | None:
    """The coordinates in `c/0/1`, in zarr's form and inside the grid; None if the parts are invalid."""
    if not parts or parts[0] != "c" or len(parts) != len(grid) + 1:
        return None
    index = [int(part) if part.isdecimal() and len(part) < 20 else -1 for part in parts[1:]]
    inside = all(0 <= i < n and str(i) == part for i, n, part in zip(index, grid, parts[1:], strict=True))
    return index if inside else None


def _part(data: bytes, wanted: ByteRequest | None) -> bytes:
    """The requested part of an object, cut off at the object's ends."""
    match wanted:
        case None:
            return data
        case RangeByteRequest(start, end):
            return data[start:end]
        case OffsetByteRequest(offset):
            return data[offset:]
        case SuffixByteRequest(suffix):
            return data[max(0, len(data) - suffix) :]
        case _:
            raise OptionError(f"{wanted!r} is no byte range of zarr's; use RangeByteRequest, OffsetByteRequest or SuffixByteRequest.")
