"""The storage fails one process of three, or all: a full disk, a read-only one, a limit of file
sizes.

All processes learn at once that the save failed, and one of them why; what was there stays; and
once the fault is gone the same processes save again, into another attempt.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from aftermath import LAYOUTS, attempts, contents, prepare, value_of

import shardckpt
from shardckpt import errors
from shardckpt.runs import collecting

PROCESSES = 3
REASONS = {"full disk": "make room", "read-only": "mounted read-only", "small files": "ulimit -f"}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk takes root's rights")


def afflict(jobs, root, layout, values, afflicted, affliction):
    """Save a value while one process is afflicted, then others with all in good health; what each
    process was told, per save."""
    options = {"layout": layout, "overwrite": True, "commit_timeout": 30}
    answers = jobs.run(
        "save_afflicted",
        PROCESSES,
        root / "checkpoint",
        values,
        afflicted,
        {"layout": layout, **affliction},
        options,
        timeout=90,
    )
    assert all(isinstance(answer, list) for answer in answers), answers
    return [list(of_save) for of_save in zip(*answers, strict=True)]


def assert_failed(messages, afflicted, reason):
    """The one says what to do, the others name it and say the same; nobody has waited for a
    timeout."""
    for process, message in enumerate(messages):
        assert message.startswith("StorageError: " if process == afflicted else "CommitError: "), (
            messages
        )
        assert reason in message
        assert (
            afflicted in (process, 0) or f"process {afflicted} could not write its share" in message
        )


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("afflicted", [0, 2])
@pytest.mark.parametrize(
    "affliction",
    [
        pytest.param({"kind": "full disk", "bytes": 8 << 10}, marks=needs_root, id="full disk"),
        pytest.param({"kind": "read-only"}, marks=needs_root, id="read-only"),
        pytest.param({"kind": "small files", "bytes": 8 << 10}, id="small files"),
    ],
)
def test_what_fails_one_process_fails_the_save_for_all_and_the_next_one_succeeds(
    tmp_path, jobs, layout, afflicted, affliction
):
    prepare(jobs, tmp_path, layout, PROCESSES, overwrite=True)
    earlier, url = contents(tmp_path / "earlier"), tmp_path / "checkpoint"
    first, second = afflict(jobs, tmp_path, layout, [2, 3], afflicted, affliction)
    assert_failed(first, afflicted, REASONS[affliction["kind"]])
    assert second == ["saved"] * PROCESSES
    assert value_of(url, PROCESSES) == 3
    assert contents(tmp_path / "earlier") == earlier
    failed = set(attempts(url)) - {shardckpt.open(url).record.attempt}
    assert len(failed) <= 1  # none, where the others were told before they had written anything
    assert {(one.attempt, one.state) for one in shardckpt.commit(url)} == {
        (attempt, "incomplete") for attempt in failed
    }
    assert {one.attempt for one in collecting.collect(url, grace=0)} == failed
    assert value_of(url, PROCESSES) == 3


@pytest.fixture
def disk(tmp_path):
    """A disk of one MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "shardckpt-test", place], check=True, timeout=30
    )
    yield place
    subprocess.run(["umount", "--lazy", place], check=True, timeout=30)


def collected(disk):
    """Whether a collection publishes a save that is complete; it removes all others, or says that
    there is no room."""
    outcomes = collecting.collect(disk, grace=0)
    assert all(
        one.outcome in ("removed", "published") or "make room" in one.reason for one in outcomes
    )
    return any(one.outcome == "published" for one in outcomes)


@pytest.mark.long
@needs_root
@pytest.mark.parametrize("layout", LAYOUTS)
def test_however_much_room_is_left_for_all_a_save_is_whole_or_fails(
    disk, jobs, full, layout, record_property
):
    """From none to enough: the chunks, their tables, the index or the record find no room; with
    some more all do."""
    prepare(jobs, disk, layout, PROCESSES, overwrite=True)
    earlier, url = contents(disk / "earlier"), disk / "checkpoint"
    outcomes, value = [], 1
    for room in range(0, 400, 8 if full else 40):
        with leaving(disk, room << 10):
            answers = jobs.run(
                "save",
                PROCESSES,
                url,
                value + 1,
                {"layout": layout, "overwrite": True, "commit_timeout": 30},
            )
            if all(isinstance(answer, list) for answer in answers):
                outcomes.append("saved")
                value += 1
            else:
                outcomes.append("failed")
                assert {answer["error"] for answer in answers} <= {"StorageError", "CommitError"}, (
                    answers
                )
                assert all("make room" in answer["message"] for answer in answers), (room, answers)
            assert value_of(url, PROCESSES) == value
            value += collected(disk)
            assert value_of(url, PROCESSES) == value
        value += collected(disk)
        assert attempts(url) == [shardckpt.open(url).record.attempt]
        assert contents(disk / "earlier") == earlier
    record_property("outcomes", dict(Counter(outcomes)))
    assert outcomes[0] == "failed"
    assert outcomes[-1] == "saved"
    # At the limit it depends on the files that several processes happen to have at the same time.
    last_failed = len(outcomes) - 1 - outcomes[::-1].index("failed")
    assert last_failed <= outcomes.index("saved") + 1, outcomes


@contextmanager
def leaving(disk, room):
    """The disk has so many bytes of room, in whole pages."""
    filler = disk / "filler"
    space = os.statvfs(disk)
    with filler.open("wb", buffering=0) as file:
        file.write(bytes(space.f_bavail * space.f_bsize - room))
    yield
    filler.unlink()


def test_a_place_that_is_no_directory_is_an_error_for_all(tmp_path, jobs):
    (tmp_path / "file").write_text("in the way")
    answers = jobs.run(
        "save", PROCESSES, tmp_path / "file" / "checkpoint", 2, {"commit_timeout": 30}
    )
    for answer in answers:
        assert issubclass(getattr(errors, answer["error"]), errors.ShardckptError)
        assert str(tmp_path / "file") in answer["message"]
    assert (tmp_path / "file").read_text() == "in the way"


@needs_root
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_deleted_from_a_disk_without_any_room(disk, layout):
    options = shardckpt.SaveOptions(layout=layout)
    for step in (1, 2):
        shardckpt.save(disk / str(step), {"w": np.full((64, 64), step)}, options=options)
    with leaving(disk, 0):
        assert collecting.delete(disk / "1") == []
        with pytest.raises(errors.NotFoundError):
            shardckpt.restore(disk / "1")
        assert (shardckpt.restore(disk / "2")["w"] == 2).all()
    assert collecting.collect(disk, grace=0) == []


def test_a_deletion_that_was_killed_on_a_full_disk_is_finished_by_the_next_one_alone(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.ones(3)})
    attempt = shardckpt.open(tmp_path / "c").record.attempt
    (tmp_path / "c" / "checkpoint.json").write_bytes(b"")  # and the data was not removed yet
    (outcome,) = collecting.collect(tmp_path / "c", grace=0)
    assert (outcome.outcome, attempts(tmp_path / "c")) == ("kept", [attempt])
    collecting.delete(tmp_path / "c", grace=0)
    assert not (tmp_path / "c" / attempt).exists()
