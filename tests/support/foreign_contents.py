"""All that a foreign checkpoint holds, read as an import reads it: chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.plan.pieces import chunk_boxes
from shardckpt.state import unflatten

if TYPE_CHECKING:
    from shardckpt.convert.placed import Foreign


def contents(foreign: Foreign) -> Any:
    """The state, with arrays of the logical dtypes."""
    arrays = {}
    for name, tensor in foreign.structure.tensors.items():
        array = np.empty(tensor.shape, tensor.dtype.storage)
        for piece in tensor.pieces:
            boxes = chunk_boxes(piece, np.arange(piece.num_chunks))
            for i in range(len(boxes)):
                chunk = foreign.read(tensor, piece, boxes[i])
                assert (chunk.shape, chunk.dtype) == (boxes[i].shape, tensor.dtype.storage)
                array[boxes[i].slices] = chunk
        arrays[name] = array.view(tensor.dtype.numpy)
    return unflatten(foreign.structure.tree, arrays)
