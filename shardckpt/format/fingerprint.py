"""Sums by which two tensors are found equal, however each of them is cut, laid out and distributed.

A tensor's elements in their stored form, in row-major order, are cut into blocks of `BLOCK_BYTES`.
The sum of a block is the remainder of its bits as a polynomial modulo that of CRC-32C: the checksum
without the inversions at its beginning and end. It is linear, so the sum of a block is the
exclusive or of the sums of its parts, each shifted to its place. Whoever has a box of the tensor
adds that (`add`), and the exclusive or of everybody's sums is the sum of the whole, provided that
each element was added once.

A shift by n bytes is a multiplication by x^8n; `multiply` has the polynomials' bits reversed, as
CRC-32C has: bit 31 is x^0.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from shardckpt.errors import DtypeError, FormatError, StructureMismatchError
from shardckpt.format.crc_algebra import CRC32C, ONE, joined, product, shift
from shardckpt.layout.dtypes import by_name, with_plain_bools
from shardckpt.plan.pieces import chunk_boxes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from shardckpt.format.structure import TensorRecord
    from shardckpt.plan.pieces import Piece

BLOCK_BYTES = 1 << 24
Sums = NDArray[np.uint32]
"""(blocks,) sums of a tensor's blocks, or of a part of their elements."""

RunSums = tuple[NDArray[np.int64], Sums]
"""Runs of a tensor's bytes, each within one block: where they end, and their sums."""

