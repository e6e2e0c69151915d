"""Checkpoints on object stores, from the first save to the last deletion, by one process and by
several; and what is asked of the store."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
import zarr
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule
from processes import Processes

import shardckpt
from shardckpt import SaveOptions, errors
from shardckpt.io.store import Store
from shardckpt.runs.collecting import collect, delete
from shardckpt.writing.packed import DATA_FILE_BYTES, OBJECT_BYTES, PackedWriter

MiB = 1 << 20
RESTORED = (
    np.arange(2_400_000, dtype=np.float32).reshape(2400, 1000),
    np.arange(40_000, dtype=np.int32),
    np.arange(5),
)


class Cloud:
    """An emulator behind a proxy, and a job whose processes are led there, as this one is."""

    def __init__(self, emulator, proxy, job):
        self.emulator, self.proxy, self.job = emulator, proxy, job
        # TensorStore keeps to the way by which it first came to a bucket.
        self.bucket = emulator.new_bucket(f"b-{uuid.uuid4().hex}")

    def place(self):
        return f"{self.emulator.scheme}://{self.bucket}/{uuid.uuid4().hex}"

    def requests(self, url, kind):
        return [
            e.operation
            for e in self.proxy.traffic.exchanges(url.partition("://")[2])
            if e.operation.kind == kind
        ]

    def sizes(self, url):
        """Object, relative to the place → bytes that came to store it."""
        prefix = url.partition("://")[2]
        return {
            name.removeprefix(prefix): size
            for name, size in self.proxy.traffic.uploaded(prefix).items()
        }


EVERY = pytest.mark.parametrize("cloud", ["gs", "s3", "az"], indirect=True)


@pytest.fixture(scope="module", params=["gs", "s3"])
def cloud(request):
    emulator = request.getfixturevalue(
        {"gs": "gcs_server", "s3": "s3_server", "az": "azure_server"}[request.param]
    )
    with (
        FaultProxy(emulator.endpoint) as proxy,
        environment(emulator.env(proxy.url)),
        Processes("many_hosts") as job,
    ):
        yield Cloud(emulator, proxy, job)


def assert_holds(url, shift):
    assert shardckpt.open(url).verify().ok
    restored = shardckpt.restore(url)
    for name, expected in zip(("large", "medium", "small"), RESTORED, strict=True):
        np.testing.assert_array_equal(restored[name], expected + shift)
    assert restored["step"] == 7 + shift


def attempts(url):
    return [name for name in Store.open(url).list_children() if name.endswith("/")]


@pytest.mark.long
@EVERY
@pytest.mark.timeout(300)  # a few seconds on a machine of its own
@pytest.mark.parametrize(
    ("processes", "layout"), [pytest.param(1, "zarr", marks=pytest.mark.slow), (3, "packed")]
)
def test_a_checkpoint_is_saved_verified_restored_replaced_collected_around_and_deleted(
    cloud, layout, processes
):
    url, options = cloud.place(), {"layout": layout}

    def save(shift, **more):
        return cloud.job.run("save", processes, url, options | more, shift, timeout=250)

    assert save(0) == ["saved"] * processes
    assert_holds(url, 0)

    refused = save(1)
    assert {answer["error"] for answer in refused} == {"AlreadyExistsError"}
    assert save(1, overwrite=True) == ["saved"] * processes
    assert_holds(url, 1)

    for attempt in collect(url, grace=0):  # of the save that was refused
        assert attempt.outcome == "removed"
    cloud.job.run("save_without_committing", 2, url, {**options, "overwrite": True}, 2)
    assert len(attempts(url)) == 2
    assert {orphan.outcome for orphan in collect(url, grace=0)} == {"published"}  # it is complete
    assert attempts(url) == [f"{shardckpt.open(url).record.attempt}/"]
    assert_holds(url, 2)

    assert delete(url) == []
    with pytest.raises(errors.NotFoundError):
        shardckpt.restore(url)
    assert Store.open(url).list() == []

    assert save(3) == ["saved"] * processes
    assert_holds(url, 3)


@pytest.mark.long
@EVERY
def test_of_two_jobs_that_save_to_one_place_at_once_exactly_one_commits(cloud):
    url = cloud.place()
    outcomes = cloud.job.run("race", 2, url, 8, timeout=250)
    for attempt, pair in enumerate(zip(*outcomes, strict=True)):
        assert sorted(pair) == ["AlreadyExistsError", "saved"]
        assert_holds(f"{url}/{attempt}", pair.index("saved"))


@pytest.mark.long
@EVERY
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_what_was_left_uncommitted_is_committed_by_another_process(cloud, layout):
    url = cloud.place()
    cloud.job.run("save_without_committing", 3, url, {"layout": layout})
    (outcome,) = shardckpt.commit(url)
    assert outcome.state == "committed"
    assert_holds(url, 0)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("processes", [1, 3])
def test_nothing_is_ever_listed_but_host_records_once_per_look(cloud, layout, processes):
    url = cloud.place()
    cloud.job.run("save", processes, url, {"layout": layout})
    place = f"{url.removeprefix(f'{cloud.emulator.scheme}://{cloud.bucket}/')}/{shardckpt.open(url).record.attempt}"
    listings = cloud.requests(url, "list")
    looks = len(listings)
    # The committer waits for the others; a process that saves alone waits for none.
    assert {listing.name for listing in listings} == (
        {f"{place}/records/"} if processes > 1 else set()
    )

    assert_holds(url, 0)
    assert len(cloud.requests(url, "list")) == looks


@pytest.mark.long
@EVERY
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_save_sends_requests_at_once_that_need_not_wait_for_each_other(cloud, layout):
    """Only 11 wait for one before: the record, the placeholder, the record again; all data and
    files; the manifest of the index; two to read it back; the host's record; its reading; that of
    what it refers to; the commit record. (Of the plain layout chunks come before files, and the
    root's document last.)"""
    state = {f"w{i}": np.full(1000, i, np.float32) for i in range(12)}
    shardckpt.save(cloud.place(), state)  # the first save of a process looks at more of the index
    for _ in range(3):  # a busy machine may begin a request late
        url = cloud.place()
        with cloud.proxy.rules.during(Rule("latency", seconds=0.1, times=None)):
            cloud.proxy.traffic.reset()
            shardckpt.save(url, state, options=SaveOptions(layout=layout))
            exchanges = cloud.proxy.traffic.exchanges()
        if (rounds := max(exchange.round for exchange in exchanges)) <= 11:
            break
    assert rounds <= 11 < len(exchanges)
    assert shardckpt.restore(url)["w11"][0] == 11


@pytest.mark.long
@pytest.mark.parametrize("what", ["verify", "foreign"])
def test_documents_of_many_arrays_are_read_at_once(cloud, tmp_path, what):
    url, state = cloud.place(), {f"w{i}": np.full(10, i, np.float32) for i in range(80)}
    if what == "verify":
        shardckpt.save(url, state, options=SaveOptions(layout="zarr"))
    else:  # nothing is consolidated
        group = zarr.open_group(tmp_path, mode="w", zarr_format=3)
        for name, array in state.items():
            group.create_array(name, data=array)
        for path in (path for path in tmp_path.rglob("*") if path.is_file()):
            Store.open(url).write(str(path.relative_to(tmp_path)), path.read_bytes())
    with cloud.proxy.rules.during(Rule("latency", seconds=0.1, times=None)):
        cloud.proxy.traffic.reset()
        opened = shardckpt.open(url)
        assert (
            opened.verify().ok if what == "verify" else len(opened.record.structure.tensors) == 80
        )
        exchanges = cloud.proxy.traffic.exchanges()
    # Whether a step is meant is looked for one by one, in 16 directories at most.
    assert max(exchange.round for exchange in exchanges) < 80 < len(exchanges) / 2


@pytest.mark.long
def test_data_files_are_bounded_by_64_mib_and_by_memory(cloud):
    state = {"w": np.ones((2 * OBJECT_BYTES + 3 * MiB) >> 2, np.float32)}
    url = cloud.place()
    shardckpt.save(url, state)
    sizes = sorted(size for name, size in cloud.sizes(url).items() if "/hosts/00000/0/d/0" in name)
    assert len(sizes) == 3
    # Of the request, not the object.
    assert OBJECT_BYTES - 5 * MiB < sizes[1] <= sizes[2] <= OBJECT_BYTES + 4096

    small = cloud.place()
    shardckpt.save(small, {"w": state["w"][: 5 * MiB]}, options=SaveOptions(memory_limit="40MiB"))
    sizes = [size for name, size in cloud.sizes(small).items() if "/hosts/00000/0/d/0" in name]
    assert len(sizes) >= 5
    assert max(sizes) <= 4 * MiB + 4096


def test_data_files_on_a_disk_are_bounded_by_256_mib(tmp_path):
    writer, chunk = PackedWriter(Store.open(tmp_path), 0), bytes(2 * MiB)
    for i in range(DATA_FILE_BYTES // len(chunk) + 3):
        writer.append([f"w/c/{i}"], [chunk])
    sizes = [(tmp_path / file).stat().st_size for file in writer.finish().files]
    assert sizes == [DATA_FILE_BYTES, 3 * len(chunk)]
