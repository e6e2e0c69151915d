"""Loaders whose states go by the data axis of the mesh, in real jobs of other shapes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import run_ranks


@pytest.fixture
def job(tmp_path):
    """A function that runs the ranks of a job, and returns what each printed."""

    def run(ranks, *arguments):
        server = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        return run_ranks("loader_axis.py", server, ranks, tmp_path / "c", *arguments)

    return run


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("known", ["given", "mesh"])
def test_a_loader_goes_by_its_position_on_the_data_axis_and_refuses_another_size(job, known):
    saved = job(2, "save", 2, known)
    assert saved[0]["versions"] == [[3, 0]] * 2
    for ranks in (2, 4):
        for answer in job(ranks, "restore", 2, known):
            assert answer["next"] == 2 + 10 * answer["position"]
    for answer in job(2, "restore", 1, known):
        assert (
            "one value per position on an axis of size 2, and this process is at 0 of 1"
            in answer["refused"]
        )


def test_without_a_known_axis_a_loader_goes_by_the_number_of_its_process(job):
    assert job(2, "save", 2, "unknown")[0]["versions"] == [[1, 0]] * 2
    assert [answer["next"] for answer in job(2, "restore", 2, "unknown")] == [2, 12]
