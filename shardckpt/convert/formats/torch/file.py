"""Reader of a file of `torch.save`: the places of its tensors.

Such a file is a zip archive without compression: `data.pkl` is the pickle of the state, and each
storage is an entry `data/<key>` (torch/serialization.py; since torch 1.6). It may be a separate
file, or a span of a larger one, as in DCP's files.

1. Its last and first bytes are read once: they hold the list of entries, and nearly always the
   pickle and the first headers.
2. `unpickle` reads the pickle without running it.
3. The header before an entry determines where the entry's bytes begin; the list of entries does not
   have the header's length.

The list has a CRC-32 of each entry, which torch does not check. Here the pickle's CRC-32 is
checked, and `StoredRun.check` can check a storage's. It is 0 if checksums were switched off
(`torch.serialization.set_crc32_options`).
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from shardckpt.convert.formats.torch.objects import TABLE, storage_of
from shardckpt.convert.formats.torch.unpickling import unpickle
from shardckpt.convert.span import StoredRun
from shardckpt.errors import CorruptionError, FormatError, ShardckptError
from shardckpt.io.files import LARGEST_WHOLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.convert.formats.torch.objects import Storage
    from shardckpt.convert.span import Span

WINDOW = 1 << 12
"""Bytes that are read at once at either end."""
_SIGNATURE = b"PK\x03\x04"
_HEADER = struct.Struct("<4s22sHH")
"""Header of an entry, before its name: signature, fields that the list repeats, and the lengths of
the name and the extra field."""


_UTF8 = 0x800
"""Flag of an entry whose name is in UTF-8; other names are in code page 437."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file of `torch.save`, open. Safe to use from several threads."""

    state: object
    """The saved state: containers, leaves, `PickledTensor`s and `Instance`s."""
    pickle_bytes: int
    """Length of the state's pickle."""
    span: Span
    """All bytes of the file."""
    _storages: Mapping[str, zipfile.ZipInfo]
    _runs: dict[str, StoredRun] = field(default_factory=dict)
    """Runs of storages whose headers are read."""

    def storage(self, storage: Storage) -> StoredRun:
        """The stored run of a storage.

        Raises:
            FormatError: there is no such entry.
            CorruptionError, MissingDataError: the file ends before the entry's header.
        """
        run = self._runs.get(storage.key)
        if run is not None:
            return run
        info = self._storages.get(storage.key)
        if info is None:
            raise FormatError(
                f"{self.span}: its pickle refers to the storage {storage.key[:100]!r}, which is "
                "not in the file; replace it with a backup."
            )
        start = _start(self.span, info, b"")
        run = StoredRun(self.span.part(start, start + info.file_size), info.CRC or None)
        self._runs[storage.key] = run
        return run

    def check_count(self, storage: Storage, itemsize: int) -> None:
        """Raise CorruptionError if a storage is said to have more elements than its entry."""
        info = self._storages.get(storage.key)
        if info is not None and storage.count * itemsize > info.file_size:
            raise CorruptionError(
                f"{self.span}: its pickle says that the storage {storage.key[:100]!r} has "
                f"{storage.count} elements, but it has {info.file_size} bytes; replace the file "
                "with a backup."
            )


def is_torch_file(beginning: bytes) -> bool:
    """Whether a file with these first bytes may be a file of `torch.save`."""
    return beginning.startswith(_SIGNATURE)


