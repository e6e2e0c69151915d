"""Keys and bytes at one location: on a disk, in memory, on Cloud Storage and on S3 alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as replace_rule
from pathlib import Path

import numpy as np
import pytest
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule

from shardckpt.errors import CorruptionError, FormatError, MissingDataError, StorageError, UrlError
from shardckpt.io.failures import storage_errors
from shardckpt.io.store import Store


def test_what_was_written_is_read(store):
    for data in (b"bytes", bytearray(b"array"), memoryview(b"view"), np.arange(9, dtype=np.uint8), b""):
        store.write("deep/down/ünï 100%", data)
        assert store.read("deep/down/ünï 100%") == bytes(data)


def test_ranges_are_read_exactly(store):
    store.write("key", b"0123456789")
    assert store.read("key", 2, 5) == b"234"
    assert store.read("key", 7) == b"789"
    assert store.read("key", stop=3) == b"012"
    assert store.read("key", 4, 4) == b""


def test_a_range_beyond_the_end_is_corruption(store):
    store.write("key", b"0123456789")
    for start, stop in ((8, 11), (20, 30)):
        with pytest.raises(CorruptionError, match="ends before byte") as error:
            store.read("key", start, stop)
        assert f"{store}/key" in str(error.value)


def test_a_missing_object_is_missing_data_with_its_name(store):
    for span in ((None, None), (0, 4)):
        with pytest.raises(MissingDataError) as error:
            store.read("no/such key", *span)
        assert f"{store}/no/such key" in str(error.value)
    assert not store.exists("no/such key")
    assert store.read_versioned("no/such key")[0] is None


def test_an_object_is_created_once(store):
    assert store.create("record", b"first")
    assert not store.create("record", b"second")
    assert store.read("record") == b"first"
    assert store.exists("record")


@pytest.mark.parametrize("begin", ["nothing", "something"])
def test_of_many_threads_exactly_one_writes_first(store, begin):
    """All have seen the same: nothing, which one of them creates, or an object, which one of them replaces."""
    barrier = threading.Barrier(16)

    def write(i, key):
        _, generation = store.read_versioned(key)
        barrier.wait()
        return store.replace(key, b"%d" % i, generation)

    with ThreadPoolExecutor(16) as pool:
        for attempt in range(3):
            key = f"record {attempt}"
            if begin == "something":
                store.write(key, b"something")
            won = list(pool.map(write, range(16), [key] * 16))
            assert won.count(True) == 1
            assert store.read(key) == b"%d" % won.index(True)


def test_a_writer_that_finds_its_own_bytes_has_written_them(store):
    """The answer to a write may be lost, and the second try finds the object changed: by the first."""
    assert store.create("record", b"mine")
    assert store.create("record", b"mine")
    assert not store.create("record", b"yours")
    _, generation = store.read_versioned("record")
    assert store.replace("record", bytearray(b"new"), generation)
    assert store.replace("record", np.frombuffer(b"new", np.uint8), generation)
    assert not store.replace("record", b"late", generation)


def test_of_many_processes_exactly_one_creates(tmp_path):
    program = (
        "import json, sys; from shardckpt.io.store import Store; s = Store.open(sys.argv[1]); s.exists('x'); sys.stdin.read(1);"
        "print(json.dumps([s.create(f'record {i}', sys.argv[2].encode()) for i in range(50)]))"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    for child in children:
        child.stdin.write("x")
        child.stdin.flush()
    won = np.array([json.loads(child.communicate()[0]) for child in children])
    assert (won.sum(0) == 1).all()
    assert [Store.open(tmp_path).read(f"record {i}") for i in range(50)] == [b"%d" % w for w in won.argmax(0)]


def test_a_replacement_needs_the_present_generation(store):
    store.write("record", b"old")
    _, stale = store.read_versioned("record")
    assert store.replace("record", b"new", stale)
    assert not store.replace("record", b"late", stale)
    assert store.read("record") == b"new"


def test_a_replacement_of_what_was_deleted_is_refused(store):
    store.write("record", b"old")
    _, generation = store.read_versioned("record")
    store.delete("record")
    assert not store.replace("record", b"late", generation)
    assert not store.exists("record")


def test_whether_an_object_is_longer_is_told_without_reading_it(store):
    store.write("key", b"0123")
    assert [store.is_longer("key", n) for n in (0, 3, 4, 5)] == [True, True, False, False]
    assert not store.is_longer("no such key", 0)


def test_an_upload_goes_on_while_others_are_begun(store):
    store.make_parents("a/b")
    uploads = [store.upload(f"a/{i}", b"%d" % i) for i in range(20)]
    for upload in uploads:
        upload.wait()
    assert [store.read(f"a/{i}") for i in range(20)] == [b"%d" % i for i in range(20)]


def test_ranges_are_read_into_several_buffers(store):
    store.write("key", b"0123456789")
    parts = [bytearray(2), bytearray(0), bytearray(3)]
    generation = store.read_into("key", 4, [memoryview(part) for part in parts])
    assert parts == [b"45", b"", b"678"]
    assert generation == (b"" if store.location.local else store.read_versioned("key")[1])  # of ranges of a disk's files nothing is hashed
    with pytest.raises(CorruptionError, match=r"key ends before byte 11"):
        store.read_into("key", 9, [memoryview(bytearray(2))])
    with pytest.raises(MissingDataError, match="no/such key is missing"):
        store.read_into("no/such key", 0, [memoryview(bytearray(2))])


def test_deleting_what_is_not_there_is_no_error(store):
    store.write("something", b"")
    store.delete("nothing")
    store.delete_prefix("nothing/")
    assert store.list() == ["something"]


def test_keys_are_listed_in_order(store):
    for key in ("b/2", "a", "b/1", "b/c/3", "bb"):
        store.write(key, b"")
    assert store.list() == ["a", "b/1", "b/2", "b/c/3", "bb"]
    assert store.list("b/") == ["b/1", "b/2", "b/c/3"]
    assert store.list("b") == ["b/1", "b/2", "b/c/3", "bb"]
    assert store.list("none/") == []


def test_children_are_the_names_of_one_level(store):
    for key in ("b/2", "a", "b/1", "b/c/3", "bb"):
        store.write(key, b"")
    assert store.list_children() == ["a", "b/", "bb"]
    assert store.list_children("b/") == ["1", "2", "c/"]
    assert store.list_children("none/") == []


def test_a_prefix_is_deleted_and_its_namesakes_stay(store):
    for key in ("step1/a", "step1/b/c", "step10/a", "step1"):
        if key != "step1" or store.location.local is None:
            store.write(key, b"")
    store.delete_prefix("step1/")
    assert "step10/a" in store.list()
    assert not store.list("step1/")
    assert "step1/" not in store.list_children()
    with pytest.raises(AssertionError):
        store.delete_prefix("step1")
    store.delete_prefix()
    assert store.list() == []
    assert store.location.local is None or not store.location.local.exists()


def test_deleting_removes_links_and_not_what_they_point_to(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"x")
    store = Store.open(tmp_path / "runs")
    store.write("step/key", b"")
    (tmp_path / "runs" / "step" / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "precious")
    store.delete_prefix("linked/")
    store.delete_prefix("step/")
    assert store.list_children() == []
    assert (tmp_path / "precious" / "file").exists()


def test_a_store_below_sees_the_same_objects(store):
    store.sub("attempt").sub("hosts/").write("table", b"rows")
    assert store.read("attempt/hosts/table") == b"rows"
    assert str(store.sub("attempt")) == f"{store}/attempt"


def test_all_stores_of_a_process_share_one_memory():
    Store.open("memory://shared/place").write("key", b"value")
    assert Store.open("memory://shared").read("place/key") == b"value"
    assert Store.open("memory://shared").local_path("place/key") is None


def test_a_local_store_says_where_its_keys_lie(tmp_path):
    store = Store.open(tmp_path / "x")
    store.write("a/b", b"value")
    assert store.local_path("a/b").read_bytes() == b"value"
    assert store.local_path("") == tmp_path / "x"


@pytest.mark.parametrize("key", ["../x", "/x", "a//b", "a/./b", "", "a\\b"])
def test_keys_that_lead_elsewhere_are_refused(store, key):
    for use in (store.read, store.exists, store.read_versioned, store.delete):
        with pytest.raises(FormatError):
            use(key)
    for use in (store.write, store.create):
        with pytest.raises(FormatError):
            use(key, b"")
    with pytest.raises(UrlError):
        store.sub(key)


def test_opening_a_place_creates_nothing(tmp_path):
    Store.open(tmp_path / "x").sub("y").list()
    assert not (tmp_path / "x").exists()


def test_a_file_in_the_way_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = Store.open(tmp_path / "file" / "below")
    for use in (lambda: store.write("key", b""), lambda: store.create("key", b""), store.list):
        with pytest.raises(StorageError) as error:
            use()
        assert str(tmp_path / "file") in str(error.value)


def test_a_name_that_is_too_long_is_a_storage_error(store):
    if store.location.scheme != "memory":
        with pytest.raises(StorageError, match="choose a shorter path"):
            store.write("x" * (300 if store.location.local is not None else 1200), b"")
    if store.location.local is not None:
        with pytest.raises(StorageError, match="choose a shorter path") as error:
            store.read("x" * 5000)
        assert len(str(error.value)) < 2000


def test_in_a_bucket_that_is_not_there_nothing_is_written(cloud):
    with environment(cloud.env()):
        store = Store.open(f"{cloud.scheme}://not-there/run")
        for use in (store.write, store.create):
            with pytest.raises(StorageError, match=r"not-there/run/key: .*bucket"):
                use("key", b"")
        assert not store.exists("key")


@pytest.fixture
def proxied(cloud):
    """A proxy, and a store behind it that gives up soon, in a bucket that TensorStore knows by this proxy alone."""
    with FaultProxy(cloud.endpoint) as proxy, environment({**cloud.env(proxy.url), "SHARDCKPT_RETRY_SECONDS": "0.1"}):
        yield proxy, Store.open(f"{cloud.scheme}://{cloud.new_bucket(f'b-{uuid.uuid4().hex}')}/run")


FAULTS = [Rule("status", status=status) for status in (408, 429, 500, 502, 503, 504)] + [
    Rule("reset"),
    Rule("lost-answer"),
    Rule("truncate"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda rule: f"{rule.fault} {rule.status}")
def test_a_request_that_fails_for_a_moment_is_repeated(proxied, fault):
    proxy, store = proxied
    store.write("key", b"0123456789")

    def replace():
        store.write("old", b"old")
        return store.replace("old", b"new", store.read_versioned("old")[1])

    uses = {
        "read": lambda: store.read("key") == store.read("key", 0, 10) == b"0123456789",
        "stat": lambda: store.exists("key") and not store.exists("no such key"),
        "upload": lambda: store.write("written", b"x") is None and store.create("created", b"x") and replace(),
        "delete": lambda: store.delete("key") is None and not store.exists("key"),
    }
    for kind, use in uses.items():
        with proxy.rules.during(replace_rule(fault, kinds=(kind,))):
            assert use()
            assert kind == "stat" or proxy.rules.fired()[0][1] == 1


@pytest.mark.parametrize("fault", [Rule("status", times=None), Rule("reset", times=None)], ids=lambda rule: rule.fault)
def test_a_request_that_fails_for_good_is_an_error_with_the_url(proxied, fault):
    proxy, store = proxied
    store.write("key", b"0123456789")
    uses = (
        lambda: store.read("key"),
        lambda: store.read_versioned("key"),
        lambda: store.exists("key"),
        lambda: store.write("key", b""),
        lambda: store.create("key", b""),
        lambda: store.upload("key", b"").wait(),
        lambda: store.delete("key"),
    )
    with proxy.rules.during(fault):
        for use in uses:
            with pytest.raises(StorageError, match=rf"{store}/key: .*SHARDCKPT_RETRY_SECONDS"):
                use()


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("PERMISSION_DENIED: Failed to open: \"/x\": Permission denied [os_error_code='13']", "give this user permission"),
        ("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']", "make room"),
        ("Failed to create directory: Read-only file system", "choose another place"),
        ("PERMISSION_DENIED: Failed to open: \"/x.__lock\": Read-only file system [os_error_code='30']", "choose another place"),
        ("PERMISSION_DENIED: 403 Insufficient Permission", "give these credentials permission"),
        ("something new", "storage's own message"),
    ],
)
def test_what_the_storage_says_is_kept_and_followed_by_advice(said, advice):
    with pytest.raises(StorageError, match=advice) as error, storage_errors("write", "/data/key"):
        raise ValueError(said)
    assert str(error.value).startswith(f"cannot write /data/key: {said}")
    assert isinstance(error.value, OSError)


def test_every_directory_on_the_way_is_made_durable(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def seen(fd):
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", seen)
    store = Store.open(tmp_path / "runs" / "7")
    store.sub("attempt").write("hosts/00000/table", b"")
    steps = ["runs", "runs/7", "runs/7/attempt", "runs/7/attempt/hosts", "runs/7/attempt/hosts/00000"]
    directory = tmp_path / steps[-1]
    assert synced == [*((tmp_path / step).parent for step in steps), directory / "table.__lock", directory]
    store.write("attempt/hosts/00000/record", b"")
    assert synced[len(steps) + 2 :] == [directory / "record.__lock", directory]


def test_a_directory_that_was_deleted_is_made_again(tmp_path):
    store = Store.open(tmp_path)
    store.write("a/b", b"1")
    store.delete_prefix("a/")
    store.write("a/b", b"2")
    assert store.read("a/b") == b"2"
