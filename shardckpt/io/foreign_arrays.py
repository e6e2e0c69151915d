"""Reading zarr arrays that other programs wrote: their shapes, dtypes and elements.

1. Each array lies in a directory of its own below a common one, or under such a name in one OCDBT
   database over that directory.
2. All requested arrays are opened concurrently, a limited number at a time, as zarr v2 or v3.
3. `read` returns the elements of a box. One read covers a stored chunk. It covers the complete
   array if that is small, or a complete object of several chunks (`sharding_indexed`) if that is
   small.

A missing chunk is an error, or stands for the fill value if the writer leaves out chunks that equal
it. The caller says which, because it knows the format.
"""

from __future__ import annotations

import re
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import tensorstore as ts

from shardckpt.errors import BudgetError, CorruptionError, DtypeError, FormatError, MissingDataError
from shardckpt.format.documents import LARGEST_DIMENSION, check_key
from shardckpt.io.cores import free_memory
from shardckpt.io.failures import storage_errors
from shardckpt.layout import dtypes
from shardckpt.state.names import shown
from shardckpt.text import file_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardckpt.io.store import Store
    from shardckpt.layout.box import Box
    from shardckpt.layout.dtypes import DType

_AT_ONCE = 128
"""Number of arrays that are opened at a time."""
_INDEX_BYTES = 100_000_000
"""Bytes of an OCDBT database's index that are cached: Orbax writes it as one node of up to that
size."""
_SMALL_ARRAY = 1 << 20
"""Most bytes of an array that is read at once, whatever its chunks."""
_SMALL_OBJECT = 16 << 20
"""Most bytes of an object of several chunks that is read at once."""
_LARGE = 1 << 30
"""Bytes of a chunk for which the free memory is looked at."""
_UNREADABLE = (
    "DATA_LOSS",
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "OUT_OF_RANGE",
    "Error decoding",
)
"""Parts of TensorStore's messages about bytes that cannot be decoded."""
_SURROUNDINGS = re.compile(
    r'.*?driver: (Error reading .*/(\.zarray|zarr\.json)": )?|Error parsing (object member|value) '
)
"""Parts of its messages about metadata that are not the reason: the file, and "Error …"."""