def open_torch_file(span: Span, table: Mapping[str, object] = TABLE) -> TorchFile:
    """Read the list of entries and the pickle.

    Args:
        span: the file.
        table: replacements of the names in the pickle.

    Raises:
        FormatError: it is not such a file, is malformed, or has a pickle that is too long.
        CorruptionError: its pickle fails its checksum.
        MissingDataError, StorageError: it cannot be read.
    """
    window = _Ends(span)
    if not is_torch_file(window.head):
        raise FormatError(
            f"{span}: a file of torch.save (torch 1.6 or later) begins with {_SIGNATURE!r}, but "
            f"this one with {window.head[:4]!r}; it is damaged, or has another format."
        )
    try:
        with zipfile.ZipFile(window) as archive:
            infos = archive.infolist()
    except ShardckptError:
        raise
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        OSError,
        ValueError,
        EOFError,
        struct.error,
        RuntimeError,
    ) as e:
        raise FormatError(
            f"{span}: the list of entries at its end cannot be read ({e}): it is damaged, or cut "
            "off. Replace it with a backup."
        ) from e
    pickles = [info for info in infos if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise FormatError(
            f"{span}: a file of torch.save has one data.pkl and nothing compressed; this is "
            "another archive."
        )
    top = pickles[0].filename.removesuffix("data.pkl")
    by_name = {info.filename.removeprefix(top): info for info in infos}
    if len(by_name) < len(infos):
        raise FormatError(
            f"{span}: two of its entries have the same name, so readers would disagree about its "
            "contents; get a new copy."
        )
    pickle = _content(window, pickles[0])
    if pickles[0].CRC not in (0, zlib.crc32(pickle)):
        raise CorruptionError(
            f"{span}: the CRC-32 of its pickle is wrong; replace it with a backup."
        )
    if "byteorder" in by_name and _content(window, by_name["byteorder"]) != b"little":
        raise FormatError(
            f"{span}: it was written on a big-endian machine; load it with torch and save it on a "
            "little-endian one."
        )
    return TorchFile(
        unpickle(pickle, str(span), table, persistent=storage_of),
        len(pickle),
        span,
        {
            name.removeprefix("data/"): info
            for name, info in by_name.items()
            if name.startswith("data/")
        },
    )


def _content(window: _Ends, info: zipfile.ZipInfo) -> bytes:
    start = _start(window.span, info, window.head)
    return window.part(start, start + info.file_size)


def _start(span: Span, info: zipfile.ZipInfo, head: bytes) -> int:
    """Offset of an entry's bytes."""
    called = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437", "replace")
    at, stop = info.header_offset, info.header_offset + _HEADER.size
    header = (
        head[at : stop + len(called)]
        if at >= 0 and stop + len(called) <= len(head)
        else bytes(span.read(at, stop + len(called)))
    )
    signature, _, name, extra = _HEADER.unpack(header[: _HEADER.size])
    if signature != _SIGNATURE or name != len(called) or header[_HEADER.size :] != called:
        raise FormatError(
            f"{span}: there is no header of {info.filename[:100]!r} at byte {at}; the file is "
            "damaged. Replace it with a backup."
        )
    return stop + int(name) + int(extra)


class _Ends(io.RawIOBase):
    """A span as a file object; its first and last bytes are read once."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.at = 0

    @cached_property
    def head(self) -> bytes:
        return bytes(self.span.read(0, min(WINDOW, len(self.span))))

    @cached_property
    def tail(self) -> bytes:
        if len(self.head) == len(self.span):
            return self.head
        return bytes(self.span.read(max(0, len(self.span) - WINDOW), len(self.span)))

    def part(self, start: int, stop: int) -> bytes:
        """Read a range of its bytes.

        Raises:
            FormatError: it has more than `LARGEST_WHOLE` bytes.
        """
        if stop - start > LARGEST_WHOLE:
            raise FormatError(
                f"{self.span}: its pickle or its list of entries has {stop - start} bytes, at most "
                f"{LARGEST_WHOLE} are expected; it is damaged, or has large values that are not "
                "tensors. Load it with torch and save these as tensors."
            )
        if stop <= len(self.head):
            return self.head[start:stop]
        before = len(self.span) - len(self.tail)
        return (
            self.tail[start - before : stop - before]
            if start >= before
            else bytes(self.span.read(start, stop))
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: len(self.span)}[whence]
        )
        if self.at < 0:
            raise ValueError("a position before the beginning")
        return self.at

    def read(self, n: int | None = -1) -> bytes:
        stop = len(self.span) if n is None or n < 0 else min(len(self.span), self.at + n)
        data = self.part(self.at, stop) if self.at < stop else b""
        self.at += len(data)
        return data
