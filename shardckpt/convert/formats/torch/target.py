"""Writer of one file that `torch.load(path, weights_only=True)` reads.

Such a file is a zip archive of uncompressed records: a description of the state, and the bytes of
each tensor, row-major, at a multiple of 64 bytes.

1. torch.save itself writes the file, for tensors without memory, and leaves out their bytes
   (`skip_data`). So the description is torch's own, and every tensor has its place. Tied tensors
   are one record.
2. Then blocks are written at their offsets, in any order.
3. torch could not compute the CRC-32 of the records. torch does not check it, but other readers do,
   so it is computed from the CRCs of the written parts (`crc32`).
4. The file is made durable, and takes its name.

`weights_only` accepts no numpy scalars: they become Python numbers of the same value.
"""

from __future__ import annotations

import mmap
import os
import struct
import warnings
import zipfile
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import IO, TYPE_CHECKING, Any

import crc32c
import numpy as np

from shardckpt.convert.files.draft import Draft
from shardckpt.convert.files.read_back import WrittenBlock
from shardckpt.convert.formats.torch.crc32 import PartsCrc
from shardckpt.convert.small_leaves import describe_losses, find_unsupported
from shardckpt.convert.span import find_runs
from shardckpt.convert.state_writer import StateWriter
from shardckpt.errors import BudgetError, DtypeError, MissingDataError, MissingExtraError
from shardckpt.io.buffers import gather_write
from shardckpt.io.failures import storage_errors
from shardckpt.io.store import byte_view
from shardckpt.io.threads import call_aside
from shardckpt.state import unflatten
from shardckpt.state.document import Tensor, Tied, leaves_of
from shardckpt.state.names import shown
from shardckpt.streaming.stream import read_once_blocks
from shardckpt.text import install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import Structure
    from shardckpt.io.url import Location
    from shardckpt.layout.box import Box
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.naming.outputs import OutputTensor
    from shardckpt.state.document import Node

_RECORD_BYTES = 512
"""Approximate bytes of a record's headers and alignment, and of its tensor's description."""
_LONGEST_INT = 255
"""Bytes of the longest int that `weights_only` reads."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR = b"PK\x07\x08"
_HAS_DESCRIPTOR = 1 << 3


@dataclass(slots=True)
class _Record:
    """The record of one tensor in the archive."""

    offset: int
    """Offset of its first byte in the file."""
    nbytes: int
    crc_at: tuple[int, ...]
    """Offsets at which its CRC-32 is written."""
    crc: PartsCrc = field(default_factory=PartsCrc)
    """CRC-32 of the bytes written so far."""


class TorchFileWriter(StateWriter):
    """A file that is being written."""

    checksum = staticmethod(zlib.crc32)

    def __init__(
        self, structure: Structure, location: Location, *, overwrite: bool = False
    ) -> None:
        """Lay out the file.

        Args:
            structure: the state; its tensors have the dtypes in which they are written.
            location: the file.
            overwrite: whether to replace an existing file when the new one is complete.

        Raises:
            DtypeError: torch lacks the dtype of a tensor; the message names the tensor.
            MissingExtraError: torch is not installed, or too old.
            AlreadyExistsError, OptionError, StorageError: the file cannot be written at `location`.
            BudgetError: the process may not reserve address space of the size of the largest
                tensor.
        """
        tree = structure.nodes
        dtypes = torch_dtypes(structure)
        left = find_unsupported(tree, _refusal)
        self.notes: list[str] = describe_losses(tree, left)
        """Parts of the state that are left out or changed, a line each."""
        self._tensors = structure.tensors
        nbytes = sum(tensor.nbytes + _RECORD_BYTES for tensor in self._tensors.values())
        self._draft = Draft(location, overwrite=overwrite, nbytes=nbytes)
        try:
            _write_without_data(self._draft, tree, structure, dtypes, left)
            self._records = self._records_of(tree)
        except BaseException:
            self.abort()
            raise

    def blocks(self, output: OutputTensor, stored: Sequence[Piece], room: int) -> Sequence[Piece]:
        """Blocks that read each stored byte once."""
        return read_once_blocks(output, stored, room)

    def put(self, output: OutputTensor, box: Box, array: NDArray[Any]) -> None:
        """Write one block."""
        record, data = self._records[output.name], byte_view(array.reshape(-1).view(np.uint8))
        offsets, length = find_runs(output.shape, box, array.itemsize)
        for at, offset in zip(range(0, data.nbytes, length), offsets.tolist(), strict=True):
            run = data[at : at + length]
            with storage_errors("write", self._draft.final):
                gather_write(self._draft.fd, record.offset + offset, [run])
            record.crc.add(offset, length, zlib.crc32(run))

    def complete(self) -> list[WrittenBlock]:
        """Write the records' CRC-32."""
        for name, record in self._records.items():
            if record.crc.nbytes < record.nbytes:
                raise MissingDataError(
                    f"{self._draft.final}: not all of {shown(name)} was written; nothing was "
                    "published. Export again."
                )
            with storage_errors("write", self._draft.final):
                for at in record.crc_at:
                    crc = memoryview(struct.pack("<I", record.crc.value))
                    gather_write(self._draft.fd, at, [crc])
        with storage_errors("write", self._draft.final):
            os.fsync(self._draft.fd)
        return [
            WrittenBlock(name, self._draft.path, [(r.offset, r.nbytes)], r.crc.value)
            for name, r in self._records.items()
        ]

    def _records_of(self, tree: Node) -> dict[str, _Record]:
        """The records by tensor name.

        torch.save numbers the records in the order in which it met their tensors.
        """
        stored = dict.fromkeys(
            leaf.stored for leaf in leaves_of(tree) if isinstance(leaf, Tensor | Tied)
        )
        by_number = _records(self._draft)
        records = {name: by_number[number] for number, name in enumerate(stored)}
        assert all(
            record.nbytes == self._tensors[name].nbytes for name, record in records.items()
        ), "records are in order of appearance"
        return records


