"""Names change step by step, and what changes nothing, or makes two names one, is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.reading.naming.renaming import NameTable, dotted, read_names, rename
from shardckpt.reading.naming.substitution import parse_substitution, without_prefix
from shardckpt.state import flatten
from shardckpt.text import named

NAMES = ["model/layers.0/w", "model/layers.1/w", "model/norm", "step"]


def renamed(names=NAMES, prefix=None, file=None, rules=()):
    of_prefix = [] if prefix is None else [without_prefix(prefix, named("strip_prefix", prefix))]
    return rename(
        {name: dotted(name) for name in names},
        [*of_prefix, NameTable("the file", file or {}), *map(parse_substitution, rules)],
    )


def test_the_keys_on_the_way_to_a_tensor_are_joined_with_dots() -> None:
    assert list(renamed().values()) == [
        "model.layers.0.w",
        "model.layers.1.w",
        "model.norm",
        "step",
    ]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=4)
)
def test_keys_are_what_they_were_before_they_were_escaped(keys: list[str]) -> None:
    state: object = b"here"
    for key in reversed(keys):
        state = {key: state}
    (name,) = flatten(state, lambda leaf: leaf == b"here").tensors
    assert dotted(name) == ".".join(keys)


@pytest.mark.parametrize("prefix", ["model/", "model."])
def test_a_prefix_goes_from_the_names_that_have_it(prefix: str) -> None:
    assert list(renamed(prefix=prefix).values()) == ["layers.0.w", "layers.1.w", "norm", "step"]


def test_steps_go_in_order() -> None:
    rules = [r"s/^layers\.(\d)/h.\1/", "s/[.]w$/&eight/"]
    assert renamed(prefix="model/", file={"norm": "ln_f", "step": None}, rules=rules) == {
        "model/layers.0/w": "h.0.weight",
        "model/layers.1/w": "h.1.weight",
        "model/norm": "ln_f",
    }


def test_a_file_may_name_what_the_checkpoint_does_or_what_became_of_it() -> None:
    assert renamed(file={"model/norm": "a", "model.layers.0.w": "b"})["model/norm"] == "a"
    assert renamed(file={"model/norm": "step", "step": "model.norm"})["step"] == "model.norm"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"prefix": "modle/"},
            OptionError,
            "strip_prefix='modle/': it matches none of 4 names, such as 'model.layers.0.w'",
        ),
        (
            {"rules": ["s/layer_/h/"]},
            OptionError,
            "rename='s/layer_/h/': it matches none of 4 names, such as 'model.layers.0.w'",
        ),
        (
            {"file": {"model.nrm": "x"}},
            OptionError,
            r"no tensor 'model.nrm' \(did you mean 'model.norm'\?\)",
        ),
        (
            {"rules": [r"s/\.\d\././"]},
            NamesMismatchError,
            "'model/layers.0/w' and 'model/layers.1/w' would both be called 'model.layers.w'",
        ),
        (
            {"file": {"step": "model.norm"}},
            NamesMismatchError,
            "'model/norm' and 'step' would both be called 'model.norm'",
        ),
        (
            {"prefix": "model/", "file": {"model/norm": "a", "norm": "b"}},
            OptionError,
            "'norm' and another name mean one tensor, 'model/norm'",
        ),
        ({"rules": ["s/step//"]}, NamesMismatchError, "'step' would have no name"),
        (
            {"names": ["a.b", "a/b"]},
            NamesMismatchError,
            "'a.b' and 'a/b' would both be called 'a.b'",
        ),
    ],
)
def test_what_changes_nothing_or_makes_two_names_one_is_refused(
    options, error, message: str
) -> None:
    with pytest.raises(error, match=message):
        renamed(**options)


# --- s/…/…/ ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [
        ("s/a/b/", "aa", "ba"),
        ("s/a/b/g", "aa", "bb"),
        ("s/A/b/gi", "aA", "bb"),
        ("s|a/b|c|", "a/b", "c"),
        (r"s/a\/b/c\/d/", "a/b", "c/d"),
        ("s/[ab]/<&>/g", "abc", "<a><b>c"),
        (r"s/b/\&\\/", "abc", r"a&\c"),
        (r"s/\(a\)/x/", "(a)", "x"),
        (r"s/(a)|(b)/\1-\2/g", "ab", "a--b"),
        (r"s,\\,/,", "a\\b", "a/b"),
    ],
)
def test_a_substitution_is_what_sed_does(rule: str, name: str, expected: str) -> None:
    assert parse_substitution(rule).of(name) == expected
    if shutil.which("sed") is not None and r"\(" not in rule:
        done = subprocess.run(
            ["sed", "-E", rule.removesuffix("i") + ("I" if rule.endswith("i") else "")],
            input=name,
            capture_output=True,
            text=True,
        )
        assert done.stdout.rstrip("\n") == expected


@given(st.text("ab.^$*+?()[]{}|\\0/", max_size=20), st.text("a1./\\&", max_size=20))
def test_any_text_is_a_substitution_or_refused(regex: str, replacement: str) -> None:
    try:
        rule = parse_substitution(f"s/{regex}/{replacement}/")
    except OptionError:
        return
    assert rule.of("a.b/c") is None or isinstance(rule.of("a.b/c"), str)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a/b", "as sed does"),
        ("s/a/b", "three times"),
        ("s/a/b/c/", "three times"),
        ("s/a/b/x", "'x' is not a flag"),
        ("s/(/b/", "not a regular expression"),
        (r"s/a/\1/", "no group"),
        (r"s/(?P<n>a)/\g<n>/", r"\\g has no meaning in a replacement"),
        (r"s/a/\\\n/", r"\\n has no meaning"),
        ("s/a/" + "b" * 1000 + "/", "at most 1000"),
    ],
)
def test_what_is_no_substitution_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_substitution(text)


def test_a_name_on_which_an_expression_could_take_for_ever_is_refused() -> None:
    with pytest.raises(OptionError, match="a name of 5000 characters is too long"):
        parse_substitution("s/(a+)+$/b/").of("a" * 5000)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("n.json", '{"a.b": "c", "d": null}'),
        ("n.toml", '"a.b" = "c"\nd = false'),
        ("n.yaml", "a.b: c\nd: null"),
    ],
)
def test_a_file_of_names_is_json_toml_or_yaml(tmp_path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_names(tmp_path / name).names == {"a.b": "c", "d": None}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("n.csv", "", "is JSON or TOML or YAML"),
        ("n.json", "[]", "expected a table of old and new names, found a list"),
        ("n.json", '{"a": "b", "a": "c"}', "'a' appears twice"),
        ("n.json", '{"a": 3}', "'a' = 3: give a new name"),
        ("n.json", '{"a": ""}', "give a new name"),
        ("n.json", "[" * 100_000, "not JSON"),
        ("n.toml", 'a.b = "c"', "put a name with dots in quotes"),
        ("n.yaml", "1: b", "1 = 'b': give a new name"),
        ("n.yaml", "!!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_a_file_that_says_something_else_is_refused_by_its_name(
    tmp_path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        read_names(tmp_path / name)
    assert name in str(caught.value)


def test_names_survive_a_file(tmp_path) -> None:
    names = {"é/~1 [x]": "a", "b": None}
    (tmp_path / "n.json").write_text(json.dumps(names))
    assert read_names(tmp_path / "n.json").names == names
    assert re.fullmatch(r"é/~1 \[x\]", next(iter(names)))
