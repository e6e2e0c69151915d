"""The configuration beside a model's weights goes into a checkpoint and out again, so that
transformers loads what is exported."""

from __future__ import annotations

import base64
import json
import zlib

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardckpt
from shardckpt import errors
from shardckpt.convert.files import local_files
from shardckpt.convert.formats.safetensors.hf_configs import LARGEST_FILE
from shardckpt.views.model_view import ModelView

CONFIG = {"model_type": "llama", "hidden_size": 32, "eos_token_id": [1, 2], "größe": None}


@pytest.fixture
def imported(tmp_path):
    (tmp_path / "hf").mkdir()
    save_file(
        {"a.weight": np.ones((4, 4), np.float32), "b.weight": np.ones(3, np.float32)},
        tmp_path / "hf" / "model.safetensors",
    )
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf" / "generation_config.json").write_text('{"do_sample": true}')
    shardckpt.import_checkpoint(tmp_path / "hf", tmp_path / "c", workers=1)
    return tmp_path / "c"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.timeout(300)
def test_transformers_loads_an_export_of_an_import(tmp_path):
    import torch
    import transformers

    widths = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**widths))
    model.save_pretrained(tmp_path / "hf")
    shardckpt.import_checkpoint(tmp_path / "hf", tmp_path / "c", workers=1)
    shardckpt.export_safetensors(tmp_path / "c", tmp_path / "out", max_shard_size="40KB")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (tmp_path / "hf" / "config.json").read_text()
    )
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= set(
        names(tmp_path / "out")
    )
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", {"b.weight": "float16"}])
def test_config_json_names_the_dtype_of_converted_weights(tmp_path, dtype):
    (tmp_path / "hf").mkdir()
    save_file(
        {"a.weight": np.ones((4, 4), np.float32), "b.weight": np.ones(3, np.float32)},
        tmp_path / "hf" / "model.safetensors",
    )
    config = {
        "dtype": "float32",
        "text_config": {"torch_dtype": "float32"},
        "quantization_config": {"dtype": "float32"},
        "other": {"torch_dtype": ["float32"]},
        "width": 4,
    }
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    shardckpt.import_checkpoint(tmp_path / "hf", tmp_path / "c", workers=1)
    shardckpt.export_safetensors(tmp_path / "c", tmp_path / "same")
    shardckpt.export_safetensors(tmp_path / "c", tmp_path / "out", dtype=dtype)
    assert json.loads((tmp_path / "same" / "config.json").read_text()) == config
    most = dtype if isinstance(dtype, str) else "float32"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {
        "dtype": most,
        "text_config": {"torch_dtype": most},
    }


def test_configurations_come_back_into_a_directory_and_not_beside_a_single_file(imported, tmp_path):
    report = shardckpt.export_safetensors(imported, tmp_path / "out")
    assert report.files == ("config.json", "generation_config.json", "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "do_sample": True
    }
    shardckpt.export_safetensors(imported, tmp_path / "one" / "a.safetensors")
    assert names(tmp_path / "one") == ["a.safetensors"]


