"""Reading boxes of a tensor whose elements lie at regular distances in a file.

A tensor in a torch file is a run of elements and a stride per dimension: usually in row-major
order, sometimes transposed or in `channels_last` order. A box of it lies between its first and its
last element. If few other elements lie between these, that run of bytes is read and viewed with the
tensor's strides; otherwise the box is halved along the dimension of the longest stride.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.convert.foreign import ROWS_BYTES, row_chunks
from shardckpt.convert.span import StoredRun
from shardckpt.layout.box import Box, with_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardckpt.convert.formats.torch.objects import PickledTensor


def strided_chunks(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, nbytes: int = ROWS_BYTES
) -> tuple[int, ...]:
    """The chunks of `row_chunks`, in the order in which the dimensions are stored.

    >>> strided_chunks((4096, 1024), (1, 4096), 4)
    (4096, 64)
    """
    order = sorted(range(len(shape)), key=lambda d: strides[d], reverse=True)
    chunks = row_chunks([shape[d] for d in order], itemsize, nbytes)
    return tuple(chunks[order.index(d)] for d in range(len(shape)))


def read_box(
    entry: StoredRun, tensor: PickledTensor, dtype: np.dtype[Any], box: Box
) -> NDArray[Any]:
    """The elements of a box, C-contiguous.

    Args:
        entry: the stored run of the tensor's storage.
        tensor: the tensor's offset, shape and strides in the storage.
        dtype: dtype of the elements.
        box: the box, in the tensor's indices.

    Raises:
        CorruptionError: the storage is too short, or fails its checksum.
        MissingDataError, StorageError: it cannot be read.
    """
    if box.size == 0:
        return np.empty(box.shape, dtype)
    first = tensor.offset + sum(
        i * stride for i, stride in zip(box.start, tensor.strides, strict=True)
    )
    count = 1 + sum((n - 1) * stride for n, stride in zip(box.shape, tensor.strides, strict=True))
    size = dtype.itemsize
    if count > box.size and count * size > ROWS_BYTES:
        along = max(
            (d for d in range(box.ndim) if box.shape[d] > 1), key=lambda d: tensor.strides[d]
        )
        middle = (box.start[along] + box.stop[along]) // 2
        halves = (
            with_range(box, along, box.start[along], middle),
            with_range(box, along, middle, box.stop[along]),
        )
        return np.concatenate([read_box(entry, tensor, dtype, half) for half in halves], axis=along)
    data = entry.span.read(first * size, (first + count) * size)
    entry.check([data])
    elements = np.ndarray(
        box.shape, dtype, data, strides=[stride * size for stride in tensor.strides]
    )
    return np.ascontiguousarray(elements).reshape(box.shape)


def run_of(entry: StoredRun, tensor: PickledTensor, itemsize: int) -> StoredRun | None:
    """The stored run of a tensor whose elements are contiguous in its storage, else None.

    The elements must be in row-major order.
    """
    expected = itemsize
    for n, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if n != 1 and stride * itemsize != expected:
            return None
        expected *= n
    first = tensor.offset * itemsize
    if not 0 <= first <= first + expected <= len(entry.span):
        return None  # `read_box` reports the error
    return StoredRun(
        entry.span.part(first, first + expected), entry.crc if expected == len(entry.span) else None
    )
