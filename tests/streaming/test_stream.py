"""Outputs are made block by block: each element where it belongs, each block once, each stored byte
read once."""

from __future__ import annotations

import uuid
from contextlib import closing
from itertools import chain

import ml_dtypes
import numpy as np
import pytest
from convert_states import MiB, layouts, random, saved, sharded
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt import Box, errors
from shardckpt.layout.dtypes import by_name
from shardckpt.plan.grids import one_grid
from shardckpt.plan.views import View
from shardckpt.reading.naming.outputs import OutputTensor, identity
from shardckpt.streaming.stream import Stream, read_once_blocks, row_blocks


def grid_of(output, chunks):
    return one_grid(output.name, output.shape, chunks)


def made(checkpoint, outputs, how=row_blocks, limit=64 * MiB, **options):
    """Each output as one array, and the boxes in the order in which they came."""
    arrays = {output.name: np.zeros(output.shape, output.dtype.storage) for output in outputs}
    times = {output.name: np.zeros(output.shape, np.int8) for output in outputs}
    came = []

    with closing(Stream(checkpoint, outputs, how, limit=limit, **options).read()) as batches:
        for block in chain.from_iterable(batches):
            name, at = block.output.name, (*block.box.slices, ...)
            assert block.elements.flags.c_contiguous
            assert block.elements.dtype == block.output.dtype.storage
            arrays[name][at] = block.elements
            times[name][at] += 1
            came.append((name, block.box))
    assert all((count == 1).all() for count in times.values()), "each element comes once"
    return {output.name: arrays[output.name].view(output.dtype.numpy) for output in outputs}, came


def stored_bytes(checkpoint):
    return sum(
        len(rows) and int(rows.length.sum())
        for rows in checkpoint.reader.whole_table().arrays.values()
    )


@given(
    data=st.data(),
    dtype=st.sampled_from(["float32", "bfloat16", "uint8", "complex128", "uint4", "bool"]),
)
@settings(max_examples=25)
def test_tensors_of_any_layout_come_as_they_are_in_any_blocks(data, dtype):
    shape = data.draw(st.lists(st.integers(0, 40), max_size=3).map(tuple))
    w = random(shape, dtype)
    checkpoint = saved(
        f"memory://{uuid.uuid4()}",
        {"w": w, "s": random((), dtype, 1)},
        {"w": data.draw(layouts(len(shape)))},
    )
    block = data.draw(st.tuples(*[st.integers(1, 12)] * len(shape)))
    outputs = [identity(checkpoint.tensor("w")), identity(checkpoint.tensor("s"), "t")]
    arrays, _ = made(
        checkpoint,
        outputs,
        lambda output, *_: grid_of(output, block if output.name == "w" else ()),
        in_order=data.draw(st.booleans()),
    )
    assert arrays["w"].tobytes() == w.tobytes()
    assert arrays["t"].tobytes() == random((), dtype, 1).tobytes()


@given(data=st.data())
@settings(max_examples=25)
def test_parts_that_are_transposed_and_joined_are_what_numpy_makes_of_them(data):
    a, b = random((6, 20, 9), seed=1), random((20, 6), seed=2)
    place = f"memory://{uuid.uuid4()}"
    checkpoint = saved(
        place, {"a": a, "b": b}, {"a": data.draw(layouts(3)), "b": data.draw(layouts(2))}
    )
    cut, order = data.draw(st.integers(1, 19)), data.draw(st.permutations(range(3)))
    f32 = by_name("float32")
    outputs = [
        OutputTensor(
            "transposed",
            tuple(a.shape[d] for d in order),
            f32,
            (View("a", Box.full(a.shape), tuple(order), (0, 0, 0)),),
        ),
        OutputTensor(
            "layer", (9, 20), f32, (View("a", Box((4, 0, 0), (5, 20, 9)), (2, 1), (0, 0)),)
        ),
        OutputTensor(
            "joined",
            (20, 15),
            f32,
            (
                View("a", Box((2, 0, 0), (3, cut, 9)), (1, 2), (0, 6)),
                View("a", Box((3, cut, 0), (4, 20, 9)), (1, 2), (cut, 6)),
                View("b", Box.full((20, 6)), (0, 1), (0, 0)),
            ),
        ),
        OutputTensor(
            "stacked",
            (2, 6, 20),
            f32,
            tuple(View("b", Box.full((20, 6)), (None, 1, 0), (i, 0, 0)) for i in range(2)),
        ),
    ]
    arrays, _ = made(
        checkpoint,
        outputs,
        lambda output, *_: grid_of(output, (7, 5, 4)[: len(output.shape)]),
        in_order=data.draw(st.booleans()),
    )
    expected = {
        "transposed": a.transpose(order),
        "layer": a[4].T,
        "joined": np.concatenate([b, np.concatenate([a[2, :cut], a[3, cut:]])], axis=1),
        "stacked": np.stack([b.T, b.T]),
    }
    assert all(
        np.array_equal(arrays[name].view(np.uint32), expected[name].view(np.uint32))
        for name in expected
    )


