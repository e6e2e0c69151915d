"""Tensors that `dtype=` converts: the same rule for reshards, imports, exports and their plans."""

from __future__ import annotations

import json
import pickle
from types import MappingProxyType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import shardckpt
from shardckpt import errors
from shardckpt.cli.app import app
from shardckpt.convert.options import ImportOptions
from shardckpt.reshard.optimizer_state import optimizer_state
from shardckpt.reshard.options import ReshardOptions
from shardckpt.state import flatten
from tests.support.composites import Scaled

F = np.float32
STEP = np.array(12345, F)
"""12352 in bfloat16."""
STATE = {
    "model": {
        "w": np.ones((4, 4), F),
        "scale": np.array(3.1, F),
        "ids": np.arange(3),
        "z": np.ones(2, np.complex64),
    },
    "optimizer": {
        "state": {"w": {"exp_avg": np.full((4, 4), 0.1, F), "step": STEP}},
        "param_groups": {"w": {"lr": 1e-3}},
    },
}
LEFT = {
    "model": {"not floating-point": 2, "without dimensions": 1},
    "optimizer": {"optimizer state": 2},
}


@pytest.fixture
def source(tmp_path):
    shardckpt.save(tmp_path / "a", STATE)
    return tmp_path / "a"


def dtypes(place):
    checkpoint = shardckpt.open(place)
    return {name: checkpoint.info(name).dtype.name for name in checkpoint.names()}


def changed(place):
    before = {
        name: array.dtype.name
        for name, array in flatten(
            STATE, lambda value: isinstance(value, np.ndarray)
        ).tensors.items()
    }
    return {name: dtype for name, dtype in dtypes(place).items() if dtype != before[name]}


def counts(report):
    return {one.subtree: (dict(one.converted), dict(one.left)) for one in report.conversions}


BARE = {"model": ({"bfloat16": 1}, LEFT["model"]), "optimizer": ({}, LEFT["optimizer"])}


def test_a_dtype_alone_converts_weights_and_leaves_counters_and_moments_and_says_so(
    source, tmp_path
):
    report = shardckpt.reshard(source, tmp_path / "b", dtype="bfloat16", workers=1)
    assert changed(tmp_path / "b") == {"model/w": "bfloat16"}
    assert shardckpt.restore(tmp_path / "b")["optimizer"]["state"]["w"]["step"] == 12345
    assert counts(report) == BARE


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ({"optimizer/**": "bf16"}, {"optimizer/state/w/exp_avg": "bfloat16"}),
        (
            {"": "bf16", "optimizer/**": "fp16"},
            {"model/w": "bfloat16", "optimizer/state/w/exp_avg": "float16"},
        ),
        ({"optimizer/**/step": "float64"}, {"optimizer/state/w/step": "float64"}),
        (
            {"model/ids": "int32", "model/scale": "bf16"},
            {"model/ids": "int32", "model/scale": "bfloat16"},
        ),
        ({"model/[isw]*": "bf16"}, {"model/w": "bfloat16"}),
    ],
)
def test_a_pattern_converts_what_it_names_and_counters_only_by_their_own_last_part(
    source, tmp_path, dtype, expected
):
    shardckpt.reshard(source, tmp_path / "b", dtype=dtype, workers=1)
    assert changed(tmp_path / "b") == expected


@pytest.mark.parametrize("to", ["torch", "dcp", "orbax", "safetensors"])
def test_exports_follow_the_same_rule(source, tmp_path, to):
    place = tmp_path / {"torch": "e.pt", "safetensors": "e.safetensors"}.get(to, "e")
    report = shardckpt.export(source, place, to=to, dtype="bfloat16")
    assert counts(report) == BARE
    shardckpt.import_checkpoint(place, tmp_path / "b", trust_pickle=True, workers=1)
    exported = {name.replace(".", "/"): dtype for name, dtype in dtypes(tmp_path / "b").items()}
    assert exported == {**dtypes(source), "model/w": "bfloat16"}


def test_exports_by_new_names_still_know_an_optimizer(source, tmp_path):
    report = shardckpt.export_safetensors(
        source, tmp_path / "e.safetensors", rename="s/^optimizer.*w/moments/", dtype="bf16"
    )
    assert counts(report)["moments"] == ({}, {"optimizer state": 2})


def test_imports_follow_the_same_rule_where_the_foreign_state_says_what_is_an_optimizer(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"net": model.state_dict(), "adam": optimizer.state_dict()}, tmp_path / "s.pt")
    report = shardckpt.import_checkpoint(
        tmp_path / "s.pt", tmp_path / "b", dtype="bfloat16", workers=1
    )
    assert counts(report) == {"net": ({"bfloat16": 2}, {}), "adam": ({}, {"optimizer state": 6})}
    assert {dtype for name, dtype in dtypes(tmp_path / "b").items() if name.startswith("adam")} == {
        "float32"
    }


