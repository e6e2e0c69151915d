"""`shardckpt export`."""

import safetensors.torch

import shardckpt


def test_a_checkpoint_becomes_a_file_that_safetensors_reads(run, saver, tmp_path):
    saver(tmp_path / "1")
    answer = run("export", tmp_path / "1", tmp_path / "a.safetensors")
    assert (answer.status, answer.err) == (0, "")
    first, *notes = answer.out.splitlines()
    assert first.startswith(f"exported  {tmp_path}/a.safetensors: ")
    assert all(line.startswith("note      ") for line in notes)
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert len(found) == len({shardckpt.open(tmp_path / "1").tensor(name).name for name in shardckpt.open(tmp_path / "1").names()})


def test_options_choose_and_convert_and_the_answer_is_json(run, saver, tmp_path):
    saver(tmp_path / "1")
    names = shardckpt.open(tmp_path / "1").names()
    asked = ["--include", names[0], "--dtype", "bfloat16", "--memory-limit", "64MiB", "--no-verify", "--json"]
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
    again = run("export", tmp_path / "1", tmp_path / "a.safetensors", "--exclude", names[0], "--overwrite", "--json").json
    assert again["tensors"] >= 1


def test_what_cannot_be_done_is_told_in_a_line_with_its_status(run, saver, tmp_path):
    saver(tmp_path / "1")
    (tmp_path / "a.safetensors").write_bytes(b"mine")
    answer = run("export", tmp_path / "1", tmp_path / "a.safetensors")
    assert answer.status == 7
    assert "--overwrite" in answer.err
    assert run("export", tmp_path / "1", tmp_path / "b.safetensors", "--memory-limit", "1KiB").status == 8
    assert run("export", tmp_path / "1", tmp_path / "b.safetensors", "--to", "gguf").status == 2
    assert run("export", tmp_path / "2", tmp_path / "b.safetensors").status == 3
    assert run("export", tmp_path / "1", tmp_path / "b.safetensors", "--include", "nothing").status == 5


def test_the_answer_names_the_file_where_only_a_directory_was_given(run, saver, tmp_path):
    saver(tmp_path / "1")
    assert run("export", tmp_path / "1", tmp_path / "out.bin").out.startswith(f"exported  {tmp_path}/out.bin/model.safetensors: ")
