"""`shardckpt diff`."""

import numpy as np
import pytest

from shardckpt import Mesh, PartitionSpec, Sharding


@pytest.fixture
def other(saver, model, tmp_path):
    """A changed copy of `checkpoint`."""
    state = model()
    state["model"]["layers"][1]["w"][3, 4] = 3.5
    state["model"]["norm"] = np.ones((4, 4), np.float16)
    state["step"] = 200
    del state["opt"][0]["lr"]
    state["new"] = np.ones(3)
    return saver(tmp_path / "other", state)


def test_a_checkpoint_equals_itself(run, checkpoint):
    answer = run("diff", checkpoint, checkpoint)
    assert (answer.status, answer.err) == (0, "")
    assert answer.out == "equal  4 tensors, 3.8 KiB, compared bit by bit\n"


def test_differences_are_listed_by_kind(run, checkpoint, other):
    answer = run("diff", checkpoint, other)
    assert answer.status == 1
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert lines == [
        "only in A (1)",
        "opt/0/lr",
        "",
        "only in B (1)",
        "new",
        "",
        "changed (2)",
        "model/norm shape 16 → 4×4",
        "step leaf 100 → 200",
        "",
        "values differ (1)",
        "model/layers/1/w 1 of 48 by up to 2.5, first at [3, 4]",
        "",
        "another layout in 3 tensors, which counts as no difference; --layout lists them",
        "different 3 tensors, 3.8 KiB, compared bit by bit",
    ]


def test_json_has_all_differences(run, checkpoint, other):
    answer = run("diff", checkpoint, other, "--json")
    assert answer.status == 1
    doc = answer.json
    assert (doc["a"], doc["b"], doc["equal"]) == (str(checkpoint), str(other), False)
    assert (doc["only_a"], doc["only_b"]) == (["opt/0/lr"], ["new"])
    assert doc["changes"] == [
        {"name": "model/norm", "aspect": "shape", "a": [16], "b": [4, 4]},
        {"name": "step", "aspect": "leaf", "a": "100", "b": "200"},
    ]
    (value,) = doc["values"]
    assert value.pop("relative") > 0
    assert value == {
        "name": "model/layers/1/w",
        "differing": 1,
        "elements": 48,
        "largest": 2.5,
        "nans": 0,
        "first": [3, 4],
    }
    assert doc["layouts"][0] == {
        "name": "model/embed",
        "aspect": "layout",
        "a": "data, model over data=4 × model=2",
        "b": None,
    }
    assert doc["tensors_compared"] == 3


def test_structure_alone_reads_no_values(run, checkpoint, other, saver, model, tmp_path):
    doc = run("diff", "--structure", checkpoint, other, "--json").json
    assert (doc["values"], doc["tensors_compared"], doc["equal"]) == (None, 0, False)
    state = model()
    state["model"]["norm"][3] = 7
    assert run("diff", "--structure", checkpoint, saver(tmp_path / "2", state)).status == 0


def test_another_layout_is_a_difference_on_request(run, checkpoint, saver, model, tmp_path):
    rows = saver(
        tmp_path / "2",
        model(),
        shardings={"model/embed": Sharding(Mesh((2,), ("x",)), PartitionSpec("x"))},
    )
    assert run("diff", checkpoint, rows).status == 0
    answer = run("diff", checkpoint, rows, "--layout")
    assert answer.status == 1
    assert " ".join(answer.out.split()).startswith(
        "laid out otherwise (3) model/embed data, model over data=4 × model=2 → x over x=2"
    )


def test_an_infinite_difference_is_written_as_json_can(run, saver, tmp_path):
    one, other = (
        saver(tmp_path / "1", {"w": np.ones(2)}),
        saver(tmp_path / "2", {"w": np.array([1, np.inf])}),
    )
    (value,) = run("diff", one, other, "--json").json["values"]
    assert value["largest"] == "inf"


def test_long_lists_are_cut_off_for_people_and_whole_in_json(run, saver, tmp_path):
    one, other = saver(tmp_path / "1", {}), saver(tmp_path / "2", {f"w{i}": 1 for i in range(60)})
    assert "  … and 10 more; --json lists all" in run("diff", one, other).out
    assert len(run("diff", one, other, "--json").json["only_b"]) == 60


def test_a_memory_limit_that_cannot_be_is_an_error_of_usage(run, checkpoint):
    answer = run("diff", checkpoint, checkpoint, "--memory", "lots")
    assert answer.status == 2
    assert answer.err.startswith("error: --memory-limit lots")
