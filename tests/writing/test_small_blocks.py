"""Small tensors that a background save copies together, beside tensors of all other kinds."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt

KINDS = {
    "float32": lambda n: torch.arange(n * 7, dtype=torch.float32).reshape(n, 7),
    "bfloat16": lambda n: torch.full((n,), float(n), dtype=torch.bfloat16),
    "bool": lambda n: torch.arange(n) % 3 == 0,
    "parameter": lambda n: torch.nn.Parameter(torch.full((n, 3), float(n))),
    "number": torch.tensor,
    "transposed": lambda n: torch.arange(n * 6).reshape(n, 6).T,
    "part": lambda n: torch.arange(3 * n)[n : 2 * n],
    "expanded": lambda n: torch.full((1,), n).expand(n),
    "empty": lambda n: torch.zeros(0, n),
    "32 KiB": lambda n: torch.full((4096,), n),
    "a little more": lambda n: torch.full((4097,), n),
    "large": lambda n: torch.full((300_000,), n),
    "numpy": lambda n: np.full((2, n), n, np.float16),
    "numpy, other byte order": lambda n: np.full((2, n), n, ">i4"),
    "numpy, columns": lambda n: np.arange(4 * n).reshape(2, 2 * n).T[::2],
    "numpy, one number": np.array,
}


@pytest.mark.long
@given(
    groups=st.lists(
        st.tuples(st.sampled_from([*KINDS]), st.sampled_from([1, 2, 63, 64, 65, 130])), max_size=6
    ),
    limit=st.sampled_from(["1GiB", "64MiB"]),
)
@settings(max_examples=60, deadline=None)
def test_a_background_save_of_small_and_other_tensors_has_the_bytes_of_one_in_the_foreground(
    groups, limit, tmp_path_factory
):
    state = {
        f"{g:02d} {kind}.{i:03d}": KINDS[kind](i + 1)
        for g, (kind, number) in enumerate(groups)
        for i in range(number)
    }
    place = tmp_path_factory.mktemp("saved")
    options = shardckpt.SaveOptions(memory_limit=limit)
    shardckpt.save(place / "foreground", state, options=options)
    handle = shardckpt.save_async(place / "background", state, options=options)
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            tensor.data = torch.zeros_like(tensor)  # the memory may be used for something else
    handle.wait()

    foreground, background = (
        [(name, array.tobytes()) for name, array in shardckpt.restore(place / how).items()]
        for how in ("foreground", "background")
    )
    assert foreground == background
    assert shardckpt.open(place / "background").verify().ok


def test_small_tensors_that_are_fetched_into_more_memory_than_they_have_are_published(tmp_path):
    # Views with a pending negation: a copy of float32 is made, and from it one of bfloat16.
    state = {
        f"{i:03d}": torch.imag(torch.full((5,), complex(1, i), dtype=torch.complex64).conj())
        for i in range(100)
    }
    with shardckpt.Publisher(tmp_path, dtype="bfloat16", proof=False) as publisher:
        publisher.publish(1, state)
    (step,) = [one for one in tmp_path.iterdir() if one.name.isdigit()]
    checkpoint = shardckpt.open(step)
    assert [checkpoint.read(f"{i:03d}").tolist() for i in range(100)] == [
        [float(-i)] * 5 for i in range(100)
    ]


def test_the_chunks_of_a_background_save_are_in_the_order_of_the_tensors(tmp_path):
    sizes = [10] * 100 + [300_000] + [10] * 100
    state = {f"{i:03d}": torch.full((n,), i + 1) for i, n in enumerate(sizes)}
    shardckpt.save_async(tmp_path, state).wait()

    (data,) = [path.read_bytes() for path in tmp_path.rglob("d/0*")]
    begins = [data.index(tensor[:10].numpy().tobytes()) for tensor in state.values()]
    assert begins == sorted(begins)


@pytest.mark.parametrize(
    ("other", "most"),
    [
        pytest.param(np.ones((3, 4)), 48, id="all alike"),
        pytest.param(np.ones((3, 4)).T, 58, id="one transposed"),
    ],
)
def test_training_waits_for_few_calls_per_small_tensor(tmp_path, other, most):
    state = {f"{i}.weight": np.full((50, 50), float(i)) for i in range(1000)}
    state["other"] = other
    shardckpt.save_async(tmp_path / "first", state).wait()
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        handle = shardckpt.save_async(tmp_path / "second", state)
    finally:
        sys.setprofile(None)
    handle.wait()
    assert calls <= most * len(state), "with a view and a copy for each it is 69"
