"""Another checkpoint's layouts by name: as they are there, or over another mesh."""

import pickle

import numpy as np
import pytest

import shardckpt
from shardckpt import Mesh, OpSharding, PartitionSpec, Rules, Sharding
from shardckpt.errors import OptionError, ShardingError
from shardckpt.layout.placements import Placements
from shardckpt.reshard.rules import parse_mesh
from shardckpt.reshard.rules.like import Like

MESH = Mesh((2, 4), ("data", "model"))


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Of a checkpoint with two sharded tensors and a plain one."""
    url = tmp_path_factory.mktemp("like") / "other"
    shardings = {
        "w": Sharding(MESH, PartitionSpec("data", "model")),
        "b": Sharding(MESH, PartitionSpec("model")),
    }
    arrays = {"w": np.ones((8, 8)), "b": np.ones(8), "plain": np.ones(8)}
    shardckpt.save(url, arrays, options=shardckpt.SaveOptions(shardings=shardings))
    return shardckpt.open(url).record


def test_layouts_are_those_of_the_other_checkpoint(record):
    rules = Rules.like(record, "run/other")
    assert rules.mesh == MESH
    assert pickle.loads(pickle.dumps(rules)) == rules
    assert hash(rules) == hash(Rules.like(record))
    decided = rules.decide_all({"w": (16, 8), "b": (8,), "plain": (9,), "new": (40_000,)})
    assert decided["w"].layout == Sharding(MESH, PartitionSpec("data", "model"))
    assert decided["b"].layout == Sharding(MESH, PartitionSpec("model"))
    assert decided["plain"].layout is None
    assert (decided["w"].rule, decided["w"].why) == ("like run/other", "run/other has this layout")
    assert decided["new"].layout == Sharding(MESH, PartitionSpec())
    assert decided["new"].notices == ("no rule matches it: replicated",)


def test_over_another_mesh_the_specs_stay(record):
    mesh = parse_mesh("model=2,data=3")
    decided = Rules.like(record).decide_all({"w": (8, 8), "b": (8,)}, mesh)
    assert decided["w"].layout == Sharding(mesh, PartitionSpec("data", "model"))
    assert decided["w"].notices == (
        "dimension 0 is uneven: 8 in 3 parts (data=3) are 2 of 3, one of 2",
    )
    with pytest.raises(
        ShardingError, match=r"'w': its layout in run/other does not fit the mesh: .*no axis 'data'"
    ):
        Rules.like(record, "run/other").decide("w", (8, 8), parse_mesh("model=2"))


def test_state_that_it_lacks_follows_its_parameter(record):
    decided = Rules.like(record).decide_all({"w": (8, 8), "optimizer/state/w/exp_avg": (8, 8)})
    assert decided["optimizer/state/w/exp_avg"].layout == decided["w"].layout


def test_rules_before_it_go_first_and_rules_after_it_take_what_it_lacks(record):
    rules = Rules.parse("b=replicated").then(Rules.like(record)).then(Rules.parse("**=(data)"))
    decided = rules.decide_all({"w": (8, 8), "b": (8,), "new": (8,)})
    assert [decided[name].layout.spec for name in ("b", "new")] == [
        PartitionSpec(),
        PartitionSpec("data"),
    ]
    assert decided["w"].layout == Sharding(MESH, PartitionSpec("data", "model"))


def test_what_cannot_be_copied_is_refused_by_name(record):
    rules = Rules.like(record, "run/other")
    with pytest.raises(
        ShardingError, match=r"'w' has shape \(8,\), but \(8, 8\) in run/other, .*its own rule"
    ):
        rules.decide("w", (8,))
    with pytest.raises(OptionError, match="run/other has none of the 1 tensors, such as 'v'"):
        rules.decide_all({"v": (8,)})
    with pytest.raises(OptionError, match="No rule matches 'v'"):
        Rules(rules.entries, "error", rules.mesh).decide("v", (8,))


def test_layouts_without_axes_are_copied_as_they_are_or_by_an_equivalent_spec():
    mesh = Mesh((2, 2), ("dp", "tp"))
    nested = Placements.of(mesh, ["_S(0,2)", "S(0)"])
    by_text = OpSharding.parse("{devices=[4,1]<=[4]}")
    like = Like((("nested", (8, 3), nested), ("text", (8, 3), by_text)))
    rules = Rules((like,), mesh=like.mesh)
    assert rules.decide("nested", (8, 3)).layout is nested
    assert rules.decide("text", (8, 3)).layout == Sharding(mesh, PartitionSpec(("dp", "tp"), None))
    assert rules.decide("text", (8, 3), parse_mesh("x=2,y=2@3,1,0,2")).layout is by_text
    assert Rules((like,)).decide("text", (8, 3)).layout is by_text
    other = parse_mesh("tp=4,dp=2")
    assert rules.decide("nested", (8, 3), other).layout == Sharding(
        other, PartitionSpec(("tp", "dp"), None)
    )
    with pytest.raises(
        ShardingError,
        match=r"'nested': .*_S\(0,2\) over dp=2, S\(0\) over tp=2, is not a partition spec",
    ):
        rules.decide("nested", (5, 3), other)
    with pytest.raises(ShardingError, match=r"'text': .*over 4 devices"):
        rules.decide("text", (8, 3), other)
    assert rules.decide("text", (8, 3), parse_mesh("x=4")).layout == Sharding(
        parse_mesh("x=4"), PartitionSpec("x", None)
    )


def test_layouts_that_were_worked_out_for_each_tensor_are_rules():
    worked_out = {
        "cache": Sharding(MESH, PartitionSpec("data", None)),
        "scale": Sharding(MESH, PartitionSpec()),
    }
    rules = Rules.parse("scale=(model)").then(Rules.by_name(worked_out, "the graph"))
    decided = rules.decide_all({"cache": (8, 3), "scale": (8,), "new": (40_000,)})
    assert decided["cache"].layout == worked_out["cache"]
    assert (decided["cache"].rule, decided["cache"].why) == (
        "like the graph",
        "the graph has this layout",
    )
    assert decided["scale"].layout.spec == PartitionSpec("model")
    assert decided["new"].notices == ("no rule matches it: replicated",)
