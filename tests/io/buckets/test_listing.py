"""Listings of a place, with ages: complete, by the level that is asked for, and by the storage's
clock."""

from __future__ import annotations

import os
import uuid

import pytest
from emulators import environment
from fault_proxy import FaultProxy
from fault_rules import Rule

import shardckpt
from shardckpt.errors import StorageError
from shardckpt.io.buckets import cloud as settings
from shardckpt.io.buckets.bucket import Bucket, open_bucket
from shardckpt.io.store import Store


def test_files_that_go_away_while_a_directory_is_walked_are_left_out(tmp_path):
    store = Store.open(tmp_path)
    for i in range(3):
        store.write(f"d{i}/x", b"")
    walk = store.modification_times()
    first = next(walk)[0]
    for i in range(3):
        store.delete_prefix(f"d{i}/")
    assert [first, *(key for key, _ in walk)] == [first]


def test_a_link_to_nothing_has_no_size_and_hides_none(tmp_path):
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to("nothing")
    assert Store.open(tmp_path).sizes("") == {"file": 5}


def test_links_are_listed_and_not_followed(tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "x").write_bytes(b"")
    store = Store.open(tmp_path / "here")
    store.write("key", b"")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "away")
    (tmp_path / "here" / "dangling").symlink_to(tmp_path / "nowhere")
    assert sorted(key for key, _ in store.modification_times()) == ["dangling", "key", "link"]


def test_a_time_that_was_set_is_the_time_that_is_seen(tmp_path):
    store = Store.open(tmp_path)
    store.write("old", b"")
    os.utime(tmp_path / "old", (1e9, 1e9))
    assert dict(store.modification_times()) == {"old": 1e9}


@pytest.fixture
def pages(monkeypatch):
    """Pages so short that a test can have several."""
    monkeypatch.setattr(Bucket, "page", 4)


@pytest.fixture
def proxy(cloud):
    """A proxy before the emulator, and this process led to it."""
    with FaultProxy(cloud.endpoint) as proxy, environment(cloud.env(proxy.url)):
        yield proxy


@pytest.fixture
def place(cloud, proxy):
    """A store in a bucket of its own: TensorStore keeps to the way by which it first came to
    one."""
    return Store.open(f"{cloud.scheme}://{cloud.new_bucket(f'b-{uuid.uuid4().hex}')}/run")


def test_one_level_is_listed_however_much_lies_below(place, proxy):
    for i in range(30):
        place.write(f"attempt/hosts/{i}", b"")
    place.write("checkpoint.json", b"")
    proxy.traffic.reset()
    assert place.list_children() == ["attempt/", "checkpoint.json"]
    (exchange,) = proxy.traffic.exchanges()
    assert exchange.operation.query["delimiter"] == "/"
    assert exchange.bytes_down < 2000


def test_a_listing_of_several_pages_is_complete(place, proxy, pages):
    keys = sorted(f"{'abc'[i % 3]}/{i}" for i in range(15))
    for key in keys:
        place.write(key, b"")
    proxy.traffic.reset()
    assert place.list() == keys
    assert len(proxy.traffic.exchanges()) == 4
    assert place.list_children() == ["a/", "b/", "c/"]
    assert len(dict(place.modification_times("b/"))) == 5


def test_a_folder_that_a_console_has_made_is_no_object_and_is_deleted_with_the_rest(cloud_store):
    """Consoles write an empty object whose name ends in a slash."""
    bucket, prefix = open_bucket(cloud_store.location), cloud_store.location.object_prefix
    for name in ("", "a/", "a/b/"):
        bucket.write(prefix + name, memoryview(b""))
    cloud_store.write("a/key", b"bytes")
    assert cloud_store.list() == ["a/key"]
    assert cloud_store.list("a/") == ["a/key"]
    assert cloud_store.sizes("a/") == {"a/key": 5}
    assert [key for key, _ in cloud_store.modification_times()] == ["a/key"]
    assert cloud_store.list_children() == ["a/"]
    cloud_store.delete_prefix()
    assert not [one for page in bucket.pages(prefix) for one in page.objects]


def test_all_pages_of_a_prefix_are_deleted(place, pages):
    for i in range(15):
        place.write(f"step1/{i}", b"")
        place.write(f"step10/{i}", b"")
    place.delete_prefix("step1/")
    assert place.list_children() == ["step10/"]
    assert len(place.list("step10/")) == 15


def test_a_listing_that_is_refused_is_an_error_and_not_an_empty_one(place, proxy):
    """TensorStore 0.1.86 takes a refusal by Cloud Storage for an empty listing."""
    place.write("records/0", b"")
    for use in (
        place.list,
        place.list_children,
        place.delete_prefix,
        lambda: list(place.modification_times()),
    ):
        with (
            proxy.rules.during(Rule("status", status=403, kinds=("list",))),
            pytest.raises(StorageError, match=str(place)),
        ):
            use()
    assert place.list("records/") == ["records/0"]


def test_a_listing_that_fails_for_a_moment_is_asked_for_again(place, proxy):
    place.write("records/0", b"")
    with proxy.rules.during(Rule("status", status=503, kinds=("list",))):
        assert place.list() == ["records/0"]


@pytest.mark.parametrize(
    "rule",
    [Rule(fault, kinds=("list",), times=None) for fault in ("status", "reset")],
    ids=lambda rule: rule.fault,
)
def test_a_listing_that_fails_for_good_is_asked_for_as_often_as_the_environment_says(
    place, proxy, rule
):
    place.write("records/0", b"")
    for seconds in ("0.05", "0.5"):
        with environment({"SHARDCKPT_RETRY_SECONDS": seconds}), proxy.rules.during(rule):
            tries = len([*settings.pauses()]) + 1
            proxy.traffic.reset()
            with pytest.raises(
                StorageError, match=f"{place}.* {tries} attempts failed.*SHARDCKPT_RETRY_SECONDS"
            ):
                place.list()
            # A client of HTTP may repeat by itself what a connection that it had kept has lost.
            if rule.fault == "status":
                assert len(proxy.traffic.exchanges()) == tries
    assert place.list() == ["records/0"]


def test_a_refused_listing_is_asked_for_once(place, proxy):
    with proxy.rules.during(Rule("status", status=403, kinds=("list",), times=None)):
        proxy.traffic.reset()
        with pytest.raises(StorageError, match="permission"):
            place.list()
    assert len(proxy.traffic.exchanges()) == 1


def test_a_bucket_that_is_not_there_is_an_error_that_says_so(cloud):
    with environment(cloud.env()):
        store = Store.open(f"{cloud.scheme}://no-such-bucket/run")
        for use in (store.list, store.list_children, store.delete_prefix):
            with pytest.raises(StorageError, match=r"no such bucket .*create it"):
                use()


@pytest.mark.parametrize("name", ["run", "model.safetensors", "model.pt"])
def test_nothing_is_taken_for_a_file_of_another_format_in_a_bucket_that_is_not_there(cloud, name):
    url = f"{cloud.scheme}://no-such-bucket/{name}"
    with environment(cloud.env()), pytest.raises(StorageError, match=rf"{url}: there is no such b"):
        shardckpt.open(url)
