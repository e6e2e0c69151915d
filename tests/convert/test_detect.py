"""Detection of a place's format. A place of no format, or possibly of two, is refused; the error
lists what is there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from faults import faulty_cloud
from safetensors.numpy import save, save_file

import shardckpt
from shardckpt import errors
from shardckpt.convert import detect as detecting
from shardckpt.convert.detect import FORMATS, Detected, detect, module_of
from shardckpt.io.store import Store
from shardckpt.io.url import parse

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.convert.files.file_version import Candidate

ARRAYS = {"w": np.ones((2, 3), np.float32)}


class Other:
    """A format that sees itself in every directory with a file of its suffix."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def looks_like(self, candidate: Candidate) -> str | None:
        return next((name for name in candidate.names if name.endswith(self.suffix)), None)


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides safetensors, formats of which a file says it all."""
    known = {
        "safetensors": module_of("safetensors"),
        "torch": Other(".bin"),
        "orbax": Other(".orbax"),
        "dcp": Other(".distcp"),
    }
    monkeypatch.setattr(detecting, "FORMATS", {name: f"files of {name}" for name in known})
    monkeypatch.setattr(detecting, "module_of", known.__getitem__)


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("model.safetensors", "model.safetensors, by its name"),
        ("weights", "weights, which begins with the length of a header and the header"),
    ],
)
def test_a_file_is_known_by_its_name_or_by_how_it_begins(
    tmp_path: Path, name: str, seen: str
) -> None:
    save_file(ARRAYS, tmp_path / name)
    assert detect(parse(tmp_path / name)) == Detected("safetensors", seen)


def test_a_directory_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert detect(parse(tmp_path)) == Detected("safetensors", "model.safetensors in the directory")


def test_detection_in_a_bucket_lists_a_directory_once_for_all_formats(gcs_server: Any) -> None:
    # TensorStore keeps a bucket's endpoint: this one is known by the proxy's alone.
    ours = replace(gcs_server, bucket=gcs_server.new_bucket(f"detect-{uuid4().hex}"))
    with faulty_cloud(ours) as cloud:
        place = parse(cloud.emulator.url("model"))
        Store.open(place).write("model.safetensors", save(ARRAYS))
        with cloud.breaking():
            assert detect(place).format == "safetensors"
        assert sum(cloud.proxy.traffic.summary()["kinds"].values()) <= 3


@pytest.mark.usefixtures("formats")
def test_of_two_formats_side_by_side_one_may_go_before_the_other(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    detected = detect(parse(tmp_path))
    assert (detected.format, detected.others) == ("safetensors", ("torch: pytorch_model.bin",))


@pytest.mark.usefixtures("formats")
def test_of_two_formats_of_which_none_goes_before_the_other_one_has_to_be_meant(
    tmp_path: Path,
) -> None:
    save_file(ARRAYS, tmp_path / "model.safetensors")
    (tmp_path / "x.orbax").write_bytes(b"")
    with pytest.raises(
        errors.OptionError,
        match=r"could have several formats \(safetensors: .*; orbax: x.orbax\); choose one with "
        r"from_",
    ):
        detect(parse(tmp_path))


def test_what_is_no_format_is_refused_with_what_was_looked_for_and_what_is_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    (tmp_path / "sub").mkdir()
    with pytest.raises(
        errors.FormatError, match=r"Looked for: a \*.safetensors file.* Found: sub/, weights.gguf\."
    ):
        detect(parse(tmp_path))
    with pytest.raises(errors.FormatError, match=r"Found: a file that begins like none of these\."):
        detect(parse(tmp_path / "weights.gguf"))


@pytest.mark.parametrize("from_", ["auto", "safetensors"])
def test_nothing_is_not_found(tmp_path: Path, from_: str) -> None:
    with pytest.raises(errors.NotFoundError, match="no directory of that name with files"):
        shardckpt.import_checkpoint(tmp_path / "nowhere", tmp_path / "out", from_=from_)


def test_a_checkpoint_of_our_own_is_not_imported(tmp_path: Path) -> None:
    shardckpt.save(tmp_path / "a", ARRAYS)
    with pytest.raises(errors.OptionError, match=r"a shardckpt checkpoint already; .* reshard"):
        detect(parse(tmp_path / "a"))


def test_a_format_that_there_is_not_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(errors.OptionError, match=r"from_='gguf': use 'auto', 'safetensors'"):
        shardckpt.import_checkpoint(tmp_path, tmp_path / "out", from_="gguf")
    assert "safetensors" in FORMATS


@pytest.fixture
def deepspeed(tmp_path: Path) -> Path:
    """A directory of DeepSpeed's, as 0.19 writes it with ZeRO 3 on two processes."""
    step = tmp_path / "run/global_step5"
    step.mkdir(parents=True)
    (tmp_path / "run/latest").write_text("global_step5")
    for rank in range(2):
        torch.save(
            {"module": {"w": torch.empty(0)}},
            step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
        flat = {"fp32_flat_groups": [torch.ones(5)]}
        torch.save(
            {"optimizer_state_dict": flat},
            step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return tmp_path / "run"


def test_a_checkpoint_of_deepspeed_is_refused_with_what_to_do(deepspeed: Path) -> None:
    step = deepspeed / "global_step5"
    for path in (deepspeed, step):
        for options in ({}, {"from_": "torch"}):
            with pytest.raises(
                errors.FormatError,
                match=rf"^{path} is a checkpoint of DeepSpeed .*zero_to_fp32\.py.*import `joined`",
            ):
                shardckpt.import_checkpoint(path, deepspeed.parent / "new", **options)
        with pytest.raises(
            errors.FormatError, match=r"is a checkpoint of DeepSpeed .*zero_to_fp32"
        ):
            shardckpt.open(path)
    for path in step.iterdir():
        with pytest.raises(
            errors.FormatError, match=rf"^{path} has one process's part .*zero_to_fp32\.py"
        ):
            shardckpt.import_checkpoint(path, deepspeed.parent / "new")
    (deepspeed / "latest").unlink()
    step.rename(deepspeed / "a_tag_of_the_users")
    (deepspeed / "zero_to_fp32.py").touch()
    with pytest.raises(errors.FormatError, match="is a checkpoint of DeepSpeed"):
        detect(parse(str(deepspeed)))


def test_a_universal_checkpoint_of_deepspeed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    step = tmp_path / "run/global_step5_universal"
    (step / "zero/a.weight").mkdir(parents=True)
    torch.save({"param": torch.ones(2)}, step / "zero/a.weight/fp32.pt")
    torch.save({}, step / "zero/optimizer_state.pt")
    torch.save({}, step / "mp_rank_00_model_states.pt")
    for path in (step, step.parent):
        with pytest.raises(
            errors.FormatError,
            match=rf"^{path} \w+ a universal checkpoint of DeepSpeed.*under DeepSpeed",
        ):
            detect(parse(str(path)))
    shardckpt.import_checkpoint(step / "zero/a.weight/fp32.pt", tmp_path / "new")
    assert shardckpt.open(tmp_path / "new").names() == ["param"]


def test_a_file_of_deepspeed_with_complete_tensors_is_read_with_a_note(tmp_path: Path) -> None:
    for name in ("mp_rank_00_model_states.pt", "layer_00-model_states.pt"):
        torch.save({"module": {"w": torch.ones(2)}, "args": Other(".x")}, tmp_path / name)
        report = shardckpt.import_checkpoint(tmp_path / name, tmp_path / "new", overwrite=True)
        assert (
            report.notes[1] == f"{name} is one file of a checkpoint of DeepSpeed; only it is read."
        )
        assert report.notes[2].startswith("args is left behind: it is a ")


def test_weights_beside_deepspeeds_own_files_are_imported(deepspeed: Path) -> None:
    save_file(ARRAYS, deepspeed / "model.safetensors")
    assert detect(parse(str(deepspeed))).format == "safetensors"