_ALL = 0xFFFFFFFF
_CLOSED = 0x48674BC7
"""crc32c of any bytes with their own crc32c (4 bytes, little-endian) after them."""
_TABLE_BITS = 12
"""Distances, which are less than 2**24, are looked up in two tables of this many bits."""
_AT_A_TIME = 4 << 20
"""Bytes that are made contiguous at a time."""
_DENSE_BYTES = 1024
"""Rows that are so close to each other are summed with the zeros between them: a row by itself
takes as long as so many bytes."""
_FEW = 16
"""So few sums are shifted one by one: the calls of numpy would take longer."""
_SHIFTED = 1 << 15
"""Sums that are shifted at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of a state's tensors: equal only for equal names, dtypes, shapes and elements.

    If all of these are equal, the identity is always equal.
    """

    tensors: Mapping[str, str]
    """Name → 32 hexadecimal digits."""

    @property
    def total(self) -> str:
        """32 hexadecimal digits, of all tensors together."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(f"{name}\0{self.tensors[name]}\0".encode())
        return digest.hexdigest()[:32]

    def differing(self, other: Fingerprint) -> list[str]:
        """Names of the tensors that only one of them has, or that differ, sorted."""
        names = self.tensors.keys() | other.tensors.keys()
        return sorted(name for name in names if self.tensors.get(name) != other.tensors.get(name))


class StateSums:
    """Sums of the tensors of a state, to which boxes of elements are added. For one thread."""

    def __init__(self, tensors: Iterable[TensorRecord] = ()) -> None:
        """Begin with no elements of these tensors."""
        self._tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Name → dtype and shape."""
        self._sums: dict[str, Sums] = {}
        self._of_path: dict[str, TensorRecord] = {}
        for tensor in tensors:
            self._tensors[tensor.name] = tensor.dtype.name, tensor.shape
            self._sums[tensor.name] = no_sums(tensor.nbytes)
            self._of_path |= dict.fromkeys((piece.path for piece in tensor.pieces), tensor)

    def add(self, name: str, start: Sequence[int], elements: NDArray[Any]) -> None:
        """Add the elements of a box of a tensor; as the function `add`."""
        add(self._sums[name], self._tensors[name][1], start, with_plain_bools(elements))

    def add_box(self, piece: Piece, start: Sequence[int], elements: NDArray[Any]) -> None:
        """Add the elements of a box, in the indices of the tensor that the piece belongs to."""
        self.add(self._of_path[piece.path].name, start, elements)

    def add_run_sums(self, piece: Piece, sums: RunSums) -> None:
        """Add a box of elements, of which `sums` is the result of `sums_of_run`."""
        _add_run_sums(self._sums[self._of_path[piece.path].name], *sums)

    def add_chunk(self, piece: Piece, position: int, raw: NDArray[np.uint8]) -> None:
        """Add the elements of a chunk of a piece from its stored form.

        The stored form is padded at the piece's edges.
        """
        tensor, box = self._of_path[piece.path], chunk_boxes(piece, np.array([position]))[0]
        self.add(
            tensor.name,
            box.start,
            raw.view(tensor.dtype.storage).reshape(piece.chunks)[tuple(map(slice, box.shape))],
        )

    def add_stored(self, name: str, data: bytes) -> None:
        """Add all elements of a tensor, row-major in the stored dtype."""
        dtype, shape = self._tensors[name]
        self.add(
            name, (0,) * len(shape), np.frombuffer(data, by_name(dtype).storage).reshape(shape)
        )

    def merge(self, other: StateSums) -> None:
        """Add what was added to another one.

        Raises:
            StructureMismatchError: a tensor has another shape or dtype there.
        """
        for name, tensor in other._tensors.items():
            ours = self._tensors.setdefault(name, tensor)
            if ours != tensor:
                raise StructureMismatchError(
                    f"{name}: one process has {ours[0]} {ours[1]}, another one {tensor[0]} "
                    f"{tensor[1]}; give them different names."
                )
            sums = other._sums[name]
            self._sums[name] = self._sums[name] ^ sums if name in self._sums else sums

    def to_json(self, *, zeros: bool = True) -> dict[str, list[Any]]:
        """Name → dtype, shape, and sums as Base64 of little-endian 32-bit numbers.

        Without `zeros`, tensors of which all sums are zero are left out: they add nothing.
        """
        return {
            name: [
                dtype,
                [*shape],
                base64.b64encode(self._sums[name].astype("<u4").tobytes()).decode(),
            ]
            for name, (dtype, shape) in self._tensors.items()
            if zeros or self._sums[name].any()
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any], where: str) -> StateSums:
        """Inverse of `to_json`; raises FormatError for anything else."""
        state = cls()
        for name, entry in doc.items():
            try:
                dtype, shape, text = entry
                sums = np.frombuffer(base64.b64decode(text, validate=True), "<u4").astype(np.uint32)
                fits = len(sums) == _number_of_sums(prod(shape) * by_name(dtype).itemsize)
            except (DtypeError, TypeError, ValueError) as e:
                raise FormatError(f"{where}: {name} has no dtype, shape and sums: {e}.") from e
            if not fits:
                raise FormatError(
                    f"{where}: {name} has {len(sums)} sums, which do not fit {dtype} {shape}."
                )
            state._tensors[name], state._sums[name] = (dtype, tuple(shape)), sums
        return state

    def fingerprint(self) -> Fingerprint:
        """The fingerprint, once each element was added once."""
        return Fingerprint(
            {name: digest(*tensor, self._sums[name]) for name, tensor in self._tensors.items()}
        )


def no_sums(nbytes: int) -> Sums:
    """The sums of no elements, of a tensor of so many stored bytes."""
    return np.zeros(_number_of_sums(nbytes), np.uint32)


