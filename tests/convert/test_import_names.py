"""Imports under other names, of tensors that are made of others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import shardckpt
from shardckpt import Mesh, errors
from shardckpt.convert.arrangement import Arrangement
from shardckpt.convert.foreign import ForeignPart, ForeignTensor, structure_and_tensors
from shardckpt.convert.naming.renamed_state import renamed_state
from shardckpt.convert.options import NameOptions
from shardckpt.layout.dtypes import by_name
from shardckpt.reading.naming.mapping import TensorMapping
from shardckpt.reading.naming.mapping_file import read_mapping
from shardckpt.state import alias_map, meanings, unflatten

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

HIDDEN, KV, LAYERS = 24, 8, 3
FUSED = """
[[map]]
from = ["layers.{i}.q.weight", "layers.{i}.k.weight", "layers.{i}.v.weight"]
to = "blocks.{i}.qkv.weight"
ratio = [3, 1, 1]
axis = 1
interleave = 4
transpose = true

[[map]]
from = "layers.{i}.norm"
to = "blocks.norms"
stack = 0
"""


def weights() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {"embed": rng.normal(size=(100, HIDDEN)).astype(np.float32)}
    for i in range(LAYERS):
        for name, rows in (("q", HIDDEN), ("k", KV), ("v", KV)):
            arrays[f"layers.{i}.{name}.weight"] = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
        arrays[f"layers.{i}.norm"] = rng.normal(size=HIDDEN).astype(np.float32)
    return arrays


def fused(state: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays that the mapping FUSED asks for, made by numpy."""
    arrays = {
        "embed": state["embed"],
        "blocks.norms": np.stack([state[f"layers.{i}.norm"] for i in range(LAYERS)]),
    }
    for i in range(LAYERS):
        q, k, v = (state[f"layers.{i}.{name}.weight"].T for name in "qkv")
        groups = [
            part
            for g in range(4)
            for part in (q[:, 6 * g : 6 * g + 6], k[:, 2 * g : 2 * g + 2], v[:, 2 * g : 2 * g + 2])
        ]
        arrays[f"blocks.{i}.qkv.weight"] = np.concatenate(groups, 1)
    return arrays