def test_each_stored_byte_is_read_once_though_tensors_are_larger_than_the_memory(tmp_path):
    state = {f"w{i}": random((3001, 1000 + i), seed=i) for i in range(4)}
    layout = {
        "w0": sharded("a", "b"),
        "w1": sharded("", "ab"),
        "w2": sharded("ab", ""),
        "w3": sharded("b", "a"),
    }
    checkpoint = saved(tmp_path / "c", state, layout)
    stored = stored_bytes(checkpoint)
    for how in (row_blocks, read_once_blocks):
        again = type(checkpoint)(tmp_path / "c")
        arrays, _ = made(
            again, [identity(again.tensor(name)) for name in state], how, limit=26 * MiB
        )
        assert all(arrays[name].tobytes() == state[name].tobytes() for name in state)
        assert again.stats.bytes_read == stored


def test_tall_columns_are_read_once_in_blocks_and_again_for_each_slab_of_rows(tmp_path):
    w = random((4096, 2050))
    checkpoint = saved(tmp_path / "c", {"w": w}, {"w": sharded("", "ab")})
    stored, read = stored_bytes(checkpoint), {}
    for how, in_order in ((read_once_blocks, False), (row_blocks, False), (row_blocks, True)):
        again = type(checkpoint)(tmp_path / "c")
        arrays, _ = made(
            again, [identity(again.tensor("w"))], how, limit=13 * MiB, in_order=in_order
        )
        assert arrays["w"].tobytes() == w.tobytes()
        read[how, in_order] = again.stats.bytes_read / stored
    assert read.pop((read_once_blocks, False)) == 1
    assert all(1.5 < times <= 4 for times in read.values()), read


def test_blocks_come_in_row_major_order_where_that_is_asked_for(tmp_path):
    state = {"w": random((64, 9, 400)), "v": random((300, 777), seed=1)}
    checkpoint = saved(tmp_path / "c", state, {"w": sharded("b", "", "a"), "v": sharded("", "ab")})
    outputs = [identity(checkpoint.tensor(name)) for name in state]
    block = {"w": (1, 2, 400), "v": (7, 777)}
    arrays, came = made(
        checkpoint, outputs, lambda output, *_: grid_of(output, block[output.name]), in_order=True
    )
    assert came == sorted(came, key=lambda at: (list(state).index(at[0]), at[1].start))
    assert all(arrays[name].tobytes() == state[name].tobytes() for name in state)


@given(
    skip=st.integers(0, 40),
    block=st.tuples(st.integers(5, 60), st.integers(5, 60)),
    in_order=st.booleans(),
)
@settings(max_examples=15)
def test_the_first_blocks_can_be_left_out_and_the_others_are_as_ever(skip, block, in_order):
    state = {"w": random((100, 90)), "v": random((50, 60), seed=1)}
    place = f"memory://{uuid.uuid4()}"
    checkpoint = saved(place, state, {"w": sharded("a", "b"), "v": sharded("", "ab")})

    def came(skip):
        again = type(checkpoint)(place)
        planned = Stream(
            again,
            [identity(again.tensor(n)) for n in state],
            lambda output, *_: grid_of(output, block),
            limit=64 * MiB,
            in_order=in_order,
        )
        return [
            (b.output.name, b.box, b.elements.tobytes())
            for batch in planned.read(skip)
            for b in batch
        ]

    assert came(skip) == came(0)[skip:]


