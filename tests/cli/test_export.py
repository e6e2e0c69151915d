"""`shardckpt export`."""

import json

import numpy as np
import pytest
import safetensors.torch
from safetensors.numpy import save_file

import shardckpt


def test_a_checkpoint_becomes_a_file_that_safetensors_reads(run, saver, tmp_path):
    saver(tmp_path / "1")
    answer = run("export", tmp_path / "1", tmp_path / "a.safetensors")
    assert (answer.status, answer.err) == (0, "")
    first, *notes = answer.out.splitlines()
    assert first.startswith(f"exported  {tmp_path}/a.safetensors: ")
    assert all(line.startswith("note      ") for line in notes)
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert len(tensors) == len(
        {
            shardckpt.open(tmp_path / "1").tensor(name).name
            for name in shardckpt.open(tmp_path / "1").names()
        }
    )


def test_options_choose_and_convert_and_the_answer_is_json(run, saver, tmp_path):
    saver(tmp_path / "1")
    names = shardckpt.open(tmp_path / "1").names()
    asked = [
        "--include",
        names[0],
        "--dtype",
        "bfloat16",
        "--memory-limit",
        "64MiB",
        "--no-verify",
        "--json",
    ]
    document = run("export", tmp_path / "1", tmp_path / "a.safetensors", *asked).json
    assert document["tensors"] == 1
    assert document["files"] == ["a.safetensors"]
    assert set(document) == {
        "url",
        "files",
        "tensors",
        "bytes",
        "read_bytes",
        "written_bytes",
        "resumed_bytes",
        "notes",
        "seconds",
        "conversions",
    }
    again = run(
        "export",
        tmp_path / "1",
        tmp_path / "a.safetensors",
        "--exclude",
        names[0],
        "--overwrite",
        "--json",
    ).json
    assert again["tensors"] >= 1


def test_what_cannot_be_done_is_told_in_a_line_with_its_status(run, saver, tmp_path):
    saver(tmp_path / "1")
    (tmp_path / "a.safetensors").write_bytes(b"mine")
    answer = run("export", tmp_path / "1", tmp_path / "a.safetensors")
    assert answer.status == 7
    assert "--overwrite" in answer.err
    assert (
        run("export", tmp_path / "1", tmp_path / "b.safetensors", "--memory-limit", "1KiB").status
        == 8
    )
    assert run("export", tmp_path / "1", tmp_path / "b.safetensors", "--to", "gguf").status == 2
    assert run("export", tmp_path / "2", tmp_path / "b.safetensors").status == 3
    assert (
        run("export", tmp_path / "1", tmp_path / "b.safetensors", "--include", "nothing").status
        == 5
    )


def test_the_answer_names_the_file_where_only_a_directory_was_given(run, saver, tmp_path):
    saver(tmp_path / "1")
    assert run("export", tmp_path / "1", tmp_path / "out.dir").out.startswith(
        f"exported  {tmp_path}/out.dir/model.safetensors: "
    )


@pytest.mark.parametrize(
    "name", ["model.pt", "model.PTH", "pytorch_model.bin", "last.ckpt", "weights.npz"]
)
def test_a_name_of_another_format_is_refused_and_nothing_is_written(run, saver, tmp_path, name):
    saver(tmp_path / "1", {"w": np.ones(3)})
    answer = run("export", tmp_path / "1", tmp_path / name)
    assert answer.status == 2
    assert ("--to torch" in answer.err) == (not name.endswith("npz"))
    assert not (tmp_path / name).exists()
    assert run("export", tmp_path / "1", tmp_path / "model.pt", "--to", "torch").status == 0


def test_a_mapping_takes_its_numbers_from_the_config_that_the_checkpoint_has(run, tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    heads, kv, size = 4, 2, 8
    layer = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (heads * size, 32),
        "self_attn.k_proj": (kv * size, 32),
        "self_attn.v_proj": (kv * size, 32),
    }
    shapes |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32)}
    save_file(
        {f"{layer}{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()},
        source / "model.safetensors",
    )
    config = {
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_size": 32,
    }
    (source / "config.json").write_text(json.dumps(config))
    assert run("import", source, tmp_path / "1").status == 0
    answer = run("export", tmp_path / "1", tmp_path / "fused", "--mapping", "hf-llama-fused")
    assert (answer.status, answer.err) == (0, "")
    assert f"{layer}self_attn.qkv_proj.weight" in run("info", tmp_path / "fused", "--json").out
    assert (
        run(
            "import",
            tmp_path / "fused",
            tmp_path / "2",
            "--mapping",
            "hf-llama-fused",
            "--invert-mapping",
        ).status
        == 0
    )
    assert run("diff", tmp_path / "1", tmp_path / "2").status == 0
