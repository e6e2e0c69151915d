"""An export to a bucket makes the same files as one to a disk, goes on after an interruption, and
keeps one model at a place."""

from __future__ import annotations

import dataclasses
import json
import uuid

import numpy as np
import pytest
from convert_states import random, saved, sharded
from faults import faulty_cloud
from safetensors.numpy import save_file

import shardckpt
from shardckpt import errors
from shardckpt.convert.files.object_target import ObjectTarget
from shardckpt.format.documents import open_envelope, seal
from shardckpt.io.store import Store
from shardckpt.io.url import parse

STATE = {
    "layers": [{"w": random((640, 512), seed=i)} for i in range(4)],
    "s": np.float32(3),
    "none": np.zeros((0, 3), np.int8),
}
OPTIONS = {"memory_limit": "64MiB"}
SPLIT = 3 << 20
"""Bytes per file: two matrices."""


@pytest.fixture
def place(tmp_path):
    saved(tmp_path / "c", STATE, {"**/w": sharded("a", "b")})
    return tmp_path / "c"


@pytest.fixture(scope="module", params=["gs", "s3"])
def bucket(request):
    """One of each kind, behind the proxy, which mends what the emulator makes of a resumable
    upload."""
    server = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    ours = dataclasses.replace(server, bucket=server.new_bucket(f"exports-{uuid.uuid4().hex}"))
    with faulty_cloud(ours) as faulty:
        yield faulty.emulator


@pytest.fixture
def there(bucket):
    """A place below a bucket, and how what is there is read."""
    url = bucket.url(uuid.uuid4().hex)
    return url, Store.open(parse(url))


def contents(store):
    return {name: store.read(name) for name in store.list()}


def on_disk(place, directory, **options):
    shardckpt.export(place, directory, **options)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("most", [None, SPLIT], ids=["one", "several"])
def test_objects_are_the_files_that_a_disk_would_have(tmp_path, place, there, most):
    url, store = there
    report = shardckpt.export(place, url, max_shard_size=most, **OPTIONS)
    assert contents(store) == on_disk(place, tmp_path / "out", max_shard_size=most)
    assert sorted(report.files) == store.list()
    with pytest.raises(errors.AlreadyExistsError, match=r"(is there|exists) already"):
        shardckpt.export(place, url, max_shard_size=most, **OPTIONS)
    shardckpt.export(place, url, max_shard_size=most, overwrite=True, dtype="bf16", **OPTIONS)
    assert contents(store) == on_disk(place, tmp_path / "bf16", max_shard_size=most, dtype="bf16")


@pytest.mark.parametrize(
    ("before", "after"), [(None, SPLIT), (SPLIT, None)], ids=["one-several", "several-one"]
)
def test_another_model_is_refused_or_replaced_as_a_whole(tmp_path, place, there, before, after):
    url, store = there
    shardckpt.export(place, url, max_shard_size=before, **OPTIONS)
    held = contents(store)
    with pytest.raises(errors.AlreadyExistsError, match="holds another model"):
        shardckpt.export(place, url, max_shard_size=after, **OPTIONS)
    assert contents(store) == held
    shardckpt.export(place, url, max_shard_size=after, overwrite=True, **OPTIONS)
    assert contents(store) == on_disk(place, tmp_path / "out", max_shard_size=after)


@pytest.mark.parametrize(("one", "other"), [(None, SPLIT), (SPLIT, None)], ids=["one", "many"])
def test_a_model_that_appears_during_an_export_is_the_only_one(tmp_path, place, there, one, other):
    (url, store), begun = there, []

    def export_another(_done, _total):
        if not begun:
            begun.append(shardckpt.export(place, url, max_shard_size=other, **OPTIONS))

    with pytest.raises(errors.AlreadyExistsError, match="holds another model"):
        shardckpt.export(place, url, max_shard_size=one, progress=export_another, **OPTIONS)
    assert contents(store) == on_disk(place, tmp_path / "out", max_shard_size=other)


@pytest.mark.parametrize(("one", "other"), [(None, SPLIT), (SPLIT, None)], ids=["one", "many"])
def test_of_two_models_that_may_replace_others_the_one_that_began_last_stays(
    tmp_path, place, there, one, other
):
    (url, store), begun = there, []

    def export_another(done, _total):
        if done and not begun:
            begun.append(store.list())
            shardckpt.export(place, url, max_shard_size=other, overwrite=True, **OPTIONS)

    options = {"max_shard_size": one, "overwrite": True, "progress": export_another, **OPTIONS}
    with pytest.raises(errors.StorageError, match="another export has begun there"):
        shardckpt.export(place, url, **options)
    assert ("model-00001-of-00002.safetensors" in begun[0]) == (one is not None)
    assert contents(store) == on_disk(place, tmp_path / "out", max_shard_size=other)


@pytest.mark.parametrize("dtype", [None, "bf16"], ids=["same", "another"])
def test_an_export_that_an_earlier_release_has_begun_is_gone_on_with_or_removed(
    tmp_path, place, there, dtype
):
    """Its note has no token."""
    url, store = there

    def interrupted(done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardckpt.export(place, url, max_shard_size=SPLIT, progress=interrupted, **OPTIONS)
    (key,) = (name for name in store.list() if name.endswith(".export.json"))
    note = open_envelope(store.read(key), key)
    store.write(key, seal({"digest": note["digest"], "named": note["named"]}))
    report = shardckpt.export(place, url, max_shard_size=SPLIT, dtype=dtype, **OPTIONS)
    assert (report.resumed_bytes > 0) == (dtype is None)
    assert contents(store) == on_disk(place, tmp_path / "out", max_shard_size=SPLIT, dtype=dtype)


def test_several_files_are_gone_on_with_and_the_index_comes_last(tmp_path, place, there):
    url, store = there

    def interrupted(done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardckpt.export(place, url, max_shard_size=SPLIT, progress=interrupted, **OPTIONS)
    assert "model.safetensors.index.json" not in store.list()
    shardckpt.export(place, url, max_shard_size=SPLIT, **OPTIONS)
    assert contents(store) == on_disk(place, tmp_path / "out", max_shard_size=SPLIT)
    files = json.loads(store.read("model.safetensors.index.json"))["weight_map"].values()
    assert {*files, "model.safetensors.index.json"} == set(store.list())


def test_an_empty_file_that_was_about_to_appear_is_written_by_the_next_call(
    tmp_path, there, monkeypatch
):
    url, store = there
    (tmp_path / "hf").mkdir()
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "chat_template.jinja").touch()
    shardckpt.import_checkpoint(tmp_path / "hf", tmp_path / "imported", workers=1)

    def interrupt(target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ObjectTarget, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            shardckpt.export(tmp_path / "imported", url, **OPTIONS)
    shardckpt.export(tmp_path / "imported", url, **OPTIONS)
    assert store.list() == ["chat_template.jinja", "model.safetensors"]


def test_a_limit_of_a_few_bytes_is_refused_with_one_that_suffices(place, there):
    url, store = there
    with pytest.raises(errors.BudgetError, match=r"memory_limit=3 B .*raise it to \d+ MiB"):
        shardckpt.export(place, url, memory_limit=3)
    assert contents(store) == {}


@pytest.mark.parametrize("most", [None, SPLIT], ids=["one", "several"])
def test_a_limit_too_small_for_the_parts_of_an_upload_leaves_nothing(place, there, most):
    url, store = there
    with pytest.raises(errors.BudgetError, match="holds two parts"):
        shardckpt.export(place, url, max_shard_size=most, memory_limit="32MiB")
    assert contents(store) == {}
