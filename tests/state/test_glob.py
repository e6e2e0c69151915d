"""Patterns of names match as the regular expressions of their definition do, in a number of steps
that the wildcards do not raise."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardckpt.errors import OptionError
from shardckpt.state.glob import Glob, compile_glob
from shardckpt.state.select import selector

PARTS = [
    "a",
    "b",
    "/",
    ".",
    "*",
    "**",
    "**/",
    "?",
    "[ab]",
    "[!a]",
    "[a-b]",
    "[",
    "]",
    "!",
    "\n",
    "é",
]


def definition(pattern: str) -> re.Pattern[str]:
    """The language in regular expressions: exact, and exponential in the number of wildcards."""
    meaning = {"**/": "(?:[^/]*/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression, at = "", 0
    while at < len(pattern):
        begins = at == 0 or pattern[at - 1] == "/"
        if begins and (match := re.compile(r"(?:\*\*/)+").match(pattern, at)):
            expression += meaning["**/"]
        elif match := re.compile(r"\*\*+").match(pattern, at):
            expression += meaning["**"]
        elif match := re.compile(r"[*?]").match(pattern, at):
            expression += meaning[match[0]]
        elif match := re.compile(r"\[(!?)(\][^\]]*|[^\]]+)\]").match(pattern, at):
            members = re.sub(r"([][^&|~])", r"\\\1", match[2])
            expression += f"(?!/)[{'^' if match[1] else ''}{members}]"
        else:
            match = re.compile("(?s:.)").match(pattern, at)
            expression += re.escape(match[0])
        at = match.end()
    return re.compile(expression, re.DOTALL)


@given(
    st.lists(st.sampled_from(PARTS), max_size=8).map("".join),
    st.lists(st.text("ab/.![]\né*", max_size=10), max_size=5),
)
@example("a/**/**/b", ["a/b", "a/b/b", "ab"])
@example("**/*", ["", "/", "a/", "//"])
@example("*[", ["[", "a[", "a"])
def test_a_pattern_matches_what_its_definition_matches(pattern, names):
    glob = Glob(pattern)
    for name in [*names, *names, pattern, ""]:
        assert glob.fullmatch(name) == bool(definition(pattern).fullmatch(name)), name


@pytest.mark.parametrize(
    ("pattern", "members"),
    [
        ("[+--b]", "+,-b"),
        ("[--0]", "-./0"),
        ("[a--]", None),
        ("[!--0]", "+,b"),
        ("[a-c-e]", "abc-e"),
        ("[a-]", "a-"),
        ("[]-a]", "]^_`a"),
    ],
)
def test_a_hyphen_in_a_set_stands_for_itself_where_it_makes_no_range(pattern, members):
    if members is None:
        with pytest.raises(OptionError, match="bad character range"):
            Glob(pattern)
        return
    glob = Glob(pattern)
    assert {character for character in members if glob.fullmatch(character)} == {*members} - {"/"}


@pytest.mark.parametrize("unit", ["**?", "*?", "**a", "**/", "**/*", "*/**/", "[a-z]**", "a*"])
@pytest.mark.parametrize("end", ["Z", "", "?"])
def test_a_match_computes_at_most_one_set_of_states_a_character(unit, end):
    glob = Glob(unit * 300 + end)
    glob.fullmatch("a/" * 400 + "a" * 200)
    assert glob.transitions <= 1000


def test_a_pattern_keeps_a_bounded_number_of_transitions():
    glob = Glob("**x*y**z?")
    names = [
        f"{a}x{b}yz{c}"
        for a in map(chr, range(200, 240))
        for b in map(chr, range(300, 340))
        for c in "/xz"
    ]
    expected = [bool(definition("**x*y**z?").fullmatch(name)) for name in names]
    assert [glob.fullmatch(name) for name in names] == expected
    assert glob.transitions <= 1024


def test_exact_names_among_patterns_are_looked_up_and_not_matched():
    compile_glob.cache_clear()
    chosen = selector([*(f"model/layers.{n}.w" for n in range(3000)), "head/*"])
    assert [
        name
        for name in ("model/layers.7.w", "model/layers.w", "head/b", "head/a/b")
        if chosen(name)
    ] == ["model/layers.7.w", "head/b"]
    assert compile_glob.cache_info().currsize == 1
