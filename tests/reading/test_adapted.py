"""Restores under other names, into other sizes, and of tensors that are joined or split, against
the same done by numpy."""

from __future__ import annotations

import logging
import subprocess
import sys
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from composites import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import shardckpt
from shardckpt import PerProcess, SaveOptions, Target, errors
from shardckpt.io.url import parse


@pytest.fixture
def saved(tmp_path):
    state = {
        "model": {
            "embed": np.arange(12.0).reshape(6, 2),
            "layers": [{"w": np.full(3, i)} for i in range(2)],
            "empty": {},
        },
        "step": 7,
        "rng": PerProcess({"seed": 3}),
    }
    shardckpt.save(tmp_path / "c", state)
    return tmp_path / "c"


def test_renamed_leaves_of_every_kind_come_back_at_their_new_places(saved):
    restored = shardckpt.restore(
        saved,
        rename=[
            "s/^model/net/",
            r"s/layers\/(\d)\/w/layers.\1.weight/",
            "s/^step$/progress\\/step/",
        ],
    )
    assert restored.keys() == {"net", "progress", "rng"}
    assert restored["net"].keys() == {"embed", "layers.0.weight", "layers.1.weight", "empty"}
    assert (restored["net"]["layers.1.weight"] == 1).all()
    assert (restored["progress"], restored["net"]["empty"], restored["rng"]) == (
        {"step": 7},
        {},
        [{"seed": 3}],
    )
    like = {
        "net": {
            "embed": np.zeros((6, 2)),
            "layers.0.weight": np.zeros(3, np.int64),
            "layers.1.weight": np.ones(3, np.int64),
            "empty": {},
        },
        "progress": {"step": 0},
        "seeds": PerProcess(None),
    }
    rules = [
        "s/^model/net/",
        r"s/layers\/(\d)\/w/layers.\1.weight/",
        "s/^step$/progress\\/step/",
        "s/^rng/seeds/",
    ]
    back = shardckpt.restore(saved, like, rename=rules)
    assert back["net"]["embed"] is like["net"]["embed"]
    assert like["net"]["embed"][5].tolist() == [10.0, 11.0]
    assert (back["progress"]["step"], back["seeds"].value) == (7, {"seed": 3})


def test_lists_keep_their_form_where_they_move_as_a_whole(saved):
    like = {"net": {"blocks": [{"w": np.zeros(3, np.int64)}, {"w": np.zeros(3, np.int64)}]}}
    back = shardckpt.restore(
        saved, like, only="model/layers/**", rename="s/^model.layers/net\\/blocks/"
    )
    assert [one["w"].tolist() for one in back["net"]["blocks"]] == [[0] * 3, [1] * 3]


def test_patterns_of_only_are_those_of_the_checkpoint_and_names_may_be_exchanged(tmp_path):
    shardckpt.save(tmp_path / "c", {"a": np.array([1]), "b": np.array([2])})
    rules = ["s/^a$/t/", "s/^b$/a/", "s/^t$/b/"]
    like = {"a": np.array([0]), "b": np.array([0])}
    shardckpt.restore(tmp_path / "c", like, rename=rules, only="a")
    assert (like["a"][0], like["b"][0]) == (0, 1)
    shardckpt.restore(tmp_path / "c", like, rename=rules)
    assert (like["a"][0], like["b"][0]) == (2, 1)
    with pytest.raises(errors.NamesMismatchError, match="only='c' selects none"):
        shardckpt.restore(tmp_path / "c", like, rename=rules, only="c")


