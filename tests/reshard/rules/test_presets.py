"""Presets fit the tensors of real models: each one by a named rule, cut where transformers' own
plans cut it."""

import json
import os
import re
import sys

import forks
import pytest
from paths import CHILDREN

from shardckpt import Mesh, PartitionSpec, Rules
from shardckpt.errors import OptionError, ShardingError
from shardckpt.reshard.rules import parse_mesh
from shardckpt.reshard.rules.hf_config import MODEL_TYPES
from shardckpt.reshard.rules.preset import Preset
from shardckpt.reshard.rules.rules import combined_rules

CHILD = CHILDREN / "rules_hf.py"
# Transformers imports half of torch, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(300)
MESH = parse_mesh("fsdp=2,tensor=2,expert=2")


@pytest.fixture(scope="module")
def transformers():
    """Names, shapes and plans that transformers gives for its models; asked in a process of its
    own, without torch_xla."""
    environment = {**os.environ, "USE_TORCH_XLA": "0", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, CHILD, *MODEL_TYPES]
    return json.loads(
        forks.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=240
        ).stdout
    )


def shapes(described):
    return {f"model/{name}": tuple(shape) for name, (shape, _, _) in described["tensors"].items()}


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_tensor_of_a_model_is_decided_by_a_rule(transformers, kind):
    tensors = shapes(transformers[kind])
    decided = Rules.preset(MODEL_TYPES[kind]).decide_all(tensors, MESH)
    assert [name for name, decision in decided.items() if not decision.rule and tensors[name]] == []
    for name, decision in decided.items():
        assert len(decision.layout.spec) in (0, len(tensors[name])), name


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_tp_cuts_what_the_plan_for_tensor_parallelism_cuts(transformers, kind):
    decided = Rules.preset(f"{MODEL_TYPES[kind]}/tp").decide_all(shapes(transformers[kind]), MESH)
    for name, (_, _, placement) in transformers[kind]["tensors"].items():
        if placement is None:
            continue
        axes = decided[f"model/{name}"].layout.spec.axes
        cut = [dim for dim, cutting in enumerate(axes) if cutting]
        expected = re.match(r"_?S\((-?\d+)", placement)
        assert cut == ([int(expected[1])] if expected else []), name
        # A strided shard holds a part of each of what is packed, and a spec says a run: the reader
        # is told.
        assert placement.startswith("_S") == any(
            "concatenates" in notice for notice in decided[f"model/{name}"].notices
        ), name


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_ep_cuts_what_the_plan_for_expert_parallelism_cuts(transformers, kind):
    decided = Rules.preset(f"{MODEL_TYPES[kind]}/ep").decide_all(shapes(transformers[kind]), MESH)
    cut = {
        name: decision.layout.spec
        for name, decision in decided.items()
        if any(decision.layout.spec.axes)
    }
    assert transformers[kind]["experts"]
    assert cut == {
        f"model/{name}": PartitionSpec("expert", None, None)
        for name in transformers[kind]["experts"]
    }


COLUMNS = r"(c_attn|q_attn|c_fc|\.[qkv]|wi|wi_[01]|lm_head)\.(weight|bias)$"
ROWS = r"(c_proj|\.o|wo)\.weight$"


@pytest.mark.parametrize("kind", ["gpt2", "t5", "mt5", "umt5"])
def test_tp_cuts_as_megatron_does_where_there_is_no_plan(transformers, kind):
    """Columns are a layer's outputs, rows its inputs: a Linear's weight is (out, in), a Conv1D's
    (in, out)."""
    decided = Rules.preset(f"{MODEL_TYPES[kind]}/tp").decide_all(shapes(transformers[kind]), MESH)
    seen = set()
    for name, (shape, module, _) in transformers[kind]["tensors"].items():
        outputs = 0 if module == "Linear" or len(shape) == 1 else 1
        expected = (
            [outputs]
            if re.search(COLUMNS, name)
            else [1 - outputs]
            if re.search(ROWS, name)
            else None
        )
        if module in {"Linear", "Conv1D"} and expected is not None:
            seen.add((module, expected[0]))
            assert [
                dim for dim, axes in enumerate(decided[f"model/{name}"].layout.spec.axes) if axes
            ] == expected, name
        elif module in {"Linear", "Conv1D"}:
            assert decided[f"model/{name}"].layout.spec == PartitionSpec(), name
    assert (
        seen == {("Conv1D", 0), ("Conv1D", 1), ("Linear", 0)}
        if kind == "gpt2"
        else {("Linear", 0), ("Linear", 1)}
    )


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_fsdp_and_tp_cut_different_dimensions_and_every_matrix(transformers, kind):
    tensors = shapes(transformers[kind])
    both = Rules.preset(f"{MODEL_TYPES[kind]}/fsdp+tp").decide_all(tensors, MESH)
    fsdp = Rules.preset(f"{MODEL_TYPES[kind]}/fsdp").decide_all(tensors, MESH)
    for name, shape in tensors.items():
        if len(shape) == 2 and "relative_attention_bias" not in name:
            assert any(axes == ("fsdp",) for axes in both[name].layout.spec.axes), name
        expected = [
            tuple(axis for axis in axes if axis == "fsdp") for axes in both[name].layout.spec.axes
        ]
        assert list(fsdp[name].layout.spec.axes) == (expected if any(expected) else []), name


