"""`shardckpt commit`."""

from paths import DOCS
from placeholders import undo_commit

import shardckpt

PAGE = DOCS / "json.md"


def uncommitted(place):
    """A save whose committer has died at the last moment; the attempt's name."""
    return undo_commit(place)


def begin(place):
    (place / "20260101T000000-0000000a" / "hosts" / "00000").mkdir(parents=True)


def test_what_is_complete_becomes_a_checkpoint(run, saver, tmp_path):
    saver(tmp_path / "1")
    attempt = uncommitted(saver(tmp_path / "2"))
    begin(tmp_path / "3")
    answer = run("commit", tmp_path)
    assert (answer.status, answer.err) == (0, "")
    first, second = answer.out.splitlines()
    assert first.split() == ["2", f"({attempt})", "committed"]
    assert second.split()[:3] == ["3", "(20260101T000000-0000000a)", "incomplete"]
    assert shardckpt.open(tmp_path / "2").record.attempt == attempt
    assert shardckpt.open(tmp_path / "2").verify().ok


def test_where_nothing_can_be_committed_the_status_is_1(run, tmp_path):
    begin(tmp_path / "1")
    answer = run("commit", tmp_path / "1")
    assert answer.status == 1
    assert "incomplete" in answer.out


def test_where_nothing_is_unfinished_that_is_no_error(run, saver, tmp_path):
    saver(tmp_path / "1")
    answer = run("commit", tmp_path)
    assert (answer.status, answer.out) == (0, "")
    assert "no unfinished saves" in answer.err
    assert run("commit", tmp_path, "--json").json == {"attempts": []}


def test_json_has_what_became_of_each_attempt(run, saver, tmp_path):
    attempt = uncommitted(saver(tmp_path / "1"))
    doc = run("commit", tmp_path / "1", "--json").json
    assert doc == {
        "attempts": [
            {
                "name": ".",
                "url": str(tmp_path / "1"),
                "attempt": attempt,
                "state": "committed",
                "reason": None,
            }
        ]
    }
    documented = PAGE.read_text(encoding="utf-8")
    assert all(
        f"`{key}`" in documented
        for key in [*doc, *doc["attempts"][0], "committed", "incomplete", "overtaken", "refused"]
    )


def test_a_collected_attempt_is_committed_no_more(run, saver, tmp_path):
    place = saver(tmp_path / "1")
    attempt = place / uncommitted(place)
    away = attempt.rename(tmp_path / attempt.name)
    begin(place)
    assert "removed" in run("gc", "--grace", "0", place).out
    place.mkdir()
    away.rename(attempt)
    answer = run("commit", place)
    assert answer.status == 1
    assert "overtaken" in answer.out


def test_the_command_that_is_advised_to_commit_a_reshard_can_be_copied(run, saver, tmp_path):
    target = tmp_path / "sp ace"
    answer = run("reshard", saver(tmp_path / "1"), target, "--worker", "0/2", "--layout", "zarr")
    assert f"run `shardckpt reshard commit '{target}'`" in answer.out
