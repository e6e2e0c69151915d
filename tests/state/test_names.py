"""Names of places, paths of arrays, patterns that choose names, and suggestions."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardckpt.errors import FormatError, OptionError
from shardckpt.state import names
from shardckpt.state.select import matches, selector

ANYTHING = st.text(st.characters(), max_size=40)
SURROGATES = st.text(st.characters(categories=["Cs"]), min_size=1, max_size=3)
AWKWARD = st.sampled_from(
    [
        "",
        ".",
        "..",
        "...",
        "~",
        "~e",
        "~0",
        "=",
        "=-",
        "=2E",
        "__x",
        "_",
        "__",
        "c",
        "zarr.json",
        "ZARR.JSON",
        "\\",
        "\0",
        "a.",
        "a ",
        " ",
        "A",
        "a",
    ]
)
LONG = st.builds(
    lambda text, times: text * times,
    st.sampled_from(["a", ".", "_", "é", "/", "🙂", "zarr.json", "~", "a="]),
    st.integers(150, 700),
)
STRINGS = st.one_of(ANYTHING, SURROGATES, AWKWARD, LONG)
NAMES = st.lists(STRINGS, max_size=4).map("/".join)


# --- rendering ---


def test_keys_are_joined_and_their_own_slashes_escaped():
    assert names.component_names(["a/b", "~", "", "\ud83d"]) == ["a~1b", "~0", "~e", "~ud83d"]
    assert names.child_name(names.child_name("", "a"), "b") == "a/b"


def test_a_key_that_is_no_string_reads_as_its_text_with_a_tilde_if_a_string_reads_the_same():
    assert names.component_names([0, True, None, -7]) == ["0", "True", "None", "-7"]
    assert names.component_names([0, "0", True, "True", "None", None, 1]) == [
        "0~",
        "0",
        "True~",
        "True",
        "None",
        "None~",
        "1",
    ]


def test_an_integer_key_of_any_size_has_a_name():
    (name,) = names.component_names([10**10_000])
    assert name == hex(10**10_000)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(STRINGS, st.integers(), st.booleans(), st.none(), st.integers().map(str)),
        unique_by=lambda key: (type(key), key),
    )
)
def test_no_two_keys_of_a_container_share_a_component(keys):
    components = names.component_names(keys)
    assert len(set(components)) == len(keys)
    assert all(component and "/" not in component for component in components)
    "".join(components).encode()  # no surrogates: a name can be printed, and written as JSON


# --- array paths ---


@settings(max_examples=500, deadline=None)
@given(st.one_of(NAMES, STRINGS))
@example("")
@example("/")
@example("model/layers.0.self_attn.q_proj.weight")
@example("a" * 5000)
def test_an_array_path_is_safe_everywhere_and_says_its_name(name):
    path = names.array_path(name)
    for part in path.split("/"):
        assert re.fullmatch(r"[A-Za-z0-9._~=-]{1,200}", part)
        assert not part.startswith(("__", ".", "~"))
        assert not part.endswith(".")
        assert part.lower() != "zarr.json"
    assert names.name_of_array_path(path) == name


@settings(max_examples=300, deadline=None)
@given(NAMES, NAMES)
@example("A", "a")
@example("a" * 191, "a" * 190 + "/a")
def test_different_names_have_different_paths_and_none_lies_inside_another_unless_the_names_do(
    one, other
):
    a, b = names.array_path(one), names.array_path(other)
    assert (a == b) == (one == other)
    assert b.startswith(a + "/") == other.startswith(one + "/")


@pytest.mark.parametrize(
    "name",
    ["model/layers.0.weight", "opt/state/0/exp_avg", "a~1b", "-", "_private", "x" * 190, "c"],
)
def test_an_ordinary_name_is_its_own_path(name):
    assert names.array_path(name) == name


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "a/",
        "/a",
        "a//b",
        ".",
        "..",
        "a/../b",
        "=",
        "a=",
        "a=/",
        "=/a",
        "a=/b",
        "=2e",
        "=41",
        "=C3",
        "=FF",
        "=-a",
        "é",
        "__x",
        "zarr.json",
        "\0",
        "x" * 191,
    ],
)
def test_a_path_that_no_name_has_is_refused(path):
    with pytest.raises(FormatError, match="Array path"):
        names.name_of_array_path(path)


# --- patterns ---


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("model/**", ["model/a", "model/a/b"], ["model", "models/a", "a/model/b"]),
        (
            "**/exp_avg",
            ["exp_avg", "opt/exp_avg", "opt/state/0/exp_avg"],
            ["opt/exp_avg_sq", "opt/my_exp_avg", "exp_avg/x"],
        ),
        (
            "model/layers.*.weight",
            ["model/layers.0.weight", "model/layers.0.mlp.weight"],
            ["model/layers.0/weight", "layers.0.weight"],
        ),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/xb", "b"]),
        ("a/**/**/b", ["a/b", "a/x/b"], ["a"]),
        ("a**b", ["ab", "a/x/b", "axb"], ["a/x"]),
        ("**", ["", "a", "a/b"], []),
        ("*", ["a", ""], ["a/b"]),
        ("layer?", ["layer0"], ["layer", "layer10", "layer/"]),
        ("layer[0-2]", ["layer0", "layer2"], ["layer3"]),
        ("a[!b]c", ["axc"], ["abc", "a/c"]),
        ("a[]]", ["a]"], ["a"]),
        ("a[[]b]", ["a[b]"], ["ab"]),
        ("a[", ["a["], ["a"]),
        ("a.b(c)+", ["a.b(c)+"], ["axb(c)+"]),
        ("a\nb*", ["a\nb\n"], ["a"]),
        (["a", "b/*"], ["a", "b/c"], ["b"]),
        ([], [], ["a", ""]),
        (lambda name: name.endswith("x"), ["ax"], ["a"]),
    ],
)
def test_a_pattern_asks_for_these_names_and_not_for_those(pattern, yes, no):
    assert [name for name in yes if not matches(pattern, name)] == []
    assert [name for name in no if matches(pattern, name)] == []


@given(NAMES)
def test_no_pattern_at_all_asks_for_everything(name):
    assert selector(None)(name)
    assert matches("**", name)


@given(st.text(st.characters(exclude_characters="*?["), max_size=20), STRINGS)
def test_a_pattern_without_wildcards_asks_for_itself_alone(pattern, name):
    assert matches(pattern, pattern)
    assert matches(pattern, name) == (pattern == name)


def test_many_double_stars_take_no_exponential_time():
    assert not matches("**/" * 30 + "x", "a/" * 60 + "b")


@pytest.mark.parametrize("pattern", [3, [3], {"a"}, "[z-a]"])
def test_what_is_no_pattern_is_an_option_error(pattern):
    with pytest.raises(OptionError, match=r"only=|is not a pattern of names"):
        selector(pattern)


# --- suggestions ---


def test_the_nearest_name_is_suggested():
    stored = [f"model/layers.{i}.mlp.weight" for i in range(2000)] + ["opt/step"]
    near = names.Candidates(stored)
    assert near.nearest("model/layers.1234.mlp.wieght") == "model/layers.1234.mlp.weight"
    assert near.nearest("module.model/layers.77.mlp.weight") == "model/layers.77.mlp.weight"
    assert near.nearest("model/layer.777.mlp.weight") == "model/layers.777.mlp.weight"
    assert near.nearest("model/layers.5.mlp.weight_orig") == "model/layers.5.mlp.weight"
    assert names.did_you_mean("opt/stpe", stored) == " (did you mean 'opt/step'?)"


def test_among_few_names_one_that_differs_at_both_ends_is_suggested():
    stored = [f"{c}model/layers.{i}.mlp.weight{c}" for c in "ac" for i in range(40)]
    stored.append("zmodel/decoder.norm.scalez")
    assert names.Candidates(stored).nearest("bmodel/decoder.norm.scaleb") == stored[-1]


def test_nothing_is_suggested_where_nothing_is_near():
    assert names.Candidates(["rng", ""]).nearest("model/w") is None
    assert names.did_you_mean("model/w", []) == ""


def test_a_suggestion_is_shown_on_a_bounded_number_of_characters_too():
    long = "a" * 1_000_000
    assert len(names.did_you_mean(long + "b", [long + "c"])) < 400


def test_numbers_in_names_are_in_the_order_of_their_values_with_any_number_of_digits():
    digits = "1" * 5000
    in_order = ["007", "8", "10", "a-2", "a-02-x", "a-10", f"a-{digits}", f"a-{digits}0", "b"]
    assert sorted(in_order[5:] + in_order[:5], key=names.natural_key) == in_order
    assert names.natural_key("a-01") == names.natural_key("a-1")


def test_a_message_shows_a_name_on_a_bounded_number_of_characters():
    assert names.shown("a/b") == "'a/b'"
    assert names.shown("") == "The state itself"
    assert len(names.shown("x" * 10_000)) < 400