def test_state_of_optimizers_and_averaged_weights_go_like_the_model(transformers):
    rules = Rules.preset("llama/fsdp+tp")
    adam = {name: tuple(shape) for name, shape in transformers["training"]["AdamW"].items()}
    decided = rules.decide_all(adam, MESH)
    followed = 0
    for name, shape in adam.items():
        path = name.removeprefix("optimizer/state/").rpartition("/exp_avg")[0] or name.removeprefix(
            "ema/"
        )
        parameter = f"model/{path.removeprefix('model/')}"
        if parameter in adam and shape:
            assert decided[name].layout == decided[parameter].layout, name
            followed += parameter != name
    assert followed == 3 * sum(name.startswith("model/") for name in adam)


def test_factors_of_adafactor_are_replicated_and_the_large_ones_noticed(transformers):
    factored = {name: tuple(shape) for name, shape in transformers["training"]["Adafactor"].items()}
    large = {
        name: tuple(side if side == 1 else side * 1024 for side in shape)
        for name, shape in factored.items()
    }
    decided = Rules.preset("llama/fsdp+tp").decide_all(large, MESH)
    factors = [name for name in large if name.endswith(("row_var", "col_var"))]
    assert factors
    for name in factors:
        assert decided[name].layout.spec == PartitionSpec()
        assert "it belongs to a parameter of shape" in decided[name].notices[0]


