"""Bytes that hosts read of a checkpoint, per byte that their devices need, whatever the layouts of
save and restore."""

import json
import subprocess
import sys
from math import prod

import amplification as tool
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import TOOLS

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, frameworks
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES
from shardckpt.layout.world import World
from shardckpt.writing import tensor_storage

pytestmark = pytest.mark.slow


REAL_SIZES = tool.llama_shapes(1)
SMALL_SIZES = {
    **tool.llama_shapes(8, vocabularies=(128256,)),
    "uneven": (5027, 512),
    "prime": (4001, 331),
    "vector": (300_007,),
}


def stored(shape, itemsize, sharding):
    """The record of a tensor as `save` would store it."""
    state = {"w": np.empty(shape, f"u{itemsize}")}
    return tensor_storage.tensor_records(
        frameworks.sources(state, World()), SaveOptions(shardings={"w": sharding}), World()
    )["w"]


def split(parts):
    """A sharding that cuts every dimension into so many parts."""
    axes = tuple(f"d{i}" for i in range(len(parts)))
    return Sharding(Mesh(parts, axes), PartitionSpec(*axes))


@pytest.mark.parametrize("seed", range(3))
def test_the_plan_is_what_the_storage_really_gives_byte_by_byte(tmp_path, seed):
    rng = np.random.default_rng(seed)
    state = tool.new_state(SMALL_SIZES)
    tool.fill(state, rng)
    mesh = tool.random_mesh(rng, powers_of_two=seed > 0)
    shardings = {name: tool.random_sharding(rng, mesh, array.ndim) for name, array in state.items()}
    shardckpt.save(tmp_path / "c", state, options=SaveOptions(shardings=shardings))
    checkpoint = shardckpt.open(tmp_path / "c")
    tensors = list(checkpoint.record.structure.tensors.values())

    for devices in tool.HOSTS:
        target_mesh = tool.random_mesh(rng, powers_of_two=seed > 0)
        plans = [
            tool.plan(t, tool.random_sharding(rng, target_mesh, len(t.shape)), devices)
            for t in tensors
        ]
        for host in rng.choice(len(plans[0]), min(3, len(plans[0])), replace=False).tolist():
            mine = [p[host] for p in plans]

            read, arrays = tool.read(checkpoint, tensors, mine)

            assert read == sum(p.read for p in mine)
            assert sum(a.nbytes for boxes in arrays for a in boxes) == sum(p.needed for p in mine)
            for t, p, boxes in zip(tensors, mine, arrays, strict=True):
                for i, array in enumerate(boxes):
                    assert array.tobytes() == state[t.name][p.boxes[i].slices].tobytes(), t.name


@given(
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 200)).filter(lambda s: prod(s) >= 256),
    itemsize=st.sampled_from([1, 2, 4]),
    source=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2),
    target=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2),
)
@settings(max_examples=150, deadline=None)
def test_nothing_else_is_read_where_2_4_and_8_divide_both_axes_evenly(
    sizes, itemsize, source, target
):
    shape = tuple(64 * n for n in sizes)
    if prod(shape) * itemsize < 4 << 20:
        shape = (shape[0], shape[1] * 4)
    tensor = stored(shape, itemsize, split(source))

    for devices in tool.HOSTS:
        for host in tool.plan(tensor, split(target), devices):
            chunk = prod(tensor.pieces[0].chunks) * itemsize
            assert host.read == host.needed + host.needed // chunk * CHECKSUM_BYTES
            assert host.read <= 1.001 * host.needed


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Layout changes of Llama 8B and two uneven vocabularies, planned at their real size."""
    return tool.measure(
        REAL_SIZES, pairs=80, seed=1, read_one_in=0, directory=tmp_path_factory.mktemp("unused")
    )


def test_layout_changes_of_up_to_8_ways_read_at_most_half_again_of_what_is_needed(measured):
    for summary in (
        tool.summary(measured.hosts["powers of two", "a"]),
        tool.summary(measured.tensors["powers of two", "a"]),
    ):
        assert summary["n"] > 1000
        assert summary["median"] <= 1.10
        assert summary["worst"] <= 1.5


def test_changes_by_up_to_a_factor_of_8_read_a_tenth_too_much_at_the_median(measured):
    for kind in ("powers of two", "any"):
        assert tool.summary(measured.hosts[kind, "b"])["median"] <= 1.10
    assert tool.summary(measured.hosts["powers of two", "b"])["p90"] <= 1.5


def test_meshes_of_any_size_read_a_tenth_too_much_at_the_median(measured):
    summary = tool.summary(measured.hosts["any", "a"])

    assert summary["median"] <= 1.10
    assert summary["p90"] <= 1.5


def test_low_amplification_is_not_bought_with_tiny_chunks(measured):
    """Of tensors of 8 MiB to 2 GiB, laid out over 8 to 64 devices."""
    assert min(measured.chunk_bytes) >= 128 << 10
    assert np.median(measured.chunk_bytes) >= 256 << 10


def test_the_command_reports_every_group_and_compares_with_the_storage(tmp_path):
    arguments = ["--pairs", "6", "--scale", "16", "--read", "3", "--directory", tmp_path, "--json"]
    finished = subprocess.run(
        [sys.executable, TOOLS / "amplification.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads(finished.stdout)
    assert results["pairs"] == 6
    assert results["mismatches"] == []
    assert results["hosts that really read"] == 6
    assert results["bytes really read"] > 0
    assert len(results["record and table bytes"]) == 2
    assert list(tmp_path.iterdir()) == []
