"""`shardckpt ls`."""

import os
import re
import shutil

import numpy as np
from placeholders import undo_commit

import shardckpt

ATTEMPT = "20260101T000000-00000000"


def begin(place):
    (place / ATTEMPT / "records").mkdir(parents=True)
    (place / ATTEMPT / "records" / "00001.json").write_bytes(b"{}")


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
    os.utime(tmp_path / "2" / ATTEMPT / "records" / "00001.json", (0, 0))
    assert "uncommitted" not in run("ls", tmp_path).out
    answer = run("ls", "--all", tmp_path)
    *table, empty, hint = answer.out.splitlines()
    assert re.fullmatch(
        r"2 +uncommitted: no host has finished, nothing written for [\d,]+ d", table[-1]
    )
    assert table[0].split() == ["name", "created", "tensors", "size", "layout"]
    assert empty == ""
    assert hint == f"shardckpt gc {tmp_path} removes abandoned saves, a day after their last write"
    assert max(map(len, table)) <= 80


def test_a_save_that_lacks_nothing_but_its_commit_is_pointed_out(run, saver, tmp_path):
    """Its directory's name can be pasted into a shell."""
    save = saver(tmp_path / "the run" / "1")
    undo_commit(save)
    line, _, hint, _ = run("ls", "-a", tmp_path / "the run").out.splitlines()[-4:]
    assert "1 host finished, none is missing" in line
    assert hint == f"shardckpt commit '{tmp_path / 'the run'}' commits complete saves"


def test_one_whose_place_has_been_taken_is_not(run, saver, tmp_path):
    save = saver(tmp_path / "1")
    undo_commit(save)
    other = saver(tmp_path / "2")
    shutil.copytree(other, save, dirs_exist_ok=True)
    answer = run("ls", "-a", save)
    assert "none is missing" in answer.out
    assert "shardckpt commit" not in answer.out


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
        "began": None,
        "layout": "packed",
        "tensors": 4,
        "bytes": 3872,
        "stored_bytes": 0,
        "changed_bytes": None,
        "metrics": {},
        "reason": None,
        "finished": None,
        "hosts": None,
        "committable": False,
        "pinned": False,
        "tags": [],
        "superseded": False,
        "bases": [],
        "idle": None,
    }
    assert (unfinished["state"], unfinished["attempt"], unfinished["bytes"]) == (
        "uncommitted",
        ATTEMPT,
        None,
    )
    assert (unfinished["finished"], unfinished["hosts"], unfinished["committable"]) == (
        1,
        None,
        False,
    )
    assert 0 <= unfinished["idle"] < 600


def test_a_damaged_record_is_listed_with_its_reason(run, saver, tmp_path):
    path = saver(tmp_path / "1") / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(b"float32", b"float64"))
    answer = run("ls", tmp_path)
    assert answer.status == 0
    assert "unreadable: " in answer.out
    assert "digest does not agree" in " ".join(answer.out.split())


def test_everything_is_one_table_that_fits_the_terminal(run, saver, tmp_path):
    with shardckpt.CheckpointManager(tmp_path, every=1) as manager:
        for step in (1, 2):
            manager.save(
                step, {"w": np.ones(9)}, metrics={"loss": 1.5 / step, "grad": float("inf")}
            )
    begin(tmp_path / "3")
    run("rm", tmp_path / "1", "--yes")
    broken = tmp_path / "9"
    path = saver(broken) / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(b"float32", b"float64"))
    lines = run("ls", "-a", tmp_path).out.splitlines()
    *table, empty, _ = lines
    assert max(map(len, table)) <= 80
    assert "" not in table
    assert empty == ""
    # Of "1" nothing is left.
    assert [line.split()[0] for line in table if not line.startswith(" ")] == [
        "name",
        "2",
        "3",
        "9",
        "9",
    ]
    assert table[0].split() == ["name", "created", "tensors", "size", "layout", "metrics"]
    assert table[1].endswith("loss=0.75 grad=inf")


def test_metrics_are_in_the_document(run, tmp_path):
    with shardckpt.CheckpointManager(tmp_path, every=1) as manager:
        manager.save(1, {"w": np.ones(9)}, metrics={"loss": 1.5, "grad": float("inf")})
    (entry,) = run("ls", tmp_path, "--json").json["checkpoints"]
    assert entry["metrics"] == {"loss": 1.5, "grad": "inf"}


def test_metadata_of_other_kinds_is_no_metric(run, saver, tmp_path):
    saver(tmp_path / "1", metadata={"metrics": {"loss": [1], "tag": "a", "ok": True, "n": 3}})
    saver(tmp_path / "2", metadata={"metrics": "low"})
    first, second = run("ls", tmp_path, "--json").json["checkpoints"]
    assert (first["metrics"], second["metrics"]) == ({"n": 3}, {})


def test_a_directory_without_checkpoints_is_no_error(run, tmp_path):
    answer = run("ls", tmp_path)
    assert (answer.status, answer.out) == (0, "")
    assert "no checkpoints directly below" in answer.err
    assert run("ls", tmp_path, "--json").json == {"checkpoints": [], "runs": [], "foreign": []}


def test_the_directory_is_this_one_unless_another_is_named(run, saver, tmp_path, monkeypatch):
    saver(tmp_path / "1")
    monkeypatch.chdir(tmp_path)
    assert run("ls").out == run("ls", tmp_path).out


def test_names_of_directories_cannot_reach_the_terminal(run, saver, tmp_path):
    saver(tmp_path / "\x1b[31mred", {"w": np.ones(2)})
    assert r"\x1b[31mred" in run("ls", tmp_path).out
    assert "\x1b" not in run("ls", tmp_path).out
