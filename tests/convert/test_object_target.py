"""A file on an object store is gone on with by the next process, and what was written down about it
goes with it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import uuid

import pytest
from faults import Rule, faulty_cloud
from object_target import LIMIT, SIZE, MiB, content, write
from paths import CHILDREN

from shardckpt.convert.files import object_target
from shardckpt.convert.files.object_target import ObjectTarget, upload_note
from shardckpt.errors import AlreadyExistsError, BudgetError, CommitError, StorageError
from shardckpt.io.buckets import uploading
from shardckpt.io.store import Store
from shardckpt.io.url import parse

CHILD = CHILDREN / "object_target.py"


@pytest.fixture(scope="module", params=["gs", "s3"])
def cloud(request):
    """A bucket of each kind behind the proxy."""
    server = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    # TensorStore keeps a bucket's endpoint: this one is known by the proxy's alone.
    ours = dataclasses.replace(server, bucket=server.new_bucket(f"targets-{uuid.uuid4().hex}"))
    with faulty_cloud(ours) as faulty:
        yield faulty


@pytest.fixture
def place(cloud, monkeypatch):
    """Of a file that is not there yet; parts may be of 1 MiB."""
    monkeypatch.setattr(uploading, "SMALLEST", MiB)
    monkeypatch.setattr(object_target, "SAVE_EVERY", MiB)
    return parse(cloud.emulator.url(uuid.uuid4().hex, "model.safetensors"))


def open_target(place, *, digest="a", overwrite=False, memory_limit=LIMIT):
    return ObjectTarget.open(
        place, nbytes=SIZE, digest=digest, overwrite=overwrite, memory_limit=memory_limit
    )


def stored(place):
    return Store.open(place.parent).read(place.name)


def names(place):
    return Store.open(place.parent).list()


def write_and_finish(target):
    write(target)
    target.finish()


NOTE = upload_note("model.safetensors")


def test_a_file_is_written_and_nothing_lies_beside_it(place):
    with open_target(place) as target:
        assert target.resume_at == target.durable == 0
        write(target)
        assert names(place) == [NOTE]
        target.finish()
    assert names(place) == [place.name]
    assert stored(place) == content().tobytes()


@pytest.mark.long
@pytest.mark.parametrize("durable", [pytest.param(1, marks=pytest.mark.slow), 3 * MiB])
def test_a_killed_process_is_gone_on_with_and_what_the_storage_has_is_not_sent_again(
    cloud, place, durable
):
    killed = subprocess.run(
        [sys.executable, CHILD, str(place), str(durable)], env=os.environ, timeout=200, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert names(place) == [NOTE]
    with cloud.breaking(), open_target(place) as target:
        assert target.durable >= durable
        assert target.resume_at > target.durable - 3 * MiB
        had = target.durable
        write(target)
        target.finish()
        assert cloud.proxy.traffic.summary()["bytes_up"] <= SIZE - had + (1 << 14)
    assert names(place) == [place.name]
    assert stored(place) == content().tobytes()


def test_what_was_closed_is_gone_on_with_from_there_also_with_another_memory_limit(place):
    with open_target(place) as target:
        write(target, 3 * MiB)
    at = target.durable
    with open_target(place, memory_limit=2 * MiB) as target:
        assert target.resume_at == target.durable == at
        write(target)
        target.finish()
    assert stored(place) == content().tobytes()


def write_rest_and_finish(target, at):
    """Write the rest; parts are sent in the background, so `finish` may be the first to say that
    one was refused."""
    write(target, at=at)
    target.finish()


def test_a_file_of_other_bytes_takes_the_place_of_one_under_way(place):
    with open_target(place) as first:
        at = write(first, 1)
        with open_target(place, digest="b") as second:
            assert second.resume_at == 0
            with pytest.raises((StorageError, CommitError)):
                write_rest_and_finish(first, at)
            write(second)
            second.finish()
    assert names(place) == [place.name]
    assert stored(place) == content().tobytes()


def test_two_that_write_the_same_bytes_share_the_upload(place):
    with open_target(place) as first, open_target(place) as second:
        write(first, 2 * MiB)
        write(second)
        second.finish()
        first.abort()
    with pytest.raises(AlreadyExistsError):
        open_target(place)
    assert names(place) == [place.name]
    assert stored(place) == content().tobytes()


def test_one_that_was_killed_when_it_had_published_is_found_finished(place):
    store = Store.open(place.parent)
    with open_target(place) as target:
        write(target)
        note = store.read(NOTE)
        target.finish()
    store.write(NOTE, note)
    with open_target(place) as target:
        assert target.resume_at == target.durable == SIZE
        target.finish()
    assert names(place) == [place.name]


def test_what_is_there_stays_unless_it_may_be_replaced(place):
    Store.open(place.parent).write(place.name, b"theirs")
    with pytest.raises(AlreadyExistsError, match="overwrite=True"):
        open_target(place)
    assert names(place) == [place.name]
    with open_target(place, overwrite=True) as target:
        write(target)
        assert stored(place) == b"theirs"
        target.finish()
    assert stored(place) == content().tobytes()


def test_one_that_appears_meanwhile_is_found_at_the_end_or_by_the_next_process(place):
    for finish in (True, False):
        with open_target(place) as target:
            write(target)
            Store.open(place.parent).write(place.name, b"theirs")
            if finish:
                with pytest.raises(AlreadyExistsError):
                    target.finish()
        if not finish:
            with pytest.raises(AlreadyExistsError):
                open_target(place)
        assert names(place) == [place.name]
        assert stored(place) == b"theirs"
        Store.open(place.parent).delete(place.name)


def test_it_makes_one_request_per_part_and_a_few_more(cloud, place, monkeypatch):
    """As docs/lab/bucket-requests.md says."""
    monkeypatch.setattr(object_target, "SAVE_EVERY", 256 * MiB)
    with cloud.breaking():
        with open_target(place) as target:
            write(target)
            target.finish()
        kinds = cloud.proxy.traffic.summary()["kinds"]
    parts = -(-SIZE // MiB)
    assert kinds["upload"] == parts + (2 if cloud.emulator.scheme == "gs" else 3)
    assert kinds["delete"] == 1
    assert kinds["read"] + kinds["stat"] == (4 if cloud.emulator.scheme == "gs" else 3)
    assert sum(kinds.values()) == kinds["upload"] + kinds["read"] + kinds["stat"] + 1


def test_an_aborted_file_leaves_nothing(place):
    with open_target(place) as target:
        write(target, 2 * MiB)
        target.abort()
    assert names(place) == []


def test_a_file_that_is_not_whole_is_not_published(place):
    with open_target(place) as target:
        write(target, 2 * MiB)
        with pytest.raises(CommitError, match=f"of {SIZE} bytes"):
            target.finish()
    assert names(place) == [NOTE]


@pytest.mark.parametrize("damage", [b"{}", b"", b"\xff" * 100])
def test_a_damaged_note_is_replaced(place, damage):
    Store.open(place.parent).write(NOTE, damage)
    with open_target(place) as target:
        write(target)
        target.finish()
    assert names(place) == [place.name]


def test_of_two_that_begin_at_the_same_moment_one_is_told(cloud, place, monkeypatch):
    others = []

    def begin(*args, **options):
        upload = uploading.open_upload(*args, **options)
        if not others:
            others.append(None)
            others[0] = open_target(place, digest="b")
        return upload

    monkeypatch.setattr(object_target, "open_upload", begin)
    with pytest.raises(StorageError, match="at the same moment"):
        open_target(place)
    with others[0] as other:
        write(other)
        other.finish()
    assert stored(place) == content().tobytes()


def test_an_upload_that_cannot_be_recorded_is_ended(place, monkeypatch):
    uploads = []

    def begin(*args, **options):
        uploads.append(uploading.open_upload(*args, **options))
        return uploads[-1]

    def fail(*_):
        raise StorageError("refused")

    monkeypatch.setattr(object_target, "open_upload", begin)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "replace", fail)
        with pytest.raises(StorageError, match="refused"):
            open_target(place)
    (upload,) = uploads
    with pytest.raises(StorageError, match="was closed"):
        upload.write(b"0")
    with uploading.open_upload(place, part_bytes=MiB, resume=upload.state) as another:
        assert another.state != upload.state, "the service does not know the first one"
        another.abort()


def test_an_outage_ends_one_process_and_the_next_one_goes_on(cloud, place):
    with open_target(place) as target:
        with (
            cloud.breaking(Rule("status", kinds=("upload",), skip=6, times=None)),
            pytest.raises(StorageError),
        ):
            write_and_finish(target)
        had = target.durable
        assert had > 0
    with open_target(place) as target:
        assert target.durable >= had
        write(target)
        target.finish()
    assert stored(place) == content().tobytes()


def test_parts_that_do_not_fit_the_memory_are_refused(place):
    with pytest.raises(BudgetError, match="memory_limit"):
        open_target(place, memory_limit=MiB)
    assert names(place) == []