MAXTEXT = {
    "params/params/decoder/layers/self_attention/query/kernel": (
        (64, 2, 4, 16),
        "fsdp None tensor None",
    ),
    "params/params/decoder/layers/self_attention/key/kernel": (
        (64, 2, 2, 16),
        "fsdp None tensor None",
    ),
    "params/params/decoder/layers/self_attention/out/kernel": (
        (4, 2, 16, 64),
        "tensor None None fsdp",
    ),
    "params/params/decoder/layers_0/self_attention/value/kernel": ((64, 2, 16), "fsdp tensor None"),
    "params/params/decoder/layers_0/mlp/wi_0/kernel": ((64, 128), "fsdp tensor"),
    "params/params/decoder/layers/mlp/wo/kernel": ((128, 2, 64), "tensor None fsdp"),
    "params/params/decoder/layers/pre_self_attention_layer_norm/scale": ((64, 2), "fsdp None"),
    "params/params/decoder/decoder_norm/scale": ((64,), "fsdp"),
    "params/params/token_embedder/embedding": ((96, 64), "tensor fsdp"),
    "params/params/decoder/logits_dense/kernel": ((64, 96), "fsdp tensor"),
}
MAXTEXT_EXPERTS = {
    "params/params/decoder/layers/MoeBlock_0/gate/kernel": ((64, 2, 8), "fsdp None None"),
    "params/params/decoder/layers/MoeBlock_0/wi_0": ((8, 2, 64, 128), "expert None fsdp tensor"),
    "params/params/decoder/layers_0/MoeBlock_0/wo": ((8, 128, 64), "expert tensor fsdp"),
}
MAXTEXT_GEMMA = {
    "params/params/decoder/layers/self_attention_local/query/kernel": (
        (64, 2, 4, 16),
        "fsdp None tensor None",
    ),
    "params/params/decoder/layers/mlp_global/wi_1/kernel": ((64, 2, 128), "fsdp None tensor"),
    "params/params/decoder/layers_1/post_ffw_norm_global/scale": ((64,), "fsdp"),
}
META = {
    "layers.0.attention.wq.weight": ((64, 64), "tensor fsdp"),
    "layers.0.attention.wv.weight": ((32, 64), "tensor fsdp"),
    "layers.0.attention.wo.weight": ((64, 64), "fsdp tensor"),
    "layers.0.feed_forward.w1.weight": ((128, 64), "tensor fsdp"),
    "layers.0.feed_forward.w2.weight": ((64, 128), "fsdp tensor"),
    "layers.0.attention_norm.weight": ((64,), "fsdp"),
    "tok_embeddings.weight": ((96, 64), "tensor fsdp"),
    "output.weight": ((96, 64), "tensor fsdp"),
    "rope.freqs": ((8,), ""),
}
MISTRAL = {
    "layers.0.feed_forward.experts.3.w1.weight": ((128, 64), "tensor fsdp"),
    "layers.0.block_sparse_moe.experts.0.w2.weight": ((64, 128), "fsdp tensor"),
    "model.layers.0.mlp.experts.1.down_proj.weight": ((64, 128), "fsdp tensor"),
    "layers.0.block_sparse_moe.gate.weight": ((8, 64), "None fsdp"),
}
GEMMA_PYTORCH = {
    "embedder.weight": ((96, 64), "tensor fsdp"),
    "model.layers.0.self_attn.qkv_proj.weight": ((128, 64), "tensor fsdp"),
    "model.layers.0.self_attn.o_proj.weight": ((64, 64), "fsdp tensor"),
    "model.layers.0.mlp.down_proj.weight": ((64, 128), "fsdp tensor"),
    "model.layers.0.pre_feedforward_layernorm.weight": ((64,), "fsdp"),
}
T5X = {
    "target/encoder/layers_0/attention/query/kernel": ((64, 64), "fsdp tensor"),
    "target/decoder/layers_0/encoder_decoder_attention/out/kernel": ((64, 64), "tensor fsdp"),
    "target/encoder/layers_0/mlp/wi_0/kernel": ((64, 128), "fsdp tensor"),
    "target/encoder/relpos_bias/rel_embedding": ((4, 32), "tensor None"),
    "target/decoder/logits_dense/kernel": ((64, 96), "fsdp tensor"),
}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", MAXTEXT),
        ("llama", META),
        ("mixtral", {**MAXTEXT, **MAXTEXT_EXPERTS}),
        ("mixtral", {**META, **MISTRAL}),
        ("gemma", {**MAXTEXT, **MAXTEXT_GEMMA}),
        ("gemma", GEMMA_PYTORCH),
        ("t5", T5X),
    ],
)
def test_the_families_go_by_their_original_names_as_well(family, names):
    tensors = {name: shape for name, (shape, _) in names.items()}
    for prefix in (
        ("", "opt_state/0/mu/") if "/" in next(iter(names)) else ("", "model/", "ema/module.")
    ):
        named = {f"{prefix}{name}": shape for name, shape in tensors.items()}
        decided = Rules.preset(family).decide_all(named, MESH)
        assert {
            name: " ".join(map(str, decided[prefix + name].layout.spec))
            for name in tensors
            if decided[prefix + name].rule
        } == {name: text for name, (_, text) in names.items()}


def test_the_mesh_decides_which_axis_plays_a_role():
    q = "model/layers.0.self_attn.q_proj.weight"

    def spec(preset, mesh):
        return Rules.preset(preset).decide(q, (64, 64), parse_mesh(mesh)).layout.spec

    assert spec("llama/tp", "data=2,model=4") == PartitionSpec("model", None)
    assert spec("llama/fsdp+tp", "data=2,model=4") == PartitionSpec("model", "data")
    assert spec("llama/fsdp", "data=2,fsdp=4") == PartitionSpec(None, "fsdp")
    assert spec("llama", "data=2,model=4") == PartitionSpec("model", None)
    with pytest.raises(
        ShardingError,
        match=r"no axis of the mesh \(data\) is named after a role; name the axis, as in "
        r"llama/fsdp=data",
    ):
        spec("llama", "data=2")
    for preset, words in (
        ("llama/fsdp", "but the mesh has none; give a mesh with axes, or leave the role out"),
        ("llama", r"axis of the mesh \(none\) is named after a role; give a mesh with axes, or"),
    ):
        with pytest.raises(ShardingError, match=words):
            Rules.preset(preset).decide(q, (64, 64), Mesh((), ()))
    assert spec("llama/fsdp=x+tp=y", "x=2,y=4") == PartitionSpec("y", "x")
    assert spec("llama/fsdp=x+tp=x", "x=2") == PartitionSpec("x", None)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "lama",
            OptionError,
            (
                "there is no family 'lama' .did you mean 'llama'..; there are llama, mixtral, "
                "gemma, gpt2, t5"
            ),
        ),
        (
            "llama/fdsp",
            OptionError,
            "preset 'llama/fdsp': the role 'fdsp' is unknown; the roles are fsdp, tp, ep",
        ),
        ("llama/tp+tp", OptionError, "the role 'tp' appears twice"),
        ("llama/", OptionError, "the role '' is unknown"),
        (
            "llama/tp",
            ShardingError,
            (
                "preset llama/tp: the role tp needs an axis 'tensor' or 'model' or 'tp' or 'mp', "
                "but the mesh has data, expert"
            ),
        ),
        (
            "llama/tp=date",
            ShardingError,
            "the role tp needs an axis 'date', but the mesh has data, expert .did you mean 'data'",
        ),
        (
            "gpt2/ep",
            OptionError,
            (
                "preset gpt2/ep matches none of the 1 tensors, such as 'model/foo.weight'; choose "
                "the family"
            ),
        ),
    ],
)
def test_presets_that_cannot_be_are_refused(text, kind, message):
    with pytest.raises(kind, match=message):
        Rules.preset(text).decide_all({"model/foo.weight": (8, 8)}, parse_mesh("data=2,expert=2"))