def test_a_leaf_that_is_not_restored_gives_way_to_one_that_takes_its_place(tmp_path):
    place = tmp_path / "c"
    shardckpt.save(place, {"a": np.ones(3), "b": np.zeros(3), "c": {"d": np.full(2, 2.0), "e": 5}})
    like = {"b": np.full(3, 7.0), "c": {"e": 0}}
    restored = shardckpt.restore(place, like, only=["a", "c/e"], rename="s/^a$/b/")
    assert (restored["b"].tolist(), restored["c"]) == ([1, 1, 1], {"e": 5})
    assert shardckpt.restore(place, only="b", rename="s/^a$/b/")["b"].tolist() == [0, 0, 0]
    assert shardckpt.restore(place, only="a", rename="s/^a$/c/")["c"].tolist() == [1, 1, 1]
    assert shardckpt.restore(place, only="a", rename="s,^a$,b/f,")["b"]["f"].tolist() == [1, 1, 1]
    model = torch.nn.ParameterDict({"b": torch.zeros(3)})
    shardckpt.save(
        tmp_path / "t",
        shardckpt.train_state(
            model=torch.nn.ParameterDict({"a": torch.ones(3), "b": torch.zeros(3)})
        ),
    )
    shardckpt.restore(
        tmp_path / "t",
        shardckpt.train_state(model=model, rng=False),
        only="model/a",
        rename="s,/a$,/b,",
    )
    assert model["b"].tolist() == [1, 1, 1]
    with pytest.raises(errors.NamesMismatchError, match="would both be called 'b'"):
        shardckpt.restore(place, only=["a", "b"], rename="s/^a$/b/")


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"rename": "s/nothing/else/"}, errors.OptionError, "matches none of"),
        ({"rename": "model=net"}, errors.OptionError, "s/regex/replacement/"),
        ({"rename": 3}, errors.OptionError, "rename=3"),
        ({"rename": "s/embed/step/"}, errors.NamesMismatchError, None),
        ({"rename": "s/^model.embed$/step/"}, errors.NamesMismatchError, "both be called 'step'"),
        (
            {"fit": {"**/nothing": "pad"}},
            errors.OptionError,
            r"'\*\*/nothing'.*matches none of the tensors",
        ),
        ({"fit": {"**": "grow"}}, errors.OptionError, "pad"),
        ({"fit": "pad"}, errors.OptionError, "fit='pad'"),
        ({"fit": {3: "pad"}}, errors.OptionError, r"fit=\{3: .pad.\}: give patterns"),
        ({"mapping": "hf-nothing"}, errors.OptionError, "there is no mapping"),
        ({"mapping": "hf-gpt2-linear"}, errors.OptionError, "matches no tensor"),
        ({"invert_mapping": True}, errors.OptionError, "no mapping"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_is_read(
    saved, options, kind, says
):
    like = shardckpt.restore(saved)
    checkpoint = shardckpt.open(saved)
    with pytest.raises(errors.OptionError, match="without `like`"):
        shardckpt.restore(saved, fit={"**/embed": "pad"})
    with pytest.raises(kind, match=says):
        shardckpt.restore(checkpoint, {**like, "rng": PerProcess(None)}, **options)
    assert checkpoint.stats.reads == 0


def leaf_of(kind, shape, dtype):
    """A leaf with other contents, and a function that reads the restored one."""
    array = np.full(shape, 5, dtype)
    if kind == "strided":
        array = np.full(tuple(2 * n for n in shape), 5, dtype)[
            tuple(slice(None, None, 2) for _ in shape)
        ]
    if kind == "torch":
        return torch.from_numpy(array), lambda leaf: leaf.numpy()
    if kind == "meta":
        return torch.empty(
            shape, dtype=getattr(torch, np.dtype(dtype).name), device="meta"
        ), lambda leaf: leaf.numpy()
    return (Target(shape=shape) if kind == "target" else array), lambda leaf: leaf


def fitted(array, shape):
    whole = np.zeros(shape, array.dtype)
    common = tuple(slice(0, min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    whole[common] = array[common]
    return whole


SHAPES = st.integers(1, 3).flatmap(
    lambda rank: st.tuples(*[st.lists(st.integers(0, 9), min_size=rank, max_size=rank)] * 2)
)


@pytest.mark.long
@settings(max_examples=120, deadline=None)
@given(
    shapes=SHAPES,
    mode=st.sampled_from(["pad", "slice"]),
    kind=st.sampled_from(["numpy", "strided", "torch", "meta", "target"]),
    layout=st.sampled_from(["packed", "zarr"]),
    cast=st.booleans(),
)
def test_fitted_tensors_have_what_both_have_and_zeros_elsewhere(
    tmp_path_factory, shapes, mode, kind, layout, cast
):
    small, large = (tuple(map(f, *shapes)) for f in (min, max))
    stored, own = (small, large) if mode == "pad" else (large, small)
    place = tmp_path_factory.mktemp("fit")
    array = (np.arange(prod(stored)) + 1).astype(np.float32).reshape(stored)
    shardckpt.save(place, {"a": {"w": array}}, options=SaveOptions(layout=layout, overwrite=True))
    leaf, read = leaf_of(kind, own, np.int32 if cast else np.float32)
    if kind == "target" and cast:
        leaf = Target(shape=own, dtype="int32")
    back = shardckpt.restore(
        place, {"b": {"w": leaf}}, rename="s/^a/b/", fit={"b/*": mode}, cast=cast
    )
    assert np.array_equal(read(back["b"]["w"]), fitted(array, own))
    if kind in ("numpy", "strided", "torch"):
        assert back["b"]["w"] is leaf


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64", "int4"])
def test_padding_is_zero_in_every_dtype(tmp_path, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    shardckpt.save(tmp_path / "c", {"w": np.ones((2, 3), kind)})
    like = {"w": np.ones((4, 5), kind)}
    shardckpt.restore(tmp_path / "c", like, fit={"w": "pad"})
    assert (like["w"] == fitted(np.ones((2, 3), kind), (4, 5))).all()


def test_a_dtype_without_a_zero_is_not_padded(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.ones(2, ml_dtypes.float8_e8m0fnu)})
    with pytest.raises(errors.ShapeMismatchError, match=r"^w: float8_e8m0fnu has no zero"):
        shardckpt.restore(
            tmp_path / "c", {"w": np.ones(3, ml_dtypes.float8_e8m0fnu)}, fit={"w": "pad"}
        )


def test_shapes_that_do_not_fit_as_asked_are_refused_with_both(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.ones((4, 4))})
    checkpoint = shardckpt.open(tmp_path / "c")
    for shape, mode in [
        ((5, 3), "pad"),
        ((3, 5), "slice"),
        ((4, 4, 1), "pad"),
        ((4,), "slice"),
        ((3, 4), "pad"),
    ]:
        with pytest.raises(
            errors.ShapeMismatchError,
            match=rf"^w: .*\(4, 4\).*{'.'.join(map(str, shape))[:1]}.*{mode}",
        ):
            shardckpt.restore(checkpoint, {"w": np.zeros(shape)}, fit={"w": mode})
    with pytest.raises(errors.ShapeMismatchError, match=r"fit=\{'w': 'slice'\}"):
        shardckpt.restore(checkpoint, {"w": np.zeros((2, 4))})
    with pytest.raises(errors.ShapeMismatchError) as refused:
        shardckpt.restore(checkpoint, {"w": np.zeros((5, 3))})
    assert "fit=" not in str(refused.value)
    assert checkpoint.stats.reads == 0


def test_a_composite_tensor_of_another_shape_is_refused_by_name(tmp_path):
    shardckpt.save(tmp_path / "c", {"m": {"w": scaled(3)}})
    with pytest.raises(errors.StructureMismatchError, match=r"m/w.*composite tensor.*of shape"):
        shardckpt.restore(tmp_path / "c", {"m": {"w": scaled(3, (16, 4))}}, fit={"m/w": "pad"})
    like = {"n": {"v": scaled(9)}}
    shardckpt.restore(tmp_path / "c", like, rename="s/^m.w/n\\/v/")
    assert like["n"]["v"].data_.equal(scaled(3).data_)


STACK = (
    "[[map]]\n"
    'from = "{model}/{expert}/w"\n'
    'to = "{model}/w"\n'
    "stack = 0\n"
    "[[map]]\n"
    'from = ["q", "k"]\n'
    'to = "qk"\n'
)


def test_tensors_of_any_state_are_joined_and_split_by_a_mapping_as_in_exports(tmp_path):
    (tmp_path / "m.toml").write_text(STACK)
    parts = np.arange(24.0).reshape(3, 4, 2)
    state = {
        "m": {str(i): {"w": part} for i, part in enumerate(parts)},
        "q": np.ones((2, 3)),
        "k": np.zeros((1, 3)),
        "n": 5,
    }
    shardckpt.save(tmp_path / "parts", state)
    options = {"mapping": tmp_path / "m.toml"}
    joined = shardckpt.restore(tmp_path / "parts", **options)
    assert joined.keys() == {"m", "qk", "n"}
    assert np.array_equal(joined["m"]["w"], parts)
    assert joined["qk"].tolist() == [[1.0] * 3] * 2 + [[0.0] * 3]
    like = {"m": {"w": torch.ones(4, 4, 3, dtype=torch.bfloat16)}, "qk": np.ones((2, 3)), "n": 0}
    back = shardckpt.restore(
        tmp_path / "parts", like, cast=True, fit={"m/w": "pad", "qk": "slice"}, **options
    )
    assert np.array_equal(like["m"]["w"].float().numpy(), fitted(parts, (4, 4, 3)))
    assert (back["qk"] == 1).all()
    shardckpt.save(tmp_path / "joined", {"m": {"w": parts}, "qk": joined["qk"]})
    with pytest.raises(errors.OptionError, match="ratio"):
        shardckpt.restore(tmp_path / "joined", invert_mapping=True, **options)
    (tmp_path / "m.toml").write_text(STACK + "sizes = [2, 1]\n")
    split = shardckpt.restore(tmp_path / "joined", invert_mapping=True, **options)
    assert np.array_equal(split["m"]["2"]["w"], parts[2])
    assert split["k"].tolist() == [[0.0] * 3]
    assert shardckpt.restore(tmp_path / "parts", only="m/w", **options).keys() == {"m"}


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ('from = "w"\nto = ["a", "b"]', (8,)),
        ('from = "w"\nto = ["a", "b"]\naxis = -1', (4, 6)),
        ('from = "w"\nto = ["w", "b"]', (4, 6)),
        ('from = "w"\nto = ["a", "b"]\nstack = 0', (2, 6)),
        ('from = "w"\nto = ["a", "b"]\ninterleave = 2', (4, 6)),
        ('from = "w"\nto = "v"\ntranspose = true', (4, 4)),
    ],
)
def test_parts_of_a_tensor_are_those_of_an_export(tmp_path, rule, shape):
    (tmp_path / "map.toml").write_text(f"[[map]]\n{rule}\n")
    shardckpt.save(tmp_path / "c", {"w": np.arange(float(np.prod(shape))).reshape(shape)})
    shardckpt.export(tmp_path / "c", tmp_path / "model.safetensors", mapping=tmp_path / "map.toml")
    expected = load_file(tmp_path / "model.safetensors")
    restored = shardckpt.restore(tmp_path / "c", mapping=tmp_path / "map.toml")
    assert restored.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(restored[name], array)
    like = {name: np.zeros_like(array) for name, array in expected.items()}
    shardckpt.restore(tmp_path / "c", like, mapping=tmp_path / "map.toml")
    for name, array in expected.items():
        np.testing.assert_array_equal(like[name], array)


