"""Imports of models that are split among files without an index, as an interrupted download leaves
them."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

import shardckpt
from shardckpt.convert.importing import import_checkpoint
from shardckpt.errors import FormatError, MissingDataError, OptionError


def write(path, name):
    if path.suffix == ".bin":
        torch.save({name: torch.ones(2)}, path)
    else:
        safetensors.torch.save_file({name: torch.ones(2)}, path)


@pytest.mark.parametrize(
    "pattern",
    [
        "model-{}-of-00003.safetensors",
        "diffusion_pytorch_model-{}-of-00003.safetensors",
        "pytorch_model-{}-of-00003.bin",
    ],
)
def test_a_split_model_without_an_index_is_imported_whole_or_refused_with_the_missing_files(
    tmp_path, pattern
):
    parts = [pattern.format(f"{number:05d}") for number in (1, 2, 3)]
    for number in (0, 2):
        write(tmp_path / parts[number], f"w{number}")
    with pytest.raises(
        MissingDataError, match=f"of the 3 files of a split model, {parts[1]} is missing"
    ):
        import_checkpoint(tmp_path, tmp_path / "new")
    write(tmp_path / parts[1], "w1")
    import_checkpoint(tmp_path, tmp_path / "new")
    assert shardckpt.open(tmp_path / "new").names() == ["w0", "w1", "w2"]
    write(tmp_path / parts[1], "w0")
    with pytest.raises(FormatError, match="'w0' is in"):
        import_checkpoint(tmp_path, tmp_path / "again")


@pytest.mark.parametrize("pattern", ["model-{}.safetensors", "pytorch_model-{}.bin"])
@pytest.mark.parametrize("lacking", [[], ["1-of-00002"], ["2-of-00002"]])
def test_the_files_of_two_models_in_a_directory_without_an_index_are_refused(
    tmp_path, pattern, lacking
):
    for number in {"1-of-00002", "2-of-00002", "1-of-00003", "2-of-00003"}.difference(lacking):
        write(tmp_path / pattern.format(f"0000{number}"), f"w{number}")
    with pytest.raises(
        OptionError, match=r"several models \(.*\); move the files of all models but"
    ):
        import_checkpoint(tmp_path, tmp_path / "new")


@pytest.mark.parametrize("content", [torch.ones(2), [torch.ones(2)], 5])
def test_a_part_that_holds_something_else_than_a_dict_is_refused_by_name(tmp_path, content):
    first = "pytorch_model-00001-of-00002.bin"
    write(tmp_path / "pytorch_model-00002-of-00002.bin", "w")
    torch.save(content, tmp_path / first)
    with pytest.raises(FormatError, match=f"{first} has no dict of tensors"):
        import_checkpoint(tmp_path, tmp_path / "new")


def test_a_part_of_a_split_model_that_is_named_as_a_file_is_imported_with_a_note(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"):
        write(tmp_path / name, "w")
        report = import_checkpoint(tmp_path / name, tmp_path / f"new{name}")
        assert f"{name} is one of 2 files of a split model; only it is read." in report.notes


@pytest.mark.parametrize("numbers", [[0, 1], [1]])
def test_files_with_slices_of_a_models_tensors_are_refused(tmp_path, numbers):
    for number in numbers:
        write(tmp_path / f"consolidated.{number:02d}.safetensors", "w")
    with pytest.raises(
        FormatError,
        match=r"consolidated\.01\.safetensors ha(s|ve) slices of the tensors .* cannot be joined "
        r"here",
    ):
        import_checkpoint(tmp_path, tmp_path / "new")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_file_with_slices_of_tensors_that_is_named_is_imported_with_a_note(tmp_path, suffix):
    written = tmp_path / f"consolidated.01{suffix}"
    write(written, "w")
    part = written.rename(written.with_suffix(".pth")) if suffix == ".bin" else written
    report = import_checkpoint(part, tmp_path / "new")
    assert (
        f"{part.name} has slices of the tensors of a model in Meta's form; only it is read."
        in report.notes
    )


def test_a_model_in_one_file_of_metas_form_is_imported(tmp_path):
    write(tmp_path / "consolidated.00.safetensors", "w")
    import_checkpoint(tmp_path, tmp_path / "new")
    assert shardckpt.open(tmp_path / "new").names() == ["w"]