def test_the_command_and_its_plan_say_what_is_converted_and_what_is_left(source, tmp_path):
    def run(*arguments):
        done = CliRunner().invoke(app, [*map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.output

    lines = [
        (
            "dtype     model: converted 1 to bfloat16; left 3 (1 without dimensions, 2 not "
            "floating-point)"
        ),
        "dtype     optimizer: converted 1 to bfloat16; left 1 (1 without dimensions)",
    ]
    options = ("--dtype", "bfloat16", "--dtype", "optimizer/**=bfloat16")
    for command in (
        ("plan", source),
        ("reshard", source, tmp_path / "b"),
        ("export", source, tmp_path / "e.pt", "--to", "torch"),
    ):
        assert [
            line for line in run(*command, *options).splitlines() if line.startswith("dtype ")
        ] == lines
    planned = json.loads(run("plan", source, *options, "--json"))["conversions"]
    made = json.loads(run("reshard", source, tmp_path / "c", *options, "--json"))["conversions"]
    assert (
        planned
        == made
        == [
            one.to_json()
            for one in shardckpt.reshard(
                source, tmp_path / "d", dtype={"": "bf16", "optimizer/**": "bf16"}
            ).conversions
        ]
    )


def test_any_mapping_of_dtypes_goes_to_worker_processes():
    for options in ReshardOptions, ImportOptions:
        dtype = pickle.loads(pickle.dumps(options(dtype=MappingProxyType({"a": "bf16"})))).dtype
        assert dtype == {"a": "bf16"}


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("float33", "unknown dtype 'float33'; did you mean float32 or float64 or float16"),
        ({"model/w": "flaot16"}, "unknown dtype 'flaot16'; did you mean float16"),
        ("zzz", "unknown dtype 'zzz'; known are bool, int8"),
        ("int32", "a dtype without a pattern must be a floating-point dtype; give a pattern"),
        (3, "dtype=3: give a dtype's name"),
        ({"model/w": 3}, "dtype '3' cannot be stored"),
        ({"modle/*": "bf16"}, r"'modle/\*' matches no tensor"),
    ],
)
def test_a_dtype_that_cannot_be_is_refused_in_words(source, tmp_path, dtype, words):
    with pytest.raises(errors.OptionError, match=words):
        shardckpt.reshard(source, tmp_path / "b", dtype=dtype)
    with pytest.raises(errors.OptionError, match=words):
        shardckpt.export(source, tmp_path / "e.pt", to="torch", dtype=dtype)


def test_the_parts_of_a_quantized_tensor_are_left_unless_a_pattern_names_them(tmp_path):
    weight = Scaled(torch.ones(4, 4, dtype=torch.int8), torch.full((4, 1), 0.1))
    shardckpt.save(tmp_path / "a", {"model": {"w": weight, "b": torch.ones(3)}})
    report = shardckpt.reshard(tmp_path / "a", tmp_path / "b", dtype="bfloat16", workers=1)
    left = {"part of a quantized tensor": 1, "not floating-point": 1}
    assert counts(report) == {"model": ({"bfloat16": 1}, left)}
    exported = shardckpt.export(tmp_path / "a", tmp_path / "e.pt", to="torch", dtype="bfloat16")
    assert counts(exported) == counts(report)
    like = Scaled(torch.zeros(4, 4, dtype=torch.int8), torch.zeros(4, 1))
    shardckpt.restore(tmp_path / "b", {"model": {"w": like}}, only="model/w/*")
    assert like.scale.tolist() == weight.scale.tolist()
    shardckpt.reshard(tmp_path / "a", tmp_path / "c", dtype={"**/scale": "bf16"}, workers=1)
    assert dtypes(tmp_path / "c")["model/w/scale"] == "bfloat16"


class Wrapper(torch.Tensor):
    """A plain tensor inside of another one, as torchao's for training in float8 is."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], {}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(args[0].inner)


def test_a_wrapper_around_plain_elements_is_rounded_like_them(tmp_path):
    weight = Wrapper(torch.ones(4, 4))
    shardckpt.save(tmp_path / "a", {"w": weight, "tied": weight})
    report = shardckpt.reshard(tmp_path / "a", tmp_path / "b", dtype="bfloat16", workers=1)
    assert dtypes(tmp_path / "b")["w/inner"] == "bfloat16"
    exported = shardckpt.export(tmp_path / "a", tmp_path / "e.pt", to="torch", dtype="bfloat16")
    shardckpt.export_safetensors(tmp_path / "a", tmp_path / "s", dtype="bfloat16")
    (stored,) = load_file(tmp_path / "s" / "model.safetensors").values()
    assert stored.dtype is torch.bfloat16
    assert counts(report) == counts(exported)


def test_what_is_state_of_an_optimizer_is_told_by_containers_and_names():
    w = np.ones(2)
    state = {
        "model": {"optimal.weight": w, "optics": {"w": w}, "state": {"h": w}},
        "a": {"state": {0: {"m": w}}, "param_groups": [{"lr": w}], "scaler": w},
        "flat": {"x.state.p.m": w, "x.param_groups.0.lr": w, "y.state.p": w},
        "chained_0.optimizer.state.p": w,
        "opt_state": [{"mu": {"w": w}, "nu": {"w": w}}],
        "Optim_1": {"w": w},
        "ema/exp_avg": w,
        "moments": {"p.exp_avg_sq": w, "momentum_buffer": w},
    }
    tree = flatten(state, lambda value: isinstance(value, np.ndarray)).tree
    assert sorted(optimizer_state(tree)) == sorted(
        (
            *(
                "a/state/0/m",
                "a/param_groups/0/lr",
                "flat/x.state.p.m",
                "flat/x.param_groups.0.lr",
                "chained_0.optimizer.state.p",
            ),
            *(
                "opt_state/0/mu/w",
                "opt_state/0/nu/w",
                "Optim_1/w",
                "moments/p.exp_avg_sq",
                "moments/momentum_buffer",
            ),
        )
    )
