"""Outputs of a state: its tensors, their names and their dtypes."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from arrays import made

from shardckpt.convert.foreign import ForeignPart, ForeignTensor, structure_and_tensors
from shardckpt.convert.naming.apply import Outputs, outputs_of
from shardckpt.convert.naming.ties import first_names
from shardckpt.convert.options import NameOptions
from shardckpt.errors import DtypeMismatchError, NamesMismatchError, OptionError
from shardckpt.format.structure import Structure
from shardckpt.layout.dtypes import of_numpy
from shardckpt.state import flatten

W = np.arange(12, dtype=np.float32).reshape(4, 3)
STATE = {
    "model": {"layers.0": {"w": W, "b": W[0]}, "head": W},
    "optimizer": {"m": W + 1, "count": np.int64(3)},
    "step": 7,
}


def structure(state: Any) -> Structure:
    """Of a state of arrays; those that are one array are tied."""
    arrays: dict[int, ForeignTensor] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: leaf(inside) for key, inside in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        whole = ForeignPart.whole(value.shape)
        return arrays.setdefault(
            id(value), ForeignTensor(value.shape, of_numpy(value.dtype), (whole,), None, id(value))
        )

    return structure_and_tensors(leaf(state), "here")[0]


def plan(state: Any = STATE, *, importing: bool = False, **options: Any) -> Outputs:
    return outputs_of(structure(state), NameOptions(**options), "here", importing=importing)


def names(outputs: Outputs) -> list[str]:
    return [output.name for output in outputs.tensors]


def test_all_tensors_are_written_tied_ones_once_and_other_leaves_are_noted() -> None:
    outputs = plan()
    assert names(outputs) == ["model.layers.0.w", "model.layers.0.b", "optimizer.m"]
    assert outputs.tied == {"model.head": "model.layers.0.w"}
    assert outputs.notes == (
        "'optimizer/count' and 1 more: no tensor, and not written.",
        "'model.head' is the same tensor as 'model.layers.0.w', and is not written again.",
    )


def test_patterns_choose_by_the_names_of_the_checkpoint() -> None:
    assert names(plan(include="model/**", exclude=["**/b"], strip_prefix="model/")) == [
        "layers.0.w"
    ]
    assert names(plan(include=["model/head"])) == ["model.head"], "a further name will do"
    with pytest.raises(
        NamesMismatchError, match=r"here: include='modle/\*\*' selects none of its 4 tensors"
    ):
        plan(include="modle/**")
    with pytest.raises(
        NamesMismatchError, match=r"here: include=\['modle/\*\*'\] selects none of its 4 tensors"
    ):
        plan(include=["model/**", "modle/**"], exclude="**/b")
    with pytest.raises(
        NamesMismatchError, match=r"here: exclude=\['modle/\*\*'\] selects none of its 4 tensors"
    ):
        plan(exclude=["**/b", "modle/**"])
    assert plan(exclude=[]) == plan()


def test_steps_go_in_the_order_in_which_they_are_documented(tmp_path) -> None:
    (tmp_path / "names.json").write_text(
        json.dumps({"layers.0.w": "l.0.left", "optimizer/m": "l.0.right"})
    )
    (tmp_path / "m.toml").write_text(
        '[[map]]\nfrom = ["l.*.gauche", "l.*.right"]\nto = "l.*"\naxis = 1'
    )
    outputs = plan(
        exclude="**/b",
        strip_prefix="model.",
        rename_file=tmp_path / "names.json",
        rename="s/left/gauche/",
        mapping=tmp_path / "m.toml",
        add_prefix="net.",
        dtype={"net.l.*": "bf16"},
    )
    (only,) = outputs.tensors
    assert (only.name, only.shape, only.dtype.name) == ("net.l.0", (4, 6), "bfloat16")
    both = made(outputs.tensors, {"model/layers.0/w": W, "optimizer/m": W + 1})["net.l.0"]
    assert np.array_equal(both, np.concatenate([W, W + 1], 1).astype(ml_dtypes.bfloat16))


def test_a_dtype_for_all_floats_leaves_other_numbers_alone() -> None:
    state = {
        "f": np.zeros(2, np.float64),
        "i": np.zeros(2, np.int32),
        "c": np.zeros(2, np.complex64),
    }
    assert [o.dtype.name for o in plan(state, dtype="fp16").tensors] == [
        "float16",
        "int32",
        "complex64",
    ]
    assert [
        o.dtype.name for o in plan(state, dtype={"i": "uint8", "*": "float64"}, exclude="c").tensors
    ] == [
        "float64",
        "uint8",
    ]
    with pytest.raises(
        DtypeMismatchError,
        match=r"'c' has dtype complex64, which cannot be converted to float32; leave it out of "
        r"dtype='c'",
    ):
        plan(state, dtype={"c": "float32"})
    with pytest.raises(OptionError, match="'d' matches no tensor"):
        plan(state, dtype={"d": "float32"})


def test_numbers_that_mean_something_are_neither_converted_nor_passed_off_as_others() -> None:
    flat = flatten(
        {"rng": W, "w": W + 1},
        lambda v: isinstance(v, np.ndarray),
        meaning=lambda v: "jax.key:fry" if v is W else None,
    )
    tensors = structure({"rng": W, "w": W + 1}).tensors
    keys = Structure(flat.tree, tensors)
    assert (
        "'rng' is jax.key:fry, and is written as numbers."
        in outputs_of(keys, NameOptions(), "here").notes
    )
    with pytest.raises(DtypeMismatchError, match=r"means jax\.key:fry"):
        outputs_of(keys, NameOptions(dtype={"*": "float16"}, rename="s/rng/r/"), "here")


def test_on_the_way_in_names_keep_the_borders_of_containers_and_ties_stay() -> None:
    theirs = {"wte.weight": W, "lm_head.weight": W, "h.0.w": W + 1}
    outputs = plan(theirs, importing=True, rename=r"s/^h\.(\d+)\./h\/\1\//", add_prefix="model/")
    assert names(outputs) == ["model/wte.weight", "model/h/0/w"]
    assert outputs.tied == {"model/lm_head.weight": "model/wte.weight"}


def test_a_mapping_that_needs_a_tied_tensor_twice_says_how_it_gets_it(tmp_path) -> None:
    (tmp_path / "m.toml").write_text('[[map]]\nfrom = ["q.w", "k.w", "v.w"]\nto = "qkv.w"')
    state = {"q.w": W, "k.w": W, "v.w": W + 1}
    with pytest.raises(
        NamesMismatchError, match=r"'k\.w' is the same tensor as 'q\.w', .* use ties='copies'\.$"
    ):
        plan(state, mapping=tmp_path / "m.toml")
    (whole,) = plan(state, mapping=tmp_path / "m.toml", ties="copies").tensors
    assert whole.shape == (12, 3)
    del state["k.w"]
    with pytest.raises(NamesMismatchError, match=r"'k\.w' is missing, or an earlier rule has"):
        plan(state, mapping=tmp_path / "m.toml", ties="copies")


def test_a_rule_for_a_name_that_is_not_written_says_which_tensor_it_is(tmp_path) -> None:
    (tmp_path / "m.toml").write_text('[[map]]\nfrom = "{any}_head.weight"\nto = "{any}.w"')
    with pytest.raises(
        OptionError,
        match=r"'lm_head\.weight' is the same tensor as 'wte\.weight', .* use ties='copies'\.$",
    ):
        plan({"wte.weight": W, "lm_head.weight": W}, mapping=tmp_path / "m.toml")


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_what_is_no_pattern_is_refused(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option}=3: give a pattern"):
        NameOptions(**{option: 3})
    with pytest.raises(OptionError, match="give patterns of names, as text"):
        NameOptions(**{option: lambda _name: True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": "a/b"}, "as sed does"),
        ({"rename": ["s/a/b/", 3]}, "as sed does"),
        ({"rename": 3}, "rename=3"),
        ({"mapping": {}}, "mapping={}: give the path"),
        ({"config": 3}, "config=3: give the path"),
        ({"strip_prefix": ""}, "strip_prefix=''"),
        ({"add_prefix": None}, "add_prefix=None"),
        ({"dtype": "float17"}, "float17"),
        ({"dtype": 3}, "give a dtype's name"),
        ({"invert_mapping": 1}, "invert_mapping=1"),
        ({"ties": "never"}, 'use "auto", "once" or "copies"'),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_is_read(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        NameOptions(**options)


# --- ties -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "kept"),
    [
        (["model.embed_tokens.weight", "lm_head.weight"], "model.embed_tokens.weight"),
        (["lm_head.weight", "model.embed_tokens.weight"], "model.embed_tokens.weight"),
        (
            ["lm_head.weight", "model.decoder.embed_tokens.weight"],
            "model.decoder.embed_tokens.weight",
        ),
        (
            [
                "decoder.embed_tokens.weight",
                "encoder.embed_tokens.weight",
                "lm_head.weight",
                "shared.weight",
            ],
            "shared.weight",
        ),
        (["cls.predictions.decoder.bias", "cls.predictions.bias"], "cls.predictions.bias"),
        (["lm_head.decoder.bias", "lm_head.bias"], "lm_head.bias"),
        (
            ["output_layer.weight", "embedding.word_embeddings.weight"],
            "embedding.word_embeddings.weight",
        ),
        (["b", "a"], "b"),
    ],
)
def test_the_name_that_is_kept_is_the_one_that_transformers_ties_others_to(
    group: list[str], kept: str
) -> None:
    assert first_names(dict.fromkeys(group, "stored")) == {
        name: kept for name in group if name != kept
    }


@pytest.mark.parametrize(
    ("ties", "tie_word_embeddings", "copied"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("auto", None, False),
        ("copies", True, True),
        ("once", False, False),
    ],
)
def test_a_model_that_ties_nothing_gets_a_copy_for_each_name(
    tmp_path, ties: str, tie_word_embeddings: bool | None, copied: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tie_word_embeddings}))
    outputs = plan({"embed": W, "lm_head.weight": W}, ties=ties, config=tmp_path, add_prefix="net.")
    assert names(outputs) == (["net.embed", "net.lm_head.weight"] if copied else ["net.embed"])
    assert outputs.tied == ({} if copied else {"net.lm_head.weight": "net.embed"})
    (note,) = outputs.notes
    assert (
        note == "'net.lm_head.weight' is the same tensor as 'net.embed', and is "
        f"{'written for itself' if copied else 'not written again'}."
    )
