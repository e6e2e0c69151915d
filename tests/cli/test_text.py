"""Names, numbers and device lists as people read them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.layout.device_list import device_list
from shardckpt.text import count, file_size, shape_text, visible


def expand(text):
    """The ids of a list that leaves nothing out, or leaves out what its pattern says."""
    parts = [tuple(map(int, part.split("–"))) for part in text.split(",") if part != "…"]
    if "…" in text:
        (first, second, last) = parts
        step = second[0] - first[0]
        parts = [
            tuple(bound + k * step for bound in first)
            for k in range((last[0] - first[0]) // step + 1)
        ]
    return [i for part in parts for i in range(part[0], part[-1] + 1)]


@given(st.text())
def test_what_is_shown_is_printable_and_on_one_line(text):
    assert visible(text).isprintable()


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_letters_of_all_scripts_and_signs_are_shown_as_they_are(text):
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\nb\rc", r"a\nb\rc"),
        ("\u202egnp", r"\u202egnp"),
        ("\ud800", r"\ud800"),
        ("\u200b\ufeff\x9b31m", r"\u200b\ufeff\x9b31m"),
        ("[bold]größe[/bold] ", "[bold]größe[/bold] "),
    ],
)
def test_what_would_move_the_cursor_or_hide_text_is_escaped(text, shown):
    assert visible(text) == shown


@given(st.sets(st.integers(0, 400), min_size=1, max_size=60))
def test_a_device_list_means_its_devices_or_says_how_many(ids):
    text = device_list(sorted(ids), most=40)
    span = re.fullmatch(r"(\d+)…(\d+) \((\d+)\)", text)
    if span:
        assert tuple(map(int, span.groups())) == (min(ids), max(ids), len(ids))
    else:
        assert expand(text) == sorted(ids)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 40), st.integers(1, 4))
def test_a_regular_device_list_is_shown_without_loss(start, length, times, gap):
    step = length + gap
    ids = [start + k * step + i for k in range(times) for i in range(length)]
    assert expand(device_list(ids, most=40)) == ids


@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=200), st.integers(14, 60))
def test_a_device_list_keeps_to_its_width(ids, most):
    assert len(device_list(list(ids), most=most)) <= most


@given(st.integers(0, 1 << 62))
def test_a_size_is_near_its_bytes(nbytes):
    number, unit = file_size(nbytes).split(" ")
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(float(number.replace(",", "")) * scale - nbytes) <= 0.06 * max(nbytes, 1)


def test_numbers_have_their_nouns():
    assert (count(0, "chunk"), count(1, "chunk"), count(4096, "chunk")) == (
        "0 chunks",
        "1 chunk",
        "4,096 chunks",
    )
    assert shape_text((3, 4)) == "3×4"