def test_numbers_that_a_built_in_mapping_names_come_from_a_copy_as_the_error_says(tmp_path):
    name = "model.layers.0.self_attn.{}_proj.weight"
    shardckpt.save(tmp_path / "c", {name.format(part): np.arange(8)[:, None] for part in "qk"})
    with pytest.raises(
        errors.OptionError,
        match=r"mapping hf-llama-meta, rule 2: rotary, heads names 'num_attention_heads', which "
        r"nothing says; .* table \[values\] .*copy it from shardckpt/reading/naming/mappings\)",
    ):
        shardckpt.restore(tmp_path / "c", mapping="hf-llama-meta")
    folder = Path(shardckpt.__file__).parent / "reading/naming/mappings"
    built_in = (folder / "hf-llama-meta.toml").read_text().replace("optional = true", "")
    copy = built_in.replace("[[map]]", "[[map]]\noptional = true")
    values = "[values]\nnum_attention_heads = 1\nnum_key_value_heads = 2\n"
    (tmp_path / "m.toml").write_text(f"{copy}\n{values}")
    restored = shardckpt.restore(tmp_path / "c", mapping=tmp_path / "m.toml")
    for part, rows in (("q", [0, 4, 1, 5, 2, 6, 3, 7]), ("k", [0, 2, 1, 3, 4, 6, 5, 7])):
        assert restored[f"layers.0.attention.w{part}.weight"].ravel().tolist() == rows


