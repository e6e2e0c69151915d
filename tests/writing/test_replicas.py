"""Tensors that describe their own shards, and tensors that several processes hold, in jobs of real
processes."""

from __future__ import annotations

import numpy as np
import pytest
from processes import Processes

import shardckpt


@pytest.fixture(scope="module")
def job():
    with Processes("replicas") as processes:
        yield processes


def numbered(columns):
    return np.arange(8 * columns, dtype=np.float32).reshape(8, columns)


@pytest.mark.parametrize("columns", [3, 5000])
def test_tensors_that_describe_their_shards_are_saved_as_one_and_restored_in_place(
    tmp_path, job, columns
):
    assert job.run("save_described", 2, tmp_path / "c", columns) == ["saved"] * 2
    checkpoint = shardckpt.open(tmp_path / "c")
    np.testing.assert_array_equal(checkpoint.read("w"), numbered(columns))
    assert checkpoint.verify().damage == []
    assert job.run("restore_described", 2, tmp_path / "c", columns) == [[True] * 3] * 2
    assert job.run("restore_described", 4, tmp_path / "c", columns) == [[True] * 3] * 4


def test_equal_shards_of_two_processes_make_the_global_shape_and_not_one_shard_s(tmp_path, job):
    assert job.run("save_described", 2, tmp_path / "c", 5000, 0.0) == ["saved"] * 2
    assert shardckpt.open(tmp_path / "c").info("w").shape == (8, 5000)


def test_described_shards_are_exported_and_resharded_like_any_others(tmp_path, job):
    from safetensors.numpy import load_file

    job.run("save_described", 2, tmp_path / "c", 40)
    shardckpt.export_safetensors(tmp_path / "c", tmp_path / "e.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "e.safetensors")["w"], numbered(40))
    shardckpt.reshard(
        tmp_path / "c", tmp_path / "r", mesh=shardckpt.Mesh((4,), ("x",)), rules=["w=(x,)"]
    )
    np.testing.assert_array_equal(shardckpt.restore(tmp_path / "r")["w"], numbered(40))


def test_a_module_with_described_parameters_resumes_with_its_moments(tmp_path, job):
    saved = job.run("train_described", 2, tmp_path / "c", False)
    assert job.run("train_described", 2, tmp_path / "c", True) == saved


def test_two_processes_that_describe_the_same_shard_are_named(tmp_path, job):
    answers = job.run("save_same_shard", 2, tmp_path / "c")
    assert {answer["error"] for answer in answers} == {"CommitError"}
    assert (
        "'w' describes its own shards, and processes 0-1 describe the same one"
        in answers[0]["message"]
    )


SIZES = [100, 300_000]
DRIFTED = "'w': this {} has other elements on {} than on {}"


def refused(answers, kind, one, other):
    assert {answer["error"] for answer in answers} == {"CommitError"}
    return DRIFTED.format(kind, one, other) in answers[0]["message"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("background", [False, True])
def test_replicas_that_differ_fail_the_save_and_are_named(tmp_path, job, size, background):
    case = {"kind": "replicated", "size": size, "drifted": [1], "background": background}
    answers = job.run("save_held", 3, tmp_path / "c", case)
    assert refused(answers, "replicated tensor", "processes 0, 2", "process 1")
    with pytest.raises(shardckpt.errors.NotFoundError):
        shardckpt.open(tmp_path / "c")


def test_only_holders_of_one_shard_are_compared(tmp_path, job):
    """Of four processes 1 and 3 hold the second half, and the halves differ."""
    same = {"kind": "HSDP", "size": 200_000, "drifted": [1, 3]}
    assert job.run("save_held", 4, tmp_path / "c", same) == ["saved"] * 4
    restored = shardckpt.restore(tmp_path / "c")["w"]
    assert (set(restored[:100_000]), set(restored[100_000:])) == ({0}, {1})
    assert refused(
        job.run("save_held", 4, tmp_path / "d", {**same, "drifted": [3]}),
        "replicated tensor",
        "process 1",
        "process 3",
    )


def test_large_plain_tensors_that_differ_fail_the_save_as_before(tmp_path, job):
    answers = job.run(
        "save_held", 2, tmp_path / "c", {"kind": "plain", "size": 300_000, "drifted": [1]}
    )
    assert refused(answers, "plain tensor", "process 0", "process 1")


@pytest.mark.parametrize("options", [{"check_replicas": True}, {"fingerprint": True}])
def test_one_different_element_is_found_when_all_are_compared(tmp_path, job, options):
    case = {"kind": "replicated", "size": 300_000, "drifted": [1], "at": 77_777}
    assert job.run("save_held", 2, tmp_path / "sampled", case) == ["saved"] * 2
    assert refused(
        job.run("save_held", 2, tmp_path / "c", case, options),
        "replicated tensor",
        "process 0",
        "process 1",
    )


@pytest.mark.parametrize("kind", ["replicated", "plain"])
@pytest.mark.parametrize("drifted", [0, 1])
def test_without_comparison_the_lowest_process_s_copy_is_stored_as_a_whole(
    tmp_path, job, kind, drifted
):
    case = {"kind": kind, "size": 300_000, "drifted": [drifted]}
    options = {"check_replicas": False, "fingerprint": True}
    assert job.run("save_held", 2, tmp_path / "c", case, options) == ["saved"] * 2
    assert set(shardckpt.restore(tmp_path / "c")["w"]) == {1 - drifted}
    opened = shardckpt.open(tmp_path / "c")
    assert opened.verify().damage == []
    assert opened.fingerprint().tensors == opened.fingerprint(recorded=False).tensors


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (
            {"fingerprint": True},
            (
                "hosts 0 and 1 disagree on fingerprint: True and False; save with the same options "
                "on all"
            ),
        ),
        (
            {"check_replicas": True},
            "make them equal, and check_replicas= the same on all processes",
        ),
        (
            {"check_replicas": False},
            "give all processes the same host_tensors= and check_replicas=",
        ),
    ],
)
def test_processes_with_different_options_of_comparison_are_told_of_the_option(
    tmp_path, job, one, why
):
    answers = job.run(
        "save_held",
        2,
        tmp_path / "c",
        {"kind": "replicated", "size": 300_000, "drifted": []},
        [one, {}],
    )
    assert [why in answer["message"] for answer in answers] == [True, True]