def test_a_configuration_that_is_there_stays_and_is_replaced_only_with_overwrite(
    imported, tmp_path
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    report = shardckpt.export_safetensors(imported, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert report.notes[-1] == "config.json is there already, and stays as it is."
    with pytest.raises(errors.AlreadyExistsError, match=r"model\.safetensors is there already"):
        shardckpt.export_safetensors(imported, tmp_path / "out")
    shardckpt.export_safetensors(imported, tmp_path / "out", overwrite=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG


def test_config_takes_the_place_of_what_was_kept(imported, tmp_path):
    (tmp_path / "other.json").write_text('{"model_type": "gpt2"}')
    shardckpt.export_safetensors(imported, tmp_path / "out", config=tmp_path / "other.json")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "gpt2"}


def test_an_export_that_was_interrupted_goes_on_with_its_configuration(imported, tmp_path):
    def stop(done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardckpt.export_safetensors(imported, tmp_path / "out", progress=stop)
    shardckpt.export_safetensors(imported, tmp_path / "out")
    assert names(tmp_path / "out") == ["config.json", "generation_config.json", "model.safetensors"]


def test_an_interrupted_export_goes_on_beside_a_configuration_that_was_there(
    imported, tmp_path, monkeypatch
):
    def stop(done, total):
        if done == total:
            raise KeyboardInterrupt

    monkeypatch.setattr(local_files, "_NOTE_BYTES", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    with pytest.raises(KeyboardInterrupt):
        shardckpt.export_safetensors(imported, tmp_path / "out", progress=stop)
    report = shardckpt.export_safetensors(imported, tmp_path / "out")
    assert report.resumed_bytes == report.nbytes > 0
    assert report.notes[-1] == "config.json is there already, and stays as it is."
    assert names(tmp_path / "out") == ["config.json", "generation_config.json", "model.safetensors"]


TOKENIZER = {
    "tokenizer.json": '{"model": "größe"}\n'.encode(),
    "tokenizer.model": bytes(range(256)) * 9,
    "chat_template.jinja": b"",
}


def with_tokenizer(path):
    path.mkdir()
    save_file({"w": np.ones(3, np.float32)}, path / "model.safetensors")
    for name, data in TOKENIZER.items():
        (path / name).write_bytes(data)
    (path / "notes.txt").write_text("nobody asked for me")
    return path


def test_a_tokenizer_comes_back_byte_by_byte_and_what_else_lies_there_does_not(tmp_path):
    report = shardckpt.import_checkpoint(with_tokenizer(tmp_path / "hf"), tmp_path / "c", workers=1)
    assert "left behind: notes.txt" in report.notes
    shardckpt.export_safetensors(tmp_path / "c", tmp_path / "out")
    assert names(tmp_path / "out") == sorted([*TOKENIZER, "model.safetensors"])
    view = ModelView(tmp_path / "c")
    for name, data in TOKENIZER.items():
        assert (tmp_path / "out" / name).read_bytes() == view.open(name).readall() == data


def test_a_directory_as_config_brings_its_tokenizer_to_a_training_checkpoint(imported, tmp_path):
    hf = with_tokenizer(tmp_path / "tokenizer")
    (hf / "config.json").write_text('{"model_type": "gemma"}')
    view = ModelView(imported, config=hf)
    assert json.loads(view.open("config.json").readall()) == {"model_type": "gemma"}
    assert json.loads(view.open("generation_config.json").readall()) == {"do_sample": True}
    assert all(view.open(name).readall() == data for name, data in TOKENIZER.items())
    shardckpt.export_safetensors(imported, tmp_path / "out", config=hf)
    assert {*TOKENIZER} <= {*names(tmp_path / "out")}


@pytest.mark.parametrize(
    "kept",
    [
        {"tokenizer.json": 3},
        {"tokenizer.json": "?"},
        {"tokenizer.json": base64.b64encode(b"plain").decode()},
        {"../a": "", "vocab.txt": ""},
    ],
)
def test_metadata_that_is_no_file_is_refused_by_name(tmp_path, kept):
    shardckpt.save(
        tmp_path / "c",
        {"w": np.ones(3)},
        options=shardckpt.SaveOptions(metadata={"hf_files": kept}),
    )
    with pytest.raises(errors.CorruptionError, match=r"hf_files.*(tokenizer\.json|vocab\.txt)"):
        ModelView(tmp_path / "c")


def test_a_small_text_that_inflates_without_end_is_refused(tmp_path):
    bomb = base64.b64encode(zlib.compress(bytes(LARGEST_FILE + 1), 9)).decode()
    shardckpt.save(
        tmp_path / "c",
        {"w": np.ones(3)},
        options=shardckpt.SaveOptions(metadata={"hf_files": {"tokenizer.json": bomb}}),
    )
    with pytest.raises(
        errors.CorruptionError, match=r"tokenizer\.json is incomplete or has more than"
    ):
        ModelView(tmp_path / "c")
