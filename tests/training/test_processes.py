"""The whole state of a training in several processes: saved, killed, resumed as if nothing had
happened.

What is trained: `tests/children/training_ranks.py`.
"""

from __future__ import annotations

import pytest
from ranks import asked

import shardckpt

LAST = 12
NEVER = 10**9
"""No step."""


@pytest.fixture(scope="module")
def ranks():
    """Runs functions in ranks of a gloo job."""
    with asked("training_ranks") as run:
        yield run


@pytest.fixture(scope="module")
def whole(ranks):
    """A function: kind → a training that was never interrupted."""
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = ranks("train", 2, kind, LAST, {})
        return made[kind]

    return of


@pytest.mark.parametrize("kind", ["FSDP2", "DDP"])
@pytest.mark.parametrize(
    "saved",
    [
        pytest.param(3, id="in an epoch"),
        pytest.param(5, id="at the end of one", marks=pytest.mark.slow),
        pytest.param(10, id="at the end of another", marks=pytest.mark.slow),
    ],
)
def test_a_training_killed_and_resumed_is_the_one_never_interrupted_bit_by_bit(
    ranks, whole, tmp_path, kind, saved
):
    url = tmp_path / "run"
    killed = ranks("train", 2, kind, LAST, {"save": [saved, url], "kill": saved + 2})
    assert killed == [{"signal": 9}] * 2
    resumed = ranks("train", 2, kind, LAST, {"restore": url})
    for after, before in zip(resumed, whole(kind), strict=True):
        assert after["seen"] == before["seen"][saved:]
        assert after["metadata"] == {"kind": kind}


def test_the_ranks_of_these_trainings_differ_and_their_state_is_what_it_says(whole):
    sharded, replicated = whole("FSDP2"), whole("DDP")
    assert sharded[0]["seen"] != sharded[1]["seen"]
    assert (sharded[0]["kinds"], replicated[0]["kinds"]) == (["DTensor"], ["Tensor"])
    assert sharded[0]["moments"] == {
        "step": "Tensor",
        "exp_avg": "DTensor",
        "exp_avg_sq": "DTensor",
    }


def test_moments_follow_their_parameters_when_the_groups_come_in_another_order(
    ranks, whole, tmp_path
):
    url = tmp_path / "run"
    ranks("train", 2, "FSDP2", 4, {"save": [4, url]})
    for after, before in zip(
        ranks("train", 2, "FSDP2", LAST, {"restore": url, "reversed_groups": True}),
        whole("FSDP2"),
        strict=True,
    ):
        assert [
            [loss, rates[::-1], scale, rows] for loss, rates, scale, rows in after["seen"]
        ] == before["seen"][4:]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A checkpoint of two processes under FSDP2."""
    url = tmp_path_factory.mktemp("saved") / "run"
    ranks("train", 2, "FSDP2", 4, {"save": [4, url]})
    return url


def test_buffers_under_ddp_are_those_of_rank_0(ranks, whole, tmp_path):
    ranks("train", 2, "DDP", 4, {"save": [4, tmp_path / "run"]})
    names = shardckpt.open(tmp_path / "run").names()
    assert {"model/norm.running_mean", "ema/norm.running_mean", "ema/n_averaged"} <= {*names}


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_statistics_that_differ_from_rank_to_rank_are_saved_of_the_first_and_restored_on_all(
    ranks, tmp_path, kind
):
    first, second = ranks("normalized", 2, kind, tmp_path / "run", True)
    assert first["norm.running_mean"] != second["norm.running_mean"]
    for processes in (3, 1):
        assert ranks("normalized", processes, kind, tmp_path / "run", False) == [first] * processes


@pytest.mark.long
def test_more_processes_than_saved_derive_generators_of_their_own_the_same_each_time(ranks, saved):
    first, again = (ranks("elastic", 3, saved, "derive") for _ in range(2))
    assert first == again
    assert len({str(answer["drawn"]) for answer in first}) == 3
    two = ranks("elastic", 2, saved, "derive")
    assert [answer["drawn"] for answer in two] == [answer["drawn"] for answer in first[:2]]
    assert {answer["step"] for answer in first} == {4}


def test_any_number_of_processes_has_the_weights_and_moments_bit_by_bit(ranks, saved):
    digests = {
        answer["digest"]
        for processes in (1, 2, 3)
        for answer in ranks("elastic", processes, saved, "derive")
    }
    assert len(digests) == 1


def test_one_process_takes_the_generators_of_the_first(ranks, saved):
    (alone,), (first, _) = (
        ranks("elastic", 1, saved, "derive"),
        ranks("elastic", 2, saved, "derive"),
    )
    assert alone["drawn"] == first["drawn"]


@pytest.mark.slow
def test_a_training_over_a_mesh_of_two_dimensions_goes_on_over_the_same_and_over_others(
    ranks, tmp_path
):
    """FSDP2 over tensor parallelism; optimizers are new and have made no step. Digests are of what
    torch itself puts together."""
    url = tmp_path / "run"
    before = ranks("meshed", 4, [2, 2], {"save": url})
    for processes, shape, tolerance in (
        (4, [2, 2], 0),
        (2, [2], 1e-5),
        (2, [1, 2], 1e-5),
        (2, [], 1e-5),
    ):
        for after in ranks("meshed", processes, shape, {"restore": url}):
            assert after["digests"] == before[0]["digests"]
            assert after["losses"] == pytest.approx(before[0]["losses"], rel=tolerance, abs=0)


def test_stages_of_a_pipeline_each_have_parameters_and_groups_of_their_own(ranks, tmp_path):
    assert ranks("staged", 2, tmp_path / "run") == [
        {"equal": True, "lr": 0.1 / 4},
        {"equal": True, "lr": 0.05 / 4},
    ]
    assert {"model/stage0.weight", "model/stage1.weight"} <= {
        *shardckpt.open(tmp_path / "run").names()
    }


def test_names_are_those_of_the_module_under_all_that_it_is_wrapped_in(ranks, tmp_path):
    assert ranks("compiled", 2, tmp_path / "run") == [[[True] * 5, True]] * 2
    assert shardckpt.open(tmp_path / "run").names()[0] == "model/into.weight"


def test_exact_generators_are_for_as_many_processes_as_saved(ranks, saved):
    for kind, message in ranks("elastic", 3, saved, "exact"):
        assert kind == "MismatchError"
        assert (
            "'rng' has one value per process; 2 processes saved the checkpoint, and 3 restore it"
            in message
        )


def test_a_manager_takes_the_whole_state_and_resumes_it_from_its_latest_step(
    ranks, whole, tmp_path
):
    root = tmp_path / "run"
    assert ranks("managed", 2, "FSDP2", root, LAST, 8) == [{"signal": 9}] * 2
    resumed = ranks("managed", 2, "FSDP2", root, LAST, NEVER)
    for after, before in zip(resumed, whole("FSDP2"), strict=True):
        assert (after["from"], after["same"]) == (6, True)
        assert after["seen"] == before["seen"][6:]


def test_the_first_version_of_fsdp_is_refused_with_what_to_use_instead(ranks):
    for kind, message in ranks("flat", 2):
        assert kind == "LeafError"
        assert "'model' is wrapped in FullyShardedDataParallel" in message
        assert "fully_shard" in message
