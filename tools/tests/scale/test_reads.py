"""Requests for chunk tables in a restore: their number does not depend on how many hosts saved.
docs/scale.md has whole jobs."""

from __future__ import annotations

import numpy as np
import pytest
from chunk_oracle import chunks_inside

from tools.scale.host import Job
from tools.scale.layouts import KINDS
from tools.scale.reads import MEASURED
from tools.scale.tables import owners

pytestmark = pytest.mark.slow


def requests(kind, devices, tensors=120, **onto):
    return MEASURED["requests"](tree="405B", kind=kind, devices=devices, tensors=tensors, **onto)()


@pytest.mark.parametrize("kind", KINDS)
def test_the_simulated_tables_give_each_host_what_it_plans_to_write(kind):
    job = Job("8B", kind, 256, 40)
    whose = owners(job, job.records())
    for host in (0, 7, 31):
        written = {
            name: np.sort(np.concatenate([chunks_inside(b.piece, b.box)[0] for b in blocks]))
            for name, blocks in job.planned(host).blocks.items()
        }
        for name, hosts in whose.items():
            np.testing.assert_array_equal(
                np.flatnonzero(hosts == host), written.get(name, np.empty(0, np.int64))
            )


@pytest.mark.parametrize("devices", [4096, 16384])
def test_a_host_that_restores_its_own_share_reads_few_things_to_find_it(devices):
    """The header of the table of all, a unit of it, its record, its own table."""
    counted = requests("FSDP", devices)
    assert counted["most table requests"] <= 6
    assert counted["table bytes"] <= 0.05 * counted["data bytes"] + counted["header"]


def test_onto_half_as_many_devices_it_reads_the_tables_of_those_that_have_its_share():
    """Up to eight: tensors with unlike numbers of rows are cut at unlike places, twice."""
    counted = requests("FSDP", 16384, onto_devices=8192)
    assert counted["most table requests"] <= 2 + 2 * 8


@pytest.mark.parametrize("kind", ["HSDP", "FSDP+TP", "EP"])
def test_where_the_chunks_lie_takes_fewer_requests_than_the_chunks(kind):
    counted = requests(kind, 16384)
    assert counted["table requests"] < counted["data requests"]
    assert counted["most table requests"] <= 24


def test_replicas_that_read_together_ask_for_a_part_of_the_data_each():
    """Of 16 replicas a 16th."""
    counted = requests("HSDP", 16 * 256, tensors=40)
    assert counted["data bytes together"] == pytest.approx(counted["data bytes"] / 16, rel=0.05)
    assert counted["data requests together"] < 0.2 * counted["data requests"]


@pytest.mark.parametrize("kind", ["FSDP+TP", "EP"])
def test_vectors_that_all_devices_hold_are_few_requests_together(kind):
    counted = requests(kind, 4096)
    assert counted["table requests together"] <= 8
    assert counted["data bytes together"] < counted["data bytes"]
    assert counted["data requests together"] < counted["data requests"]


def test_where_no_two_hosts_need_the_same_nothing_is_read_together():
    assert "data requests together" not in requests("FSDP", 256, tensors=20)
