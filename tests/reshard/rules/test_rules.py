"""The layout of every tensor: the first rule that matches it decides, by its name or by a name
above it."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt import PartitionSpec, Rules, Sharding
from shardckpt.errors import OptionError, ShardingError
from shardckpt.reshard.rules import Rule, parse_mesh
from shardckpt.state.glob import compile_glob
from shardckpt.state.select import matches

MESH = parse_mesh("data=2,model=4")
W1 = "model/layers.0.w1.weight"
MOMENT = "optimizer/state/layers.0.w1.weight/exp_avg"


def spec(rules, name, shape, mesh=MESH):
    return rules.decide(name, shape, mesh).layout.spec


def test_the_first_rule_that_means_a_tensor_decides():
    rules = Rules.parse(["**/*.w1.weight=(model)", "**/*.weight=(data)", "**=replicated"])
    assert spec(rules, W1, (8, 8)) == PartitionSpec("model")
    assert spec(rules, "model/layers.0.w2.weight", (8, 8)) == PartitionSpec("data")
    assert spec(rules, "model/layers.0.w2.bias", (8,)) == PartitionSpec()
    decision = rules.decide(W1, (8, 8), MESH)
    assert (decision.rule, decision.why) == ("**/*.w1.weight=(model)", "rule 1 matches its name")


@given(
    st.lists(
        st.sampled_from(["**", "*", "a/**", "**/w", "a/*", "a/w", "b/w", "**/[vw]"]), max_size=6
    ),
    st.sampled_from(["a/w", "b/v", "w"]),
)
def test_the_first_of_any_patterns_that_match_decides(patterns, name):
    rules = Rules(
        tuple(
            Rule(pattern, PartitionSpec(None, ("data", "model")[i % 2]))
            for i, pattern in enumerate(patterns)
        )
    )
    decision = rules.decide(name, (8, 8), MESH)
    # No pattern here matches what these names lie below, without matching them: "a" and "b".
    first = next(
        (
            rule
            for rule in rules.entries
            if matches(rule.pattern, name) or (rule.pattern == "*" and "/" in name)
        ),
        None,
    )
    assert decision.rule == ("" if first is None else str(first))
    assert decision.layout.spec == (PartitionSpec() if first is None else first.spec)


def test_state_of_an_optimizer_follows_its_parameter():
    rules = Rules.parse(["**/layers.*.w1.weight=(None,model)", "**=replicated"])
    tensors = {W1: (8, 16), MOMENT: (8, 16), "optim/state.layers.0.w1.weight.exp_avg_sq": (8, 16)}
    decided = rules.decide_all(tensors, MESH)
    assert {decision.layout.spec for decision in decided.values()} == {PartitionSpec(None, "model")}
    assert decided[MOMENT].why == "rule 1 matches the name above it"


def test_state_of_another_shape_than_its_parameter_is_replicated_with_a_notice():
    rules = Rules.parse(["**/*.w1.weight=(model,data)"])
    rows = "optimizer/state/layers.0.w1.weight/exp_avg_sq_row"
    decided = rules.decide_all({W1: (40_000, 8), rows: (40_000,), rows + "x": (8, 40_000)}, MESH)
    for name, shape in ((rows, (40_000,)), (rows + "x", (8, 40_000))):
        assert decided[name].layout.spec == PartitionSpec()
        assert decided[name].notices == (
            (
                f"it belongs to a parameter of shape (40000, 8) and has shape {shape} itself: "
                "replicated"
            ),
        )


def test_state_in_a_tree_of_its_own_follows_its_parameter():
    rules = Rules.parse(["params/**/kernel=(model,data)"])
    tensors = {
        "params/layers_0/wq/kernel": (8, 16),
        "opt_state/0/mu/layers_0/wq/kernel": (8, 16),
        "opt_state/0/v_row/layers_0/wq/kernel": (8,),
        "opt_state/0/count": (),
    }
    decided = rules.decide_all(tensors, MESH)
    assert decided["opt_state/0/mu/layers_0/wq/kernel"].layout.spec == PartitionSpec(
        "model", "data"
    )
    assert "'params/layers_0/wq/kernel'" in decided["opt_state/0/mu/layers_0/wq/kernel"].why
    assert decided["opt_state/0/v_row/layers_0/wq/kernel"].layout.spec == PartitionSpec()
    assert decided["opt_state/0/count"].layout.spec == PartitionSpec()


def test_a_moving_average_follows_its_parameter_wherever_it_stands_in_the_tree():
    rules = Rules.parse("model/**=(x)", mesh="x=2")
    for names in (["ema/w", "model/w"], ["model/w", "ema/w"]):
        decided = rules.decide_all(dict.fromkeys(names, (8, 8)))
        assert {decision.layout.spec for decision in decided.values()} == {PartitionSpec("x")}


def test_state_that_dcp_flattened_follows_a_pattern_with_the_whole_name_of_what_it_lies_below():
    rules = Rules.parse("optim/layers.0.w=(x)", mesh="x=2")
    assert rules.decide("optim/state.layers.0.w.exp_avg", (8, 8)).layout.spec == PartitionSpec("x")


def test_a_module_may_be_called_state():
    rules = Rules.parse(["**/state.proj=(x)", "**/proj=replicated"], mesh="x=2")
    decision = rules.decide("model/state.proj.weight", (8, 8))
    assert decision.layout.spec == PartitionSpec("x")
    assert decision.why == "rule 1 matches the name above it"


def test_factors_of_a_parameter_are_told_from_parameters_of_fewer_dimensions():
    scanned = "decoder/layers/self_attention/query/kernel"
    tensors = {
        f"params/{scanned}": (64, 2, 8, 64),
        f"opt_state/0/v_row/{scanned}": (64, 2, 8),
        f"opt_state/0/mu/{scanned}": (64, 2, 8, 64),
    }
    specs = [
        decision.layout.spec
        for decision in Rules.preset("llama/tp").decide_all(tensors, MESH).values()
    ]
    assert specs == [
        PartitionSpec(None, None, "model", None),
        PartitionSpec(),
        PartitionSpec(None, None, "model", None),
    ]
    rules = Rules.parse("**/kernel=(None,None,model,data)")
    specs = [decision.layout.spec for decision in rules.decide_all(tensors, MESH).values()]
    assert specs == [
        PartitionSpec(None, None, "model", "data"),
        PartitionSpec(),
        PartitionSpec(None, None, "model", "data"),
    ]


def test_a_thousand_tensors_compile_each_pattern_once():
    rules = Rules.preset("mixtral/fsdp=data+tp")
    names = {
        f"model/model.layers.{layer}.self_attn.{x}_proj.weight": (8, 8)
        for layer in range(250)
        for x in "qkvo"
    }
    before = compile_glob.cache_info().misses
    assert len({decision.layout for decision in rules.decide_all(names, MESH).values()}) == 2
    assert compile_glob.cache_info().misses - before <= len(rules.steps(MESH))


def test_what_has_one_element_is_replicated_whatever_the_rules_say():
    decision = Rules.parse("**=(model,data)").decide("step", (), MESH)
    assert (decision.layout.spec, decision.notices) == (PartitionSpec(), ())
    assert Rules((), "error").decide("step", (1, 1), MESH).layout == Sharding(MESH, PartitionSpec())


def test_unmatched_tensors_are_replicated_with_a_notice_or_an_error():
    rules = Rules.parse("a=(model)")
    assert rules.decide("b", (1000, 1000), MESH).notices == ("no rule matches it: replicated",)
    assert rules.decide("b", (10, 10), MESH).notices == ()
    strict = Rules.parse("a=(model)", unmatched="error")
    with pytest.raises(
        OptionError,
        match=r"No rule matches 'b' and 1 other tensor; add a rule, such as '\*\*=replicated'",
    ):
        strict.decide_all({"a": (8,), "b": (8,), "c": (8,)}, MESH)


def test_sides_need_not_divide_and_a_notice_says_what_becomes_of_them():
    rules = Rules.parse("**=(data,model)")
    decision = rules.decide("w", (7, 5), MESH)
    assert decision.layout.tile((7, 5)) == (4, 2)
    assert decision.notices == (
        "dimension 0 is uneven: 7 in 2 parts (data=2) are 1 of 4, one of 3",
        "dimension 1 is uneven: 5 in 4 parts (model=4) are 2 of 2, one of 1, 1 empty",
    )
    assert rules.decide("w", (0, 8), MESH).notices == ()


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=3),
    st.sampled_from(["(data,model)", "(None,(data,model))", "((model,data),None)"]),
)
def test_the_tiles_of_every_decision_cover_the_tensor(shape, text):
    layout = Rules.parse(f"**={text}").decide("w", tuple(shape), MESH).layout
    tile, parts = layout.tile(shape), layout.parts(len(shape))
    assert all(side * count >= size for side, count, size in zip(tile, parts, shape, strict=True))


@pytest.mark.parametrize(
    ("texts", "kind", "message"),
    [
        (["a=(None,modle)"], ShardingError,
         "rule 1 .'a=.None,modle.'.: the mesh has no axis 'modle' .did you mean 'model'..;"),
        (["**=replicated", "a=(5)"], ShardingError,
         "rule 2 .'a=.5.'.: the mesh has no axis 5; its axes are data, model"),
        (["a/w=(0,data)"], ShardingError,
         "rule 1 .'a/w=.0,data.'.: .*axis 'data' appears more than once"),
        ([3], OptionError, "rule 1: 3 is not a rule"),
        (3, OptionError, "rule 1: 3 is not a rule"),
        (["a/**=(None,None,model)"], ShardingError,
         r"has 3 entries, and 'a/w' has shape \(8, 8\); give at most one per dimension"),
        (["w=(model)"], OptionError,
         r"rule 1 .'w=.model.'. matches no tensor; .* '\*\*/w' would match 'a/w'"),
        (["a/wurst=(model)"], OptionError,
         "matches no tensor; patterns are matched with whole names, such as 'a/w'"),
        (["a/*=(model)", "a/w=(data)"], OptionError,
         r"rule 2 .'a/w=.data.'. decides for no tensor: earlier rules match first"),
    ],
)  # fmt: skip
def test_mistakes_name_the_rule_and_what_to_do(texts, kind, message):
    with pytest.raises(kind, match=message):
        Rules.parse(texts).decide_all({"a/w": (8, 8)}, MESH)


def test_without_a_mesh_only_what_cuts_nothing_can_be_said():
    assert Rules.parse("**=replicated").decide("w", (8,)).layout is None
    with pytest.raises(
        ShardingError,
        match=r"rule 1 .'w=.model.'. cuts over the axis 'model' and needs a mesh; give one",
    ):
        Rules.parse("w=(model)").decide("w", (8,))


def test_rules_have_a_mesh_of_their_own_and_are_values():
    rules = Rules.parse("w=(model)", mesh="model=2")
    assert rules.decide("w", (8,)).layout.tile((8,)) == (4,)
    assert spec(rules, "w", (8,)) == PartitionSpec("model")
    same = pickle.loads(pickle.dumps(rules))
    assert same == rules
    assert hash(same) == hash(rules)
    assert same.decide("w", (8,)) == rules.decide("w", (8,))


def test_rules_come_one_after_the_other():
    rules = Rules.parse("**/w=(model)").then(
        Rules.parse(["**=(data)"], mesh="data=2", unmatched="error")
    )
    assert (rules.unmatched, rules.mesh, len(rules.entries)) == ("error", parse_mesh("data=2"), 2)
    assert [spec(rules, name, (8,)) for name in ("a/w", "v")] == [
        PartitionSpec("model"),
        PartitionSpec("data"),
    ]
