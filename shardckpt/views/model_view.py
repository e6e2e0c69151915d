"""Virtual files: what `export_safetensors` would write, readable at any offset without writing it.

`safetensors_view` opens one file, `ModelView` all files of a model: weights, the index, and the
small files that an import keeps. A header is known as soon as the checkpoint is open; elements are
read on demand.
"""

from __future__ import annotations

import hashlib
import io
import json
from bisect import bisect_left, bisect_right
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.commit.attempts import unfolded
from shardckpt.convert.formats.safetensors.header import LENGTH_BYTES
from shardckpt.convert.formats.safetensors.layout import lay_out
from shardckpt.convert.formats.safetensors.model_files import plan_model_files
from shardckpt.convert.options import ExportOptions, SafetensorsOptions
from shardckpt.errors import NotFoundError, OptionError
from shardckpt.plan.views import View
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.lazy_array import LazyArray
from shardckpt.reading.naming.outputs import OutputTensor, identity
from shardckpt.streaming.elements import CACHE_BYTES, OutputReader
from shardckpt.text import few

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from _typeshed import WriteableBuffer
    from numpy.typing import NDArray

    from shardckpt.convert.formats.safetensors.layout import SafetensorsFile
    from shardckpt.layout.box import Box
    from shardckpt.layout.dtypes import DType
    from shardckpt.reading.locate import Request


