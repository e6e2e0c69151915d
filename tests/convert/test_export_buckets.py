"""An export to an object store is there as a whole or not at all, and goes on where a killed one
was."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import uuid

import pytest
from convert_states import random, saved, sharded
from export_to_bucket import LIMIT, MiB
from faults import faulty_cloud
from paths import CHILDREN

import shardckpt
from shardckpt import errors
from shardckpt.convert.files import object_target
from shardckpt.convert.files.object_target import ObjectTarget
from shardckpt.io.buckets import uploading
from shardckpt.io.store import Store
from shardckpt.streaming import stream as streaming

CHILD = CHILDREN / "export_to_bucket.py"
INDEX = "model.safetensors.index.json"
FILES = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
TENSORS = 19
SHARD = 8 * MiB
"""Bytes of a file: eight of the tensors, the last file having three."""


@pytest.fixture(scope="module", params=["gs", "s3"])
def cloud(request):
    """A bucket of each kind behind the proxy."""
    server = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    # TensorStore keeps a bucket's endpoint: this one is known by the proxy's alone.
    ours = dataclasses.replace(server, bucket=server.new_bucket(f"exports-{uuid.uuid4().hex}"))
    with faulty_cloud(ours) as faulty:
        yield faulty


@pytest.fixture
def place(cloud, monkeypatch):
    """A url at which nothing is yet; parts, batches and notes are of a MiB."""
    monkeypatch.setattr(uploading, "SMALLEST", MiB)
    monkeypatch.setattr(object_target, "SAVE_EVERY", MiB)
    monkeypatch.setattr(streaming, "_BATCH", MiB)
    return cloud.emulator.url(uuid.uuid4().hex)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint, and the files that an export to a disk makes of it: one, and several."""
    return made(tmp_path_factory.mktemp("source"), 0)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same of other elements."""
    return made(tmp_path_factory.mktemp("other"), 100)


def made(folder, seed):
    state = {f"w{i:02d}": random((512, 512), seed=seed + i) for i in range(TENSORS)}
    saved(folder / "c", state, {"w0*": sharded("a", "b"), "w1*": sharded("", "ab")})
    shardckpt.export_safetensors(folder / "c", folder / "one.safetensors")
    shardckpt.export_safetensors(folder / "c", folder / "several", max_shard_size=SHARD)
    return folder


def export(source, to, **options):
    return shardckpt.export_safetensors(source / "c", to, memory_limit=LIMIT, **options)


def objects(place):
    """Contents of all objects at a place, by name."""
    store = Store.open(place)
    return {name: store.read(name) for name in store.list()}


def on_disk(source):
    """The same files, as an export to a disk made them."""
    return {path.name: path.read_bytes() for path in (source / "several").iterdir()}


def killed(source, to, size, until):
    """Export in a process that dies when it has written so much."""
    command = [sys.executable, CHILD, source / "c", to, str(size), str(until)]
    assert (
        subprocess.run(command, env=os.environ, timeout=250, check=False).returncode
        == -signal.SIGKILL
    )


def test_one_file_is_that_of_a_disk_and_nothing_is_beside_it(source, place):
    seen = []
    report = export(
        source, f"{place}/a.safetensors", progress=lambda *_: seen.append(set(objects(place)))
    )
    assert set().union(*seen) == {".a.safetensors.upload.json"}, (
        "nothing under its name before the end"
    )
    assert objects(place) == {"a.safetensors": (source / "one.safetensors").read_bytes()}
    assert (report.url, report.files, report.tensors) == (
        f"{place}/a.safetensors",
        ("a.safetensors",),
        TENSORS,
    )
    assert report.written_bytes == (source / "one.safetensors").stat().st_size
    assert report.read_bytes < 1.02 * report.nbytes


@pytest.mark.long
def test_several_files_are_those_of_a_disk_and_the_index_comes_last(source, place):
    seen = []
    report = export(
        source, place, max_shard_size=SHARD, progress=lambda *_: seen.append(set(objects(place)))
    )
    assert all(INDEX not in names for names in seen)
    assert any(FILES[0] in names and FILES[1] not in names for names in seen)
    assert objects(place) == on_disk(source)
    assert set(report.files) == {*FILES, INDEX}
    assert json.loads(objects(place)[INDEX])["metadata"]["total_size"] == report.nbytes


@pytest.mark.long
def test_one_file_that_was_interrupted_by_a_kill_is_gone_on_with(cloud, source, place):
    killed(source, f"{place}/a.safetensors", "", 15 * MiB)
    assert set(objects(place)) == {".a.safetensors.upload.json"}
    with cloud.breaking():
        report = export(source, f"{place}/a.safetensors")
        sent = cloud.proxy.traffic.summary()["bytes_up"]
    assert sent <= (TENSORS - 15 + 6) * MiB, (
        "what the service has is not sent again, but for the parts under way"
    )
    assert report.resumed_bytes >= 9 * MiB
    assert report.read_bytes <= report.nbytes - report.resumed_bytes + 2 * MiB
    assert objects(place) == {"a.safetensors": (source / "one.safetensors").read_bytes()}


@pytest.mark.long
def test_a_kill_in_the_second_of_several_files_costs_some_of_the_second(cloud, source, place):
    killed(source, place, SHARD, SHARD + 7 * MiB)
    there = set(objects(place))
    assert FILES[0] in there
    assert not there & {*FILES[1:], INDEX}
    with cloud.breaking():
        report = export(source, place, max_shard_size=SHARD)
        sent = cloud.proxy.traffic.summary()["bytes_up"]
    assert sent <= (TENSORS - 15 + 6) * MiB
    assert report.resumed_bytes >= SHARD + MiB
    assert report.read_bytes <= report.nbytes - report.resumed_bytes + 2 * MiB
    assert objects(place) == on_disk(source)


def test_one_that_was_killed_when_all_was_there_is_found_finished(source, place, monkeypatch):
    delete = Store.delete

    def die(store, key):
        if key.endswith(".export.json"):
            raise KeyboardInterrupt
        delete(store, key)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", die)
        with pytest.raises(KeyboardInterrupt):
            export(source, place, max_shard_size=SHARD)
    assert set(objects(place)) == {*on_disk(source), f".{INDEX}.export.json"}

    def fail(_done, _total):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        export(source, place, max_shard_size=SHARD, progress=fail)
    report = export(source, place, max_shard_size=SHARD)
    assert (report.read_bytes, report.resumed_bytes) == (0, report.nbytes)
    assert objects(place) == on_disk(source)


def test_another_export_removes_what_an_interrupted_one_has_left(source, place):
    killed(source, place, SHARD, SHARD + 7 * MiB)
    export(source, place, max_shard_size=SHARD, dtype="bfloat16")
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert set(objects(place)) == {*names, INDEX}


@pytest.mark.long
def test_an_export_that_another_one_replaces_between_two_files_publishes_no_mixed_model(
    source, other, place, monkeypatch
):
    begin, others = ObjectTarget.open.__func__, []

    def stop(done, _total):
        if done > SHARD + MiB:
            raise KeyboardInterrupt

    def begin_after_the_other(cls, at, **options):
        if at.name == FILES[1] and not others:
            others.append(at)
            with pytest.raises(KeyboardInterrupt):
                export(other, place, max_shard_size=SHARD, progress=stop)
        return begin(cls, at, **options)

    monkeypatch.setattr(ObjectTarget, "open", classmethod(begin_after_the_other))
    with pytest.raises(errors.StorageError, match="another export has begun there"):
        export(source, place, max_shard_size=SHARD)
    assert INDEX not in objects(place)
    export(other, place, max_shard_size=SHARD)
    assert objects(place) == on_disk(other)


@pytest.mark.long
def test_an_export_that_another_one_has_replaced_does_not_end_its_upload(
    source, other, place, monkeypatch
):
    begin, refused = ObjectTarget.open.__func__, []

    def begin_amid_the_other(cls, at, **options):
        if refused:
            return begin(cls, at, **options)
        refused.append(None)

        def begin_again(done, _total):
            if done > MiB and refused == [None]:
                with pytest.raises(errors.StorageError, match="another export") as info:
                    begin(cls, at, **options)
                refused.append(info.value)

        export(other, place, max_shard_size=SHARD, progress=begin_again)
        raise refused[-1]

    monkeypatch.setattr(ObjectTarget, "open", classmethod(begin_amid_the_other))
    with pytest.raises(errors.StorageError, match="another export has begun there"):
        export(source, place, max_shard_size=SHARD)
    assert objects(place) == on_disk(other)


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
def test_an_export_that_another_one_has_replaced_deletes_nothing_of_it(source, other, place, fails):
    begun = []

    def replace(done, _total):
        if done > SHARD + MiB and not begun:
            begun.append(done)
            export(other, place, max_shard_size=SHARD)
            if fails:
                raise RuntimeError

    with pytest.raises(RuntimeError if fails else errors.StorageError):
        export(source, place, max_shard_size=SHARD, progress=replace)
    assert objects(place) == on_disk(other)


@pytest.mark.long
@pytest.mark.parametrize("there", ["a.safetensors", FILES[0], FILES[2], INDEX])
def test_what_is_there_is_refused_at_once_and_replaced_if_that_is_wanted(
    cloud, source, place, there
):
    one = there == "a.safetensors"
    to, options = (f"{place}/{there}", {}) if one else (place, {"max_shard_size": SHARD})
    Store.open(place).write(there, b"theirs")
    with cloud.breaking():
        with pytest.raises(errors.AlreadyExistsError, match=f"{there}.*overwrite=True"):
            export(source, to, **options)
        assert cloud.proxy.traffic.summary()["bytes_up"] < MiB, "before the elements are sent"
    assert objects(place) == {there: b"theirs"}
    export(source, to, overwrite=True, **options)
    assert objects(place) == (
        {there: (source / "one.safetensors").read_bytes()} if one else on_disk(source)
    )


def test_a_damaged_source_leaves_nothing(tmp_path, place):
    checkpoint = saved(tmp_path / "c", {f"w{i}": random((512, 512), seed=i) for i in range(12)})
    data = tmp_path / "c" / checkpoint.record.attempt / checkpoint.reader.whole_table().files[-1]
    content = bytearray(data.read_bytes())
    content[-3000] ^= 4
    data.write_bytes(content)
    for to, options in ((f"{place}/a.safetensors", {}), (place, {"max_shard_size": 5 * MiB})):
        with pytest.raises(errors.CorruptionError, match="is damaged"):
            export(tmp_path, to, **options)
        assert objects(place) == {}


def test_a_limit_too_small_for_the_parts_of_an_upload_is_refused_with_one_that_does(source, place):
    limit, refused = 7 * MiB, 0
    while True:
        try:
            shardckpt.export_safetensors(source / "c", f"{place}/a.safetensors", memory_limit=limit)
        except errors.BudgetError as e:
            refused += 1
            limit = str(e).rstrip(".").rpartition("raise it to ")[2].replace(" ", "")
            assert objects(place) == {}
        else:
            break
    assert 1 <= refused <= 2
    assert objects(place) == {"a.safetensors": (source / "one.safetensors").read_bytes()}