class _Output:
    """A file with the methods that torch.save calls, of which none raises an error.

    torch's writer is C++, and writes once more when it is destroyed, perhaps long after: an error
    would then end the process. So the first error is kept, and nothing is written after it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file: IO[bytes] | None = file
        self._failure: Exception | None = None
        self.checksum = 0

    def write(self, data: Any) -> int:
        def append(file: IO[bytes]) -> None:
            file.write(data)
            self.checksum = crc32c.crc32c(data, self.checksum)

        self._do(append)
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int) -> None:
        self._do(lambda file: file.seek(offset, whence))

    def flush(self) -> None:
        self._do(lambda file: file.flush())

    def _do(self, work: Callable[[IO[bytes]], object]) -> None:
        if self._file is not None:
            try:
                work(self._file)
            except Exception as e:  # noqa: BLE001  (`end` raises it)
                self._failure, self._file = e, None

    def end(self) -> None:
        """Leave the file alone from now on; raise the first error."""
        self._file = None
        if self._failure is not None:
            raise self._failure


def torch_save(value: object, file: IO[bytes], *, skip_data: bool = False) -> int:
    """Call `torch.save` so that neither Ctrl-C nor a full disk ends the process.

    Args:
        value: the value.
        file: an open file; written from where it stands.
        skip_data: whether to leave out the bytes of tensors.

    Returns:
        The crc32c of the bytes that were written.
    """
    import torch

    skip = torch.serialization.skip_data if skip_data else nullcontext
    output = _Output(file)

    def save() -> None:
        with skip():
            torch.save(value, output)

    try:
        call_aside(save, "shardckpt-export")
    finally:
        output.end()
    return output.checksum


def torch_dtypes(structure: Structure) -> dict[str, Any]:
    """The torch dtype of every tensor.

    Raises:
        DtypeError: torch lacks a dtype; the message names the tensor.
        MissingExtraError: torch is not installed.
    """
    try:
        from shardckpt.frameworks.torch import torch_dtype
    except ImportError:
        raise MissingExtraError(
            "PyTorch writes this format and is not installed; install it with "
            f"`{install_command('torch')}`."
        ) from None
    dtypes = {name: torch_dtype(tensor.dtype) for name, tensor in structure.tensors.items()}
    lacking = next((name for name, dtype in dtypes.items() if dtype is None), None)
    if lacking is not None:
        raise DtypeError(
            f"{shown(lacking)}: torch has no dtype {structure.tensors[lacking].dtype}; export it "
            "in another dtype, or leave it out."
        )
    return dtypes


def _refusal(value: object) -> str | None:
    """The reason why torch.load(weights_only=True) would not read a small leaf.

    None: it reads the leaf.
    """
    if value == b"" and isinstance(value, bytes):
        return "torch.load(weights_only=True) reads no empty bytes"
    if isinstance(value, int) and value.bit_length() >= 8 * _LONGEST_INT:
        return f"torch.load(weights_only=True) reads no int of more than {_LONGEST_INT} bytes"
    if isinstance(value, np.generic) and type(value.item()) not in (
        bool,
        int,
        float,
        complex,
        str,
        bytes,
    ):
        return f"torch.load(weights_only=True) reads no {type(value).__name__} of numpy"
    return None


def _write_without_data(
    draft: Draft, tree: Node, structure: Structure, dtypes: dict[str, Any], left: dict[str, str]
) -> None:
    """Write everything except the tensors' bytes, with torch.save."""
    import torch

    if not hasattr(torch.serialization, "skip_data"):
        raise MissingExtraError(
            f"torch {torch.__version__} cannot write a file without having all of it in memory; "
            "install 2.6 or later."
        )
    state = _of_python(
        unflatten(tree, _without_memory(structure, dtypes), lambda name: name not in left)
    )
    # torch.save would store the file's temporary name if it got a path.
    with storage_errors("write", draft.final), draft.path.open("wb") as file:
        torch_save(state, file, skip_data=True)


