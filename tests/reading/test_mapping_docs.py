"""The statements and examples of docs/mapping.md hold."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields

import numpy as np
from arrays import made, records
from paths import DOCS
from safetensors.numpy import load_file
from typer.testing import CliRunner

import shardckpt
from shardckpt.cli.app import app
from shardckpt.convert.options import NameOptions
from shardckpt.io.config_files import parse_text
from shardckpt.reading.naming.mapping_file import _KEYS, PRESETS, parse_mapping
from shardckpt.reading.naming.renaming import read_names
from shardckpt.reading.naming.substitution import parse_substitution

DOCUMENT = (DOCS / "mapping.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


def test_its_mappings_do_what_it_says_and_read_both_ways() -> None:
    gpt2 = {"h.0.attn.c_attn.weight": numbers(2, 12), "h.0.attn.c_attn.bias": numbers(12)}
    q, kv = numbers(64, 3), numbers(16, 3)
    states = [
        {
            "layers.0.wq.weight": q,
            "layers.0.wk.weight": kv,
            "layers.0.wv.weight": kv,
            "layers.0.norm.weight": q[0],
        },
        gpt2,
        {"layers.0.q_proj.weight": q, "layers.0.k_proj.weight": kv, "layers.0.v_proj.weight": kv},
        {f"layers.{layer}.q_proj.weight": numbers(8, 5) + layer for layer in range(3)},
    ]
    made_of = [
        {"blocks.0.qkv.weight": (96, 3), "blocks.0.ln.weight": (3,)},
        {
            f"h.0.attn.{part}.{kind}": (4, 2) if kind == "weight" else (4,)
            for part in "qkv"
            for kind in ("weight", "bias")
        },
        {"decoder.layers.0.self_attention.linear_qkv.weight": (96, 3)},
        {"decoder.layers.query.kernel": (5, 3, 4, 2)},
    ]
    # The ratio of the first example is 4:1:1, that of the third 32:8:8.
    for text, state, expected in zip(blocks("toml"), states, made_of, strict=True):
        rules = parse_mapping(parse_text(text, ".toml", "docs"), "docs")
        there = made(rules.outputs(records(state)), state)
        assert {name: array.shape for name, array in there.items()} == expected
        back = made(rules.inverse().outputs(records(there)), there)
        assert {name: array.tolist() for name, array in back.items()} == {
            name: array.tolist() for name, array in state.items()
        }


def test_its_substitutions_and_its_file_of_names_do_what_it_says(tmp_path) -> None:
    (substitutions,) = blocks("text")
    for line in substitutions.splitlines():
        rule, before, after = re.fullmatch(r"(\S+) +(\S+) +→ (\S+)", line).groups()
        assert parse_substitution(rule).of(before) == after
    (text,) = blocks("json")
    (tmp_path / "names.json").write_text(text)
    assert list(read_names(tmp_path / "names.json").names.values()) == ["embed.weight", None]


def test_all_keys_options_and_mappings_are_there() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("|")]
    assert sorted(
        re.match(r"\| `([\w-]+)` \| [^|]+ \| [^|]+ \|$", row)[1]
        for row in rows
        if row.startswith("| `hf-")
    ) == list(PRESETS)
    assert {key for key in _KEYS if not any(row.startswith(f"| `{key} = ") for row in rows)} == {
        "from",
        "to",
    }
    assert [
        field.name
        for field in fields(NameOptions)
        if f"`{field.name}`" not in DOCUMENT and f"`{field.name}=" not in DOCUMENT
    ] == []


def test_a_view_shows_the_result_of_a_mapping(tmp_path) -> None:
    shapes = {"attn.c_attn": (64, 192), "mlp.c_fc": (64, 256), "mlp.c_proj": (256, 64)}
    shardckpt.save(
        tmp_path / "gpt2",
        {f"h.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()},
    )
    with shardckpt.safe_open(tmp_path / "gpt2", "np", mapping="hf-gpt2-linear") as f:
        shown = {name: f.get_slice(name).get_shape() for name in f.keys()}  # noqa: SIM118  # the method of safetensors
    square = {f"h.0.attn.{part}_proj.weight": [64, 64] for part in "qkv"}
    assert shown == square | {"h.0.mlp.c_fc.weight": [256, 64], "h.0.mlp.c_proj.weight": [64, 256]}


def test_its_commands_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    attention = {"weight": numbers(4, 12).astype(np.float32), "bias": np.ones(12, np.float32)}
    mlp = {"c_fc": numbers(4, 16), "c_proj": numbers(16, 4)}
    block = {f"attn.c_attn.{kind}": array for kind, array in attention.items()} | {
        "attn.c_proj.weight": numbers(4, 4),
        **{f"mlp.{name}.weight": array for name, array in mlp.items()},
    }
    state = {f"transformer.h.0.{name}": array for name, array in block.items()}
    shardckpt.save("run/100", {"model": state, "step": 100})
    for line in "".join(blocks("sh")).splitlines():
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
    assert load_file("hf/tiny/model.safetensors").keys() == state.keys()
    q = next(
        array
        for name, array in load_file("gpt2.safetensors").items()
        if re.search(r"\bq\w*\.weight$", name)
    )
    assert (q == attention["weight"].T[:4]).all()
