"""Rules, specs and meshes as text, and back; every mistake says where it is."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardckpt import HybridMesh, Mesh, PartitionSpec
from shardckpt.errors import OptionError, ShardingError
from shardckpt.reshard.rules import Rule, parse_mesh
from shardckpt.reshard.rules.pattern import Match, literal, match, owners
from shardckpt.reshard.rules.spec_text import format_spec, parse_spec
from shardckpt.state.select import matches

AXES = st.one_of(
    st.sampled_from(
        [
            "data",
            "fsdp",
            "model",
            "None",
            "0",
            "a=(b",
            "ü-x.y",
            '"',
            "'",
            " ",
            "\\",
            "replicated",
            0,
            3,
        ]
    ),
    st.text(min_size=1, max_size=4),
)


@st.composite
def specs(draw):
    axes = draw(st.lists(AXES, unique=True, max_size=6))
    parts = []
    while axes:
        count = draw(st.integers(0, 2))
        parts.append(tuple(axes[:count]))
        axes = axes[count:] if count else axes[1:]
    return PartitionSpec(*parts)


@given(specs())
def test_a_spec_read_from_its_text_is_the_spec(spec):
    assert parse_spec(format_spec(spec)) == spec


@given(st.text("abl*?=()[],./ '\"", min_size=1, max_size=12).map(str.strip).filter(bool), specs())
@example("a=replicated", PartitionSpec())
@example("a=(x)", PartitionSpec("a=(b"))
def test_a_rule_read_from_its_text_is_the_rule(pattern, spec):
    rule = Rule(pattern, spec)
    assert Rule.parse(str(rule)) == rule
    assert str(Rule.parse(str(rule))) == str(rule)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("replicated", ()),
        (" () ", ()),
        ("(None,model)", (None, "model")),
        ("( None , 'model' , )", (None, "model")),
        ('(("fsdp","tensor"),None)', (("fsdp", "tensor"), None)),
        ("P('data', None)", ("data", None)),
        ("PartitionSpec(('data', 'fsdp'))", (("data", "fsdp"),)),
        ("(0,None,1)", (0, None, 1)),
        ('("0")', ("0",)),
        ("((),model)", (None, "model")),
    ],
)
def test_specs_are_written_as_people_write_them(text, parts):
    assert parse_spec(text) == PartitionSpec(*parts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model", "'model' is not a partition spec; write replicated, or one entry per dimension"),
        ("(None,model", "at character 12 it ends, where"),
        ("(None model)", "at character 7 found 'model.'"),
        ("(None,,model)", "at character 7 found ',model.'"),
        ("(a))", "at character 4 found '.'"),
        ("((a,(b)))", "at character 5 found '.b"),
        ("((a,None))", "None inside a tuple of axes"),
        ("(a,a)", "axis 'a' appears more than once"),
        ('("\\q")', "is not a quoted name; escapes are those of JSON"),
    ],
)
def test_what_is_no_spec_is_refused_with_its_place(text, message):
    with pytest.raises(OptionError, match=message):
        parse_spec(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w1", "'w1' is not a rule; write pattern=spec"),
        ("=(model)", "'' is not a pattern of names"),
        ("[z-a]=(model)", r"^here: '\[z-a\]' is not a pattern of names: bad character range"),
        ("a=b=(mo del)", r"here .'a=b=\(mo del\)'.: .* at character 5 found 'del\)'"),
        ("a=replicate", "'replicate' is not a partition spec"),
        (7, "7 is not a rule"),
    ],
)
def test_what_is_no_rule_is_refused_with_its_place(text, message):
    with pytest.raises(OptionError, match=message):
        Rule.parse(text, "here")


NAMES = st.text("ab./", min_size=1, max_size=10)
PATTERNS = st.text("ab./*?[]!", min_size=1, max_size=8).filter(
    lambda pattern: pattern.count("[") == pattern.count("]") == 0 or "[" in pattern
)


@given(PATTERNS, NAMES)
def test_a_pattern_means_what_it_matches_and_what_lies_directly_below(pattern, name):
    how = match(pattern, name)
    assert (how is Match.WHOLE) == matches(pattern, name)
    assert (how is Match.BELOW) == (
        not matches(pattern, name)
        and literal(pattern) in name
        and any(matches(pattern, owner) for owner in owners(name))
    )


@given(PATTERNS, NAMES)
def test_the_literal_text_of_a_pattern_is_in_every_name_it_means(pattern, name):
    if matches(pattern, name) or any(matches(pattern, owner) for owner in owners(name)):
        assert literal(pattern) in name


def test_a_mesh_is_axes_and_sizes():
    assert parse_mesh("data=2, model=4") == Mesh((2, 4), ("data", "model"))
    assert parse_mesh("data=2,model=2@3,1,0,2").device_ids.tolist() == [3, 1, 0, 2]
    assert parse_mesh("x=4@8-10,0").device_ids.tolist() == [8, 9, 10, 0]
    assert parse_mesh("data=1x2,fsdp=4") == HybridMesh((1, 4), (2, 1), ("data", "fsdp"))


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(1, 4)),
        min_size=1,
        max_size=4,
        unique_by=lambda axis: axis[0],
    ),
    st.randoms(),
)
def test_a_mesh_read_from_its_axes_and_ids_is_the_mesh(axes, random):
    names, shape = zip(*axes, strict=True)
    mesh = Mesh(shape, names)
    ids = mesh.device_ids.tolist()
    random.shuffle(ids)
    text = ",".join(f"{name}={size}" for name, size in axes)
    assert parse_mesh(text) == mesh
    assert parse_mesh(f"{text}@{','.join(map(str, ids))}") == Mesh(shape, names, ids)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", OptionError, "'' is not an axis; write name=size for each"),
        ("data=2,model", OptionError, "'model' is not an axis"),
        ("data=-2", OptionError, "'data=-2' is not an axis"),
        ("data=0", ShardingError, "mesh 'data=0': .*must be at least 1"),
        ("data=2,data=2", ShardingError, "axis name 'data' is used more than once"),
        ("data=2@0", ShardingError, "1 device ids for shape"),
        ("data=2@a", OptionError, "'a' is not a device id"),
        ("data=2@1-0", OptionError, "'1-0' is not a range of device ids"),
        ("data=2@0-99999999999", OptionError, "or the mesh has too many"),
        ("data=99999999", ShardingError, "at most"),
        ("data=2x2@0-3", OptionError, "a mesh of slices .AxB. has ids from 0"),
    ],
)
def test_what_is_no_mesh_is_refused_with_its_part(text, kind, message):
    with pytest.raises(kind, match=message):
        parse_mesh(text)


def test_quotes_are_those_of_json():
    assert json.loads(format_spec(PartitionSpec("a b"))[1:-1]) == "a b"