def _without_memory(structure: Structure, dtypes: dict[str, Any]) -> dict[str, Any]:
    """Tensors over address ranges without memory behind them, as long as nobody reads there.

    Each has its own storage.

    There is one address range per dtype, because torch.save refuses storages of two dtypes at one
    address. (torch's own `FakeTensor` would work, too, but takes seconds to import.)
    """
    import torch

    largest = max((tensor.nbytes for tensor in structure.tensors.values()), default=0)
    ranges: dict[Any, mmap.mmap] = {}
    tensors = {}
    for name, tensor in structure.tensors.items():
        dtype = dtypes[name]
        if tensor.nbytes == 0:
            tensors[name] = torch.empty(tensor.shape, dtype=dtype)
            continue
        if dtype not in ranges:
            try:
                ranges[dtype] = mmap.mmap(
                    -1, largest, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ
                )
            except OSError as e:
                raise BudgetError(
                    f"{shown(name)}: cannot reserve {largest} bytes of address space ({e}); raise "
                    "`ulimit -v`."
                ) from e
        # torch warns that these tensors cannot be written to.
        with warnings.catch_warnings(action="ignore"):
            tensors[name] = torch.frombuffer(
                ranges[dtype], dtype=dtype, count=prod(tensor.shape)
            ).reshape(tensor.shape)
    return tensors


def _of_python(value: object) -> object:
    """The same value with Python's numbers instead of numpy's."""
    if isinstance(value, dict):
        return {key: _of_python(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_of_python(inner) for inner in value)  # type: ignore[call-arg, attr-defined]
    return value.item() if isinstance(value, np.generic) else value


def _records(draft: Draft) -> dict[int, _Record]:
    """The records of tensors in the archive, by number."""
    by_number: dict[int, _Record] = {}
    with storage_errors("read", draft.final), zipfile.ZipFile(draft.path) as archive:
        at = archive.start_dir
        for info in archive.infolist():
            central = _CENTRAL_HEADER.unpack(os.pread(draft.fd, _CENTRAL_HEADER.size, at))
            folder, _, number = info.filename.partition("/data/")
            if number and "/" not in folder:
                local = _LOCAL_HEADER.unpack(
                    os.pread(draft.fd, _LOCAL_HEADER.size, info.header_offset)
                )
                offset = info.header_offset + _LOCAL_HEADER.size + sum(local[-2:])
                end = offset + info.file_size
                trailing = (
                    end + len(_DESCRIPTOR)
                    if info.flag_bits & _HAS_DESCRIPTOR
                    else info.header_offset + 14
                )
                assert info.compress_type == zipfile.ZIP_STORED, "torch compresses no tensors"
                by_number[int(number)] = _Record(offset, info.file_size, (at + 16, trailing))
            at += _CENTRAL_HEADER.size + sum(central[10:13])
    return by_number
