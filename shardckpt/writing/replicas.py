"""Checksums of the boxes that several processes hold.

The committer uses them to find copies that differ.

Replicas share the writing of their box, so copies that differ would be stored as a mixture. Each
process takes a checksum of its own copy of every such box, and writes them beside its chunks
(`format.replicas`); no process waits for another one.

1. "sample": of a box that the host reads without a copy, and of a box on a CUDA device, at most
   `SAMPLED` elements on a regular grid that begins at its first element. It costs about 50 µs per
   box; on a CUDA device the elements are copied behind the state's own, and the host does not wait
   for them. Boxes on other devices are not compared.
2. True: all elements of all these boxes, also those on devices, which are copied to the host for
   that.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from shardckpt import frameworks
from shardckpt.io.buffers import round_up
from shardckpt.io.copying import checksum
from shardckpt.io.threads import map_on_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardckpt.format.replicas import Checksums
    from shardckpt.frameworks.base import Source
    from shardckpt.frameworks.cuda import Arrival, DeviceCopies
    from shardckpt.writing.save_plan import SavePlan

SAMPLED = 256
"""Most elements of a box that are compared."""


class ReplicaChecksums:
    """The checksums of one process's copies, some of which may still be leaving a device."""

    def __init__(self, plan: SavePlan, sources: Mapping[str, Source], *, wholly: bool) -> None:
        """Take the checksums of all elements in host memory.

        Args:
            plan: the plan of the save, which says what is shared.
            sources: this process's tensors.
            wholly: whether to compare all elements, and wait for the devices that have them.
        """
        self._checksums: Checksums = {}
        self._late: list[tuple[str, tuple[int, ...], int, tuple[int, ...], int]] = []
        """Samples that are still on CUDA devices: tensor, holders, position of the box, and shape
        and bytes of the sample."""
        self._arrays: list[NDArray[Any]] = []
        self._arrival: Arrival | None = None
        on_devices = frozenset(frameworks.names_on_devices(sources))
        now: list[tuple[str, tuple[int, ...], int]] = []
        for name, of_box in plan.replicated.items():
            boxes = [(name, holders, box) for box, holders in enumerate(of_box) if len(holders) > 1]
            if name in on_devices and not wholly:
                held, itemsize = sources[name].boxes, sources[name].dtype.itemsize
                shapes = [_shape_of_sample(held[box].shape) for _, _, box in boxes]
                self._late += [
                    (*key, shape, prod(shape) * itemsize)
                    for key, shape in zip(boxes, shapes, strict=True)
                ]
            elif wholly or not sources[name].staged_bytes:
                now += boxes

        def summed(key: tuple[str, tuple[int, ...], int]) -> int:
            name, _, box = key
            ((array,),) = frameworks.fetch([sources[name]], [[box]])
            return checksum(array if wholly else array[grid(array.shape)])

        several = wholly and not any(sources[name].staged_bytes for name, *_ in now)
        for (name, holders, _), crc in zip(
            now, map_on_threads(summed, now) if several else map(summed, now), strict=True
        ):
            self._add(name, holders, crc)

    def late_bytes(self) -> int:
        """Bytes of host memory for the samples that are still on devices."""
        return sum(round_up(nbytes) for *_, nbytes in self._late)

    def queue(
        self, sources: Mapping[str, Source], copies: DeviceCopies, memory: NDArray[np.uint8]
    ) -> None:
        """Queue the copies of those samples to `memory`, of `late_bytes`.

        `sources` leaves them on their devices.
        """
        pairs: list[tuple[NDArray[Any], Any]] = []
        for name, _, box, shape, nbytes in self._late:
            ((elements,),) = frameworks.fetch([sources[name]], [[box]])
            array, memory = (
                memory[:nbytes].view(elements.dtype).reshape(shape),
                memory[round_up(nbytes) :],
            )
            pairs.append((array, elements[grid(elements.shape)]))
        self._arrays = [array for array, _ in pairs]
        self._arrival = copies.copy(pairs)

    def fetch_late(self, sources: Mapping[str, Source]) -> None:
        """Copy those samples of this process's tensors to the host, and wait for them."""
        if self._late:
            left, copies = frameworks.on_devices(
                {name: sources[name] for name, *_ in self._late}, overlap=False
            )
            assert copies is not None
            self.queue(left, copies, np.empty(self.late_bytes(), np.uint8))

    def complete(self) -> Checksums:
        """All checksums, once the last samples have arrived."""
        if self._arrival is not None:
            self._arrival.wait()
            for (name, holders, *_), array in zip(self._late, self._arrays, strict=True):
                self._add(name, holders, checksum(array))
            self._late, self._arrays, self._arrival = [], [], None
        return self._checksums

    def _add(self, name: str, holders: tuple[int, ...], crc: int) -> None:
        of_group = self._checksums.setdefault(holders, {})
        of_group[name] = crc32c(crc.to_bytes(4, "little"), of_group.get(name, 0))


@lru_cache(maxsize=4096)
def grid(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of at most `SAMPLED` elements of an array, evenly distributed over all dimensions.

    >>> grid((8, 4096))
    (slice(None, None, 1), slice(None, None, 128))
    """
    counts, steps = [*shape], [1] * len(shape)
    while prod(counts) > SAMPLED:
        d = max(range(len(shape)), key=counts.__getitem__)
        steps[d] *= 2
        counts[d] = -(-shape[d] // steps[d])
    return tuple(slice(None, None, step) for step in steps)


def _shape_of_sample(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(len(range(n)[part]) for n, part in zip(shape, grid(shape), strict=True))
