"""A zarr-python store over a checkpoint of either layout.

It verifies each chunk before zarr-python sees it.

zarr-python reads keys and bytes through a `Store`. `CheckpointStore` takes them from `ZarrKeys`.
Missing chunks are errors. (Other stores return None for a key without bytes, and zarr-python then
fills with zeros. This store returns None only for keys that belong to no chunk.)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numcodecs  # noqa: F401  (before zarr and modules of both, for other threads that import them)
import zarr  # noqa: F401
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)

from shardckpt.errors import MissingDataError, OptionError
from shardckpt.io.store import Store as Place
from shardckpt.reading.missing import replaced_error
from shardckpt.reading.reader import open_reader
from shardckpt.reading.zarr_keys import ZarrKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from zarr.core.buffer import Buffer, BufferPrototype

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.io.url import Location
    from shardckpt.reading.reader import ChunkReader

T = TypeVar("T")


class CheckpointStore(Store):
    """A committed checkpoint as a zarr group: `zarr.open_group(ckpt.zarr_store(), mode="r")`.

    The group is read-only.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, record: CheckpointRecord, reader: ChunkReader) -> None:
        """Show the checkpoint of a commit record.

        `reader` reads its chunks, also those in bases.
        """
        super().__init__(read_only=True)
        self._record = record
        self._reader = reader
        self._keys = ZarrKeys(record, reader)

    def with_read_only(self, read_only: bool = False) -> CheckpointStore:
        """Return the store itself; OptionError if a writable one is requested."""
        if not read_only:
            self._check_writable()
        return self

    def __eq__(self, value: object) -> bool:
        """Whether both show the same attempt of the same place; attempt names are never reused."""
        return isinstance(value, CheckpointStore) and (self._place, self._record.attempt) == (
            value._place,
            value._record.attempt,
        )

    __hash__ = None  # type: ignore[assignment]  # like zarr's own stores

    def __reduce__(
        self,
    ) -> tuple[Callable[..., CheckpointStore], tuple[Location, CheckpointRecord]]:
        """Pickle place and record; the unpickled store reads the chunk tables again."""
        return _reopen, (self._place, self._record)

    def __repr__(self) -> str:
        """Location of the attempt."""
        return f"<CheckpointStore {self._place}>"

    @property
    def _place(self) -> Location:
        """Location of the attempt."""
        return self._reader.source.place.location

    # --- reading ----------------------------------------------------------------------------------

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The bytes of a document or of a chunk, or a part of them.

        None for a key that names neither.

        Raises:
            MissingDataError: a chunk is gone.
            ReplacedError: so is the checkpoint, or another one has taken its place.
            CorruptionError: a chunk is damaged; checked for parts of chunks too.
        """
        data = self._keys.document(key)
        if data is None:
            data = await asyncio.to_thread(self._read, self._keys.read, key)
        return None if data is None else prototype.buffer.from_bytes(_part(data, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Call `get` for several keys and ranges."""
        return list(
            await asyncio.gather(
                *(self.get(key, prototype, byte_range) for key, byte_range in key_ranges)
            )
        )

    async def exists(self, key: str) -> bool:
        """Whether the checkpoint has such a document or chunk, according to its record.

        By the record, every chunk of a grid exists.
        """
        return self._keys.exists(key)

    async def getsize(self, key: str) -> int:
        """Bytes of a document or chunk; a compressed chunk is read for that.

        FileNotFoundError if there is none.
        """
        nbytes = await asyncio.to_thread(self._read, self._keys.size, key)
        if nbytes is None:
            raise FileNotFoundError(key)
        return nbytes

    def _read(self, read: Callable[[str], T | None], key: str) -> T | None:
        """Call `read` with a key, and say if the checkpoint was replaced or deleted."""
        try:
            return read(key)
        except MissingDataError as e:
            root, attempt = self._place.parent, self._record.attempt
            replaced = None
            if root is not None and self._place.name == attempt:
                replaced = replaced_error(Place.open(root), root, attempt)
            if replaced is None:
                raise
            raise replaced from e

    # --- listing ----------------------------------------------------------------------------------

    async def list(self) -> AsyncIterator[str]:
        """All keys."""
        for key in self._keys.starting_with():
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All keys that start with `prefix`."""
        for key in self._keys.starting_with(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below a path."""
        for name in self._keys.children(prefix.strip("/")) or ():
            yield name

    # --- refusing to write ------------------------------------------------------------------------

    def _check_writable(self) -> NoReturn:
        raise OptionError(
            f"{self._place}: a checkpoint is read-only; open it with mode='r', or copy what you "
            "want to change."
        )

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse: OptionError."""
        del key, value
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refuse: OptionError."""
        del key
        self._check_writable()


def _reopen(place: Location, record: CheckpointRecord) -> CheckpointStore:
    """Open a store of the attempt at a place, after unpickling."""
    return CheckpointStore(record, open_reader(Place.open(place), record))


def _part(data: bytes, request: ByteRequest | None) -> bytes:
    """The requested part of an object, cut off at the object's ends."""
    match request:
        case None:
            return data
        case RangeByteRequest(start, end):
            return data[start:end]
        case OffsetByteRequest(offset):
            return data[offset:]
        case SuffixByteRequest(suffix):
            return data[max(0, len(data) - suffix) :]
        case _:
            raise OptionError(
                f"{request!r} is not a byte range of zarr's; use RangeByteRequest, "
                "OffsetByteRequest or SuffixByteRequest."
            )