def test_a_tensor_that_a_mapping_makes_may_have_the_name_of_a_stored_one(tmp_path):
    (tmp_path / "m.toml").write_text('[[map]]\nfrom = ["a", "b"]\nto = "a"')
    shardckpt.save(tmp_path / "c", {"a": np.ones(2), "b": np.zeros(1)})
    assert shardckpt.restore(tmp_path / "c", mapping=tmp_path / "m.toml")["a"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("only", ["**.weight", ["**a.weight", "**n.weight"]])
def test_only_selects_a_made_tensor_by_its_place(tmp_path, only):
    rule = '[[map]]\nfrom = "a.weight"\nto = "a.weight"\ntranspose = true'
    (tmp_path / "m.toml").write_text(rule)
    options = {"mapping": tmp_path / "m.toml", "only": only}
    stored = np.arange(6.0).reshape(2, 3)
    state = {"a.weight": stored, "n.weight": np.ones(2), "a.bias": np.ones(2)}
    shardckpt.save(tmp_path / "c", state)
    like = {"a.weight": np.zeros((3, 2)), "n.weight": np.zeros(2), "a.bias": np.zeros(2)}
    shardckpt.restore(tmp_path / "c", like, **options)
    assert np.array_equal(like["a.weight"], stored.T)
    assert (like["n.weight"].tolist(), like["a.bias"].tolist()) == ([1, 1], [0, 0])
    alone = shardckpt.restore(tmp_path / "c", **options)
    assert alone.keys() == {"a.weight", "n.weight"}


def test_only_selects_a_made_tensor_of_a_module_by_its_place(tmp_path):
    rule = '[[map]]\nfrom = "a.weight"\nto = "a.weight"\ntranspose = true'
    (tmp_path / "m.toml").write_text(rule)
    stored = np.arange(6, dtype=np.float32).reshape(2, 3)
    shardckpt.save(tmp_path / "c", {"model": {"a.weight": stored}, "step": 3})
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3, bias=False)})
    state = shardckpt.train_state(model=model, rng=False)
    shardckpt.restore(tmp_path / "c", state, mapping=tmp_path / "m.toml", only="model/*.weight")
    assert np.array_equal(model["a"].weight.detach(), stored.T)


