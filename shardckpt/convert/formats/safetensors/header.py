"""Parser of the header of a safetensors file.

It trusts nothing that the file's size does not confirm.

A file consists of 8 bytes with the header's length N (little-endian), N bytes of JSON, and the
elements of all tensors:

    {"__metadata__": {text: text},
     name: {"dtype": "BF16", "shape": [4, 6], "data_offsets": [0, 48]}, …}

1. N is at most 100 MB, and the header is one JSON object in UTF-8, possibly with blanks around it.
2. No key occurs twice: the format forbids it, and readers would disagree about which entry counts.
3. Each tensor has the size of its dtype and shape; together the tensors fill the rest of the file,
   each byte once, without a gap.

These are the rules of the reference implementation (`Metadata::validate` in
safetensors/src/tensor.rs), except the second, which it does not check.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

from shardckpt.convert.formats.safetensors.layout import DTYPES, LARGEST_HEADER, METADATA
from shardckpt.convert.strict_json import parse_json
from shardckpt.errors import CorruptionError, DtypeError, FormatError
from shardckpt.format.documents import LARGEST_DIMENSION, MOST_DIMENSIONS
from shardckpt.layout.dtypes import by_name
from shardckpt.state.names import shown
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.convert.files.file_version import FileVersion
    from shardckpt.layout.dtypes import DType

LENGTH_BYTES = 8
"""Bytes of the header's length."""
_FIELDS = {"dtype", "shape", "data_offsets"}
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
"""Dtype names of the format → names in shardckpt."""
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")
"""Dtypes in which several elements share a byte."""


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """A tensor in a file: one run of bytes, in row-major order."""

    dtype: DType
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.start + prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a header."""

    tensors: Mapping[str, HeaderTensor]
    """Tensors by name, in the order of the header."""
    metadata: Mapping[str, str]
    """Further texts of the writer."""
    nbytes: int
    """Bytes of the complete file."""


def open_header(version: FileVersion) -> Header:
    """Read the header of a file, and check the file's length against it.

    Raises:
        FormatError: the file is malformed, or is longer or shorter than its header says.
        DtypeError: a tensor's dtype cannot be stored.
        ReplacedError, StorageError: the file has changed, or cannot be read.
    """
    where = str(version)
    try:
        nbytes = header_bytes(version.read(0, LENGTH_BYTES).tobytes(), where)
        raw = version.read(LENGTH_BYTES, LENGTH_BYTES + nbytes)
    except CorruptionError as e:
        raise FormatError(
            f"{where}: it ends before its header does; it is not a safetensors file, or is cut off."
        ) from e
    header = parse_header(raw.tobytes(), where)
    version.require_length(header.nbytes)
    return header


def header_bytes(length: bytes, where: str) -> int:
    """Length of the header in bytes, from the first bytes of a file.

    Raises:
        FormatError: the file is not a safetensors file.
    """
    nbytes = int.from_bytes(length, "little")
    if len(length) != LENGTH_BYTES or not 2 <= nbytes <= LARGEST_HEADER:
        raise FormatError(
            f"{where}: its first {LENGTH_BYTES} bytes are not the length of a header (2 to "
            f"{LARGEST_HEADER}); it is not a safetensors file, or is damaged."
        )
    return nbytes


def parse_header(raw: bytes, where: str) -> Header:
    """Parse a header.

    Args:
        raw: its bytes.
        where: the file, for messages.

    Raises:
        FormatError: it is malformed; the message names the tensor.
        DtypeError: a tensor's dtype cannot be stored.
    """
    try:
        doc = parse_json(raw)
    except ValueError as e:
        raise FormatError(
            f"{where}: its header is not JSON that can be read ({e}); the file is damaged."
        ) from e
    if not isinstance(doc, dict):
        raise FormatError(
            f"{where}: expected a JSON object as header, found a {type(doc).__name__}; the file "
            "is damaged."
        )
    metadata = doc.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise FormatError(
            f"{where}: {METADATA} in its header must map texts to texts, found "
            f"{shorten(metadata)}; the file is damaged."
        )
    begin = LENGTH_BYTES + len(raw)
    tensors = {name: _tensor(name, entry, begin, where) for name, entry in doc.items()}
    at = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != at:
            _fail(
                where,
                name,
                f"it begins at byte {tensor.start} of the file, and the tensor before it ends at "
                f"byte {at}",
            )
        at = tensor.stop
    return Header(tensors, metadata, at)


def _tensor(name: str, entry: Any, begin: int, where: str) -> HeaderTensor:
    if not isinstance(entry, dict) or not entry.keys() >= _FIELDS:
        _fail(where, name, f"{shorten(entry)} does not give dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        if dtype in _PACKED:
            raise DtypeError(
                f"{where}: {shown(name)} has dtype {dtype}, with several elements per byte; store "
                "it as bytes (U8)."
            )
        _fail(where, name, f"its dtype {shorten(dtype)} is none of {', '.join(_DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS:
        _fail(
            where,
            name,
            f"its shape {shorten(shape)} is not a list of at most {MOST_DIMENSIONS} lengths",
        )
    if not _are_sizes(offsets) or len(offsets) != 2:
        _fail(
            where,
            name,
            f"its data_offsets {shorten(offsets)} are not a first byte and one past the last",
        )
    tensor = HeaderTensor(by_name(_DTYPES[dtype]), tuple(shape), begin + offsets[0])
    if prod(max(n, 1) for n in shape) * tensor.dtype.itemsize > LARGEST_DIMENSION:
        _fail(where, name, f"its shape {shape} has more bytes than can be addressed")
    if tensor.stop != begin + offsets[1]:
        _fail(
            where,
            name,
            f"its data_offsets {offsets} do not have the {tensor.stop - tensor.start} bytes of "
            f"{dtype} and shape {shape}",
        )
    return tensor


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(n) is int and 0 <= n <= LARGEST_DIMENSION for n in value
    )


def _fail(where: str, name: str, why: str) -> NoReturn:
    raise FormatError(f"{where}: {shown(name)}: {why}; the file is damaged.")
