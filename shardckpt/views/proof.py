"""Proof that what several processes read of a checkpoint is what was saved.

Each process adds the sums (`format.fingerprint`) of the boxes that it has read, as they lie in its
memory. Where the boxes of all processes cover a tensor, each element once, their sums give the
tensor's fingerprint, which must be the one that the save recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.commit.fingerprints import recorded_fingerprint
from shardckpt.errors import CorruptionError
from shardckpt.format.fingerprint import add, digest, no_sums
from shardckpt.plan.pieces import Piece, coverage_gap
from shardckpt.text import few

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.box import Box
    from shardckpt.views.model_view import ModelView

    Parts = Mapping[str, Mapping[Box, NDArray[np.uint32]]]
    """Name of a stored tensor → box → sums."""


class ReadProof:
    """Sums of the boxes that a process has read of a model.

    Boxes may be added on several threads.
    """

    def __init__(self, view: ModelView) -> None:
        """Sum up tensors of which a fingerprint is recorded, and that the view does not change.

        All others cannot be proved.
        """
        checkpoint = view.checkpoint
        self._where = checkpoint.location
        with checkpoint.reading():
            self._recorded = recorded_fingerprint(checkpoint.place, checkpoint.record)
        self._tensors: dict[int, TensorRecord] = {}
        for number, name in enumerate(view.unchanged):
            if name in self._recorded:
                self._tensors[number] = checkpoint.tensor(name)
        self.parts: dict[str, dict[Box, NDArray[np.uint32]]] = {}
        """Name of a stored tensor → box → sums. The processes exchange these."""

    def add(self, number: int, box: Box, elements: NDArray[Any]) -> None:
        """Add a box that was read; for `Recorder`."""
        tensor = self._tensors.get(number)
        if tensor is not None:
            sums = no_sums(tensor.nbytes)
            add(sums, tensor.shape, box.start, elements.view(tensor.dtype.storage))
            known = self.parts.setdefault(tensor.name, {}).setdefault(box, sums)
            if not np.array_equal(known, sums):
                raise CorruptionError(
                    f"{self._where}: {tensor.name}{box} was read twice, with different elements; "
                    "check the memory."
                )

    def check(self, processes: Iterable[Parts]) -> list[str]:
        """Compare the sums with the recorded fingerprint.

        Args:
            processes: `parts` of all processes.

        Returns:
            Names of the tensors that are proved to be what was saved. All others have no
            fingerprint, are changed by the view, or were read in part or in boxes that overlap.

        Raises:
            CorruptionError: a tensor is not what was saved.
        """
        together: dict[str, dict[Box, NDArray[np.uint32]]] = {}
        for parts in processes:
            for name, boxes in parts.items():
                for box, sums in boxes.items():
                    if not np.array_equal(
                        together.setdefault(name, {}).setdefault(box, sums), sums
                    ):
                        raise CorruptionError(
                            f"{self._where}: two processes have different elements of "
                            f"{name}{box}; check their memory."
                        )
        proved: list[str] = []
        wrong: list[str] = []
        for tensor in self._tensors.values():
            boxes = together.get(tensor.name, {})
            pieces = [Piece(tensor.name, box.start, box.shape, (1,) * box.ndim) for box in boxes]
            if coverage_gap(tensor.shape, pieces) is None:
                total = np.bitwise_xor.reduce([no_sums(tensor.nbytes), *boxes.values()])
                matches = (
                    digest(tensor.dtype.name, tensor.shape, total) == self._recorded[tensor.name]
                )
                (proved if matches else wrong).append(tensor.name)
        if wrong:
            raise CorruptionError(
                f"{self._where}: elements that were read do not match the saved fingerprint of "
                f"{few(wrong)}; run shardckpt verify."
            )
        return proved
