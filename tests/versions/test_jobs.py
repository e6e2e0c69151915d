"""Versions published by jobs of several processes, and followed on other meshes; the programs are
`tests/children/versions_ranks.py`."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from one_of_several import OneOfThreads
from ranks import asked

import shardckpt
from shardckpt.errors import CommitError
from shardckpt.io.store import Store
from shardckpt.runs.catalog import catalog
from shardckpt.versions.version import PublishedVersion, Selection
from shardckpt.writing.handle import SaveHandle, SaveProgress
from shardckpt.writing.kept import KeptChunks


@pytest.fixture(scope="module")
def ranks():
    with asked("versions_ranks") as run:
        yield run


def weights(step):
    from versions_ranks import weights

    return {name: tensor.to(torch.bfloat16) for name, tensor in weights(step).items()}


def digest(model):
    return hashlib.sha256(
        b"".join(tensor.view(torch.int16).numpy().tobytes() for tensor in model.values())
    ).hexdigest()


def published(url):
    """Step → whether it is stored as differences, of all that is published."""
    locations = [entry.location for entry in catalog(url)]
    return {
        int(place.name): shardckpt.open(place.path).record.compression == "difference"
        for place in locations
    }


def check(url, steps):
    for step in steps:
        like = {name: torch.zeros_like(tensor) for name, tensor in weights(step).items()}
        shardckpt.restore(url / str(step), like)
        assert all(torch.equal(like[name], tensor) for name, tensor in weights(step).items()), step
        assert shardckpt.open(url / str(step)).verify().ok


@pytest.mark.long
def test_versions_of_two_ranks_are_followed_on_other_meshes(ranks, tmp_path):
    assert ranks("publish", 2, tmp_path, "rows", list(range(7))) == [[], []]
    assert published(tmp_path) == {step: step not in (0, 5) for step in range(7)}
    check(tmp_path, range(7))
    for count, placement in ((2, "columns"), (3, "rows"), (4, "columns"), (2, "replicated")):
        answers = ranks("follow", count, tmp_path, placement, 6)
        expected = [[step, ["w", "v", "b"], digest(weights(step))] for step in range(7)]
        assert answers == [expected] * count


@pytest.mark.parametrize("placement", ["rows", "columns", "replicated"])
def test_shards_of_two_ranks_are_compared_on_their_devices(ranks, tmp_path, placement):
    assert ranks("publish", 2, tmp_path, placement, list(range(7)), None, 1, 5, "device") == [
        [],
        [],
    ]
    assert published(tmp_path) == {step: step not in (0, 5) for step in range(7)}
    check(tmp_path, range(7))


@pytest.mark.parametrize("process", [0, 1])
def test_a_rank_that_fails_leaves_the_others_copies_on_devices_good(ranks, tmp_path, process):
    answers = ranks("publish", 2, tmp_path, "rows", [0, 1, 2, 3, 4], 2, process, 5, "device")
    assert answers[process] == [[2, "LeafError"]]
    assert answers[1 - process] == [[2, "CommitError"]]
    check(tmp_path, [0, 1, 3, 4])


@pytest.mark.long
def test_versions_of_two_ranks_are_folded_by_process_0_and_followed(ranks, tmp_path):
    assert ranks("publish", 2, tmp_path, "rows", list(range(12)), None, 1, 64) == [[], []]
    records = {step: shardckpt.open(tmp_path / str(step)).record for step in range(12)}
    assert [step for step, record in records.items() if "-folded-" in record.attempt] == [3, 6, 9]
    assert {len(record.hosts) for record in records.values()} == {2}
    check(tmp_path, range(12))
    answers = ranks("follow", 3, tmp_path, "columns", 11)
    assert answers == [[[step, ["w", "v", "b"], digest(weights(step))] for step in range(12)]] * 3


@pytest.mark.parametrize("process", [0, 1])
def test_a_version_that_one_rank_cannot_publish_is_nobody_s_base(ranks, tmp_path, process):
    answers = ranks("publish", 2, tmp_path, "rows", [0, 1, 2, 3, 4], 2, process)
    assert answers[process] == [[2, "LeafError"]]
    assert answers[1 - process] == [[2, "CommitError"]]
    # Process 0 did not begin the version, so all still have the elements of the one before.
    assert published(tmp_path) == {0: False, 1: True, 3: process == 0, 4: True}
    check(tmp_path, [0, 1, 3, 4])


def test_a_chunk_that_another_process_wrote_last_is_stored_whole(ranks, tmp_path):
    from versions_ranks import changing

    ranks("publish_changing", 2, tmp_path / "p", 7)
    for step in range(7):
        restored = shardckpt.restore(tmp_path / "p" / str(step))
        assert {name: array.tobytes() for name, array in restored.items()} == {
            n: t.numpy().tobytes() for n, t in changing(step).items()
        }
        assert shardckpt.open(tmp_path / "p" / str(step)).verify().ok
    assert (
        published(tmp_path / "p")
        == published(tmp_path / "p-other")
        == {step: step > 0 for step in range(7)}
    )


def test_a_job_on_another_mesh_goes_on_with_an_anchor(ranks, tmp_path):
    ranks("publish", 2, tmp_path, "rows", [0, 1])
    ranks("publish", 3, tmp_path, "columns", [2, 3])
    assert published(tmp_path) == {0: False, 1: True, 2: False, 3: True}
    check(tmp_path, range(4))


def test_all_ranks_skip_the_same_versions_and_publish_the_last(ranks, tmp_path):
    one, other = ranks("publish_at_once", 2, tmp_path, 12)
    assert one == other
    assert sorted([*published(tmp_path), *one]) == list(range(12))
    assert 11 in published(tmp_path)


class Asked(OneOfThreads):
    """Counts its requests to the store of the job."""

    requests = 0

    def _get(self, key):
        self.requests += 1
        return super()._get(key)


@pytest.mark.long
def test_a_process_gives_process_0_its_time_after_the_version_before_and_asks_it_rarely():
    """The version before is written for longer than a process waits for process 0."""
    keys = {}
    with ThreadPoolExecutor(2) as pool:
        leader, other = pool.map(lambda process: Asked(keys, process, 2), range(2))
    root = Store.open(f"memory://{uuid.uuid4().hex}")
    progress, versions = SaveProgress("before"), []
    for number in (1, 2):
        version = PublishedVersion(
            root,
            number,
            "version",
            KeptChunks(),
            Selection(None, None, None),
            number=number,
            share=None,
            proof=True,
            before=versions[-1] if versions else None,
            decide=lambda *_: None,
            settle=lambda _: None,
            timeout=1,
        )
        versions.append(version)
    before, version = versions
    before.handle = SaveHandle(progress)
    waits = threading.Thread(target=version.await_turn, args=(root, other, lambda: ""))
    waits.start()
    time.sleep(2)
    assert waits.is_alive()
    progress.end(CommitError("it was given up"))
    leader.announce("version/2", {"number": 2, "base": None, "began": "now"})
    waits.join()
    assert version.before is None
    assert other.requests < 60
    with pytest.raises(CommitError, match="has not begun this version within 1 s"):
        before.await_turn(root, other, lambda: "")
