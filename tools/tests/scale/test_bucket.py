"""Requests of a save to an object store, counted on real saves; and the load that thousands of
hosts make of them at once."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.scale.bucket import INITIAL, Job, simulate
from tools.scale.counted import emulated_save

pytestmark = pytest.mark.slow


MiB = 1 << 20
LOOKS = 9
"""Most that a host takes until it sees the placeholder of process 0, or has put its own there."""
SEEN = ("stat", "contents/#")
"""Looks at the contents: for those that are written already and, in the first save, for a storage
that is shared."""
PLACEHOLDER = ("upload", "checkpoint.json")


@pytest.fixture(scope="module")
def packed():
    return emulated_save(hosts=3, tensors=8, mebibytes=3)


@pytest.fixture(scope="module")
def plain():
    return emulated_save(hosts=2, tensors=2, mebibytes=3, layout="zarr")


def counts(requests):
    return Counter((r.kind, r.what) for r in requests)


@pytest.mark.parametrize(("hosts", "tensors", "mebibytes"), [(2, 1, 8), (4, 24, 1)])
def test_what_a_host_asks_besides_its_data_depends_on_neither_hosts_nor_tensors(
    packed, hosts, tensors, mebibytes
):
    """But for what describes the checkpoint: of hosts that say the same, one or more write it."""
    described = ("upload", "contents/#")
    other = emulated_save(hosts=hosts, tensors=tensors, mebibytes=mebibytes)
    for by_host in (packed[1:], other[1:]):
        for requests in by_host:
            each = counts(r for r in requests if r.what != "data")
            assert each.pop(described, 0) <= 1
            assert 1 <= each.pop(SEEN) <= 2
            assert 1 <= each.pop(("read", "checkpoint.json")) <= LOOKS
            assert each.pop(PLACEHOLDER, 0) <= 1
            assert each == {
                ("upload", "hosts/#/#/d/tree"): 1,
                ("upload", "hosts/#/#/manifest.ocdbt"): 1,
                ("read", "hosts/#/#/manifest.ocdbt"): 1,
                ("read", "hosts/#/#/d/tree"): 1,
                ("upload", "hosts/#/table"): 1,
                ("upload", "hosts/#/replicas.json"): 1,
                ("upload", "records/#.json"): 1,
            }


def test_a_host_of_the_plain_layout_asks_for_little_but_its_chunks(plain):
    requests = counts(r for r in plain[1] if r.what != "data")
    assert requests.pop(("upload", "contents/#"), 0) <= 1
    assert 1 <= requests.pop(SEEN) <= 2
    assert 1 <= requests.pop(("read", "checkpoint.json")) <= LOOKS
    assert requests.pop(PLACEHOLDER, 0) <= 1
    assert requests == {
        ("upload", "hosts/#/table"): 1,
        ("upload", "hosts/#/replicas.json"): 1,
        ("upload", "records/#.json"): 1,
    }


def test_no_object_is_read_or_written_by_two_hosts_but_the_committer(packed):
    for host, requests in enumerate(packed[1:], 1):
        assert {r.host for r in requests} <= {host, None}
        assert not [r for r in requests if r.kind == "list"]


def test_a_committer_asks_the_same_few_things_about_every_host(packed):
    for host in (1, 2):
        assert counts(r for r in packed[0] if r.host == host) == {
            ("read", "records/#.json"): 1,
            ("read", "hosts/#/table"): 1,
        }
    assert {r.key for r in packed[0] if r.kind == "list"} == {"records/"}


@pytest.mark.parametrize("hosts", [1, 16, 4096])
def test_a_save_stays_under_what_a_new_bucket_bears_however_many_hosts_start_at_once(packed, hosts):
    load = simulate(Job(hosts, 256 * MiB, spread=0.0), packed)
    assert load.most_writes <= INITIAL["write"]
    assert load.most_reads <= INITIAL["read"]
    assert load.writes >= hosts * 8
    # The pace leaves little unused: a save takes about as long as that many writes must.
    assert load.seconds <= load.writes / (0.7 * INITIAL["write"]) + hosts * 5 / 500 + 3


def test_many_small_objects_keep_the_pace_too(plain):
    load = simulate(Job(64, 64 * MiB, "zarr"), plain)
    assert load.writes >= 64 * 64
    assert load.most_writes <= INITIAL["write"]


def test_without_a_pace_it_would_not(packed):
    load = simulate(Job(4096, 256 * MiB, paced=False), packed)
    assert load.most_writes > 10 * INITIAL["write"]
