"""Rules files say what the text says, in TOML and in YAML; every mistake names file and place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt import PartitionSpec, Rules
from shardckpt.errors import OptionError, ShardingError
from shardckpt.reshard.rules import Rule, parse_mesh
from shardckpt.reshard.rules.preset import Preset

TEXTS = ["**/layers.*.w1=(None,model)", "**/*.bias=replicated", '**/w2=(("data","model"),None)']

TOML = """
mesh = "data=2,model=4"
unmatched = "error"
preset = "llama/tp"
[rules]
"**/layers.*.w1" = "(None,model)"
"**/*.bias" = "replicated"
"**/w2" = [["data", "model"], []]
"""
YAML = """
mesh: {data: 2, model: 4}
unmatched: error
preset: [llama/tp]
rules:
  "**/layers.*.w1": [null, model]
  "**/*.bias": replicated
  "**/w2": [[data, model], null]
"""


def written(directory, name, text):
    file = directory / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("name", "text"), [("rules.toml", TOML), ("rules.yaml", YAML), ("rules.yml", YAML)]
)
def test_a_file_says_what_the_text_says(tmp_path, name, text):
    rules = Rules.from_file(written(tmp_path, name, text))
    assert rules == Rules.parse(TEXTS, mesh="data=2,model=4", unmatched="error").then(
        Rules.preset("llama/tp")
    )
    assert rules.entries[1].origin == f"{tmp_path / name}, rule 2"


@given(st.lists(st.sampled_from(TEXTS), unique=True))
def test_lists_of_texts_are_rules_in_both(tmp_path_factory, texts):
    directory = tmp_path_factory.mktemp("rules")
    for name, text in (
        ("a.toml", f"rules = {json.dumps(texts)}"),
        ("a.yaml", f"rules: {json.dumps(texts)}"),
    ):
        assert Rules.from_file(written(directory, name, text)) == Rules.parse(texts)


def test_an_empty_file_has_no_rules(tmp_path):
    assert Rules.from_file(written(tmp_path, "a.toml", "")) == Rules()
    assert Rules.from_file(written(tmp_path, "a.yaml", "rules:")) == Rules()


@pytest.mark.parametrize(
    ("name", "text", "kind", "message"),
    [
        ("a.json", "{}", OptionError, "a rules file is TOML or YAML"),
        ("a.toml", "rules = 3 4", OptionError, "a.toml: not TOML: .*line 1, column 11"),
        ("a.yaml", "rules: [", OptionError, "a.yaml: not YAML: .*line 1, column 9"),
        ("a.yaml", "rules:\n  a: replicated\n  a: (x)", OptionError,
         "the key 'a' appears twice.*line 3, column 3"),
        ("a.yaml", "!!python/object/apply:os.system [ls]", OptionError,
         "could not determine a constructor"),
        ("a.yaml", "mesh: 2024-13-45", OptionError,
         "a.yaml: not YAML: '2024-13-45' cannot be read as timestamp.*line 1, column 7"),
        ("a.yaml", "mesh: 2024-01-02 25:00:00", OptionError, "cannot be read as timestamp"),
        ("a.yaml", "mesh: !!timestamp foo", OptionError, "'foo' cannot be read as timestamp"),
        ("a.yaml", "mesh: !!int foo", OptionError, "'foo' cannot be read as int"),
        ("a.yaml", "mesh: !!float x", OptionError, "'x' cannot be read as float"),
        ("a.yaml", "mesh: !!bool foo", OptionError, "'foo' cannot be read as bool"),
        ("a.yaml", "mesh: !!map [1, 2]", OptionError, "not YAML: expected a mapping node"),
        ("a.yaml", "mesh: " + "9" * 5000, OptionError, "a.yaml: not YAML: .* read as int"),
        ("a.toml", "mesh = " + "9" * 5000, OptionError, "a.toml: not TOML: .*5000 digits"),
        ("a.yaml", "", OptionError, "expected keys .*, found a NoneType"),
        ("a.yaml", "- a", OptionError, "expected keys .*, found a list"),
        ("a.toml", "rule = []", OptionError,
         ("there is no key 'rule' .did you mean 'rules'.*; "
          "there are mesh, unmatched, preset, rules")),
        ("a.toml", "rules = ['a=(b']", OptionError,
         r"a.toml, rule 1 .'a=\(b'.: .* at character 3 it ends"),
        ("a.toml", "rules = [3]", OptionError, "a.toml, rule 1: 3 is not a rule"),
        ("a.toml", "[rules]\na = 3", OptionError,
         r"a.toml, rule 1 \('a'\): 3 is not a partition spec"),
        ("a.yaml", "rules: {a: [no]}", OptionError,
         r"a.yaml, rule 1 \('a'\): .*entry 0 holds False"),
        ("a.yaml", "rules: {a: [[[x]]]}", OptionError, "tuples cannot be nested"),
        ("a.yaml", "rules: {1: replicated}", OptionError,
         "a.yaml, rule 1: 1 is not a pattern of names"),
        ("a.toml", "mesh = 3", OptionError, "a.toml, mesh: 3 is not a mesh"),
        ("a.toml", "mesh = {data = 'x'}", OptionError, "a.toml, mesh: .*'data=x' is not an axis"),
        ("a.toml", "mesh = {data = 0}", ShardingError, "a.toml, mesh: mesh 'data=0'"),
        ("a.toml", "unmatched = 'ignore'", OptionError, 'a.toml: .*use "replicate" or "error"'),
        ("a.toml", "preset = 'lama'", OptionError,
         "a.toml: preset 'lama': there is no family 'lama' .did you mean 'llama'"),
        ("a.toml", "preset = 3", OptionError, "a.toml: preset 3: give text"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_file_and_the_place(tmp_path, name, text, kind, message):
    with pytest.raises(kind, match=message):
        Rules.from_file(written(tmp_path, name, text))


def test_a_file_that_is_not_there_or_no_text_is_an_option_error(tmp_path):
    with pytest.raises(OptionError, match=r"none.toml: the rules file cannot be read"):
        Rules.from_file(tmp_path / "none.toml")
    with pytest.raises(OptionError, match=r"the rules file cannot be read: embedded null byte"):
        Rules.from_file(f"{tmp_path}/no\0ne.toml")
    (tmp_path / "a.toml").write_bytes(b"\xff")
    with pytest.raises(OptionError, match=r"a.toml: the rules file cannot be read"):
        Rules.from_file(tmp_path / "a.toml")


def test_a_mistake_that_shows_later_names_the_file_as_well(tmp_path):
    rules = Rules.from_file(written(tmp_path, "a.toml", "rules = ['a=(x)', 'b=replicated']"))
    with pytest.raises(
        ShardingError, match=r"a.toml, rule 1 .'a=\(x\)'.: the mesh has no axis 'x'"
    ):
        rules.decide("a", (8,), parse_mesh("data=2"))


def test_entries_are_checked():
    assert Rules([Rule("a", PartitionSpec()), Preset("t5")]).entries[1].family == "t5"
    with pytest.raises(OptionError, match=r"Rules: 'a=replicated' is not a rule; use Rules.parse"):
        Rules(["a=replicated"])
    with pytest.raises(OptionError, match=r"give a shardckpt.Mesh"):
        Rules(mesh=(2, 4))
    with pytest.raises(OptionError, match=r"'a' has a tuple; give a shardckpt.PartitionSpec"):
        Rule("a", ("data",))