@pytest.mark.parametrize("text", ["llama", "mixtral/ep", "t5/fsdp=data+tp=model"])
def test_a_preset_read_from_its_text_is_the_preset(text):
    assert str(Preset.parse(text)) == text
    assert Preset.parse(str(Preset.parse(text))) == Preset.parse(text)


def configured(directory, **config):
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_models_configuration_chooses_the_preset(transformers, tmp_path, kind):
    directory = configured(tmp_path, **transformers[kind]["config"])
    rules = Rules.from_hf_config(directory, "tp")
    assert rules == Rules.from_hf_config(directory / "config.json", "tp")
    assert str(rules.entries[0]) == f"{MODEL_TYPES[kind]}/tp"
    assert rules.entries[0].heads.query == 4
    assert rules.decide_all(shapes(transformers[kind]), MESH)


def test_cutting_through_a_head_is_noticed(tmp_path):
    rules = Rules.from_hf_config(
        configured(tmp_path, model_type="llama", num_attention_heads=12, num_key_value_heads=2),
        "tp",
    )
    mesh = parse_mesh("tensor=8")
    names = {
        f"model/model.layers.0.self_attn.{x}_proj.weight": (96 if x in "qo" else 16, 96)
        for x in "qkvo"
    }
    decided = {
        name[-13]: decision.notices for name, decision in rules.decide_all(names, mesh).items()
    }
    assert decided["q"] == (
        "dimension 0: 12 query heads do not divide into 8 parts (tensor=8): some are cut",
    )
    assert (
        decided["k"]
        == decided["v"]
        == ("dimension 0: 2 key-value heads do not divide into 8 parts (tensor=8): some are cut",)
    )
    assert decided["o"] == (
        "dimension 1: 12 query heads do not divide into 8 parts (tensor=8): some are cut",
    )
    maxtext = rules.decide("params/decoder/layers_0/self_attention/key/kernel", (96, 2, 8), mesh)
    assert (
        maxtext.notices[0] == "dimension 1 is uneven: 2 in 8 parts (tensor=8) are 2 of 1, 6 empty"
    )


def test_a_model_that_no_preset_knows_is_refused_with_those_that_there_are(tmp_path):
    with pytest.raises(
        OptionError,
        match=r"config.json: there is no preset for model_type 'lama' \(did you mean 'llama'\?\); "
        r"there are .*mixtral",
    ):
        Rules.from_hf_config(configured(tmp_path, model_type="lama"))
    with pytest.raises(OptionError, match="no preset for model_type None"):
        Rules.from_hf_config(configured(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OptionError, match=r"config.json: the model's configuration cannot be read"):
        Rules.from_hf_config(tmp_path)
    with pytest.raises(OptionError, match="cannot be read"):
        Rules.from_hf_config(tmp_path / "none")


def test_a_preset_and_a_configuration_together_are_refused_as_both_decide_the_same_tensors(
    tmp_path,
):
    config = str(configured(tmp_path, model_type="llama", num_attention_heads=8))
    assert combined_rules(preset="llama/tp") is not None
    assert combined_rules(hf_config=config) is not None
    with pytest.raises(OptionError, match="both decide the same tensors; give one of"):
        combined_rules(preset="llama/tp", hf_config=config)
