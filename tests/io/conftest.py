"""Arrays cut into encoded chunks, without the code under test; and stores of both kinds."""

from __future__ import annotations

import itertools
import uuid

import crc32c
import ml_dtypes
import numpy as np
import pytest

from shardckpt.io.store import Store


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    """A store of each kind, at a place that does not exist yet."""
    if request.param == "memory":
        yield Store.open(f"memory://{uuid.uuid4().hex}/a b")
    else:
        yield Store.open(tmp_path / "a b")


@pytest.fixture
def encoded_chunks():
    """Yields (index, stored bytes) of an array's chunks: little-endian, padded with zeros, crc32c at the end."""

    def chunks(array, chunk_shape):
        array = np.asarray(array)
        grid = [range(-(-n // c)) for n, c in zip(array.shape, chunk_shape, strict=True)]
        for index in itertools.product(*grid):
            part = array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk_shape, strict=True))]
            whole = np.zeros(chunk_shape, array.dtype)
            whole[tuple(slice(n) for n in part.shape)] = part
            raw = whole.tobytes()
            yield index, raw + crc32c.crc32c(raw).to_bytes(4, "little")

    return chunks


@pytest.fixture
def random_array():
    """Makes an array of any dtype with reproducible, mostly arbitrary bits."""

    def make(shape, dtype, seed=0):
        rng = np.random.default_rng(seed)
        dtype = np.dtype(dtype)
        if dtype.kind == "b":
            return rng.integers(0, 2, shape).astype(bool)
        if dtype in (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.int2)):
            return rng.integers(-2, 2, shape).astype(np.int8).astype(dtype)
        if dtype == np.dtype(ml_dtypes.float4_e2m1fn):
            return rng.integers(-2, 3, shape).astype(np.float32).astype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        return rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)

    return make