def same(actual: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    assert {name: (a.shape, a.tobytes()) for name, a in actual.items()} == {
        name: (a.shape, a.tobytes()) for name, a in expected.items()
    }


@pytest.fixture
def mapping(tmp_path: Path) -> Path:
    (tmp_path / "fused.toml").write_text(FUSED)
    return tmp_path / "fused.toml"


def imported(source: Path, target: Path, **options: Any) -> Any:
    shardckpt.import_checkpoint(source, target, workers=1, **options)
    assert shardckpt.open(target).verify().ok
    return shardckpt.restore(target)


def test_tensors_are_made_of_others_as_numpy_makes_them_and_taken_apart_again(
    tmp_path: Path, mapping: Path
) -> None:
    save_file(weights(), tmp_path / "a.safetensors")
    layout: dict[str, Any] = {
        "mesh": Mesh((4,), ("x",)),
        "rules": ["blocks.*.qkv.weight=(x,None)", "embed=(None,x)"],
        "unmatched": "replicate",
    }
    same(
        imported(tmp_path / "a.safetensors", tmp_path / "1", mapping=mapping, **layout),
        fused(weights()),
    )
    shardckpt.export_safetensors(tmp_path / "1", tmp_path / "b.safetensors")
    same(load_file(tmp_path / "b.safetensors"), fused(weights()))
    same(
        imported(tmp_path / "b.safetensors", tmp_path / "2", mapping=mapping, invert_mapping=True),
        weights(),
    )
    shardckpt.export_safetensors(tmp_path / "2", tmp_path / "c.safetensors", mapping=mapping)
    same(load_file(tmp_path / "c.safetensors"), fused(weights()))


def test_renamed_tensors_are_read_once_and_slashes_make_containers(tmp_path: Path) -> None:
    state = {
        name: np.arange(300_000, dtype=np.float32) + i
        for i, name in enumerate(("model.a.w", "model.b.w", "head.w"))
    }
    save_file(state, tmp_path / "a.safetensors")
    options: dict[str, Any] = {
        "strip_prefix": "model.",
        "rename": ["s/[.]/\\//g"],
        "exclude": "head.*",
        "add_prefix": "net/",
        "into": "s",
    }
    report = shardckpt.import_checkpoint(
        tmp_path / "a.safetensors", tmp_path / "1", workers=1, **options
    )
    assert report.read_bytes == 2 * 4 * 300_000
    restored = shardckpt.restore(tmp_path / "1")
    same(
        {name: restored["s"]["net"][name]["w"] for name in "ab"},
        {name: state[f"model.{name}.w"] for name in "ab"},
    )
    assert restored.keys() == {"s"}
    assert restored["s"].keys() == {"net"}
    assert restored["s"]["net"].keys() == {"a", "b"}


def test_the_attempt_follows_from_the_names_and_workers_agree(
    tmp_path: Path, mapping: Path
) -> None:
    save_file(weights(), tmp_path / "a.safetensors")

    def attempt(**options: Any) -> str:
        return shardckpt.import_checkpoint(
            tmp_path / "a.safetensors", tmp_path / "1", worker=(0, 2), workers=1, **options
        ).attempt

    assert attempt(mapping=mapping) == attempt(mapping=mapping)
    (tmp_path / "other.toml").write_text(
        mapping.read_text().replace("interleave = 4", "interleave = 2")
    )
    swapped = "s/layers.0.norm/x/", "s/layers.1.norm/layers.0.norm/", "s/x/layers.1.norm/"
    all_of_them = [
        attempt(),
        attempt(mapping=mapping),
        attempt(mapping=tmp_path / "other.toml"),
        attempt(rename=swapped),
    ]
    assert len(set(all_of_them)) == 4


# --- the new state, without files -----------------------------------------------------------------

F32 = by_name("float32")


def tensor(shape: tuple[int, ...] = (4, 6), **options: Any) -> ForeignTensor:
    return ForeignTensor(shape, F32, (ForeignPart.whole(shape),), **options)


def arranged(state: object, **options: Any) -> tuple[Arrangement, Any]:
    """The arrangement, and the state with each tensor as the names of what it is made of."""
    structure, _ = structure_and_tensors(state, "there")
    arrangement = Arrangement.named(structure, NameOptions(**options), "there")
    made = {name: [view.tensor for view in views] for name, views in arrangement.views.items()}
    return arrangement, unflatten(arrangement.structure.tree, made)


def test_other_leaves_and_the_types_of_keys_stay_what_they_are() -> None:
    state = {
        "opt": {
            "state": {0: {"m": tensor(), "step": 3}, 1: {"m": tensor()}},
            "groups": [{"lr": 0.1}, (tensor(), 7)],
            "none": {},
        }
    }
    _, tree = arranged(state, rename="s/m$/exp_avg/", exclude="opt/state/*/step")
    assert tree == {
        "opt": {
            "state": {0: {"exp_avg": ["opt/state/0/m"]}, 1: {"exp_avg": ["opt/state/1/m"]}},
            "groups": [{"lr": 0.1}, (["opt/groups/1/0"], 7)],
            "none": {},
        }
    }
    _, tree = arranged(state, include="opt/state/0/m", rename="s#opt/state/0/m#a~1b/~0#")
    assert tree == {"a/b": {"~": ["opt/state/0/m"]}}
    _, tree = arranged([tensor(), tensor(), 5], rename="s/^1$/2/", exclude="2")
    assert tree == {0: ["0"], 2: ["1"]}
    _, tree = arranged([tensor(), tensor()], rename=["s/^1$/x/", "s/^0$/1/", "s/x/0/"])
    assert tree == [["1"], ["0"]]


def test_small_leaves_and_empty_containers_move_as_tensors_do() -> None:
    state = {
        "optimizer_states": [
            {
                "state": {0: {"m": tensor(), "step": 3}},
                "groups": [{"betas": (0.9, 0.95), "params": [0]}],
                "none": {},
            }
        ]
    }
    _, tree = arranged(state, rename="s#^optimizer_states/0#optimizer#")
    assert tree == {
        "optimizer": {
            "state": {0: {"m": ["optimizer_states/0/state/0/m"], "step": 3}},
            "groups": [{"betas": (0.9, 0.95), "params": [0]}],
            "none": {},
        }
    }
    _, tree = arranged(state, strip_prefix="optimizer_states/0/", exclude="**/none")
    assert tree == {
        "state": {0: {"m": ["optimizer_states/0/state/0/m"], "step": 3}},
        "groups": [{"betas": (0.9, 0.95), "params": [0]}],
    }


def test_a_file_of_names_moves_and_leaves_out_small_leaves(tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text('{"global_step": "step", "epoch": null}')
    _, tree = arranged(
        {"w": tensor(), "global_step": 7, "epoch": 1}, rename_file=tmp_path / "names.json"
    )
    assert tree == {"w": ["w"], "step": 7}


def test_two_leaves_never_get_one_name() -> None:
    with pytest.raises(
        errors.NamesMismatchError, match="'steps' and 'step' would both be called 'step'"
    ):
        arranged({"w": tensor(), "steps": 7, "step": 1}, rename="s/^steps$/step/")


@settings(max_examples=100, deadline=None)
@given(
    state=st.recursive(
        st.integers() | st.just("tensor"),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text("a0", min_size=1) | st.integers(0, 2), inner)
        ),
        max_leaves=12,
    )
)
def test_a_state_that_moves_as_a_whole_is_the_same_elsewhere(state: Any) -> None:
    def made(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: made(inner) for key, inner in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(map(made, node))
        return tensor() if node == "tensor" else node

    whole = {"there": made(state), "w": tensor()}
    _, stays = arranged(whole)
    _, moves = arranged(whole, rename="s#^there#here/x#")
    assert repr(moves["here"]["x"]) == repr(stays["there"])  # in the same order, too


def test_tied_tensors_stay_tied_or_become_copies() -> None:
    state = {"embed": tensor(identity=1), "other": 5, "head": tensor(identity=1)}
    arrangement, tree = arranged(state, add_prefix="model/")
    assert tree == {"model": {"embed": ["embed"], "head": ["embed"]}, "other": 5}
    assert alias_map(arrangement.structure.tree) == {"model/head": "model/embed"}
    assert not arrangement.notes
    arrangement, _ = arranged(state, ties="copies")
    assert not alias_map(arrangement.structure.tree)
    assert arrangement.notes == (
        "'head' is the same tensor as 'embed', and is written for itself.",
    )


def test_each_name_of_a_tied_tensor_gets_what_the_mapping_says_of_it(tmp_path: Path) -> None:
    state = {"a": tensor(identity=1), "c": tensor(), "b": tensor(identity=1)}

    def mapped(rules: str) -> tuple[Any, dict[str, str]]:
        (tmp_path / "m.toml").write_text(rules)
        arrangement, tree = arranged(state, mapping=tmp_path / "m.toml")
        turned = {n: "T" for n, new in arrangement.structure.tensors.items() if new.shape == (6, 4)}
        return tree, alias_map(arrangement.structure.tree) | turned

    def rule(old: str, new: str, more: str = "") -> str:
        return f'[[map]]\nfrom = "{old}"\nto = "{new}"\n{more}\n'

    tree, how = mapped(rule("a", "x") + rule("c", "a"))
    assert tree == {"x": ["a"], "a": ["c"], "b": ["a"]}
    assert how == {"x": "b"}
    tree, how = mapped(rule("a", "a", "transpose = true"))
    assert tree == {"a": ["a"], "c": ["c"], "b": ["a"]}
    assert how == {"a": "T"}
    tree, how = mapped(rule("{n}", "{n}", "transpose = true"))
    assert how == {"a": "T", "c": "T", "b": "a"}
    tree, how = mapped(rule("b", "y"))
    assert tree == {"a": ["a"], "c": ["c"], "y": ["a"]}
    assert how == {"y": "a"}
    with pytest.raises(errors.NamesMismatchError, match="'b' would be made twice"):
        mapped(rule("c", "b"))


def test_a_built_in_mapping_names_the_head_of_a_tied_model() -> None:
    state = {"model.embed_tokens.weight": tensor(identity=1), "lm_head.weight": tensor(identity=1)}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rules = read_mapping("hf-llama-meta", heads).rules
    mapping = TensorMapping(tuple(replace(rule, optional=True) for rule in rules))
    arrangement, _ = arranged(state, mapping=mapping)
    assert alias_map(arrangement.structure.tree) == {"output.weight": "tok_embeddings.weight"}


def test_what_elements_mean_goes_with_them() -> None:
    state = {"key": tensor((4, 2), meaning="jax.key:threefry2x32"), "w": tensor()}
    arrangement, _ = arranged(state, rename="s/key/rng/")
    assert meanings(arrangement.structure.tree) == {"rng": "jax.key:threefry2x32"}
    assert meanings(arrangement.below("a/b").structure.tree) == {"a/b/rng": "jax.key:threefry2x32"}


@pytest.mark.parametrize("name", ["", "a//b", "/a", "w/x", "small", "box", "box/s/x", "a/"])
def test_a_name_where_something_else_lies_is_refused(name: str) -> None:
    state = {"w": tensor(), "small": 1, "box": {"s": 2}, "moved": tensor()}
    with pytest.raises(errors.NamesMismatchError):
        arranged(state, rename=f"s#^moved$#{name}#")


NAMES = st.lists(st.text("ab.~/0", min_size=1, max_size=5), min_size=2, max_size=6, unique=True)


@settings(max_examples=150, deadline=None)
@given(old=NAMES, new=NAMES)
def test_any_names_become_a_state_or_an_error_and_no_tensor_is_lost(
    old: list[str], new: list[str]
) -> None:
    count = min(len(old), len(new))
    structure, _ = structure_and_tensors({name: tensor() for name in old[:count]}, "there")
    leaves = {name: object() for name in new[:count]}
    try:
        state = renamed_state(structure.tree, leaves, {})
    except errors.NamesMismatchError:
        return
    reached: list[object] = []

    def walk(node: Any) -> None:
        for child in node.values():
            walk(child) if isinstance(child, dict) else reached.append(child)

    walk(state)
    assert sorted(map(id, reached)) == sorted(map(id, leaves.values()))


def test_pieces_of_a_joined_tensor_have_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('[[map]]\nfrom = ["q", "k", "empty"]\nto = "qk"')
    halves = ForeignPart((0, 0), (4, 3), (4, 3)), ForeignPart((0, 3), (4, 3), (1, 3))
    state = {"q": ForeignTensor((4, 6), F32, halves), "k": tensor((2, 6)), "empty": tensor((0, 6))}
    arrangement, _ = arranged(state, mapping=tmp_path / "m.toml")
    assert [(piece.path, piece.shape) for piece in arrangement.structure.tensors["qk"].pieces] == [
        ("qk=p0", (4, 3)),
        ("qk=p3", (4, 3)),
        ("qk=p24", (2, 6)),
    ]
