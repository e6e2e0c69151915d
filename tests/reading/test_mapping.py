"""Tensors are made of others as numpy makes them, and a rule read backwards undoes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from arrays import Arrays, made, records
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.convert.naming.choose import config_values
from shardckpt.errors import DtypeMismatchError, NamesMismatchError, OptionError, ShapeMismatchError
from shardckpt.io.config_files import parse_text
from shardckpt.reading.naming.mapping_file import PRESETS, parse_mapping, read_mapping

if TYPE_CHECKING:
    from shardckpt.reading.naming.mapping import TensorMapping


def mapping(text: str, **values: int) -> TensorMapping:
    return parse_mapping(parse_text(text, ".toml", "m.toml"), "m.toml", values)


def numbers(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def run(text: str, arrays: Arrays, **values: int) -> Arrays:
    """Result of a mapping of arrays; a mapping that can be read backwards must give the arrays
    back."""
    rules = mapping(text, **values)
    result = made(rules.outputs(records(arrays)), arrays)
    try:
        inverse = rules.inverse()
    except OptionError:
        return result
    back = made(inverse.outputs(records(result)), result)
    assert {name: array.tolist() for name, array in back.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    return result


# --- against numpy --------------------------------------------------------------------------------


@st.composite
def fused(draw: st.DrawFn) -> tuple[dict[str, object], list[list[np.ndarray]], np.ndarray]:
    """A rule, the parts by index, and the whole as numpy makes it of them."""
    parts, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stacked = draw(st.integers(1, 3)) if draw(st.booleans()) else None
    rank = draw(st.integers(1, 3))
    order = draw(st.permutations(range(rank)))
    axis = draw(st.integers(0, rank - 1))
    ratio = [draw(st.integers(1, 3)) for _ in range(parts)]
    groups = groups if parts > 1 else 1
    sides = [draw(st.integers(0, 3)) for _ in range(rank)]
    rows, wholes = [], []
    for index in range(stacked or 1):
        shapes = [
            [groups * n if d == axis else side for d, side in enumerate(sides)] for n in ratio
        ]
        in_whole = [numbers(*shape, start=1000 * index + 100 * p) for p, shape in enumerate(shapes)]
        rows.append([array.transpose(np.argsort(order)) for array in in_whole])
        in_turn = [np.split(array, groups, axis) for array in in_whole]
        wholes.append(
            np.concatenate([turn[group] for group in range(groups) for turn in in_turn], axis)
        )
    stack = draw(st.integers(0, rank)) if stacked is not None else None
    whole = wholes[0] if stack is None else np.stack(wholes, stack)
    rule: dict[str, object] = {"transpose": list(order)}
    if parts > 1:
        at = axis + (stack is not None and axis >= stack)
        rule |= {
            "axis": draw(st.sampled_from([at, at - whole.ndim])),
            "ratio": ratio,
            "interleave": groups,
        }
    if stack is not None:
        rule["stack"] = draw(st.sampled_from([stack, stack - whole.ndim]))
    axes = [d for d, n in enumerate(whole.shape) if d != stack and n > 0]
    if axes and draw(st.booleans()):
        at = draw(st.sampled_from(axes))
        count = draw(
            st.sampled_from([n for n in range(1, whole.shape[at] + 1) if whole.shape[at] % n == 0])
        )
        rule["unfold"] = {"axis": draw(st.sampled_from([at, at - whole.ndim])), "count": count}
        whole = whole.reshape(
            *whole.shape[:at], count, whole.shape[at] // count, *whole.shape[at + 1 :]
        )
    return rule, rows, whole


@given(fused())
def test_merging_is_what_numpy_does_and_splitting_undoes_it(
    case: tuple[dict[str, object], list[list[np.ndarray]], np.ndarray],
) -> None:
    rule, rows, whole = case
    index = ".{index}" if "stack" in rule else ""
    doc = {
        "map": [
            {
                "from": [f"layer.*.part{p}{index}" for p in range(len(rows[0]))],
                "to": "layer.*.whole",
                **rule,
            }
        ]
    }
    arrays = {
        f"layer.7.part{p}{f'.{i}' if index else ''}": array
        for i, row in enumerate(rows)
        for p, array in enumerate(row)
    }
    merging = parse_mapping(doc, "m.toml")
    merged = made(merging.outputs(records(arrays)), arrays)
    assert list(merged) == ["layer.7.whole"]
    assert np.array_equal(merged["layer.7.whole"], whole)
    split = made(merging.inverse().outputs(records(merged)), merged)
    assert split.keys() == arrays.keys()
    assert all(np.array_equal(split[name], array) for name, array in arrays.items())
    if len(rows[0]) == 1 and not index:
        return
    # The same, written as a rule that splits.
    order: list[int] = rule["transpose"]  # type: ignore[assignment]
    (entry,) = doc["map"]
    backwards = {
        **entry,
        "from": entry["to"],
        "to": entry["from"],
        "transpose": [order.index(d) for d in range(len(order))],
    }
    again = made(parse_mapping({"map": [backwards]}, "m.toml").outputs(records(merged)), merged)
    assert all(np.array_equal(again[name], array) for name, array in arrays.items())


@given(heads=st.integers(1, 4), half=st.integers(0, 3), columns=st.integers(0, 2))
def test_rows_for_rotary_embeddings_move_as_metas_own_conversion_moves_them(
    heads: int, half: int, columns: int
) -> None:
    meta = numbers(heads * half * 2, columns)
    text = '[[map]]\nfrom = "wq"\nto = "q"\nrotary = {heads = "n", to = "halves"}'
    # `permute` of convert_llama_weights_to_hf.
    theirs = meta.reshape(heads, half, 2, columns).transpose(0, 2, 1, 3).reshape(meta.shape)
    assert np.array_equal(run(text, {"wq": meta}, n=heads)["q"], theirs)


def test_an_interleaved_fused_projection_is_megatrons() -> None:
    groups, queries, width, hidden = 2, 3, 4, 5
    q, k, v = (
        numbers(rows, hidden, start=1000 * i)
        for i, rows in enumerate([groups * queries * width, groups * width, groups * width])
    )
    text = (
        "[[map]]\n"
        'from = ["*.q", "*.k", "*.v"]\n'
        'to = "*.qkv"\n'
        'ratio = ["queries", 1, 1]\n'
        'interleave = "groups"'
    )
    result = run(text, {"0.q": q, "0.k": k, "0.v": v}, groups=groups, queries=queries)
    by_group = [array.reshape(groups, -1, width, hidden) for array in (q, k, v)]
    assert np.array_equal(result["0.qkv"], np.concatenate(by_group, 1).reshape(-1, hidden))


def test_a_conv1d_of_gpt2_is_cut_and_transposed_with_its_bias_by_one_rule() -> None:
    arrays = {"h.0.c_attn.weight": numbers(4, 12), "h.0.c_attn.bias": numbers(12)}
    result = run(
        "[[map]]\n"
        'from = "h.*.c_attn.*"\n'
        'to = ["l.*.q.*", "l.*.k.*", "l.*.v.*"]\n'
        "axis = -1\n"
        "transpose = true",
        arrays,
    )
    assert np.array_equal(result["l.0.k.weight"], arrays["h.0.c_attn.weight"][:, 4:8].T)
    assert np.array_equal(result["l.0.v.bias"], arrays["h.0.c_attn.bias"][8:])


def test_a_projection_gets_a_dimension_for_its_heads_as_jax_has_it() -> None:
    layers = {f"layers.{i}.q": numbers(6, 5) + 100 * i for i in range(2)}
    text = (
        "[[map]]\n"
        'from = "layers.{i}.q"\n'
        'to = "q/kernel"\n'
        "transpose = true\n"
        "stack = 1\n"
        "unfold = {axis = 2, count = 3}"
    )
    kernel = np.stack([array.reshape(3, 2, 5).transpose(2, 0, 1) for array in layers.values()], 1)
    assert np.array_equal(run(text, layers)["q/kernel"], kernel)


def test_parts_themselves_can_be_stacked() -> None:
    arrays = {"wi_0": numbers(2, 3), "wi_1": numbers(2, 3, start=9)}
    result = run('[[map]]\nfrom = ["wi_0", "wi_1"]\nto = "wi"\nstack = 1', arrays)
    assert np.array_equal(result["wi"], np.stack([arrays["wi_0"], arrays["wi_1"]], 1))


def test_what_no_rule_means_stays_and_everything_is_in_the_order_of_its_first_source() -> None:
    arrays = {name: numbers(2) for name in ["a", "l.0.k", "z", "l.0.q", "b"]}
    assert list(
        run('[[map]]\nfrom = ["l.*.q", "l.*.k"]\nto = "l.*.qk"\nratio = [1, 1]', arrays)
    ) == ["a", "z", "l.0.qk", "b"]


def test_a_tensor_goes_to_the_first_rule_that_means_it() -> None:
    text = '[[map]]\nfrom = "a.0"\nto = "first"\n[[map]]\nfrom = "a.*"\nto = "b.*"'
    assert list(run(text, {"a.0": numbers(1), "a.1": numbers(1)})) == ["first", "b.1"]


def test_what_is_stacked_is_counted_and_others_of_that_form_stay() -> None:
    arrays = {
        **{f"experts.{e}.w": numbers(2) + e for e in range(11)},
        "experts.shared.w": numbers(2),
    }
    result = run('[[map]]\nfrom = "experts.{e}.w"\nto = "experts.w"\nstack = 0', arrays)
    assert result["experts.w"].tolist() == [[e, e + 1] for e in range(11)]
    assert "experts.shared.w" in result


def test_tensors_that_differ_only_in_what_the_new_name_does_not_tell_apart_are_refused() -> None:
    with pytest.raises(NamesMismatchError, match="'xx' would be made twice"):
        run('[[map]]\nfrom = "**.**"\nto = "**x**"', {"x.": numbers(1), ".x": numbers(1)})


def test_many_heads_of_many_layers_are_planned_with_a_view_for_each_run() -> None:
    arrays = {
        f"l.{layer}.{p}": np.broadcast_to(np.int8(0), (4096, 8))
        for layer in range(8)
        for p in "qkv"
    }
    rules = mapping(
        "[[map]]\n"
        'from = ["l.*.q", "l.*.k", "l.*.v"]\n'
        'to = "l.*.qkv"\n'
        "ratio = [1, 1, 1]\n"
        "interleave = 128"
    )
    outputs = rules.outputs(records(arrays))
    assert [len(output.sources) for output in outputs] == [3 * 128] * 8
    assert [
        len(output.sources)
        for output in rules.inverse().outputs(
            {o.name: records({o.name: arrays["l.0.q"].repeat(3, 0)})[o.name] for o in outputs}
        )
    ] == ([128] * 24)


# --- what cannot be -------------------------------------------------------------------------------

Q_K = {"l.0.q": numbers(4, 2), "l.0.k": numbers(2, 2)}
MERGE = '[[map]]\nfrom = ["l.*.q", "l.*.k"]\nto = "l.*.qk"\n'


@pytest.mark.parametrize(
    ("text", "arrays", "error", "message"),
    [
        (
            MERGE,
            {"l.0.q": numbers(2), "l.1.k": numbers(2)},
            NamesMismatchError,
            "rule 1 .*'l.0.qk' needs 2 tensors, but 'l.0.k' is missing",
        ),
        (MERGE, {"m": numbers(2)}, OptionError, r"rule 1 .* matches no tensor"),
        (
            MERGE + "axis = 1",
            Q_K,
            ShapeMismatchError,
            r"'l.0.k' has shape \(2, 2\), 'l.0.q' has \(4, 2\)",
        ),
        (MERGE + "axis = 2", Q_K, ShapeMismatchError, "axis = 2 is not a dimension of"),
        (
            MERGE + "ratio = [1, 1]",
            Q_K,
            ShapeMismatchError,
            r"\[4, 2\] along dimension 0; ratio is \[1, 1\]",
        ),
        (
            MERGE + "sizes = [2, 1]",
            Q_K,
            ShapeMismatchError,
            r"\[4, 2\] along dimension 0; sizes is \[2, 1\]",
        ),
        (MERGE + "interleave = 4", Q_K, ShapeMismatchError, "cannot be interleaved in 4 groups"),
        (MERGE + "transpose = [0, 2, 1]", Q_K, ShapeMismatchError, "transpose names 3 dimensions"),
        (MERGE, {**Q_K, "l.0.k": numbers(2)}, ShapeMismatchError, "differ in rank"),
        (
            MERGE,
            {**Q_K, "l.0.k": np.zeros((2, 2), np.int8)},
            DtypeMismatchError,
            "'l.0.k' has dtype int8, 'l.0.q' has int32",
        ),
        (
            MERGE,
            {**Q_K, "l.0.qk": numbers(1)},
            NamesMismatchError,
            "'l.0.qk' would be made twice, from 'l.0.q' and from 'l.0.qk'",
        ),
        (
            '[[map]]\nfrom = "w"\nto = ["a", "b", "c"]',
            {"w": numbers(4)},
            ShapeMismatchError,
            "cannot be cut by the ratio 1:1:1",
        ),
        (
            '[[map]]\nfrom = "w"\nto = ["a", "b"]\nsizes = [1, 2]',
            {"w": numbers(4)},
            ShapeMismatchError,
            "has 4 along dimension 0, and sizes",
        ),
        (
            '[[map]]\nfrom = "w"\nto = ["a", "b"]\nstack = 0',
            {"w": numbers(3, 2)},
            ShapeMismatchError,
            "has 3 along dimension 0, not 2",
        ),
        (
            '[[map]]\nfrom = "w"\nto = "w.{e}"\nstack = 0',
            {"w": numbers(0, 2)},
            ShapeMismatchError,
            "no elements along dimension 0",
        ),
        (
            '[[map]]\nfrom = "w"\nto = "v"\nrotary = {heads = 2, to = "pairs"}',
            {"w": numbers(6)},
            ShapeMismatchError,
            "6 rows are not an even number",
        ),
        (
            '[[map]]\nfrom = "w"\nto = "v"\nunfold = {axis = 0, count = 4}',
            {"w": numbers(6)},
            ShapeMismatchError,
            "no dimension of .* can be made two",
        ),
        (
            '[[map]]\nfrom = "w"\nto = "v"\nunfold = {axis = 1, count = 2}',
            {"w": numbers(6)},
            ShapeMismatchError,
            "no dimension of .* can be made two",
        ),
        (
            '[[map]]\nfrom = "e.{e}"\nto = "w"\nstack = 0\nunfold = {axis = 0, count = 1}',
            {"e.0": numbers(2)},
            ShapeMismatchError,
            "no dimension of .* but stack can be made two",
        ),
        (
            '[[map]]\nfrom = "w"\nto = "e.{e}"\nstack = 0\nunfold = {axis = 0, count = 2}',
            {"w": numbers(2, 2)},
            ShapeMismatchError,
            "stack and unfold are both dimension 0",
        ),
        (
            '[[map]]\nfrom = "w"\nto = ["a", "b"]\nunfold = {axis = 0, count = 3}',
            {"w": numbers(2, 2)},
            ShapeMismatchError,
            "does not have 3 along dimension 0 and one more",
        ),
        (
            '[[map]]\nfrom = "e.{e}"\nto = "w"\nstack = 0',
            {"e.0": numbers(1), "e.2": numbers(1)},
            NamesMismatchError,
            "'w' needs 2 tensors, but 'e.1' is missing",
        ),
        (
            '[[map]]\nfrom = ["e.{e}.a", "e.{e}.b"]\nto = "w"\nstack = 0\naxis = 0',
            {"e.0.a": numbers(1), "e.0.b": numbers(1)},
            OptionError,
            "axis and stack are both dimension 0",
        ),
    ],
)
def test_tensors_that_do_not_suit_a_rule_are_named_with_it(
    text: str, arrays: Arrays, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        mapping(text).outputs(records(arrays))
    assert "m.toml, rule 1" in str(caught.value) or "twice" in message


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ('to = "b"', "from is None; give a name"),
        ('from = ["a", "b"]\nto = ["c", "d"]', "one of them is one name"),
        ('from = ["a", "b"]\nto = "c"\nsize = [1, 1]', r"no key 'size' \(did you mean 'sizes'\?\)"),
        ('from = ["a", "b"]\nto = "c"\nsizes = [1, 1]\nratio = [1, 1]', "give only one of them"),
        ('from = ["a", "b"]\nto = "c"\nsizes = [1]', "1 sizes are given for 2 parts"),
        ('from = ["a", "b"]\nto = "c"\nratio = [0, 1]', "positive whole number"),
        ('from = ["a", "b"]\nto = "c"\nratio = [1, "heads"]', "names 'heads', which nothing says"),
        ('from = ["a", "b"]\nto = "c"\naxis = true', "number of a dimension"),
        ('from = ["a", "b"]\nto = "c"\ntranspose = [1, 1]', "all dimensions in their new order"),
        ('from = ["a", "a"]\nto = "c"', "same name twice"),
        ('from = ["a.*", "b"]\nto = "c"', "different wildcards"),
        ('from = "a"\nto = "c"\nratio = [1]', "there is one part"),
        ('from = "a"\nto = "c"\nstack = 0', "nothing to stack"),
        ('from = "a.*"\nto = "c"', "lacks one of its \\*; to stack the tensors that it counts"),
        ('from = "a.{i}.{j}"\nto = "c"\nstack = 0', "lacks {i} and {j}"),
        ('from = ["a", "b"]\nto = "c.*"', "has the wildcard one of its \\*, but a does not"),
        ('from = "a.{1}"\nto = "c"', r"'\{1\}' is not a wildcard"),
        ('from = "a"\nto = "c"\nrotary = {heads = 2, to = "evens"}', 'use "pairs" or "halves"'),
        ('from = "a"\nto = "c"\noptional = 1', "true or false"),
        ('from = "a"\nto = "c"\nunfold = {count = 2}', "unfold: axis is None; give the number"),
        ('from = "a"\nto = "c"\nunfold = {axis = 0}', "unfold, count is None"),
        ('from = "a"\nto = "c"\nunfold = 2', "expected keys \\(axis, count\\), found a int"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_where_it_is_read(rule: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        mapping(f"[[map]]\n{rule}")
    assert "m.toml, rule 1" in str(caught.value)


def test_a_merge_that_does_not_say_how_long_its_parts_are_is_not_guessed_backwards() -> None:
    with pytest.raises(OptionError, match=r"write ratio = \[1, 1\] for equal parts"):
        mapping(MERGE).inverse()


# --- files ----------------------------------------------------------------------------------------


def test_toml_and_yaml_say_the_same(tmp_path) -> None:
    (tmp_path / "m.toml").write_text(MERGE + "ratio = [2, 1]\naxis = 0")
    (tmp_path / "m.yaml").write_text(
        "map:\n  - {from: ['l.*.q', 'l.*.k'], to: 'l.*.qk', ratio: [2, 1], axis: 0}"
    )
    one, other = (
        read_mapping(tmp_path / name).outputs(records(Q_K)) for name in ("m.toml", "m.yaml")
    )
    assert one == other


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("m.txt", "", "is TOML or YAML"),
        ("m.toml", "map = ", "not TOML"),
        ("m.yaml", "map: [", "not YAML"),
        ("m.yaml", "- 1", "expected keys \\(map, values\\), found a list"),
        ("m.toml", "mapp = 1", "did you mean 'map'"),
        ("m.toml", "values = {a = 1.5}", "give a table of whole numbers"),
        ("m.toml", "", "there are no rules"),
        ("m.toml", 'map = ["a"]', "rule 1: expected keys .*, found a str"),
    ],
)
def test_a_file_that_says_something_else_is_refused_by_its_name(
    tmp_path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        read_mapping(tmp_path / name)
    assert name in str(caught.value)


def test_a_mapping_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        OptionError, match=r"no mapping 'hf-lama-meta' \(did you mean 'hf-llama-meta'\?\)"
    ):
        read_mapping("hf-lama-meta")


@pytest.mark.parametrize("name", PRESETS)
def test_every_mapping_that_comes_along_reads_both_ways(name: str) -> None:
    rules = read_mapping(name, {"num_attention_heads": 4, "num_key_value_heads": 2})
    assert rules.inverse().inverse() == rules


def test_numbers_of_heads_come_from_a_configuration_by_whatever_name_it_has(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        '{"n_head": 12, "tie_word_embeddings": true, "vocab_size": 9}'
    )
    assert config_values(tmp_path) == {
        "n_head": 12,
        "vocab_size": 9,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    }
    (tmp_path / "config.json").write_text(
        '{"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2}}'
    )
    assert config_values(tmp_path / "config.json") == {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
