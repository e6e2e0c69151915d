"""Output of commands about a checkpoint that has left tensors in another."""

import shutil

import numpy as np
import pytest

import shardckpt
from shardckpt import SaveOptions


@pytest.fixture
def tuned(tmp_path):
    """A step that has left its embedding in step 0, in which it is tied."""
    embed = np.arange(64 * 12, dtype=np.float32).reshape(64, 12)
    shardckpt.save(tmp_path / "0", {"embed": embed, "head": embed, "w": np.ones(3)})
    state = {"head": embed, "w": np.zeros(3)}
    shardckpt.save(tmp_path / "100", state, options=SaveOptions(base=tmp_path / "0", skip="head"))
    return tmp_path / "100"


def test_ls_says_what_a_checkpoint_needs(run, tuned):
    answer = run("ls", tuned.parent, width=120)
    assert answer.out.splitlines()[-1].endswith("needs 0")
    assert [entry["bases"] for entry in run("ls", "--json", tuned.parent).json["checkpoints"]] == [
        [],
        ["../0"],
    ]


def test_info_says_where_tensors_lie(run, tuned):
    answer = run("info", tuned, width=120)
    assert [line.split(None, 1) for line in answer.out.splitlines() if line.startswith("base")] == [
        ["base", f"1 tensor, 3 KiB of that in {tuned.parent / '0'}"]
    ]
    assert next(line for line in answer.out.splitlines() if "head" in line).endswith("in ../0")
    document = run("info", tuned, "--json").json
    assert [base["url"] for base in document["bases"]] == ["../0"]
    assert {tensor["name"]: tensor["base"] for tensor in document["tensors"]} == {
        "head": 0,
        "w": None,
    }


def test_info_of_a_tensor_says_where_it_lies_and_how_to_open_it_there(run, tuned):
    attempt = shardckpt.open(tuned.parent / "0").record.attempt
    answer = run("info", tuned, "head", width=200)
    assert f"{tuned.parent / '0'} (attempt {attempt}), as embed" in answer.out
    document = run("info", tuned, "head", "--json").json
    assert document["base"] == str(tuned.parent / "0")
    assert document["tensorstore"] == shardckpt.open(tuned.parent / "0").stock_spec("embed")
    assert run("info", tuned, "w", "--json").json["base"] is None


def test_diff_compares_what_lies_in_a_base(run, tuned):
    shardckpt.save(tuned.parent / "full", shardckpt.restore(tuned))
    assert run("diff", tuned, tuned.parent / "full").status == 0


def test_verify_tells_of_a_base_that_is_gone(run, tuned):
    assert run("verify", tuned).status == 0
    shutil.rmtree(tuned.parent / "0")
    answer = run("verify", tuned, width=200)
    assert answer.status == 1
    assert "../0" in answer.out
    (damage,) = run("verify", tuned, "--json").json["damage"]
    assert (damage["tensor"], damage["start"], damage["stop"]) == ("head", [0, 0], [64, 12])


def test_rm_of_a_base_is_refused_by_name(run, tuned):
    answer = run("rm", "--yes", tuned.parent / "0")
    assert answer.status == 2
    assert "has" not in answer.out
    assert "read tensors from it: 100; so it is not deleted" in " ".join(answer.err.split())
    assert run("rm", "--yes", tuned).status == 0
    assert run("rm", "--yes", tuned.parent / "0").status == 0
