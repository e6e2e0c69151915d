"""Reasons for a tensor's layout, as an engineer reads them in a terminal."""

from textwrap import dedent

import pytest

from shardckpt import Rules
from shardckpt.errors import NamesMismatchError
from shardckpt.reshard.rules import explain, parse_mesh

MESH = parse_mesh("data=4,model=2")


def test_the_page_in_the_documentation_is_what_is_said():
    rules = Rules.parse(
        ["**/*norm.weight=(data)", "**/layers.*.w1.weight=(data,model)", "**=replicated"]
    )
    text = rules.explain(
        "model/layers.0.w1.weight", {"model/layers.0.w1.weight": (14, 8)}, MESH, itemsize=2
    )
    assert text == dedent(explain.__doc__.partition("\n\n")[2]).strip("\n")


def test_a_presets_rules_that_do_not_match_are_counted():
    text = (
        Rules.preset("llama/tp")
        .explain("model/norm.weight", {"model/norm.weight": (8,)}, MESH)
        .split("\n")
    )
    assert text[2] == "    preset llama/tp   16 rules                     does not match"
    assert text[3] == "  → preset llama/tp   **/*norm.weight=replicated   matches its name"
    assert text[-1] == "each of 8 devices holds (8,), 8 bytes; 8 devices hold the same"


def test_what_no_rule_means_and_what_a_rule_is_not_for_is_said():
    tensors = {"model/embed_tokens.weight": (8,), "model/foo": (400, 400)}
    rules = Rules.preset("llama/tp")
    assert "is for 2 dimensions" in rules.explain("model/embed_tokens.weight", tensors, MESH)
    text = rules.explain("model/foo", tensors, MESH)
    assert "→" not in text
    assert text.count("no rule matches it: replicated") == 1


def test_state_says_which_parameter_it_belongs_to():
    tensors = {"model/w": (8, 8), "opt/mu/0/w": (8, 8), "opt/rows/0/w": (8,)}
    rules = Rules.parse("model/w=(data,model)")
    assert "it belongs to 'model/w': rule 1 matches its name" in rules.explain(
        "opt/mu/0/w", tensors, MESH
    )
    assert "it belongs to a parameter of shape (8, 8)" in rules.explain(
        "opt/rows/0/w", tensors, MESH
    )


def test_names_with_control_characters_do_not_reach_the_terminal():
    assert "\x1b" not in Rules.parse("**=replicated").explain("a\x1b[2J", {"a\x1b[2J": (8,)}, MESH)


def test_a_name_that_is_not_there_is_told_with_the_nearest():
    with pytest.raises(
        NamesMismatchError, match=r"There is no tensor 'model/v1' .did you mean 'model/w1'"
    ):
        Rules().explain("model/v1", {"model/w1": (8,)}, MESH)