@pytest.mark.parametrize("keys", [["actor", "critic"], ["critic", "actor"]])
def test_a_rule_must_match_in_one_of_several_modules(tmp_path, keys):
    def state(**actor):
        modules = {"actor": torch.nn.ModuleDict(actor), "critic": torch.nn.Linear(2, 3)}
        return shardckpt.train_state(**{key: modules[key] for key in keys}, rng=False)

    rule = '[[map]]\nfrom = ["{}.weight", "k.weight"]\nto = "qk.weight"\n'
    before = {name: torch.nn.Linear(2, 2, bias=False) for name in "qk"}
    shardckpt.save(tmp_path / "c", state(**before))
    after = torch.nn.Linear(2, 4, bias=False)
    (tmp_path / "m.toml").write_text(rule.format("q"))
    shardckpt.restore(tmp_path / "c", state(qk=after), mapping=tmp_path / "m.toml")
    assert torch.equal(after.weight, torch.cat([before[name].weight for name in "qk"]))
    (tmp_path / "m.toml").write_text(rule.format("p").replace("k.", "r."))
    with pytest.raises(errors.OptionError, match=r"rule 1 .* matches no tensor"):
        shardckpt.restore(tmp_path / "c", state(qk=after), mapping=tmp_path / "m.toml")


MANY_NAMED_W = """
[[map]]
from = ["w", "x"]
to = "w"
[[map]]
from = ["y", "z"]
to = "w'"
"""


