"""Boxes of tensors in files of torch.save, whatever their strides are; torch's own slices are what
they are held against."""

from __future__ import annotations

import io
from math import prod
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.convert.foreign import ROWS_BYTES
from shardckpt.convert.formats.torch.file import WINDOW, open_torch_file
from shardckpt.convert.span import LoadedFile, Span
from shardckpt.convert.strided import read_box, run_of, strided_chunks
from shardckpt.errors import CorruptionError
from shardckpt.layout.box import Box


class CountedFile(LoadedFile):
    """A file that notes how many of its bytes were read at a time."""

    sizes: ClassVar[list[int]] = []

    def read(self, start, stop):
        self.sizes.append(stop - start)
        return super().read(start, stop)


def saved(tensor):
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def read(data, box):
    file = open_torch_file(Span(CountedFile("the file", data), 0, len(data)))
    return read_box(file.storage(file.state.storage), file.state, np.dtype(np.int32), box)


@given(st.data())
def test_any_box_of_any_view_is_what_torch_slices(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    tensor = (
        torch.arange(prod(shape), dtype=torch.int32)
        .reshape(shape)
        .permute(*data.draw(st.permutations(range(len(shape)))))
    )
    for d in range(tensor.ndim):
        tensor = tensor[
            (slice(None),) * d
            + (
                slice(
                    data.draw(st.integers(0, tensor.shape[d] - 1)),
                    None,
                    data.draw(st.integers(1, 3)),
                ),
            )
        ]
    start = [data.draw(st.integers(0, n)) for n in tensor.shape]
    stop = [data.draw(st.integers(a, n)) for a, n in zip(start, tensor.shape, strict=True)]
    box = Box(tuple(start), tuple(stop))
    elements = read(saved(tensor), box)
    assert elements.flags.c_contiguous
    np.testing.assert_array_equal(elements, tensor[box.slices].numpy())


@given(st.data())
def test_what_torch_has_in_row_major_order_is_one_run_of_bytes_and_nothing_else(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tensor = (
        torch.arange(prod(shape), dtype=torch.int32)
        .reshape(shape)
        .permute(*data.draw(st.permutations(range(len(shape)))))
    )
    tensor = tensor[data.draw(st.integers(0, tensor.shape[0] - 1)) :]
    written = saved(tensor)
    file = open_torch_file(Span(LoadedFile("the file", written), 0, len(written)))
    entry = run_of(file.storage(file.state.storage), file.state, 4)
    assert (entry is not None) == tensor.is_contiguous()
    if entry is not None:
        assert entry.span.read(0, len(entry.span)).tobytes() == tensor.numpy().tobytes()
        assert (entry.crc is not None) == (tensor.numel() == prod(shape)), (
            "a checksum is of a whole storage"
        )


def test_a_chunk_is_read_without_what_is_beside_it():
    rows = torch.arange(2_000_000, dtype=torch.int32).reshape(2000, 1000)
    for tensor in (rows, rows.t(), rows.reshape(20, 100, 1000).permute(1, 2, 0)):
        shape = strided_chunks(tensor.shape, tensor.stride(), 4)
        assert ROWS_BYTES / 2 < prod(shape) * 4 <= ROWS_BYTES
        CountedFile.sizes.clear()
        box = Box((0,) * tensor.ndim, shape)
        np.testing.assert_array_equal(read(saved(tensor), box), tensor[box.slices].numpy())
        assert sum(CountedFile.sizes) <= prod(shape) * 4 + 3 * WINDOW


def test_a_box_across_the_order_of_the_elements_is_read_in_parts_of_bounded_size():
    tensor = torch.arange(1_000_000, dtype=torch.int32).reshape(1000, 1000).t()
    box = Box((3, 0), (7, 1000))
    CountedFile.sizes.clear()
    np.testing.assert_array_equal(read(saved(tensor), box), tensor[3:7].numpy())
    assert max(CountedFile.sizes) <= ROWS_BYTES


def test_a_file_in_memory_that_ends_before_what_is_asked_for_is_said_to():
    file = LoadedFile("the file", b"0123")
    parts = [bytearray(2), bytearray(2)]
    file.read_into(0, list(map(memoryview, parts)))
    assert parts == [b"01", b"23"]
    for ask in (lambda: file.read(2, 5), lambda: file.read_into(1, list(map(memoryview, parts)))):
        with pytest.raises(CorruptionError, match="the file ends before byte 5"):
            ask()
