"""Exports of states in every format appear whole or not at all, and hold the same as the
checkpoint."""

from __future__ import annotations

import json

import exported
import pytest
from typer.testing import CliRunner

import shardckpt
from shardckpt import errors
from shardckpt.cli.app import app
from shardckpt.convert.options import StateOptions
from shardckpt.convert.whole_state import FORMATS, write_state
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint

MiB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return exported.save(tmp_path_factory.mktemp("states") / "checkpoint")


@pytest.mark.parametrize("to", FORMATS)
def test_what_does_not_read_back_is_not_published(checkpoint, tmp_path, to):
    def damage(done, total):
        if done == total:
            (draft,) = tmp_path.glob(".state.*.partial")
            file = {
                "torch": draft,
                "dcp": draft / "__0_0.distcp",
                "orbax": draft / "model.rows" / "c" / "0" / "0",
            }[to]
            with file.open("r+b") as opened:
                opened.seek(file.stat().st_size // 2)
                opened.write(b"damage")

    with pytest.raises(
        errors.CorruptionError, match="'model/rows' does not read back as it was written"
    ):
        write_state(
            Checkpoint(checkpoint),
            parse(tmp_path / "state"),
            to,
            StateOptions(memory_limit=64 * MiB, progress=damage),
        )
    assert not list(tmp_path.iterdir())
    write_state(
        Checkpoint(checkpoint),
        parse(tmp_path / "state"),
        to,
        StateOptions(memory_limit=64 * MiB, progress=damage, verify=False),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_checkpoint_is_not_exported_and_nothing_is_left(tmp_path, to):
    exported.save(tmp_path / "c")
    for path in tmp_path.glob("c/*/hosts/*/*/d/*"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(errors.CorruptionError):
        write_state(
            Checkpoint(tmp_path / "c"),
            parse(tmp_path / "state"),
            to,
            StateOptions(memory_limit=64 * MiB),
        )
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_limit_that_does_not_suffice_is_refused_and_nothing_is_left(checkpoint, tmp_path, to):
    with pytest.raises(errors.BudgetError, match="memory_limit=1 KiB is too little"):
        write_state(
            Checkpoint(checkpoint), parse(tmp_path / "state"), to, StateOptions(memory_limit=1024)
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", FORMATS)
def test_the_public_function_and_the_command_do_the_same(checkpoint, tmp_path, to):
    report = shardckpt.export(
        checkpoint, tmp_path / "a", to=to, include="model/**", memory_limit="64MiB"
    )
    assert (report.tensors, report.files, report.url) == (8, ("a",), str(tmp_path / "a"))
    answer = CliRunner().invoke(
        app,
        [
            "export",
            str(checkpoint),
            str(tmp_path / "b"),
            "--to",
            to,
            "--include",
            "model/**",
            "--json",
        ],
    )
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["bytes"] == report.nbytes
    with pytest.raises(
        errors.OptionError,
        match="does not have the option metadata=, which is only for safetensors",
    ):
        shardckpt.export(checkpoint, tmp_path / "c", to=to, metadata={"a": "b"})
