"""Host memory stays inside the budget, however large tensors are: counted by the pool, and as the
peak of a whole process."""

import json
import subprocess
import sys

import pytest
from paths import CHILDREN

from shardckpt.io.cores import cores

CHILD = CHILDREN / "memory_use.py"
MiB = 1 << 20

LARGE, ALL = 256 * MiB, 512 * MiB
"""Bytes of the largest tensor, and of all, see the child."""
SAVED = {"mesh": [8], "spec": ["x"]}
READERS = max(2, min(8, cores()))
MARGIN = READERS * 4 * MiB + 24 * MiB
"""Memory of a process besides staging: one run per reading thread, chunk lists, and what the
allocator keeps."""


def child(verb, **case):
    finished = subprocess.run(
        [sys.executable, CHILD],
        input=json.dumps({"verb": verb, **case}),
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint whose tensors are cut by rows over 8 devices, and what saving it took."""
    url = str(tmp_path_factory.mktemp("memory") / "checkpoint")
    names = ["large", *(f"small{i}" for i in range(4))]
    return url, child("save", url=url, names=names, layout="packed", limit=64 * MiB, **SAVED)


def test_saving_takes_no_more_memory_than_its_limit(saved):
    _, took = saved

    assert took["growth"] <= 64 * MiB


@pytest.mark.long
def test_saving_many_small_objects_takes_no_more_memory_than_its_limit(tmp_path):
    took = child(
        "save", url=str(tmp_path / "c"), names=["large"], layout="zarr", limit=64 * MiB, **SAVED
    )

    assert took["growth"] <= 64 * MiB


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "spec", "devices", "shards"),
    [
        pytest.param([8], [None, "x"], [3], LARGE // 8, id="one of 8 devices"),
        pytest.param([4, 2], ["x", "y"], [2, 3], LARGE // 4, id="two of 8 devices"),
        pytest.param(
            [2, 4], ["y"], [1, 2], LARGE // 2, id="two different shards, with replicas elsewhere"
        ),
    ],
)
@pytest.mark.parametrize("limit", [16 * MiB, 80 * MiB])
def test_a_host_restores_tensors_larger_than_its_limit(saved, mesh, spec, devices, shards, limit):
    """One tensor's shards of this host are the floor, because frameworks take them in one call."""
    url, _ = saved
    assert limit < LARGE

    took = child("restore_host", url=url, limit=limit, mesh=mesh, spec=spec, devices=devices)

    floor = max(limit, shards)
    assert 0 < took["high_water"] <= floor
    assert took["growth"] <= floor + MARGIN
    assert took["needed"] == shards * ALL // LARGE
    assert took["read"] <= 1.001 * took["needed"]


@pytest.mark.long
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_restoring_in_place_takes_no_staging_at_all(saved, framework):
    url, _ = saved

    took = child("restore_in_place", url=url, limit=64 * MiB, framework=framework)

    assert took["high_water"] <= 1024
    assert took["growth"] <= MARGIN