def _number_of_sums(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def digest(dtype: str, shape: Sequence[int], sums: Sums) -> str:
    """A tensor's entry in a `Fingerprint`."""
    return hashlib.sha256(
        f"{dtype} {[*shape]} ".encode() + sums.astype("<u4").tobytes()
    ).hexdigest()[:32]


def add(sums: Sums, shape: Sequence[int], start: Sequence[int], elements: NDArray[Any]) -> None:
    """Add the elements of a box to a tensor's sums.

    Adding them a second time takes them away again.

    Args:
        sums: changed in place.
        shape: of the tensor, in elements.
        start: first index of the box in each dimension.
        elements: the box's elements, in the stored dtype; of any layout in memory.
    """
    if elements.size == 0:
        return
    runs = [*_run_sums([*shape], [*start], elements)]
    _add_run_sums(sums, *(np.concatenate(column) for column in zip(*runs, strict=True)))


def sums_of_run(
    shape: Sequence[int], start: Sequence[int], elements: NDArray[Any]
) -> RunSums | None:
    """The sums of a box whose elements are consecutive in the tensor and in memory.

    Boxes with equal elements at the same place have equal sums. None: the elements are not
    consecutive.

    Args:
        shape: as in `add`.
        start: as in `add`.
        elements: as in `add`.
    """
    begin, consecutive = 0, elements.size > 0 and elements.flags.c_contiguous
    before = 1  # indices of the box in the dimensions so far
    for n, first, side in zip(shape, start, elements.shape, strict=True):
        consecutive = consecutive and (before == 1 or side == n)
        before *= side
        begin = begin * n + first
    if not consecutive:
        return None
    data = with_plain_bools(elements).reshape(-1).view(np.uint8).data
    return _row_sums(data, np.array([begin * elements.itemsize]), len(data))


def crc_of_run(sums: RunSums, nbytes: int) -> int:
    """The CRC-32C of a run of so many bytes, from its `sums_of_run`."""
    ends, remainders = sums
    sizes = np.diff(ends, prepend=ends[-1] - nbytes)
    whole = 0
    for size, remainder in zip(sizes.tolist(), remainders.tolist(), strict=True):
        whole = joined(whole, size, remainder, CRC32C)
    return joined(_ALL, nbytes, whole, CRC32C) ^ _ALL


def _add_run_sums(sums: Sums, where: NDArray[np.int64], crcs: Sums) -> None:
    for first in range(0, len(where), _SHIFTED):
        ends, crc = where[first : first + _SHIFTED], crcs[first : first + _SHIFTED]
        block = (ends - 1) // BLOCK_BYTES
        # The last block is as long as the others: to which end sums are shifted is a matter of
        # definition.
        np.bitwise_xor.at(sums, block, _shift(crc, (block + 1) * BLOCK_BYTES - ends))


def _run_sums(shape: list[int], start: list[int], elements: NDArray[Any]) -> Iterator[RunSums]:
    """Sums of the box's runs, each contiguous in the tensor and within one block."""
    itemsize = elements.itemsize
    # A row is what is contiguous in the tensor: the dimensions after the last one of which the box
    # has a part, and that one.
    part = next((d for d in reversed(range(len(shape))) if elements.shape[d] < shape[d]), 0)
    row_bytes, apart = prod(elements.shape[part:]) * itemsize, prod(shape[part:]) * itemsize
    if part > 0 and apart < _DENSE_BYTES and row_bytes < apart:
        for first, slab in _slabs(elements, apart // row_bytes):
            wide = np.zeros((*slab.shape[:part], *shape[part:]), elements.dtype)
            wide[
                (*[slice(None)] * part, slice(start[part], start[part] + elements.shape[part]))
            ] = slab
            yield from _run_sums(
                shape, [start[0] + first, *start[1:part], *[0] * (len(shape) - part)], wide
            )
        return
    strides = [prod(shape[d + 1 :]) * itemsize for d in range(len(shape))]
    for first, slab in _slabs(elements, 1):
        offsets = np.array([sum(a * b for a, b in zip(start, strides, strict=True))], np.int64)
        if shape:
            offsets += first * strides[0]
        for d in range(part):
            offsets = (offsets[:, None] + np.arange(slab.shape[d]) * strides[d]).reshape(-1)
        data = np.ascontiguousarray(slab).reshape(-1).view(np.uint8).data
        length = len(data) // len(offsets)
        yield _row_sums(data, offsets, length)


def _slabs(elements: NDArray[Any], growth: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Parts along the first dimension, with the first index of each.

    The bytes of a part times `growth` are about `_AT_A_TIME`.
    """
    if elements.ndim == 0:
        yield 0, elements
        return
    each = max(1, _AT_A_TIME // max(1, growth * elements.nbytes // len(elements)))
    for first in range(0, len(elements), each):
        yield first, elements[first : first + each]


def _row_sums(data: memoryview, offsets: NDArray[np.int64], length: int) -> RunSums:
    """Ends and sums of rows that follow each other in `data`, and lie at `offsets` in the tensor.

    A row in several blocks is cut.
    """
    ends = offsets + length
    if (offsets // BLOCK_BYTES == (ends - 1) // BLOCK_BYTES).all():
        crcs = [crc32c(data[at : at + length], _ALL) for at in range(0, len(data), length)]
        return ends, np.array(crcs, np.uint32) ^ np.uint32(_ALL)
    cut_ends, crcs = [], []
    for at, offset in zip(range(0, len(data), length), offsets.tolist(), strict=True):
        begin = offset
        while begin < offset + length:
            end = min(offset + length, (begin // BLOCK_BYTES + 1) * BLOCK_BYTES)
            crcs.append(crc32c(data[at + begin - offset : at + end - offset], _ALL))
            cut_ends.append(end)
            begin = end
    return np.array(cut_ends, np.int64), np.array(crcs, np.uint32) ^ np.uint32(_ALL)


def _shift(sums: Sums, distance: NDArray[np.int64]) -> Sums:
    """Sums of the same runs, each followed by so many zero bytes."""
    low, high = _tables()
    mask = (1 << _TABLE_BITS) - 1
    lows, highs = low[distance & mask], high[distance >> _TABLE_BITS]
    if len(sums) <= _FEW:
        products = [
            _product(_product(one, near), far)
            for one, near, far in zip(sums.tolist(), lows.tolist(), highs.tolist(), strict=True)
        ]
        return np.array(products, np.uint32)
    return multiply(multiply(sums, lows), highs)


@cache
def _tables() -> tuple[Sums, Sums]:
    """x^8n, for n from 0 on, and for multiples of 2**_TABLE_BITS from 0 on."""
    low = _powers(np.uint32(1 << 23))
    return low, _powers(multiply(low[-1:], low[1:2])[0])


def _powers(base: np.uint32) -> Sums:
    """base^n, for n from 0 to 2**_TABLE_BITS - 1."""
    powers = np.array([1 << 31], np.uint32)
    step = np.array([base], np.uint32)
    while len(powers) < 1 << _TABLE_BITS:
        powers = np.concatenate([powers, multiply(powers, step)])
        step = multiply(step, step)
    return powers


def multiply(one: Sums, other: Sums) -> Sums:
    """The product of polynomials modulo that of CRC-32C, element by element.

    >>> one, other = np.uint32([1 << 31, 1 << 30, 1]), np.uint32([5, 1 << 30, 1 << 30])
    >>> [hex(n) for n in multiply(one, other)]
    ['0x5', '0x20000000', '0x82f63b78']
    """
    total, power = np.zeros(one.shape, np.uint32), other.copy()
    for bit in range(31, -1, -1):
        total ^= power * ((one >> np.uint32(bit)) & np.uint32(1))
        power = (power >> np.uint32(1)) ^ (np.uint32(CRC32C) * (power & np.uint32(1)))
    return total


def crc_with_chunks(crc: int, nbytes: int, count: int) -> int:
    """The crc32c of some bytes, whose own is `crc`, with stored chunks after them.

    Each of the `count` chunks has `nbytes` bytes and ends with its own crc32c: then its complete
    bytes have the same crc32c whatever they are.

    >>> chunk = b"elements" + crc32c(b"elements").to_bytes(4, "little")
    >>> crc32c(b"before" + 3 * chunk) == crc_with_chunks(crc32c(b"before"), len(chunk), 3)
    True
    """
    chunks, moved, each = 0, ONE, shift(nbytes, CRC32C)
    for bit in f"{count:b}":  # of k chunks, then of 2k or 2k + 1
        chunks, moved = chunks ^ _product(chunks, moved), _product(moved, moved)
        if bit == "1":
            chunks, moved = _CLOSED ^ _product(chunks, each), _product(moved, each)
    return _product(crc, moved) ^ chunks


def _product(one: int, other: int) -> int:
    """As `multiply`, of one pair."""
    return product(one, other, CRC32C)
