"""The layout of a safetensors file of given tensors: its header, and each tensor's offset.

    8 bytes  length of the header, little-endian
    header   JSON: "__metadata__", and by name dtype, shape and offsets in the data; padded with
             spaces to a multiple of 8 bytes
    data     the tensors' elements, row-major and little-endian, one after another without gaps

Tensors have the same order as in the output of safetensors' own writer: by dtype, widest first
(`DTYPES` backwards), then by name, code point by code point. So every tensor begins at a multiple
of its element's size, and both writers produce the same bytes.
(https://github.com/huggingface/safetensors, `prepare` in `safetensors/src/tensor.rs`.)

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from shardckpt.errors import DtypeError, NamesMismatchError, OptionError
from shardckpt.layout.dtypes import by_name, castable
from shardckpt.state.names import shown
from shardckpt.text import Message, named, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.reading.naming.outputs import OutputTensor

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""Names in shardckpt of the dtypes that a file can hold → names in the format, in the order of the
format's own list. The format's types of fewer than eight bits are left out: they are packed, and
shardckpt's are not."""
_ORDER = {name: i for i, name in enumerate(DTYPES)}
METADATA = "__metadata__"
"""Name of the entry of a header with further texts."""
LARGEST_HEADER = 100_000_000
"""Most bytes of a header that readers accept, as in the reference implementation."""


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The layout of one file."""

    header: bytes
    """All bytes before the elements."""
    tensors: tuple[OutputTensor, ...]
    """Tensors in the order of the file."""
    offsets: tuple[int, ...]
    """Offset of each tensor's first byte, from the beginning of the file."""
    nbytes: int
    """Bytes of the complete file."""


def lay_out(
    tensors: Sequence[OutputTensor], metadata: Mapping[str, str] | None = None
) -> SafetensorsFile:
    """Lay out a file for some tensors.

    Args:
        tensors: tensors in any order.
        metadata: texts for the header, in addition to "format", which is "pt".

    Raises:
        DtypeError: the format lacks a tensor's dtype; the message names the tensor.
        NamesMismatchError: a name is the format's name of the metadata, or is not Unicode; or two
            tensors have one name.
        OptionError: the metadata is not a dict of text to text; or the header would be too long for
            readers.
    """
    for tensor in tensors:
        if tensor.dtype.name not in DTYPES:
            other = "float32" if castable(tensor.dtype, by_name("float32")) else "complex64"
            reason = (
                f"{shown(tensor.name)}: safetensors has no {tensor.dtype}; convert it, for "
                "example with "
            )
            raise DtypeError(
                Message(
                    reason,
                    named("dtype", {tensor.name: other}),
                    ", or leave it out with ",
                    named("exclude"),
                    ".",
                )
            )
        if not _is_unicode(tensor.name):
            raise NamesMismatchError(
                f"{shown(tensor.name)}: a name in a safetensors file is Unicode, without "
                "surrogates; rename it."
            )
    names = [tensor.name for tensor in tensors]
    if METADATA in names or len(set(names)) < len(names):
        odd = next(name for name in names if name == METADATA or names.count(name) > 1)
        raise NamesMismatchError(
            f"{shown(odd)}: a safetensors file cannot hold "
            f"{'that' if odd == METADATA else 'two tensors of that'} name."
        )
    ordered = sorted(tensors, key=lambda tensor: (-_ORDER[tensor.dtype.name], tensor.name))
    document: dict[str, object] = {METADATA: {"format": "pt", **check_metadata(metadata)}}
    offsets, at = [], 0
    for tensor in ordered:
        nbytes = prod(tensor.shape) * tensor.dtype.itemsize
        document[tensor.name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + nbytes],
        }
        offsets.append(at)
        at += nbytes
    header = header_of(document)
    if (length := len(header) - 8) > LARGEST_HEADER:
        reason = (
            f"The header for {len(tensors)} tensors would have {length} bytes, and readers of "
            f"safetensors take {LARGEST_HEADER}"
        )
        raise OptionError(Message(reason, "; split the file with ", named("max_shard_size"), "."))
    return SafetensorsFile(
        header, tuple(ordered), tuple(len(header) + offset for offset in offsets), len(header) + at
    )


def check_metadata(metadata: object) -> dict[str, str]:
    """Check the metadata of a header, and sort it.

    Raises:
        OptionError: it is not a dict of text to text.
    """
    texts = {} if metadata is None else metadata
    if not isinstance(texts, Mapping) or not all(
        isinstance(text, str) and _is_unicode(text) for pair in texts.items() for text in pair
    ):
        raise OptionError(
            f"metadata={shorten(metadata)}: safetensors metadata maps texts to texts; give a dict "
            "of str to str."
        )
    return dict(sorted(texts.items()))


def header_of(document: Mapping[str, object]) -> bytes:
    """A file's header with its length before it, padded to align the data.

    The data begins at a multiple of 8 bytes.
    """
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