class ModelView:
    """The files of a model, readable at any offset. Safe to use from several threads."""

    def __init__(
        self,
        source: str | os.PathLike[str] | Checkpoint,
        *,
        cache_bytes: int = CACHE_BYTES,
        **options: Any,
    ) -> None:
        """Plan the files; no element is read.

        Args:
            source: path or url of the checkpoint, or an open one.
            cache_bytes: limit of the cache of read blocks.
            options: `include`, `exclude`, `dtype`, `mapping` and all other options of
                `export_safetensors` that determine the files' bytes.

        Raises:
            OptionError, NamesMismatchError, ShapeMismatchError, DtypeError, DtypeMismatchError: as
            in `export_safetensors`.
            NotFoundError: there is no committed checkpoint.
        """
        self.checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
        self._model = plan_model_files(self.checkpoint, _options(options))
        self._starts: dict[str, int] = {}
        self._outputs: list[OutputTensor] = []
        for name, file in self._model.weights.items():
            self._starts[name] = len(self._outputs)
            self._outputs += file.tensors
        self._reader = OutputReader(self.checkpoint, self._outputs, cache_bytes)
        self.sizes = {name: file.nbytes for name, file in self._model.weights.items()} | {
            name: len(data) for name, data in self._model.small.items()
        }
        """Name → bytes of each file, weights first."""

    @cached_property
    def identity(self) -> str:
        """Hexadecimal digest, which is equal only for equal bytes of the files.

        It covers the save, the headers, the small files, and which elements make the tensors.
        """
        digest = hashlib.sha256(json.dumps([unfolded(self.checkpoint.record.attempt)]).encode())
        small = self._model.small
        for name, size in self.sizes.items():
            digest.update(
                f"{name} {size} ".encode()
                + (small[name] if name in small else self._model.weights[name].header)
            )
        for stored, output in zip(self.unchanged, self._outputs, strict=True):
            digest.update(repr(output.sources if stored is None else stored).encode())
        return digest.hexdigest()

    @property
    def weights(self) -> list[str]:
        """Names of the files of weights."""
        return list(self._model.weights)

    def layout(self, name: str) -> SafetensorsFile | None:
        """The layout of a file of weights; None for another file.

        Raises:
            NotFoundError: there is no such file.
        """
        if name not in self.sizes:
            raise NotFoundError(
                f"{self.checkpoint.location}: there is no file {name!r}; there are "
                f"{few(list(self.sizes))}."
            )
        return self._model.weights.get(name)

    @property
    def header_metadata(self) -> dict[str, str]:
        """Texts in the headers."""
        header = next(iter(self._model.weights.values())).header
        texts: dict[str, str] = json.loads(header[LENGTH_BYTES:])["__metadata__"]
        return texts

    @property
    def unchanged(self) -> list[str | None]:
        """For each of `arrays()`, the stored tensor's name, or None if the view changes it."""
        names: list[str | None] = []
        for output in self._outputs:
            name = output.sources[0].tensor if output.sources else None
            same = name is not None and output == identity(
                self.checkpoint.tensor(name), output.name
            )
            names.append(name if same else None)
        return names

    def arrays(self) -> list[LazyArray]:
        """The tensors of all files, in the order of their bytes.

        Indexing an array reads a part of it.
        """
        return [
            LazyArray(
                output.name,
                output.shape,
                output.dtype,
                None,
                partial(self._read_boxes, number),
                output.shape,
            )
            for number, output in enumerate(self._outputs)
        ]

    def _read_boxes(
        self, number: int, boxes: Sequence[Box], memory: Sequence[NDArray[Any]]
    ) -> None:
        self.read_boxes([(number, box, part) for box, part in zip(boxes, memory, strict=True)])

    def read_boxes(self, boxes: Sequence[tuple[int, Box, NDArray[Any]]]) -> None:
        """Read boxes of several tensors into arrays.

        Args:
            boxes: position in `arrays()`, a box, and an array of the box's shape and the tensor's
                dtype.

        Raises:
            CorruptionError, MissingDataError, ReplacedError, StorageError: as in `read_into`.
        """
        self._reader.read_boxes(boxes)

    def requests(self, boxes: Iterable[tuple[int, Box]]) -> list[Request]:
        """Requests for boxes of tensors, by position in `arrays()`, without memory.

        Their chunks can be located, but not read.
        """
        dtypes = [output.dtype.numpy for output in self._outputs]
        return self._reader.requests(
            (i, box, np.broadcast_to(np.zeros((), dtypes[i]), box.shape)) for i, box in boxes
        )

    @property
    def sources(self) -> list[str]:
        """Names of the stored tensors that the files are made of."""
        return [*dict.fromkeys(view.tensor for output in self._outputs for view in output.sources)]

    def open(self, name: str = "model.safetensors") -> VirtualFile:
        """Open a file.

        Raises:
            NotFoundError: there is no such file.
        """
        self.layout(name)
        return VirtualFile(self, name)

    def block_end(self, name: str, offset: int, most: int) -> int:
        """The best end for a read of at most `most` bytes from an offset.

        It is the end of a block, if one is in reach.
        """
        file, end = self.layout(name), min(self.sizes[name], offset + most)
        i = -1 if file is None else bisect_right(file.offsets, end) - 1
        if file is None or i < 0 or end == self.sizes[name]:
            return end
        edges = self._reader.edges(self._starts[name] + i)
        last = file.offsets[i] + edges[bisect_right(edges, end - file.offsets[i]) - 1]
        return last if last > offset else end

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """Fill memory with a file's bytes from an offset on.

        Return the number of bytes, which is smaller at the end of the file.

        Raises:
            NotFoundError: there is no such file.
            CorruptionError, MissingDataError, ReplacedError: stored bytes are damaged or gone.
            StorageError: they cannot be read.
        """
        file = self.layout(name)
        end = min(self.sizes[name], offset + len(into))
        if end <= offset:
            return 0
        head = self._model.small[name] if file is None else file.header
        n = min(len(head), end) - offset
        if n > 0:
            into[:n] = head[offset : offset + n]
        if file is None or end <= len(head):
            return end - offset
        # The tensors that the range meets are next to each other.
        ranges = []
        for i in range(
            max(0, bisect_right(file.offsets, offset) - 1), bisect_left(file.offsets, end)
        ):
            begin, stop = (
                max(offset, file.offsets[i]),
                min(end, file.offsets[i] + file.tensors[i].nbytes),
            )
            if begin < stop:
                ranges.append(
                    (
                        self._starts[name] + i,
                        begin - file.offsets[i],
                        into[begin - offset : stop - offset],
                    )
                )
        if ranges:
            self._reader.read_into(ranges)
        return end - offset

    def __repr__(self) -> str:
        """Location and files."""
        return f"<shardckpt.ModelView of {self.checkpoint.location}: {few(list(self.sizes))}>"


