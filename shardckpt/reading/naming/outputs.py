"""Outputs of an export: each is made of boxes of one or more tensors.

An output is a tensor of another format's file, or any other tensor that is written. It is made of
views: boxes of the checkpoint's tensors, possibly transposed, each at its place (`plan.views`).
Together the views cover the output, each element once. A plain export has one view per output; an
export that splits stacked layers, or joins projections into one matrix, has others.

Pure: nothing is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from shardckpt.errors import DtypeMismatchError, ShapeMismatchError
from shardckpt.layout.dtypes import castable
from shardckpt.plan.pieces import Piece, coverage_gap
from shardckpt.plan.views import View
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.dtypes import DType


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor that is written."""

    name: str
    """Name in the output."""
    shape: tuple[int, ...]
    dtype: DType
    """Dtype to which the elements are converted, if the sources have another."""
    sources: tuple[View, ...]
    """The views from which it is made."""

    def __post_init__(self) -> None:
        """Refuse views that do not cover the tensor, each element once."""
        if (
            len(self.sources) == 1
            and self.sources[0].shape == self.shape
            and not any(self.sources[0].start)
        ):
            return  # true of nearly all tensors
        odd = next((view for view in self.sources if len(view.start) != len(self.shape)), None)
        if odd is not None:
            raise ShapeMismatchError(
                f"{shown(self.name)}: its shape is {self.shape}, but the part from "
                f"{shown(odd.tensor)} has {len(odd.start)} dimensions; give both the same number."
            )
        pieces = [
            Piece(view.tensor, view.start, view.shape, (1,) * len(self.shape))
            for view in self.sources
        ]
        gap = coverage_gap(self.shape, pieces)
        if gap is not None:
            raise ShapeMismatchError(
                f"{shown(self.name)}: its parts do not form its shape {self.shape}: {gap}."
            )

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def identity(
    record: TensorRecord, name: str | None = None, dtype: DType | None = None
) -> OutputTensor:
    """The output of an unchanged tensor, with another name or dtype if one is given."""
    view = View.whole(record.name, record.shape)
    return OutputTensor(
        record.name if name is None else name, record.shape, dtype or record.dtype, (view,)
    )


def source_tensors(
    outputs: Sequence[OutputTensor], tensor: Callable[[str], TensorRecord]
) -> dict[str, TensorRecord]:
    """The tensors that outputs are made of by name, each as `tensor` returns it.

    Raises:
        ShapeMismatchError: a view lies outside its tensor; the message names both.
        DtypeMismatchError: a tensor's elements cannot be converted.
    """
    tensors = {view.tensor: tensor(view.tensor) for output in outputs for view in output.sources}
    for output in outputs:
        _check(output, tensors)
    return tensors


def _check(output: OutputTensor, tensors: Mapping[str, TensorRecord]) -> None:
    for view in output.sources:
        tensor = tensors[view.tensor]
        if view.box.ndim != len(tensor.shape) or any(
            b > n for b, n in zip(view.box.stop, tensor.shape, strict=True)
        ):
            raise ShapeMismatchError(
                f"{shown(output.name)}: the box {view.box} of {shown(tensor.name)} lies outside "
                f"its shape {tensor.shape}."
            )
        if not castable(tensor.dtype, output.dtype):
            raise DtypeMismatchError(
                f"{shown(output.name)}: {shown(tensor.name)} has dtype {tensor.dtype}, which "
                f"cannot be converted to {output.dtype}; leave it out, or give it another dtype."
            )
