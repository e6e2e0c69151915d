"""`shardckpt ls`."""

import numpy as np


def begin(place):
    (place / "20260101T000000-00000000" / "records").mkdir(parents=True)
    (place / "20260101T000000-00000000" / "records" / "00001.json").write_bytes(b"{}")


def test_checkpoints_are_listed_by_step(run, saver, tmp_path):
    for step in (100, 9, 20):
        saver(tmp_path / f"step_{step}")
    answer = run("ls", tmp_path)
    header, *rows = answer.out.splitlines()
    assert header.split() == ["name", "created", "tensors", "size", "layout"]
    assert [row.split()[0] for row in rows] == ["step_9", "step_20", "step_100"]
    assert all(row.split()[3:] == ["4", "3.8", "KiB", "packed"] for row in rows)
    assert (answer.status, answer.err) == (0, "")


def test_unfinished_saves_show_on_request(run, saver, tmp_path):
    saver(tmp_path / "1")
    begin(tmp_path / "2")
    assert "uncommitted" not in run("ls", tmp_path).out
    answer = run("ls", "--all", tmp_path)
    assert answer.out.splitlines()[-1].split() == ["2", "(20260101T000000-00000000)", "uncommitted"]
    assert max(map(len, answer.out.splitlines())) <= 80


def test_json_has_a_document_per_checkpoint(run, saver, tmp_path):
    saver(tmp_path / "run-7")
    begin(tmp_path / "run-8")
    committed, unfinished = run("ls", "-a", tmp_path, "--json").json["checkpoints"]
    assert committed | {"attempt": "?", "created": "?", "stored_bytes": 0} == {
        "name": "run-7",
        "url": str(tmp_path / "run-7"),
        "state": "committed",
        "step": 7,
        "attempt": "?",
        "created": "?",
        "layout": "packed",
        "tensors": 4,
        "bytes": 3872,
        "stored_bytes": 0,
        "reason": None,
    }
    assert (unfinished["state"], unfinished["attempt"], unfinished["bytes"]) == ("uncommitted", "20260101T000000-00000000", None)


def test_a_damaged_record_is_listed_with_its_reason(run, saver, tmp_path):
    path = saver(tmp_path / "1") / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(b"float32", b"float64"))
    answer = run("ls", tmp_path)
    assert answer.status == 0
    assert "unreadable" in answer.out
    assert "digest does not agree" in answer.out


def test_a_directory_without_checkpoints_is_no_error(run, tmp_path):
    answer = run("ls", tmp_path)
    assert (answer.status, answer.out) == (0, "")
    assert "no checkpoints directly below" in answer.err
    assert run("ls", tmp_path, "--json").json == {"checkpoints": []}


def test_the_directory_is_this_one_unless_another_is_named(run, saver, tmp_path, monkeypatch):
    saver(tmp_path / "1")
    monkeypatch.chdir(tmp_path)
    assert run("ls").out == run("ls", tmp_path).out


def test_names_of_directories_cannot_reach_the_terminal(run, saver, tmp_path):
    saver(tmp_path / "\x1b[31mred", {"w": np.ones(2)})
    assert r"\x1b[31mred" in run("ls", tmp_path).out
    assert "\x1b" not in run("ls", tmp_path).out