def test_a_fingerprint_that_one_process_does_not_record_fails_the_save_even_if_nothing_is_compared(
    tmp_path, job
):
    options = [{"fingerprint": True, "check_replicas": False}, {"check_replicas": False}]
    answers = job.run(
        "save_held", 2, tmp_path / "c", {"kind": "plain", "size": 300_000, "drifted": []}, options
    )
    assert ["disagree on fingerprint" in answer["message"] for answer in answers] == [True, True]


def test_equal_replicas_are_described_by_files_that_nobody_has_to_read(tmp_path, job, monkeypatch):
    job.run("save_held", 2, tmp_path / "c", {"kind": "replicated", "size": 300_000})
    assert len(list((tmp_path / "c").glob("*/contents/*"))) == 1
    assert len(list((tmp_path / "c").glob("*/hosts/*/replicas.json"))) == 2
    assert shardckpt.open(tmp_path / "c").verify().damage == []


def test_a_background_save_of_replicas_does_not_keep_them_while_it_writes(tmp_path, job):
    assert job.run("save_and_drop", 2, tmp_path / "c") == [[False]] * 2


def test_a_fingerprint_of_replicas_that_differ_is_refused(job):
    same = job.run("fingerprint_held", 2, {"kind": "replicated", "size": 300_000})
    assert same[0] == same[1]
    answers = job.run(
        "fingerprint_held", 2, {"kind": "replicated", "size": 300_000, "drifted": [1], "at": 5}
    )
    assert {answer["error"] for answer in answers} == {"StructureMismatchError"}
    assert (
        "'w': this replicated tensor has other elements on process 0 than on process 1"
        in answers[0]["message"]
    )


def test_the_fingerprint_of_small_plain_tensors_is_the_recorded_one_whoever_has_them(tmp_path, job):
    everyone = {"all": 3.0}
    values = [{**everyone, "a": 1.0}, {**everyone, "b": 2.0, "c": 4.0}, {**everyone, "c": 4.0}]
    answers = job.run("fingerprint_small", 3, tmp_path / "c", values)
    live, recorded = answers[0]
    assert live == recorded
    assert [*sorted(live)] == ["a", "all", "b", "c"]
    assert answers == [answers[0]] * 3
    other = job.run("fingerprint_small_alone", 2, [everyone, {**everyone, "b": 2.5}])
    assert other[0] == other[1]
    assert other[0]["all"] == live["all"]
    assert other[0]["b"] != live["b"]


def test_a_fingerprint_of_small_plain_tensors_that_differ_is_refused(job):
    values = [{"all": 3.0}, {"all": 3.0, "some": 1.0}, {"all": 3.0, "some": 2.0}]
    answers = job.run("fingerprint_small_alone", 3, values)
    assert {answer["error"] for answer in answers} == {"StructureMismatchError"}
    assert all(
        "'some': this plain tensor has other elements on process 1 than on process 2"
        in answer["message"]
        for answer in answers
    )


def test_a_fingerprint_of_replicas_that_differ_is_refused_on_a_process_without_them(job):
    same = job.run("fingerprint_pair", 3, [0.0, 1.0, 1.0])
    assert same[0] == same[1] == same[2]
    answers = job.run("fingerprint_pair", 3, [0.0, 1.0, 2.0])
    assert {answer["error"] for answer in answers} == {"StructureMismatchError"}
    assert (
        "'w': this replicated tensor has other elements on process 1 than on process 2"
        in answers[0]["message"]
    )


@pytest.mark.parametrize("kind", ["the same", "detached", "view"])
def test_one_shard_under_two_names_is_saved(tmp_path, job, kind):
    assert job.run("save_aliases", 2, tmp_path / "c", kind) == ["saved"] * 2
    assert shardckpt.open(tmp_path / "c").info("b").shape == (8, 6000)


@pytest.mark.parametrize("kind", ["local", "replicated", "other dimension"])
def test_one_memory_that_claims_to_be_two_parts_of_a_tensor_is_refused(tmp_path, job, kind):
    answers = job.run("save_aliases", 2, tmp_path / "c", kind)
    assert [answer["error"] for answer in answers] == ["LeafError"] * 2
    assert (
        "'b' and 'a' are over the same memory, and claim to be different parts"
        in answers[0]["message"]
    )
    with pytest.raises(shardckpt.errors.NotFoundError):
        shardckpt.open(tmp_path / "c")
