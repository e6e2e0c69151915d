"""Every framework restores, onto meshes of its own and bit by bit, the saves of every other one, by
any number of processes.

The processes, their layouts and how each of them is compared with what its framework says:
`tests/children/e2e_*.py`.
"""

from __future__ import annotations

import json
from itertools import product
from math import prod

import pytest
from faults import TORTURE

import shardckpt

pytestmark = [pytest.mark.xla, pytest.mark.timeout(3600 if TORTURE else 400), pytest.mark.slow]

JOBS = {
    "torch_xla": ("torch_xla", 1),
    "torch_xla, 2 processes": ("torch_xla", 2),
    "DTensor, 2 processes": ("DTensor", 2),
    "DTensor, 4 processes": ("DTensor", 4),
    "JAX": ("JAX", 1),
    "JAX, 2 processes": ("JAX", 2),
    "numpy": ("numpy", 1),
}
KINDS = {
    "packed": {"layout": "packed", "fingerprint": True},
    "zarr": {"layout": "zarr", "fingerprint": True},
    "packed, zstd": {"layout": "packed", "compression": "zstd", "fingerprint": True},
}
"""Ways to store a checkpoint. `make test` has the first, `make sweeps` the others."""
TENSORS = 29
"""Of the state, tied ones once."""


@pytest.fixture(scope="module")
def rounds(torture):
    """Of the whole matrix, each with all layouts drawn anew."""
    return range(8 if torture else 1)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    """A way to store all checkpoints."""
    return request.param


@pytest.fixture(scope="module")
def saved(rounds, kind, run_job, tmp_path_factory):
    """By round, saver and kind: where the checkpoint is, and each tensor's layout."""
    root = tmp_path_factory.mktemp("matrix")
    checkpoints = {}
    for (saver, (framework, processes)), seed in product(JOBS.items(), rounds):
        places = {kind: (root / f"{seed} {saver}", KINDS[kind])}
        answers = run_job(framework, "save", processes, places, seed)
        assert all(answer == answers[0] for answer in answers)
        checkpoints |= {
            (seed, saver, kind): (places[kind][0], layouts) for kind, layouts in answers[0].items()
        }
    return checkpoints


@pytest.fixture(scope="module")
def flipped(run_job, tmp_path_factory):
    """A checkpoint of a state with a few bits that are not as they should be, and what that is."""
    url = tmp_path_factory.mktemp("flipped") / "c"
    (names,) = run_job("numpy", "save_flipped", 1, url)
    return url, names


@pytest.fixture(scope="module")
def restored(rounds, kind, saved, flipped, run_job):
    """By round, saver, kind and restorer: what each process has found, and each tensor's layout."""
    by_pair = {}
    for (restorer, (framework, processes)), seed in product(JOBS.items(), rounds):
        places = {
            "/".join(pair): (saved[seed, *pair][0], JOBS[pair[0]][1])
            for pair in product(JOBS, [kind])
        }
        answers = run_job(
            framework, "restore", processes, places | {"flipped": (flipped[0], 1)}, seed
        )
        by_pair |= {
            (seed, *place.split("/"), restorer): [answer[place] for answer in answers]
            for place in places
        }
        by_pair[seed, "flipped", restorer] = [answer["flipped"] for answer in answers]
    return by_pair


@pytest.mark.parametrize("restorer", JOBS)
@pytest.mark.parametrize("saver", JOBS)
def test_what_one_saved_another_restores_bit_by_bit(rounds, restored, saver, restorer, kind):
    for seed in rounds:
        assert [answer["wrong"] for answer in restored[seed, saver, kind, restorer]] == [[]] * JOBS[
            restorer
        ][1]


def test_all_savers_recorded_one_fingerprint(saved, kind):
    """Of the same tensors, on other meshes and in other numbers of processes."""
    checkpoints = [shardckpt.open(url) for url, _ in saved.values()]
    assert all(checkpoint.record.fingerprint is not None for checkpoint in checkpoints)
    assert len({checkpoint.fingerprint().total for checkpoint in checkpoints}) == 1


@pytest.mark.parametrize("restorer", JOBS)
def test_a_flipped_bit_would_have_been_noticed(flipped, restored, restorer):
    assert {name for answer in restored[0, "flipped", restorer] for name in answer["wrong"]} == set(
        flipped[1]
    )


def test_every_element_of_every_tensor_was_compared_in_every_pair(
    rounds, kind, saved, restored, record_testsuite_property
):
    checkpoint = shardckpt.open(saved[0, "numpy", kind][0])
    sizes = {
        name: prod(checkpoint.info(name).shape)
        for name in checkpoint.names()
        if name != "model/head"
    }
    cells = dict.fromkeys(product(JOBS, JOBS), 0)
    for seed, saver, restorer in product(rounds, JOBS, JOBS):
        answers = restored[seed, saver, kind, restorer]
        assert all(
            sum(answer["compared"][name] for answer in answers) >= size
            for name, size in sizes.items()
        )
        cells[saver, restorer] += len(sizes)
    assert cells == dict.fromkeys(cells, len(rounds) * TENSORS)
    record_testsuite_property("tensors compared", sum(cells.values()))


def test_nearly_every_tensor_was_restored_onto_another_layout_than_it_was_saved_with(
    saved, restored, record_testsuite_property
):
    same = different = 0
    for (place, (_, layouts)), restorer in product(saved.items(), JOBS):
        after = restored[*place, restorer][0]["layouts"]
        same += sum(layouts[name] == after.get(name) for name in layouts)
        different += sum(layouts[name] != after.get(name) for name in layouts)
    record_testsuite_property("layouts", {"same": same, "different": different})
    assert different > 20 * same


def test_every_process_wrote_a_share_of_its_own(saved):
    for (_, saver, _), (url, _) in saved.items():
        records = [
            json.loads(path.read_text())["record"] for path in sorted(url.glob("*/records/*"))
        ]
        assert [record["host"] for record in records] == list(range(JOBS[saver][1]))
        assert all(record["chunks"] for record in records)
