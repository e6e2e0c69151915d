"""Collecting and deleting checkpoints as users do, with processes that die or sleep at the worst
moment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from paths import CHILDREN

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import NotFoundError, OptionError, UrlError
from shardckpt.format.documents import seal
from shardckpt.format.record import Tombstone
from shardckpt.io.store import Store
from shardckpt.runs.collecting import GRACE, collect, delete

ORPHAN = "20260101T000000-0000000a"
HOUR = 3600


def save(url, value=1, **options):
    shardckpt.save(url, {"w": np.full(100, value)}, options=SaveOptions(**options))


def value_of(url):
    """Value of a checkpoint, which must be whole and undamaged."""
    (value,) = set(shardckpt.restore(url)["w"].tolist())
    assert shardckpt.open(url).verify().damage == []
    return value


def leave_behind(url, *, hours=25):
    """Put a whole attempt there that was never committed, so long ago; returns its name."""
    elsewhere = Path(f"{url} elsewhere")
    save(elsewhere)
    (attempt,) = (p for p in elsewhere.iterdir() if p.is_dir())
    shutil.move(attempt, Path(url) / attempt.name)
    shutil.rmtree(elsewhere)
    age(Path(url) / attempt.name, hours=hours)
    return attempt.name


def age(top, *, hours=25):
    then = time.time() - hours * HOUR
    for path in [top, *top.rglob("*")]:
        os.utime(path, (then, then))


def has_files(top):
    return any(path.is_file() for path in top.rglob("*"))


def directories(url):
    return sorted(p.name for p in Path(url).iterdir() if p.is_dir())


def directories_of(url):
    """None of what is not there."""
    return directories(url) if url.exists() else []


def outcomes(results):
    return [(Path(one.location.path).name, one.attempt, one.outcome) for one in results]


# --- a directory of checkpoints -------------------------------------------------------------------


@pytest.mark.parametrize("fingerprint", [False, True])
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_replaced_save_and_a_deleted_one_leave_nothing(tmp_path, layout, fingerprint):
    place, options = (
        tmp_path / "c",
        SaveOptions(layout=layout, fingerprint=fingerprint, overwrite=True),
    )
    for _ in range(2):
        shardckpt.save(place, {"w": np.ones((64, 64)), "tiny": np.ones(2)}, options=options)
        assert {path.name for path in place.iterdir()} == {
            "checkpoint.json",
            shardckpt.open(place).record.attempt,
        }
    delete(str(place))
    assert list(tmp_path.iterdir()) == []


def test_all_checkpoints_of_a_directory_are_collected_and_stay_what_they_are(tmp_path):
    for step in (9, 10, 11):
        save(tmp_path / f"step_{step}", step)
    orphans = [leave_behind(tmp_path / f"step_{step}") for step in (9, 10)]
    young = leave_behind(tmp_path / "step_11", hours=0)
    (tmp_path / "notes").mkdir()
    assert outcomes(collect(tmp_path)) == [
        ("step_9", orphans[0], "removed"),
        ("step_10", orphans[1], "removed"),
        ("step_11", young, "kept"),
    ]
    for step in (9, 10, 11):
        assert value_of(tmp_path / f"step_{step}") == step
        assert len(directories(tmp_path / f"step_{step}")) == 1 + (step == 11)
    assert list((tmp_path / "notes").iterdir()) == []


def test_a_root_may_be_one_checkpoint(tmp_path):
    save(tmp_path / "c")
    orphan = leave_behind(tmp_path / "c")
    assert outcomes(collect(tmp_path / "c")) == [("c", orphan, "removed")]
    assert collect(tmp_path / "c") == []


def test_one_place_that_cannot_be_collected_keeps_no_other_from_it(tmp_path):
    for name in "abc":
        save(tmp_path / name)
    orphans = {name: leave_behind(tmp_path / name) for name in "abc"}
    (tmp_path / "a" / "checkpoint.json").write_bytes(b"{}")
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "checkpoint.json")
    leave_behind(tmp_path / "b")
    results = collect(tmp_path)
    assert outcomes(results) == [
        ("a", None, "kept"),
        ("b", None, "failed"),
        ("c", orphans["c"], "removed"),
    ]
    assert "not a shardckpt record" in results[0].reason
    assert "b/checkpoint.json" in results[1].reason


def test_the_grace_period_is_a_day_unless_told_otherwise(tmp_path):
    assert GRACE == 24 * HOUR
    orphans = [leave_behind(tmp_path / str(hours), hours=hours) for hours in (23, 25)]
    assert outcomes(collect(tmp_path, dry_run=True)) == [
        ("23", orphans[0], "kept"),
        ("25", orphans[1], "removed"),
    ]
    assert {one.outcome for one in collect(tmp_path, grace=0)} == {"removed"}


def test_a_bucket_is_collected_as_a_directory_is(cloud):
    root = cloud.url(f"runs-{uuid.uuid4().hex}")
    for step in (9, 10):
        save(f"{root}/step_{step}", step)
        Store.open(f"{root}/step_{step}/{ORPHAN}").write("hosts/00000/table", b"x")
    assert outcomes(collect(root)) == [("step_9", ORPHAN, "kept"), ("step_10", ORPHAN, "kept")]
    assert outcomes(collect(root, grace=0)) == [
        ("step_9", ORPHAN, "removed"),
        ("step_10", ORPHAN, "removed"),
    ]
    assert delete(f"{root}/step_9") == []
    assert Store.open(f"{root}/step_9").list() == []
    assert value_of(f"{root}/step_10") == 10
    with pytest.raises(NotFoundError):
        collect(f"{root}/nothing")


@pytest.mark.parametrize("grace", [-1, float("nan"), float("inf"), True, "24h", None])
def test_what_is_no_number_of_seconds_is_refused(tmp_path, grace):
    save(tmp_path / "c")
    for action in (collect, delete):
        with pytest.raises(OptionError, match="give seconds"):
            action(tmp_path / "c", grace=grace)
    assert value_of(tmp_path / "c") == 1


def test_a_place_that_is_not_there_is_an_error(tmp_path):
    for action in (collect, delete):
        with pytest.raises(NotFoundError):
            action(tmp_path / "nothing")
        with pytest.raises(UrlError):
            action("ftp://host/c")
    assert collect(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


# --- killed on the way ----------------------------------------------------------------------------


def kill_at_every_operation(root, action):
    """The operation before which each fork died, in the order of the forks; fork k has left
    <root>/<k>."""
    command = [sys.executable, CHILDREN / "collect_kill_at_every_operation.py", root, action]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    return json.loads(result.stdout)


@pytest.mark.long
@pytest.mark.parametrize("committed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_collection_killed_at_any_operation_loses_nothing_and_the_next_one_ends_it(
    tmp_path, committed
):
    base = tmp_path / "base"
    if committed:
        save(base)
    orphans = {leave_behind(base), leave_behind(base)}
    kept = [name for name in directories(base) if name not in orphans]
    before = {
        path.relative_to(base): path.read_bytes() for path in base.rglob("*") if path.is_file()
    }
    died_before = kill_at_every_operation(tmp_path, "collect")
    assert {"rename", "unlink", "rmdir"} <= set(died_before)
    for k in range(len(died_before)):
        url = tmp_path / str(k)
        gone = [path for path in before if path.parts[0] in orphans and not (url / path).exists()]
        if gone and (committed or directories_of(url)):
            record = (url / "checkpoint.json").read_bytes()
            assert record != before.get(Path("checkpoint.json")), "nothing goes before the fence"
        if committed:
            assert value_of(url) == 1
        for orphan in orphans & set(directories_of(url)):
            if not has_files(url / orphan):
                age(
                    url / orphan
                    # It looks like a save that has just begun: the collection of the next day takes
                    # it.
                )
        collect(url.parent)
        assert directories_of(url) == kept
        if committed:
            assert value_of(url) == 1
        else:
            save(url, 2)
            assert value_of(url) == 2


@pytest.mark.long
def test_a_deletion_killed_at_any_operation_leaves_the_checkpoint_or_none_and_the_next_one_ends_it(
    tmp_path,
):
    save(tmp_path / "base")
    age(tmp_path / "base")
    died_before = kill_at_every_operation(tmp_path, "delete")
    assert {"rename", "unlink", "rmdir"} <= set(died_before)
    values = []
    for k in range(len(died_before)):
        url = tmp_path / str(k)
        try:
            values.append(value_of(url))
        except NotFoundError:
            values.append(None)
        for orphan in directories_of(url):
            if not has_files(url / orphan):
                age(url / orphan)
        with suppress(NotFoundError):  # nothing is left
            delete(url)
        assert directories_of(url) == []
        save(url, 2)
        assert value_of(url) == 2
    deleted = values.index(None)
    assert values == [1] * deleted + [None] * (len(values) - deleted)
    assert died_before[deleted - 1] == "rename"
    assert not {"unlink", "rmdir"} & set(died_before[:deleted])


@pytest.mark.parametrize("left", ["nothing", "a probe", "a probe and a tombstone"])
def test_the_directory_of_a_step_goes_with_what_a_killed_collection_has_left_in_it(tmp_path, left):
    place = Store.open(tmp_path / "run" / "3")
    (tmp_path / "run" / "3").mkdir(parents=True)
    (tmp_path / "run" / "eval").mkdir()
    if left != "nothing":
        place.write(".now-0123456789abcdef", b"")
        age(tmp_path / "run")
        place.write(".now-0000000000000000", b"")
    if left == "a probe and a tombstone":
        place.write("checkpoint.json", seal(Tombstone("deleted", "1").to_json()))
    assert collect(tmp_path / "run", dry_run=True) == []
    assert (tmp_path / "run" / "3").exists()
    assert collect(tmp_path / "run") == []
    # Another collection may be looking at the young one.
    assert place.list() == ([] if left == "nothing" else [".now-0000000000000000"])
    age(tmp_path / "run")
    assert collect(tmp_path / "run") == []
    assert directories(tmp_path / "run") == ["eval"]
