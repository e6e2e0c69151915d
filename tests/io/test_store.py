"""Keys and bytes at one location: on a disk, in memory, on Cloud Storage and on S3 alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from dataclasses import replace as replace_rule
from pathlib import Path

import numpy as np
import pytest
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule

from shardckpt.errors import StorageError
from shardckpt.io.failures import storage_errors
from shardckpt.io.files import LOCK_SUFFIX, OpenFile
from shardckpt.io.locks import lock_file
from shardckpt.io.store import Store


def test_of_many_processes_exactly_one_creates(tmp_path):
    program = (
        "import json, sys; from shardckpt.io.store import Store; s = Store.open(sys.argv[1]); "
        "s.exists('x'); sys.stdin.read(1);print(json.dumps([s.create(f'record {i}', "
        "sys.argv[2].encode()) for i in range(50)]))"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(i)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    for child in children:
        child.stdin.write("x")
        child.stdin.flush()
    won = np.array([json.loads(child.communicate()[0]) for child in children])
    assert (won.sum(0) == 1).all()
    assert [Store.open(tmp_path).read(f"record {i}") for i in range(50)] == [
        b"%d" % w for w in won.argmax(0)
    ]


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


def test_all_stores_of_a_process_share_one_memory():
    Store.open("memory://shared/place").write("key", b"value")
    assert Store.open("memory://shared").read("place/key") == b"value"
    assert Store.open("memory://shared").local_path("place/key") is None


def test_a_local_store_says_where_its_keys_lie(tmp_path):
    store = Store.open(tmp_path / "x")
    store.write("a/b", b"value")
    assert store.local_path("a/b").read_bytes() == b"value"
    assert store.local_path("") == tmp_path / "x"


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
            store.write("x" * (300 if store.location.local_path is not None else 1200), b"")
    if store.location.local_path is not None:
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
    """A proxy, and a store behind it that gives up soon, in a bucket that TensorStore knows by this
    proxy alone."""
    with (
        FaultProxy(cloud.endpoint) as proxy,
        environment({**cloud.env(proxy.url), "SHARDCKPT_RETRY_SECONDS": "0.1"}),
    ):
        yield proxy, Store.open(f"{cloud.scheme}://{cloud.new_bucket(f'b-{uuid.uuid4().hex}')}/run")


FAULTS = [Rule("status", status=status) for status in (408, 429, 500, 502, 503, 504)] + [
    Rule("reset"),
    Rule("lost-answer"),
    Rule("truncate"),
]


@pytest.mark.long
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
        "upload": lambda: (
            store.write("written", b"x") is None and store.create("created", b"x") and replace()
        ),
        "delete": lambda: store.delete("key") is None and not store.exists("key"),
    }
    for kind, use in uses.items():
        with proxy.rules.during(replace_rule(fault, kinds=(kind,))):
            assert use()
            assert kind == "stat" or proxy.rules.fired()[0][1] == 1


@pytest.mark.parametrize(
    "fault", [Rule("status", times=None), Rule("reset", times=None)], ids=lambda rule: rule.fault
)
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
    ("text", "advice"),
    [
        (
            "PERMISSION_DENIED: Failed to open: \"/x\": Permission denied [os_error_code='13']",
            "give this user permission",
        ),
        ("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']", "make room"),
        ("Failed to create directory: Read-only file system", "choose another place"),
        (
            (
                'PERMISSION_DENIED: Failed to open: "/x.__lock": Read-only file system '
                "[os_error_code='30']"
            ),
            "choose another place",
        ),
        ("PERMISSION_DENIED: 403 Insufficient Permission", "give these credentials permission"),
        ("can't start new thread", "allow this process more threads"),
        ("something new", "storage's own message"),
    ],
)
def test_what_the_storage_says_is_kept_and_followed_by_advice(text, advice):
    with pytest.raises(StorageError, match=advice) as error, storage_errors("write", "/data/key"):
        raise ValueError(text)
    assert str(error.value).startswith(f"cannot write /data/key: {text}")
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
    steps = [
        "runs",
        "runs/7",
        "runs/7/attempt",
        "runs/7/attempt/hosts",
        "runs/7/attempt/hosts/00000",
    ]
    directory = tmp_path / steps[-1]
    assert synced == [
        *((tmp_path / step).parent for step in steps),
        directory / "table.__lock",
        directory,
    ]
    store.write("attempt/hosts/00000/record", b"")
    assert synced[len(steps) + 2 :] == [directory / "record.__lock", directory]


def test_a_directory_that_was_deleted_is_made_again(tmp_path):
    store = Store.open(tmp_path)
    store.write("a/b", b"1")
    store.delete_prefix("a/")
    store.write("a/b", b"2")
    assert store.read("a/b") == b"2"


def test_a_directory_with_only_locks_of_killed_writers_is_removed_and_one_with_a_held_lock_is_not(
    tmp_path,
):
    for name in ("killed", "held", "used"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"a{LOCK_SUFFIX}").write_bytes(b"half a rec")
    (tmp_path / "used" / "b").touch()
    with OpenFile(tmp_path / "held" / f"a{LOCK_SUFFIX}", os.O_WRONLY) as fd:
        lock_file(fd, tmp_path / "held" / "a")
        for name in ("killed", "held", "used"):
            Store.open(tmp_path / name).remove_empty()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        f"held/a{LOCK_SUFFIX}",
        f"used/a{LOCK_SUFFIX}",
    ]
    assert not (tmp_path / "killed").exists()
