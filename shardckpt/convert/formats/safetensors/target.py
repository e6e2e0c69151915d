"""Writing a checkpoint's tensors as safetensors files: every byte once, at its offset.

1. `safetensors.layout` computes the layout of each file; `plan.grids` the blocks in which its
   tensors are written.
2. Blocks come from `streaming` and go to a `Destination`, with their checksums. An interrupted
   earlier call with the same plan is continued.
3. When everything is durable and verified, the files get their names; the index, which names other
   files, comes last.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import crc32c
import numpy as np

from shardckpt._version import __version__
from shardckpt.convert.files.destination import FileWrite, WritePlan
from shardckpt.convert.options import ignore_progress
from shardckpt.convert.span import find_runs
from shardckpt.errors import StorageError
from shardckpt.streaming.stream import Stream, read_once_blocks, row_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.convert.files.destination import BlockRuns, Destination
    from shardckpt.convert.formats.safetensors.layout import SafetensorsFile
    from shardckpt.layout.box import Box
    from shardckpt.reading.checkpoint import Checkpoint

_ORDER = 2
"""Counts the changes of the order of blocks: a file that another version has begun in another order
is written anew."""


@dataclass(frozen=True, slots=True)
class FilesWritten:
    """Byte counts of a call that wrote files."""

    read_bytes: int
    """Stored bytes that this call read."""
    written_bytes: int
    """Bytes that this call wrote, including headers."""
    resumed_bytes: int
    """Bytes of elements that an earlier, interrupted call had written."""


def write_safetensors(
    checkpoint: Checkpoint,
    files: Sequence[SafetensorsFile],
    destination: Destination,
    *,
    limit: int,
    verify: bool = True,
    first: Sequence[bytes] = (),
    last: bytes | None = None,
    progress: Callable[[int, int], None] = ignore_progress,
) -> FilesWritten:
    """Write files, and publish them.

    Args:
        checkpoint: the source; nothing of it has been read yet.
        files: layouts of the files.
        destination: the destination; it has a name for each of `first`, of `files`, and for `last`.
        limit: bytes of buffers.
        verify: read back the written bytes.
        first: contents of small files that come before the others.
        last: contents of the index; None: there is none.
        progress: called with the bytes of elements written so far, and the total.

    Raises:
        ShapeMismatchError, DtypeMismatchError, NamesMismatchError, BudgetError: as in `Stream`.
        CorruptionError, ReplacedError: the checkpoint could not be read, or the written bytes do
            not read back.
        AlreadyExistsError, StorageError: as in `Destination`.
    """
    blocks = row_blocks if destination.in_order else read_once_blocks
    outputs = [tensor for file in files for tensor in file.tensors]
    stream = Stream(
        checkpoint,
        outputs,
        blocks,
        limit=limit,
        beside=destination.memory,
        in_order=destination.in_order,
    )
    placed = _Placed(files, len(first))
    index = [] if last is None else [last]
    headers = [*first, *(file.header for file in files), *index]
    sizes = [*map(len, first), *(file.nbytes for file in files), *map(len, index)]

    def block_runs() -> Iterator[BlockRuns]:
        for output, box in stream.order():
            yield output.name, *placed.runs(output.name, box)

    plan = WritePlan(
        _identity(checkpoint, stream, headers, [destination.in_order, verify]), sizes, block_runs
    )
    begun = False
    try:
        skip = destination.begin(plan)
        begun = True
        done = sum(
            box.size * output.dtype.itemsize
            for _, (output, box) in zip(range(skip), stream.order(), strict=False)
        )
        total, resumed, written, file = sum(output.nbytes for output in outputs), done, 0, -1
        progress(done, total)
        with closing(stream.read(skip)) as batches:
            for batch in batches:
                writes, checks, nbytes = list[FileWrite](), list[int](), 0
                for block in batch:
                    data, at = block.elements.reshape(-1).view(np.uint8).data, 0
                    nbytes += data.nbytes
                    checks.append(crc32c.crc32c(data) if verify else 0)
                    number, places = placed.runs(block.output.name, block.box)
                    while file < number:
                        file += 1
                        writes.append(FileWrite(file, 0, memoryview(headers[file])))
                    for offset, length in places:
                        writes.append(FileWrite(number, offset, data[at : at + length]))
                        at += length
                destination.write(writes, checks)
                written += sum(write.data.nbytes for write in writes)
                done += nbytes
                progress(done, total)
        left = [
            FileWrite(number, 0, memoryview(headers[number]))
            for number in range(file + 1, len(headers))
        ]
        destination.write(left, [])
        destination.publish(verify=verify)
    except BaseException as e:
        # A later call continues.
        destination.abort(
            keep=not begun or isinstance(e, StorageError) or not isinstance(e, Exception)
        )
        raise
    return FilesWritten(
        stream.read_bytes, written + sum(write.data.nbytes for write in left), resumed
    )


class _Placed:
    """The places of outputs in files."""

    def __init__(self, files: Sequence[SafetensorsFile], first: int) -> None:
        self._at = {
            tensor.name: (number, offset, tensor.shape, tensor.dtype.itemsize)
            for number, file in enumerate(files, first)
            for tensor, offset in zip(file.tensors, file.offsets, strict=True)
        }

    def runs(self, name: str, box: Box) -> tuple[int, list[tuple[int, int]]]:
        """The file of a box, and offset and length of each contiguous part, in row-major order."""
        file, begin, shape, itemsize = self._at[name]
        offsets, length = find_runs(shape, box, itemsize)
        return file, [(offset, length) for offset in (begin + offsets).tolist()]


def _identity(
    checkpoint: Checkpoint, stream: Stream, headers: Sequence[bytes], flags: Sequence[bool]
) -> bytes:
    """A digest of everything that determines the written bytes and their order."""
    digest = hashlib.sha256()
    decided = [
        __version__,
        _ORDER,
        str(checkpoint.location),
        checkpoint.record.attempt,
        stream.room,
        *flags,
    ]
    digest.update(json.dumps(decided).encode())
    for header in headers:
        digest.update(hashlib.sha256(header).digest())
    for output, pieces in stream.grids:
        digest.update(
            repr(
                (
                    output.name,
                    output.sources,
                    [(piece.start, piece.shape, piece.chunks) for piece in pieces],
                )
            ).encode()
        )
    return digest.digest()
