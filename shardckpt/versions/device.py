"""`Publisher(snapshot="device")`: only what has changed is transferred from the devices.

A process's share of the last version stays on its devices.

1. On the training thread, each device compares its tensors with their copies there
   (`frameworks.snapshots`), and sends the positions and values of what differs, with a sum of the
   tensor itself. `publish` returns then.
2. The host has a copy, too. It gets the changes when the version is written: until then, the
   version before may be read from it.
3. The host's copy must have the sum that the device made of the tensor. If it has another one, a
   change was missed, or the tensor changed while it was compared: the version fails, and the tensor
   is transferred anew with the next one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt import frameworks
from shardckpt.errors import CorruptionError
from shardckpt.frameworks.base import HostSource, SourceOf
from shardckpt.frameworks.snapshots import WORD, ChangedWords, merged, sum_of
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardckpt.frameworks.base import Array, Source
    from shardckpt.frameworks.snapshots import Snapshot
    from shardckpt.layout.dtypes import DType

LEAST_BYTES = 64 << 10
"""Tensors of fewer bytes are staged in host memory as without a snapshot on devices."""


class _HeldBox:
    """A box of a tensor: its copy on the device, and that of the host."""

    def __init__(self, name: str, snapshot: Snapshot, form: object) -> None:
        self.name = name
        self.snapshot = snapshot
        self.form = form
        """See `DeviceShare.take`."""
        self.array: Array | None = None
        """The host's copy, as soon as there is one."""
        self.version = 0
        """The last version that had it."""
        self.failed = False
        """Whether the copies are not equal, as far as is known."""


@dataclass(slots=True)
class _Pending:
    """A change of a box that the host's copy lacks."""

    version: int
    box: _HeldBox
    array: NDArray[np.generic]
    """The host's copy."""
    change: ChangedWords


class DeviceShare:
    """The copies of one process's share. Versions have numbers, which ascend."""

    def __init__(self, *, proof: bool) -> None:
        """Have no copies yet.

        `proof`: whether the host's copies are compared with the devices' sums.
        """
        self._proof = proof
        self._boxes: dict[tuple[str, int], _HeldBox] = {}
        self._pending: list[_Pending] = []
        self._changing = threading.Lock()

    def take(
        self,
        version: int,
        name: str,
        box: int,
        form: tuple[tuple[int, ...], DType, str, object],
        of: Any,
    ) -> Array:
        """Compare a box of a tensor with its copy.

        Return the host's copy, which gets the version's elements with `arrive`.

        Args:
            version: the version's number.
            name: the tensor.
            box: position of the box among those that the process holds.
            form: shape and dtype of the box, the framework that compares it, and where it lies in
                the tensor.
            of: the elements.
        """
        shape, dtype, comparer, _ = form
        with self._changing:
            held = self._boxes.get((name, box))
            if held is None or held.failed or held.form != form:
                held = self._boxes[name, box] = _HeldBox(name, frameworks.snapshot(comparer), form)
            held.version = version
            held.failed = True  # until the change is noted, as the device's copy may be ahead of it
        change = held.snapshot.take(of, dtype)
        with self._changing:
            if held.array is None:
                held.array = change.words.view(dtype.numpy).reshape(shape)
            self._pending.append(_Pending(version, held, held.array, change))
            held.failed = False
            return held.array

    def skip(self, version: int) -> None:
        """Note that a version will not be written: the next one has its changes, in less memory."""
        with self._changing:
            later = [one for one in self._pending if one.version > version + 1]
            groups: dict[int, list[_Pending]] = {}
            for one in self._pending:
                if one.version <= version + 1:
                    groups.setdefault(id(one.box), []).append(one)
            combined = [
                _Pending(version + 1, of[-1].box, of[-1].array, merged([one.change for one in of]))
                for of in groups.values()
            ]
            self._pending = [*combined, *later]

    def arrive(self, version: int) -> None:
        """Give the host's copies the elements of a version.

        This is called when nothing reads the elements of an earlier version any more.

        Raises:
            CorruptionError: a copy has other elements than its tensor; names the tensor.
        """
        with self._changing:
            due = [one for one in self._pending if one.version <= version]
            self._boxes = {
                key: held for key, held in self._boxes.items() if held.version >= version
            }
        totals: dict[int, _Pending] = {}
        for one in due:
            positions, words, _ = one.change
            target = _words(one.array, words.dtype)
            if positions is not None:
                target[positions] = words
            elif target.ctypes.data != words.ctypes.data:
                target[:] = words
            totals[id(one.box)] = one
        with self._changing:  # after an error, the next version gets them, too
            self._pending = [one for one in self._pending if one.version > version]
        wrong = [
            one
            for one in totals.values()
            if self._proof and sum_of(_words(one.array, one.change.words.dtype)) != one.change.total
        ]
        for one in wrong:
            one.box.failed = True
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise CorruptionError(
                f"{shown(wrong[0].box.name)}{more}: the copy to be published has other elements "
                "than the tensor on its device has: the tensor changed during publish(), or the "
                "copy missed a change. The version is not published; a later one has all elements."
            )

    def forget(self) -> None:
        """Free the memory."""
        with self._changing:
            self._boxes.clear()
            self._pending.clear()


def _words(array: Array, word: np.dtype[Any]) -> NDArray[Any]:
    return array.reshape(-1).view(word)


@dataclass(frozen=True, slots=True)
class DeviceSource(SourceOf, HostSource):
    """A tensor that is compared on its device, in the dtype to publish."""

    of: Source
    dtype: DType
    share: DeviceShare
    version: int

    @property
    def resident(self) -> bool:  # type: ignore[override]
        """Elements arrive with `DeviceShare.arrive`."""
        return True

    @property
    def private(self) -> bool:
        """The arrays are kept, and used again."""
        return False

    @property
    def staged_bytes(self) -> int:
        """0: the host's copies are there from version to version."""
        return 0

    @classmethod
    def fetch(
        cls, sources: Sequence[DeviceSource], positions: Sequence[Sequence[int]]
    ) -> list[list[Array]]:
        """The host's copies, which do not have the elements yet."""
        return [
            [source.box(k, elements) for k, elements in _choose(source.of, boxes)]
            for source, boxes in zip(sources, positions, strict=True)
        ]

    def box(self, k: int, elements: Any) -> Array:
        """The host's copy of a box."""
        comparer = self.of.comparer
        assert comparer is not None
        box = self.of.boxes[k]
        return self.share.take(
            self.version, self.name, k, (box.shape, self.dtype, comparer, box.start), elements
        )


def _choose(source: Source, boxes: Sequence[int]) -> list[tuple[int, Any]]:
    elements = source.on_device() if boxes else []
    return [(k, elements[k]) for k in boxes]


def comparable(source: Source, dtype: DType) -> bool:
    """Whether a tensor is compared on its device.

    It must be large enough, and of a framework and dtype that allow it.
    """
    nbytes = int(source.boxes.sizes().sum()) * dtype.itemsize
    return nbytes >= LEAST_BYTES and dtype.itemsize in WORD and source.comparer is not None
