"""`shardckpt import` says what it found, what it did, and what it left behind."""

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardckpt
from shardckpt import Mesh, PartitionSpec, Sharding


@pytest.fixture
def weights(tmp_path):
    place = tmp_path / "hf"
    place.mkdir()
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
    ]
    arrays = [
        np.ones((64, 16), np.float32),
        np.full((16, 16), 2, np.float32),
        np.ones(16, np.float32),
    ]
    save_file(dict(zip(names, arrays, strict=True)), place / "model.safetensors")
    (place / "config.json").write_text('{"model_type": "llama"}')
    (place / "notes.txt").write_text("")
    return place


def test_it_says_what_was_found_and_left_behind(run, weights, tmp_path):
    answer = run(
        "import",
        weights,
        tmp_path / "out",
        "--mesh",
        "model=4",
        "--preset",
        "llama/tp",
        "--into",
        "model",
        width=100,
    )
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.splitlines()[:4] == [
        "safetensors: model.safetensors in the directory",
        "3 tensors in model.safetensors",
        "kept as metadata: config.json",
        "left behind: notes.txt",
    ]
    assert f"imported  {tmp_path / 'out'}: 5.1 KiB in 1 task" in answer.out.replace("\n", " ")
    embed = shardckpt.open(tmp_path / "out").info("model/model.embed_tokens.weight")
    assert embed.layout == Sharding(Mesh((4,), ("model",)), PartitionSpec("model", None))


def test_what_was_found_is_said_before_the_work_begins(run, weights, tmp_path):
    answer = run("import", weights, tmp_path / "out", "--memory-limit", "1MiB")
    assert answer.status == 8
    assert answer.out.splitlines()[0] == "safetensors: model.safetensors in the directory"


def test_names_change_as_in_an_export(run, weights, tmp_path):
    options = [
        "--strip-prefix",
        "model.",
        "--exclude",
        "*norm*",
        "--rename",
        "s/[.]/\\//g",
        "--add-prefix",
        "net/",
    ]
    assert run("import", weights, tmp_path / "out", *options).status == 0
    assert shardckpt.open(tmp_path / "out").names() == [
        "net/embed_tokens/weight",
        "net/layers/0/self_attn/q_proj/weight",
    ]
    assert run("import", weights, tmp_path / "other", "--mapping", "nothing.toml").status == 2


def test_as_json_it_is_one_document(run, weights, tmp_path):
    options = [
        "--layout",
        "zarr",
        "--compress",
        "zstd",
        "--dtype",
        "bfloat16",
        "--only",
        "*norm*",
        "--workers",
        "1",
        "--worker",
        "0/1",
    ]
    answer = run("import", weights, tmp_path / "out", "--from", "safetensors", *options, "--json")
    document = answer.json
    assert document.keys() == {
        *(
            "url",
            "format",
            "notes",
            "attempt",
            "committed",
            "tasks",
            "done_before",
            "bytes",
            "read_bytes",
            "stored_bytes",
            "seconds",
            "conversions",
            "notices",
        )
    }
    assert (document["format"], document["bytes"], document["committed"]) == (
        "safetensors",
        32,
        False,
    )
    assert run("commit", tmp_path / "out").status == 0
    assert shardckpt.open(tmp_path / "out").info("model.norm.weight").dtype.name == "bfloat16"


def test_trusting_pickles_says_what_that_means(run, weights, tmp_path):
    answer = run("import", weights, tmp_path / "out", "--trust-pickle")
    assert answer.status == 0
    assert "Nothing in them is called" in answer.err


@pytest.mark.parametrize(
    ("place", "options", "status", "why"),
    [
        ("nowhere", [], 3, "no directory of that name with files"),
        ("hf/notes.txt", [], 4, "holds no checkpoint of a known format"),
        ("hf", ["--from", "gguf"], 2, "use 'auto', 'safetensors'"),
        ("hf", ["--into", "/"], 2, "give keys"),
        ("hf", ["--mesh", "model=4", "--rule", "nothing=(model)"], 2, "matches no tensor"),
        ("hf", ["--memory-limit", "1MiB"], 8, "--memory-limit 1MiB is too little"),
    ],
)
def test_mistakes_are_one_line_and_a_status(run, weights, tmp_path, place, options, status, why):
    answer = run("import", weights.parent / place, tmp_path / "out", *options)
    assert answer.status == status
    assert why in answer.err
    assert "imported" not in answer.out
    assert not (tmp_path / "out").exists()