@dataclass(frozen=True, slots=True, eq=False)
class ForeignArray:
    """A zarr array, open for reading. Safe to use from several threads."""

    place: str
    """Location, for messages."""
    shape: tuple[int, ...]
    dtype: DType
    chunks: tuple[int, ...]
    """Shape of one read."""
    _array: Any
    """The `ts.TensorStore`."""

    def read(self, box: Box) -> NDArray[Any]:
        """The elements of a box, C-contiguous.

        Raises:
            MissingDataError: a chunk is not there.
            CorruptionError: a chunk cannot be decoded.
            BudgetError: a chunk has more elements than fit into the memory that is free.
            StorageError: the storage failed or refused.
        """
        chunk_bytes = prod(self.chunks) * self.dtype.storage.itemsize
        if chunk_bytes > _LARGE and (free := free_memory()) is not None and chunk_bytes > free:
            raise BudgetError(
                f"{self.place}: a chunk has {file_size(chunk_bytes)}, and {file_size(free)} of "
                "memory are free."
            )
        part = self._array[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        with _typed_errors("read", self.place):
            elements: NDArray[Any] = part.read(order="C").result()
        return elements


def open_arrays(
    place: Store,
    names: Iterable[str],
    driver: Literal["zarr", "zarr3"],
    *,
    ocdbt: bool,
    fill_missing: bool,
    unread: dict[str, str] | None = None,
) -> Mapping[str, ForeignArray]:
    """Open arrays for reading.

    Args:
        place: the directory.
        names: array names relative to it.
        driver: TensorStore's driver; "zarr" is version 2.
        ocdbt: whether an OCDBT database over the directory holds them.
        fill_missing: whether a missing chunk stands for the fill value.
        unread: gets the reason, by name, for each array whose dtype, codecs or other metadata are
            not supported, in place of an error.

    Raises:
        MissingDataError: an array does not exist.
        CorruptionError: an array's metadata is invalid.
        FormatError: an array is too large to be addressed, has chunks much larger than itself, or
            its name leads outside `place`.
        DtypeError: an array's elements cannot be stored.
        StorageError: the storage failed or refused.
    """
    database = _database(place) if ocdbt else None
    under_way: deque[tuple[str, str, Any]] = deque()
    arrays: dict[str, ForeignArray] = {}
    for name in names:
        if len(under_way) >= _AT_ONCE:
            _finish(arrays, unread, *under_way.popleft())
        where = f"{place}/{name}"
        with _typed_errors("open", where):
            check_key(name, place)
            values = place.sub(name).kvstore() if database is None else database / f"{name}/"
            spec = {
                "driver": driver,
                "fill_missing_data_reads": fill_missing,
                "recheck_cached_metadata": "open",
            }
            under_way.append(
                (
                    name,
                    where,
                    ts.open(spec, kvstore=values, open=True, read=True, context=place.context()),
                )
            )
    while under_way:
        _finish(arrays, unread, *under_way.popleft())
    return arrays


def _database(place: Store) -> Any:
    """The OCDBT database over a directory."""
    # Its error message is clearer than TensorStore's if the file is missing.
    place.read("manifest.ocdbt")
    spec = {
        "driver": "ocdbt",
        "base": place.location.kvstore(),
        "cache_pool": {"total_bytes_limit": _INDEX_BYTES},
    }
    with _typed_errors("open", place):
        return ts.KvStore.open(spec, context=place.context()).result()


def _finish(
    arrays: dict[str, ForeignArray],
    unread: dict[str, str] | None,
    name: str,
    where: str,
    opening: Any,
) -> None:
    """Add an array that has been opened, or the reason why it is not read."""
    try:
        with _typed_errors("open", where):
            array = opening.result()
    except CorruptionError as e:
        text = str(e.__cause__)
        if unread is None or text.endswith("Invalid JSON"):
            raise
        unread[name] = _SURROUNDINGS.sub("", text)
        return
    try:
        dtype = dtypes.of_numpy(array.dtype.numpy_dtype)
    except DtypeError as e:
        text = f"{shown(name)} is an array of {array.dtype.name}"
        if unread is None:
            raise DtypeError(f"{where}: {text}: {e}") from e
        unread[name] = text
        return
    shape = tuple(array.shape)
    if prod(max(n, 1) for n in shape) * dtype.itemsize > LARGEST_DIMENSION:
        raise FormatError(
            f"{where}: an array of shape {shape} has more bytes than can be addressed."
        )
    layout = array.chunk_layout
    whole, inner = tuple(layout.write_chunk.shape or ()), tuple(layout.read_chunk.shape or ())
    if prod(inner) * dtype.itemsize > max(_SMALL_OBJECT, 2 * prod(shape) * dtype.itemsize):
        # TensorStore would allocate a complete chunk, and aborts the process if it gets no memory.
        raise FormatError(
            f"{where}: an array of shape {shape} has chunks of shape {inner}, which no library "
            "writes; replace it with a backup."
        )
    at_once = (
        shape
        if prod(shape) * dtype.itemsize <= _SMALL_ARRAY
        else whole
        if prod(whole) * dtype.itemsize <= _SMALL_OBJECT
        else inner
    )
    arrays[name] = ForeignArray(
        where,
        shape,
        dtype,
        tuple(max(1, min(c, n)) for c, n in zip(at_once, shape, strict=True)),
        array,
    )


@contextmanager
def _typed_errors(action: str, place: object) -> Iterator[None]:
    """Turn TensorStore's errors for missing and invalid bytes into typed errors.

    All others are handled by `storage_errors`.
    """
    with storage_errors(action, place):
        try:
            yield
        except ValueError as e:
            text = str(e)
            if "NOT_FOUND" in text:
                raise MissingDataError(f"{place}: {text}; replace it with a backup.") from e
            if any(part in text for part in _UNREADABLE):
                raise CorruptionError(
                    f"{place}: stored bytes cannot be read: {text}; replace the files with a "
                    "backup."
                ) from e
            raise
