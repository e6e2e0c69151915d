"""`shardckpt gc` and `shardckpt rm`."""

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import DOCS

import shardckpt
from shardckpt.errors import NotFoundError, OptionError
from shardckpt.options import parse_duration
from shardckpt.text import duration_text

COMMAND = Path(sys.executable).with_name("shardckpt")
PAGE = DOCS / "json.md"
ATTEMPT = "20260101T000000-0000000a"


def leave_behind(place, *, hours=25):
    """Put an attempt there, as left by a save that was killed so long ago."""
    file = place / ATTEMPT / "hosts" / "00000" / "table"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    then = time.time() - 3600 * hours
    os.utime(file, (then, then))


@pytest.fixture
def runs(tmp_path, saver):
    """Two checkpoints; beside one of them is an old attempt, beside the other a young one."""
    for name, hours in (("step_9", 72), ("step_10", 5)):
        leave_behind(saver(tmp_path / name), hours=hours)
    return tmp_path


def test_what_is_removed_and_what_is_kept_is_told(run, runs):
    answer = run("gc", runs)
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.splitlines() == [
        f"step_9/{ATTEMPT}   removed  idle 3 d",
        f"step_10/{ATTEMPT}  kept     idle 5 h  it may be a save under way",
        "",
        "1 attempt removed, 1 kept",
        "--grace 0 removes the kept ones, too; use it only if no save is under way.",
    ]
    assert not (runs / "step_9" / ATTEMPT).exists()
    assert (runs / "step_10" / ATTEMPT).exists()
    assert shardckpt.open(runs / "step_9").verify().ok


def test_a_dry_run_only_tells(run, runs):
    first, *_, last, _ = run("gc", "--dry-run", runs).out.splitlines()
    assert first.split() == [f"step_9/{ATTEMPT}", "would", "go", "idle", "3", "d"]
    assert last == "1 attempt would go, 1 kept"
    assert (runs / "step_9" / ATTEMPT).exists()
    assert run("gc", "-n", "--json", runs).json["dry_run"] is True


def test_the_grace_period_is_given_with_its_unit(run, runs):
    assert "2 attempts removed, 0 kept" in run("gc", "--grace", "4h", runs).out
    answer = run("gc", "--grace", "4", runs)
    assert (answer.status, answer.out) == (2, "")
    assert "unit" in answer.err


def test_json_lists_what_became_of_each_attempt(run, runs):
    doc = run("gc", runs, "--json").json
    assert doc["dry_run"] is False
    (removed,), (kept,), failed = doc["removed"], doc["kept"], doc["failed"]
    assert removed | {"idle": 0} == {
        "url": str(runs / "step_9"),
        "attempt": ATTEMPT,
        "idle": 0,
        "reason": None,
    }
    assert 71 * 3600 < removed["idle"] < 73 * 3600
    assert (kept["url"], kept["reason"]) == (str(runs / "step_10"), "it may be a save under way")
    assert failed == []
    documented = PAGE.read_text(encoding="utf-8")
    assert all(f"`{key}`" in documented for key in [*doc, *removed])


def test_where_nothing_is_left_behind_that_is_no_error(run, saver, tmp_path):
    saver(tmp_path / "1")
    answer = run("gc", tmp_path)
    assert (answer.status, answer.out) == (0, "")
    assert "no unfinished saves" in answer.err
    assert run("gc", tmp_path, "--json").json == {
        "dry_run": False,
        "removed": [],
        "published": [],
        "kept": [],
        "failed": [],
    }


def test_what_the_storage_refuses_is_told_and_the_status_is_the_storages(run, runs, monkeypatch):
    def refuse(*_, **__):
        raise OSError("Input/output error")

    monkeypatch.setattr(os, "unlink", refuse)
    answer = run("gc", runs)
    assert answer.status == 6
    assert "failed" in answer.out
    assert "Input/output error" in answer.out
    assert run("gc", runs, "--json").status == 6


# --- rm -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_deleted_and_nothing_of_it_stays(run, runs):
    answer = run("rm", "--yes", runs / "step_9")
    assert (answer.status, answer.out.splitlines()[0]) == (0, f"deleted  {runs / 'step_9'}")
    assert f"step_9/{ATTEMPT}  removed" in answer.out
    assert not (runs / "step_9").exists()
    with pytest.raises(NotFoundError):
        shardckpt.open(runs / "step_9")
    assert "step_9" not in run("ls", "-a", runs).out


def test_deleting_as_json(run, runs):
    doc = run("rm", "-y", runs / "step_10", "--json").json
    assert (doc["url"], doc["removed"], doc["failed"]) == (str(runs / "step_10"), [], [])
    assert [one["attempt"] for one in doc["kept"]] == [ATTEMPT]


def test_without_a_terminal_nobody_is_asked_and_nothing_deleted(run, runs):
    answer = run("rm", runs / "step_9")
    assert (answer.status, answer.out) == (2, "")
    assert "--yes" in answer.err
    assert shardckpt.open(runs / "step_9").verify().ok


@pytest.mark.parametrize(("typed", "status"), [(b"n\n", 1), (b"\n", 1), (b"\x04", 1), (b"y\n", 0)])
def test_on_a_terminal_it_asks_first(runs, typed, status):
    ours, theirs = pty.openpty()
    os.write(ours, typed)
    done = subprocess.run(
        [COMMAND, "rm", runs / "step_9"],
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    os.close(theirs)
    os.close(ours)
    assert done.returncode == status
    assert re.match(rf"Delete {runs / 'step_9'}\? \[y/N\]", done.stderr)
    assert done.stderr.endswith("\nnot confirmed\n" if typed == b"\x04" else "]:")
    assert (runs / "step_9").exists() == bool(status)


def test_where_no_checkpoint_is_the_status_says_so(run, tmp_path):
    leave_behind(tmp_path / "1")
    assert run("rm", "-y", tmp_path / "1").status == 3
    assert run("rm", "-y", tmp_path / "2").status == 3
    answer = run("rm", tmp_path / "2")
    assert answer.status == 3, "it looks before it asks"
    assert "no checkpoint there" in answer.err


# --- lengths of time ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90s", 90),
        ("5 min", 300),
        ("5m", 300),
        ("24h", 86400),
        ("1.5d", 129600),
        (" 7 d ", 604800),
    ],
)
def test_times_are_read_with_their_units(text, seconds):
    assert parse_duration(text, "--grace") == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1e3s", "1 week", "1h30min", "inf", "٣h"])
def test_what_is_no_time_is_refused_with_the_option_and_an_example(text):
    with pytest.raises(OptionError, match=r'--grace .*such as "24h"'):
        parse_duration(text, "--grace")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9, "0 s"),
        (119.9, "119 s"),
        (120, "2 min"),
        (7199, "119 min"),
        (7200, "2 h"),
        (172799, "47 h"),
        (172800, "2 d"),
        (1e9, "11,574 d"),
    ],
)
def test_times_are_shown_in_the_unit_that_suits_them(seconds, text):
    assert duration_text(seconds) == text
