"""Arrays of random keys: their words are stored, and keys come back. Asked of
`tests/children/jax_keys.py`."""

import json
import os
import subprocess
import sys

import pytest
from paths import CHILDREN

CHILD = CHILDREN / "jax_keys.py"
PERMUTED = [3, 1, 2, 0, 7, 6, 5, 4]
GENERATORS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
"""With the words of a key."""
LAYOUTS = [
    {"shape": []},
    {"shape": [3]},
    {"shape": [], "device": 5},
    {"shape": [2, 3], "device": 5},
    {"shape": [], "mesh": [4, 2], "spec": []},
    {"shape": [5, 3], "mesh": [4, 2], "spec": []},
    {"shape": [8], "mesh": [4, 2], "spec": ["x"]},
    {"shape": [8, 3], "mesh": [4, 2], "spec": ["x"]},
    {"shape": [3, 8], "mesh": [4, 2], "spec": [None, ["y", "x"]]},
    {"shape": [4, 2, 2], "mesh": [2, 2, 2], "spec": ["z", "x", "y"]},
    {"shape": [0, 4], "mesh": [4, 2], "spec": [None, "x"]},
    {"shape": [8, 2], "mesh": [4, 2], "spec": ["y", None], "memory": "pinned_host"},
    {"shape": [8, 4], "text": "{devices=[4,2]<=[2,4]T(1,0)}"},
    {"shape": [8, 3], "text": "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"},
    {"shape": [3], "text": "{replicated}"},
]


@pytest.fixture(scope="module")
def cases():
    return [
        {"devices": PERMUTED, **layout, "impl": impl} for impl in GENERATORS for layout in LAYOUTS
    ]


@pytest.fixture(scope="module")
def answers(cases, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("keys"))
    child = subprocess.run(
        [sys.executable, CHILD],
        input=json.dumps(
            {
                "round_trip": cases,
                "numbers": list(GENERATORS),
                "leaves": [None],
                "through_storage": [root],
            }
        ),
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        timeout=250,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def round_trips(cases, answers):
    return list(zip(cases, answers["round_trip"], strict=True))


# --- Saving ---------------------------------------------------------------------------------------


def test_keys_are_stored_as_their_words_each_once(round_trips):
    for case, answer in round_trips:
        assert answer["stored"] == [
            "uint32",
            [*case["shape"], GENERATORS[case["impl"]]],
            True,
            True,
        ], case
        assert answer["boxes"][0] == answer["boxes"][1], case


def test_words_are_laid_out_as_their_keys_are_and_no_key_is_cut(round_trips):
    assert all(answer["layout"] for _, answer in round_trips)


def test_the_meaning_says_that_they_are_keys_and_of_which_generator(round_trips):
    for case, answer in round_trips:
        assert answer["meanings"] == [f"jax.key:{case['impl']}"] * 2, case


def test_only_keys_have_a_meaning_raw_ones_and_their_words_are_numbers(answers):
    assert answers["leaves"][0]["meanings"] == [
        "jax.key:mine",
        None,
        None,
        "jax.key:threefry2x32",
        None,
    ]


def test_neither_way_compiles_anything_or_leaves_a_copy_on_the_host(round_trips):
    assert {(answer["compiles"], answer["kept on the host"]) for _, answer in round_trips} == {
        (0, 0)
    }


def test_a_key_that_was_saved_has_not_been_used(answers):
    assert answers["leaves"][0]["saved and used"]


# --- Restoring ------------------------------------------------------------------------------------


def test_keys_come_back_as_jax_had_laid_them_out(round_trips):
    for case, answer in round_trips:
        assert answer["restored"] == {"leaf": [True] * 4, "struct": [True] * 4}, case
        assert answer["shardings"] == [True] * 2, case


def test_a_restored_key_draws_the_same_numbers(answers):
    assert len(answers["numbers"]) == len(GENERATORS)
    for saved, restored in answers["numbers"]:
        assert saved == restored


def test_keys_of_somebodys_own_generator_come_back(answers):
    assert answers["leaves"][0]["own"]


def test_one_key_named_twice_is_one_and_keys_are_not_their_words(answers):
    assert answers["leaves"][0]["identity"] == answers["leaves"][0]["ties"] == [True, False]


@pytest.mark.parametrize(
    ("question", "words"), [("deleted", "deleted or donated"), ("traced", "is being traced")]
)
def test_keys_without_words_are_refused_by_name(answers, question, words):
    kind, message = answers["leaves"][0][question]
    assert kind == "LeafError"
    assert message.startswith("'w': ")
    assert words in message


def test_keys_of_a_generator_without_a_name_are_refused_by_name(answers):
    for kind, message in answers["leaves"][0]["unnamed"]:
        assert kind == "LeafError"
        assert message.startswith("'w': these keys (key<?>) come from a generator without a name")


# --- Through storage ------------------------------------------------------------------------------


def test_a_state_with_keys_comes_back_the_same_and_on_another_mesh(answers):
    (answer,) = answers["through_storage"]
    assert (answer["same"], answer["moved"], answer["compiles"]) == ([True] * 3, True, 0)


def test_without_a_like_and_for_a_target_keys_are_their_words(answers):
    (answer,) = answers["through_storage"]
    assert (answer["plain"], answer["numpy"], answer["words"]) == (
        [True] * 3,
        ["ndarray"] * 3,
        True,
    )


@pytest.mark.parametrize(
    ("what", "name"),
    [("another generator", "keys"), ("numbers", "keys"), ("keys for numbers", "raw")],
)
def test_keys_are_not_restored_as_something_else(answers, what, name):
    kind, message = answers["through_storage"][0]["refused"][what]
    assert kind == "StructureMismatchError"
    assert f"'{name}'" in message or f" {name} " in message
    assert "jax.key:" in message