def test_elements_are_rounded_to_the_nearest_even_and_what_is_too_large_is_silently_infinite(
    tmp_path,
):
    halves = np.array(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.4e38, np.nan, 7e4], np.float32
    )
    checkpoint = saved(tmp_path / "c", {"w": halves})
    outputs = [
        identity(checkpoint.tensor("w"), name, by_name(name)) for name in ("bfloat16", "float16")
    ]
    arrays, _ = made(checkpoint, outputs)
    expected = [1, 1 + 2**-6, 1 + 2**-7, -np.inf, np.nan, 70144]
    np.testing.assert_array_equal(arrays["bfloat16"].astype(np.float64), expected)
    assert arrays["bfloat16"].dtype == ml_dtypes.bfloat16
    assert np.isposinf(arrays["float16"][5])


def test_what_cannot_be_made_is_refused_by_name(tmp_path):
    checkpoint = saved(
        tmp_path / "c", {"w": random((8, 4), "complex64"), "v": random((4096, 1024))}
    )
    f32 = by_name("float32")
    with pytest.raises(
        errors.ShapeMismatchError,
        match=r"'out': its parts do not form its shape \(8, 4\): the pieces hold 16",
    ):
        OutputTensor("out", (8, 4), f32, (View("v", Box((0, 0), (4, 4)), (0, 1), (0, 0)),))
    with pytest.raises(errors.ShapeMismatchError, match="has 2 dimensions; give both"):
        OutputTensor("out", (8,), f32, (View.whole("v", (8, 1)),))
    with pytest.raises(errors.OptionError, match="only dimensions of length 1 can be left out"):
        View("v", Box.full((8, 4)), (0,), (0,))
    with pytest.raises(
        errors.DtypeMismatchError,
        match="'w' has dtype complex64, which cannot be converted to float32",
    ):
        Stream(
            checkpoint, [identity(checkpoint.tensor("w"), dtype=f32)], row_blocks, limit=64 * MiB
        )
    with pytest.raises(errors.ShapeMismatchError, match="lies outside its shape"):
        Stream(checkpoint, [_outside()], row_blocks, limit=64 * MiB)
    with pytest.raises(
        errors.BudgetError,
        match=r"memory_limit=8 MiB is too little to read chunks of [\d.]+ [KM]iB; raise it to \d+ "
        r"MiB",
    ):
        Stream(checkpoint, [identity(checkpoint.tensor("v"))], row_blocks, limit=8 * MiB)
    with pytest.raises(
        errors.BudgetError,
        match=r"memory_limit=24 MiB is too little to make 'v' in blocks of 16 MiB; raise it to \d+ "
        r"MiB",
    ):
        Stream(
            checkpoint,
            [identity(checkpoint.tensor("v"))],
            lambda output, *_: grid_of(output, output.shape),
            limit=24 * MiB,
        )


def _outside():
    return OutputTensor(
        "out", (4097, 1), by_name("float32"), (View("v", Box((0, 0), (4097, 1)), (0, 1), (0, 0)),)
    )


def test_tiny_tensors_come_at_most_4096_at_a_time():
    """Each takes objects that no memory limit counts."""
    checkpoint = saved(
        f"memory://{uuid.uuid4()}", {f"w{i}": np.full(10, i, np.float32) for i in range(5000)}
    )
    outputs = [identity(checkpoint.tensor(f"w{i}")) for i in range(5000)]
    at_once = [
        len(batch) for batch in Stream(checkpoint, outputs, row_blocks, limit=64 * MiB).read()
    ]
    assert sum(at_once) == 5000
    assert max(at_once) <= 4096
