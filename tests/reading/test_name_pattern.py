"""Patterns of mappings match and capture as their regular expressions do, in a number of steps that
wildcards do not raise."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardckpt.reading.naming.name_pattern import NamePattern

PARTS = ["a", "b", ".", "/", "*", "**", "{x}", "{y}", "w.", "\n"]


def definition(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression: exact, and exponential in the number of wildcards."""
    seen: list[str] = []

    def wildcard(match: re.Match[str]) -> str:
        word = match[3] or f"n{sum(name[0] == 'n' for name in seen)}"
        seen.append(word)
        return (
            f"(?P={word})"
            if seen.count(word) > 1
            else f"(?P<{word}>{'.*' if match[1] else '[^./]+'})"
        )

    pieces = re.split(r"(\*\*+|\*|\{[^{}]*\})", pattern)
    return re.compile(
        "".join(
            re.sub(r"(\*\*+)|(\*)|\{([^{}]*)\}", wildcard, piece)
            if piece[:1] in "*{" and piece
            else re.escape(piece)
            for piece in pieces
        ),
        re.DOTALL,
    )


@given(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=7).map("".join),
    st.text("ab.w/\n", max_size=12),
)
@example("{x}{y}{x}{y}", "abab")
@example("***", "")
@example("**.*.**", "a.b.c.d")
def test_a_pattern_matches_and_captures_what_its_definition_does(pattern, name):
    match = definition(pattern).fullmatch(name)
    captures = NamePattern(pattern).match(name)
    assert (captures is None) == (match is None)
    if match is not None:
        assert captures == {
            key.removeprefix("n") if key[0] == "n" else key: text
            for key, text in match.groupdict().items()
        }
        assert NamePattern(pattern).fill(captures) == name


@pytest.mark.parametrize("unit", ["**a", "*a", "*{w}", "**.", "{w}*", "**b*"])
def test_many_wildcards_take_no_exponential_time(unit):
    text = "".join(unit.replace("{w}", f"{{w{number}}}") for number in range(60))
    assert NamePattern(text + "Z").match("a" * 200 + "Y") is None
    assert NamePattern(text + "Z").match("a" * 200 + ".Z" * 2 + "/Z") is None
