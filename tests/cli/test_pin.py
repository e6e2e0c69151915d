"""`shardckpt pin` and `shardckpt unpin`, and what `ls` and `rm` make of it."""

import shardckpt
from shardckpt.commit.markers import SUPERSEDED
from shardckpt.format.documents import seal


def test_a_pinned_checkpoint_is_listed_so_and_cannot_be_deleted(run, saver, tmp_path):
    for step in (1, 2):
        saver(tmp_path / str(step))
    assert run("pin", tmp_path / "1").out == f"pinned  {tmp_path / '1'}\n"
    lines = run("ls", tmp_path, width=200).out.splitlines()
    assert [line.split()[-1] for line in lines] == ["state", "pinned", "packed"]
    assert [entry["pinned"] for entry in run("ls", tmp_path, "--json").json["checkpoints"]] == [
        True,
        False,
    ]
    answer = run("rm", "-y", tmp_path / "1")
    assert answer.status == 2
    assert "is pinned, so it is not deleted; `shardckpt unpin` it first" in answer.err
    assert shardckpt.open(tmp_path / "1").verify().ok
    answer = run("unpin", tmp_path / "1", tmp_path / "2")
    assert answer.out == f"unpinned  {tmp_path / '1'}\nwas not pinned  {tmp_path / '2'}\n"
    assert answer.status == 0
    assert run("rm", "-y", tmp_path / "1").status == 0


def test_json_has_the_places(run, saver, tmp_path):
    saver(tmp_path / "1")
    assert run("pin", tmp_path / "1", "--json").json == {"pinned": [str(tmp_path / "1")]}
    assert run("unpin", tmp_path / "1", "--json").json == {"unpinned": [str(tmp_path / "1")]}


def test_where_there_is_no_checkpoint_there_is_nothing_to_pin(run, saver, tmp_path):
    saver(tmp_path / "1")
    run("rm", "-y", tmp_path / "1")
    for command in ("pin", "unpin"):
        for place in ("1", "2"):
            answer = run(command, tmp_path / place)
            assert answer.status == 3
            assert f"there is no checkpoint to {command}" in answer.err


def test_an_error_after_some_are_done_names_those(run, saver, tmp_path):
    done, nothing = saver(tmp_path / "1"), tmp_path / "2"
    for command, words in (
        (("pin",), "pinned"),
        (("unpin",), "unpinned"),
        (("tag", "best"), "tagged best"),
        (("untag", "best"), "untagged best"),
    ):
        answer = run(*command, done, nothing)
        assert (answer.status, answer.out) == (3, f"{words}  {done}\n")
        assert answer.err.endswith(f" Before that: {words} {done}.\n")
    answer = run("pin", done, "nowhere://x")
    assert (answer.status, answer.out) == (2, "")
    assert not run("ls", done, "--json").json["checkpoints"][0]["pinned"]


def test_a_superseded_checkpoint_is_listed_so(run, saver, tmp_path):
    saver(tmp_path / "1")
    attempt = shardckpt.open(tmp_path / "1").record.attempt
    (tmp_path / "1" / SUPERSEDED).write_bytes(seal({"attempt": attempt}))
    assert run("ls", tmp_path, width=200).out.splitlines()[1].endswith("superseded")
    run("pin", tmp_path / "1")
    assert run("ls", tmp_path, width=200).out.splitlines()[1].endswith("superseded, pinned")


def test_a_tagged_checkpoint_is_listed_so_and_cannot_be_deleted(run, saver, tmp_path):
    for step in (1, 2):
        saver(tmp_path / str(step))
    assert (
        run("tag", "best", tmp_path / "1", tmp_path / "2").out
        == f"tagged best  {tmp_path / '1'}\ntagged best  {tmp_path / '2'}\n"
    )
    run("tag", "released", tmp_path / "1")
    run("pin", tmp_path / "1")
    first, second = run("ls", tmp_path, width=200).out.splitlines()[1:]
    assert first.endswith("pinned, tagged best released")
    assert second.endswith("packed   tagged best")
    assert [entry["tags"] for entry in run("ls", tmp_path, "--json").json["checkpoints"]] == [
        ["best", "released"],
        ["best"],
    ]
    answer = run("rm", "-y", tmp_path / "2")
    assert answer.status == 2
    assert "is tagged best, so it is not deleted; `shardckpt untag best` it first" in answer.err
    assert run("untag", "best", tmp_path / "2").out == f"untagged best  {tmp_path / '2'}\n"
    assert run("untag", "best", tmp_path / "2").out == f"was not tagged best  {tmp_path / '2'}\n"
    assert run("rm", "-y", tmp_path / "2").status == 0


def test_tags_in_json_and_names_that_are_none(run, saver, tmp_path):
    saver(tmp_path / "1")
    assert run("tag", "best", tmp_path / "1", "--json").json == {"tagged": [str(tmp_path / "1")]}
    assert run("untag", "best", tmp_path / "1", "--json").json == {
        "untagged": [str(tmp_path / "1")]
    }
    for name in ("step-7", "a b"):
        assert run("tag", name, tmp_path / "1").status == 2
    answer = run("tag", "best", tmp_path / "2")
    assert answer.status == 3
    assert "there is no checkpoint to tag" in answer.err
