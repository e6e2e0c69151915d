"""Reads of parts of tensors: boxes of several tensors with their buffers, collected for one read.

A tensor that is made of others (`MadeTensor`) is read as the parts of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.format.structure import TensorRecord
from shardckpt.layout.box import BoxArray
from shardckpt.layout.records import record
from shardckpt.reading.locate import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.plan.views import View
    from shardckpt.reading.locate import Array, Ints


class TensorBoxes:
    """Boxes of one tensor and the buffers for their elements, collected for one request."""

    def __init__(self) -> None:
        self.boxes: list[BoxArray] = []
        self.buffers: list[Array] = []

    def add(
        self, view: View, boxes: BoxArray, buffers: Sequence[Array], begins: Ints | None = None
    ) -> None:
        """Add what a view of the tensor has of some boxes.

        Args:
            view: places a box of the tensor in an output.
            boxes: boxes of the output.
            buffers: for each an array that holds the box.
            begins: (n, ndim) index of each array's first element in the output; None: the box is at
                its start.
        """
        inside, which = view.inside, boxes.overlapping(view.inside)
        if not len(which):
            return
        first = boxes.start[which]
        common = BoxArray(
            np.maximum(first, inside.start), np.minimum(boxes.stop[which], inside.stop)
        )
        self.boxes.append(view.back(common))
        if begins is not None:
            first = begins[which]
        for i, begin, end in zip(
            which.tolist(),
            (common.start - first).tolist(),
            (common.stop - first).tolist(),
            strict=True,
        ):
            part: Any = (*map(slice, begin, end), ...)
            self.buffers.append(view.part(buffers[i][part]))

    def request(self, tensor: TensorRecord, *, converts: bool) -> Request:
        """A request for all of them, as `Request.of` makes it."""
        return Request.of(tensor, BoxArray.concatenate(self.boxes), self.buffers, converts=converts)


class ReadList:
    """Boxes of several tensors and the buffers for their elements, collected for one read."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, bool], tuple[TensorRecord, TensorBoxes]] = {}

    def of(self, tensor: TensorRecord, *, converts: bool) -> TensorBoxes:
        """Those of one tensor; `converts`: the buffers have another dtype."""
        return self._parts.setdefault((tensor.name, converts), (tensor, TensorBoxes()))[1]

    def requests(self) -> list[Request]:
        """A request for each tensor of which anything is needed."""
        return [
            parts.request(tensor, converts=converts)
            for (_, converts), (tensor, parts) in self._parts.items()
            if parts.boxes
        ]


@record
class MadeTensor(TensorRecord):
    """A tensor that is made of stored ones, which no checkpoint has by itself.

    Its pieces are those of these, in its own indices.
    """

    sources: tuple[tuple[View, TensorRecord], ...] = ()
    """The stored tensors, and which of its elements each has."""

    def requests(
        self, boxes: BoxArray, buffers: Sequence[Array], *, converts: bool
    ) -> list[Request]:
        """Requests for the stored elements of boxes; for the arguments see `Request.of`."""
        reads = ReadList()
        for view, stored in self.sources:
            reads.of(stored, converts=converts).add(view, boxes, buffers)
        return reads.requests()