def test_made_tensors_have_names_of_their_own_beside_any_other_names(tmp_path):
    (tmp_path / "m.toml").write_text(MANY_NAMED_W)
    options = {"mapping": tmp_path / "m.toml"}
    state = {name: np.full(2, float(i)) for i, name in enumerate("wxyz")}
    shardckpt.save(tmp_path / "c", state)
    restored = shardckpt.restore(tmp_path / "c", **options)
    assert restored["w"].tolist() == [0, 0, 1, 1]
    assert restored["w'"].tolist() == [2, 2, 3, 3]
    (tmp_path / "m.toml").write_text(MANY_NAMED_W.replace("""to = "w'\"""", 'to = "v"'))
    shardckpt.save(tmp_path / "own", state | {"w'": PerProcess(5)})
    like = {"w": np.zeros(4), "v": np.zeros(4), "w'": PerProcess(None)}
    back = shardckpt.restore(tmp_path / "own", like, **options)
    assert (back["w"].tolist(), back["w'"].value) == ([0, 0, 1, 1], 5)


def test_messages_name_made_tensors_by_their_places(tmp_path, caplog):
    (tmp_path / "m.toml").write_text('[[map]]\nfrom = ["a", "b"]\nto = "a"')
    options = {"mapping": tmp_path / "m.toml"}
    shardckpt.save(tmp_path / "c", {"a": np.ones(2), "b": np.zeros(1), "c": np.zeros(2)})
    like = {"a": np.zeros(2), "c": np.zeros(2)}
    with pytest.raises(errors.ShapeMismatchError, match=r"^a: .* pass fit=\{'a': 'slice'\}"):
        shardckpt.restore(tmp_path / "c", like, **options)
    shared = np.zeros(3)
    with pytest.raises(errors.StructureMismatchError, match=r"^a: in `like` .* with c, so"):
        shardckpt.restore(tmp_path / "c", {"a": shared, "c": shared[:2]}, **options)
    shardckpt.restore(tmp_path / "c", like, fit={"a": "slice"}, **options)
    assert "'a': (3,) made of a, b; (3,) → (2,), slice" in caplog.text


def test_a_tied_tensor_that_is_transposed_under_each_name_goes_into_a_tied_one(tmp_path, caplog):
    rules = [f'[[map]]\nfrom = "{name}"\nto = "{name}"\ntranspose = true\n' for name in "eh"]
    (tmp_path / "m.toml").write_text("".join(rules))
    options = {"mapping": tmp_path / "m.toml"}
    stored, shared = np.arange(6.0).reshape(2, 3), np.zeros((3, 2))
    shardckpt.save(tmp_path / "c", {"e": stored, "h": stored})
    back = shardckpt.restore(tmp_path / "c", {"e": shared, "h": shared}, **options)
    assert back["e"] is back["h"] is shared
    assert np.array_equal(shared, stored.T)
    assert "'e': (3, 2) made of e\n'h': (3, 2) made of e" in caplog.text
    apart = {"e": np.zeros((3, 2)), "h": np.zeros((3, 2))}
    shardckpt.restore(tmp_path / "c", apart, **options)
    assert np.array_equal(apart["e"], stored.T)
    assert np.array_equal(apart["h"], stored.T)


