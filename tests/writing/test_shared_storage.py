"""Jobs whose hosts have a storage each at the place that they save to: the first save finds that
out before data is written."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest
from emulators import environment
from processes import Processes

import shardckpt
from shardckpt.io.store import Store


@pytest.fixture(scope="module")
def job():
    with Processes("shared_storage") as processes:
        yield processes


@pytest.fixture(params=["gs", "s3"])
def bucket_job(request):
    """A job whose processes save to an emulator; and the emulator."""
    emulator = request.getfixturevalue("gcs_server" if request.param == "gs" else "s3_server")
    with Processes("shared_storage", env=emulator.env()) as processes:
        yield processes, emulator


def own_roots(tmp_path, count):
    """A root for each process, of one name, as mounts of each host would be."""
    roots = [tmp_path / f"host{i}" / "run" for i in range(count)]
    for root in roots:
        root.mkdir(parents=True)
    return roots


def data_files(roots):
    return [
        path
        for root in roots
        for path in Path(root).rglob("*")
        if path.is_file() and "/d/" in str(path)
    ]


@pytest.mark.parametrize("how", ["save", "save_async", "manager"])
def test_a_root_that_each_host_has_for_itself_is_named_by_every_process(tmp_path, job, how):
    roots = own_roots(tmp_path, 3)
    urls = [root if how == "manager" else root / "1" for root in roots]
    # On a busy machine process 0 announces late, and no process is to write before.
    answers = job.run("save", 3, urls, how, 60, (), 20)
    assert {answer["error"] for answer in answers} == {"CommitError"}
    assert all("is not shared: process " in answer["message"] for answer in answers), answers
    assert all(
        "mount one shared file system on all hosts" in answer["message"] for answer in answers
    )
    assert data_files(roots[1:]) == []


def test_one_host_without_the_shared_root_is_named_alone(tmp_path, job):
    roots = own_roots(tmp_path, 2)
    urls = [roots[0] / "1", roots[0] / "1", roots[1] / "1"]
    answers = job.run("save", 3, urls, "save", 60, (), 20)
    assert all("is not shared: process 2, on " in answer["message"] for answer in answers), answers
    assert data_files(roots[1:]) == []


def test_each_process_has_a_memory_of_its_own(job):
    answers = job.run("save", 2, [f"memory://{uuid.uuid4().hex}/1"] * 2)
    assert all(
        "memory:// is the memory of one process" in answer["message"] for answer in answers
    ), answers


@pytest.mark.long
def test_buckets_of_each_host_are_named_and_no_data_is_written(bucket_job):
    job, emulator = bucket_job
    name = uuid.uuid4().hex
    urls = [
        emulator.url(f"{name}/1"),
        f"{emulator.scheme}://{emulator.new_bucket('other')}/{name}/1",
    ]
    answers = job.run("save", 2, urls)
    assert all("Give all processes the same endpoint" in answer["message"] for answer in answers), (
        answers
    )
    with environment(emulator.env()):
        assert Store.open(urls[1]).list() == ["checkpoint.json"], "the placeholder"


@pytest.mark.long
def test_a_bucket_that_all_share_is_saved_to(bucket_job):
    job, emulator = bucket_job
    urls = [emulator.url(f"{uuid.uuid4().hex}/1")] * 3
    assert job.run("save", 3, urls) == ["saved"] * 3


def test_only_the_first_save_below_a_root_looks(tmp_path, job):
    urls = [tmp_path / name for name in ("run/1", "run/2", "run/1x")]
    for counts in job.run("save_one_by_one", 3, urls):
        assert counts[0] > 0
        assert counts[1:] == [0, 0]


@pytest.mark.parametrize("knowing", [[0], [1], [0, 1], [1, 2]])
def test_processes_that_know_different_storages_save_together(tmp_path, job, knowing):
    assert (
        job.run("save_with_one_that_knows", 3, tmp_path / "1", tmp_path / "2", knowing)
        == ["saved"] * 3
    )
    assert shardckpt.restore(tmp_path / "2")["b"].tolist() == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("without", "how"), [(0, "fails"), (1, "fails"), (1, "dies"), (1, "is absent")]
)
def test_a_process_that_is_missing_is_reported_as_in_any_later_save(tmp_path, job, without, how):
    answers = job.run("save_without_one", 3, tmp_path / "run" / "1", without, how)
    for process, answer in enumerate(answers):
        if process != without:
            assert answer["error"] == "CommitError"
            assert "not shared" not in answer["message"]


def test_processes_that_save_alone_look_for_nothing(tmp_path, job):
    roots = own_roots(tmp_path, 2)
    assert job.run("save_alone", 2, [root / "1" for root in roots]) == ["saved"] * 2


def test_the_next_save_finds_a_storage_that_is_shared_by_then(tmp_path, job):
    roots = own_roots(tmp_path, 2)
    messages = job.run("save_again_when_shared", 2, [root / "1" for root in roots], tmp_path / "1")
    assert all("is not shared" in message for message in messages)
    assert Store.open(tmp_path / "1").exists("checkpoint.json")


def test_a_checkpoint_is_replaced_by_processes_that_find_the_same_one(tmp_path, job):
    assert job.run("save", 2, [tmp_path / "1"] * 2) == ["saved"] * 2
    assert job.run("save_over", 2, tmp_path / "1") == ["saved"] * 2


def test_copies_of_a_checkpoint_on_each_host_are_not_taken_for_one(tmp_path, job):
    roots = own_roots(tmp_path, 2)
    shardckpt.save(roots[0] / "1", {"w": np.arange(3)})
    shutil.copytree(roots[0] / "1", roots[1] / "1")
    answers = job.run("save", 2, [root / "1" for root in roots], "save", 60, ["1"])
    assert all("is not shared: process 1, on " in answer["message"] for answer in answers), answers
    assert [shardckpt.restore(root / "1")["w"].tolist() for root in roots] == [[0, 1, 2]] * 2