def drop_blocks(view: ModelView) -> None:
    """Free the memory of the blocks that a view keeps; it reads them again when they are needed."""
    view._reader.drop_blocks()  # noqa: SLF001  (no method, as users need none)


class VirtualFile(io.RawIOBase):
    """A read-only binary file of a `ModelView`.

    Several threads may call `pread` at the same time. `read` and `seek` share one position, so only
    one thread may call them.
    """

    def __init__(self, view: ModelView, name: str) -> None:
        """Open the file of that name at its beginning."""
        self.view = view
        self.name = name
        self._size = view.sizes[name]
        self._at = 0

    def __len__(self) -> int:
        """Bytes of the file."""
        return self._size

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position."""
        self._check_open()
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position; return it."""
        self._check_open()
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        if whence not in base:
            raise ValueError(f"whence={whence}: give 0, 1 or 2")
        if base[whence] + offset < 0:
            raise ValueError(f"position {base[whence] + offset} lies before the beginning")
        self._at = base[whence] + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer from the position on; return the number of bytes, 0 at the end."""
        self._check_open()
        n = self.view.read_into(self.name, self._at, memoryview(buffer).cast("B"))
        self._at += n
        return n

    def readall(self) -> bytes:
        """All bytes from the position on."""
        self._check_open()
        data = self.pread(self._at, max(0, self._size - self._at))
        self._at = max(self._at, self._size)
        return data

    def pread(self, offset: int, n: int) -> bytes:
        """Read `n` bytes from an offset, or fewer at the file's end; the position stays."""
        if offset < 0 or n < 0:
            raise ValueError(f"pread({offset}, {n}): give numbers from 0 on")
        data = bytearray(max(0, min(n, self._size - offset)))
        self.view.read_into(self.name, offset, memoryview(data))
        return bytes(data)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file.")


def header_of(name: str, shape: tuple[int, ...], dtype: DType) -> bytes:
    """The header of a file that holds one tensor.

    Raises:
        DtypeError: the format lacks the dtype. NamesMismatchError: it cannot hold the name.
    """
    return lay_out([OutputTensor(name, shape, dtype, (View.whole(name, shape),))]).header


def _options(options: Mapping[str, Any]) -> SafetensorsOptions:
    known = [name for name in SafetensorsOptions.declared() if name not in ExportOptions.declared()]
    odd = next((name for name in options if name not in known), None)
    if odd is not None:
        raise OptionError(
            f"a view does not have the option {odd}=; its options are {', '.join(known)}."
        )
    return SafetensorsOptions(**options)


def safetensors_view(
    source: str | os.PathLike[str] | Checkpoint, file: str | None = None, **options: Any
) -> VirtualFile:
    """A virtual safetensors file with the bytes that `export_safetensors` would write.

    Nothing is written.

    Args:
        source: path or url of the checkpoint, or an open one.
        file: name of the file, if `max_shard_size` makes several; None: the only file.
        options: `include`, `exclude`, `dtype`, `mapping` and all other options of
            `export_safetensors` that determine the file's bytes; and `cache_bytes`, the limit of
            the cache of read blocks (128 MiB by default).

    Returns:
        A read-only binary file. Reads of the header read no tensor. All other reads read and verify
        the stored chunks that they need.

    Raises:
        OptionError: an option is invalid; or there are several files, and `file` is None.
        NotFoundError: there is no committed checkpoint, or no such file.
        NamesMismatchError, ShapeMismatchError, DtypeError, DtypeMismatchError: as in
        `export_safetensors`.
    """
    view = ModelView(source, **options)
    weights = view.weights
    if file is None and len(weights) > 1:
        raise OptionError(
            f"{view.checkpoint.location}: max_shard_size makes {len(weights)} files; name one "
            f"with file=: {few(weights)}."
        )
    return view.open(file or weights[0])