def test_a_base_holds_the_parts_of_a_tensor_that_is_made(tmp_path):
    (tmp_path / "m.toml").write_text(STACK)
    state = {
        "m": {"0": {"w": np.ones(3)}, "1": {"w": np.zeros(3)}},
        "q": np.ones(2),
        "k": np.ones(2),
    }
    shardckpt.save(tmp_path / "base", state)
    shardckpt.save(
        tmp_path / "c", state, options=SaveOptions(base=str(tmp_path / "base"), skip="m/**")
    )
    assert shardckpt.restore(tmp_path / "c", mapping=tmp_path / "m.toml")["m"]["w"].tolist() == [
        [1] * 3,
        [0] * 3,
    ]


def test_only_the_bytes_that_are_needed_are_read(tmp_path):
    """Chunks of 64 KiB: a slice of a quarter of the rows reads a quarter of them, and padding reads
    nothing more."""
    rows = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10)
    mesh = shardckpt.Mesh((16,), ("x",))
    options = SaveOptions(shardings={"**": shardckpt.Sharding(mesh, shardckpt.PartitionSpec("x"))})
    shardckpt.save(
        tmp_path / "c", {"w": rows, "e": {str(i): rows[:64] + i for i in range(4)}}, options=options
    )
    (tmp_path / "m.toml").write_text('[[map]]\nfrom = "e/{i}"\nto = "e"\nstack = 0')

    def read(like, **given):
        checkpoint = shardckpt.open(tmp_path / "c")
        shardckpt.restore(checkpoint, like, strict=False, **given)
        return checkpoint.stats

    part = read({"w": np.zeros((256, 1 << 10), np.float32)}, only="w", fit={"w": "slice"})
    assert part.bytes_needed == rows.nbytes // 4
    assert part.bytes_read <= rows.nbytes // 4 * 1.01
    more = read({"w": np.ones((1100, 1100), np.float32)}, only="w", fit={"w": "pad"})
    assert (more.bytes_needed, more.bytes_read <= rows.nbytes * 1.01) == (rows.nbytes, True)
    two = read(
        {"e": np.ones((2, 64, 1 << 10), np.float32)},
        only="e",
        mapping=tmp_path / "m.toml",
        fit={"e": "slice"},
    )
    assert two.bytes_needed == 2 * rows[:64].nbytes
    assert two.bytes_read <= two.bytes_needed * 1.01


def test_the_log_names_each_tensor_that_was_renamed_made_or_fitted(tmp_path, caplog):
    (tmp_path / "m.toml").write_text('[[map]]\nfrom = ["q", "k"]\nto = "qk"')
    shardckpt.save(
        tmp_path / "c", {"a": np.ones((6, 2)), "q": np.ones(2), "k": np.ones(2), "same": np.ones(1)}
    )
    like = {"b": np.ones((8, 2)), "qk": np.ones(3), "same": np.ones(1)}
    with caplog.at_level(logging.WARNING, "shardckpt"):
        shardckpt.restore(
            tmp_path / "c",
            like,
            rename="s/^a$/b/",
            mapping=tmp_path / "m.toml",
            fit={"b": "pad", "qk": "slice"},
        )
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"{parse(tmp_path / 'c')}: ")
    assert "'a': restored as 'b'; (6, 2) → (8, 2), pad" in message
    assert "'qk': (4,) made of q, k; (4,) → (3,), slice" in message
    assert "same" not in message


def test_a_restore_without_these_options_imports_none_of_their_modules(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.ones(3)})
    program = (
        f"import sys, shardckpt, numpy; shardckpt.restore({str(tmp_path / 'c')!r}, {{'w': "
        "numpy.zeros(3)}); print([name for name in sys.modules if 'reading.naming' in name or "
        "name.endswith('state.moving')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
