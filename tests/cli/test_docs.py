"""The examples of docs/cli.md, and then those of transcript.txt, run one after another as they
stand there.

Times, names of attempts and blanks may differ; `…` in an example stands for anything, alone on a
line for any number of lines.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from chunk_tables import decode_table
from paths import DOCS
from processes import Processes
from safetensors.numpy import save_file

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding

PAGE = DOCS / "cli.md"
FURTHER = Path(__file__).with_name("transcript.txt")
EXAMPLE = re.compile(r"^```\n\$ shardckpt (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = Path("runs/7b")
HOUR = 3600
MESH = Mesh((4, 2), ("data", "model"))


def save(step):
    embed = np.arange(4096 * 512, dtype=np.float32).reshape(4096, 512)
    if step == 10:
        embed[3, 5:17] += 0.25
    model = {
        "embed": embed,
        "head": embed,
        "bias": np.zeros(512, np.float32),
        "scale": np.ones((16, 16)),
    }
    shardings = {
        "model/embed": Sharding(MESH, PartitionSpec("data", "model")),
        "model/bias": Sharding(MESH, PartitionSpec("model")),
    }
    options = SaveOptions(shardings=shardings, metadata={"loss": 1.25})
    shardckpt.save(RUN / f"step_{step}", {"model": model, "step": step}, options=options)


def download():
    """A small model as Hugging Face's libraries write it."""
    place = Path("hf/tiny")
    place.mkdir(parents=True)
    half = np.zeros((512, 64), np.float32)
    save_file(
        {"model.embed_tokens.weight": half, "lm_head.weight": half + 1}, place / "model.safetensors"
    )
    for name in ("config.json", "tokenizer.json"):
        (place / name).write_text('{"model_type": "llama"}')


def download_llama():
    """A model of twelve layers, with its tokenizer."""
    place = Path("hf/llama")
    place.mkdir(parents=True)
    layer = {"input_layernorm": (64,), "mlp.up_proj": (256, 64), "self_attn.q_proj": (128, 64)}
    shapes = {
        f"model.layers.{i}.{name}.weight": shape for i in range(12) for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (512, 64), "lm_head.weight": (512, 64)}
    save_file(
        {name: np.full(shape, i, np.float32) for i, (name, shape) in enumerate(shapes.items())},
        place / "model.safetensors",
    )
    for name in ("config.json", "tokenizer.json"):
        (place / name).write_text('{"model_type": "llama"}')


def idle(step, hours):
    place = RUN / f"step_{step}"
    for path in place.rglob("*"):  # the placeholder, too
        os.utime(path, (time.time() - hours * HOUR,) * 2)


def damage():
    """Another byte in the chunk of `model/embed` that is third in grid order."""
    attempt = RUN / "step_10" / shardckpt.open(RUN / "step_10").record.attempt
    files, arrays = decode_table((attempt / "hosts/00000/table").read_bytes(), "")
    (rows,) = (table for path, table in arrays.items() if path.endswith("embed"))
    path = attempt / files[int(rows.file[2])]
    data = bytearray(path.read_bytes())
    data[int(rows.offset[2]) + 7] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directory of the examples before the first one, and a save that four hosts have left."""
    top = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch, Processes("many_hosts") as job:
        patch.chdir(top)
        for step in (9, 10):
            save(step)
        job.run("save_without_committing", 4, top / "left")
        yield top


def appear(step, hours, *, without=None):
    """An attempt that was left uncommitted so long ago, perhaps by fewer hosts than it has."""
    place = shutil.copytree("left", RUN / f"step_{step}")
    for record in place.glob(f"*/records/{without}.json"):
        record.unlink()
    idle(step, hours)


BEFORE = {
    "ls -a runs/7b": lambda: appear(11, 3),
    "info hf/llama": download_llama,
    "verify runs/7b/step_10": damage,
    "diff runs/7b/step_9 runs/7b/step_10": lambda: (shutil.rmtree(RUN / "step_10"), save(10)),
    "import hf/tiny exports/tiny --mesh model=4 --preset llama/tp --into model": download,
    "commit runs/7b": lambda: appear(12, 3, without="00002"),
    "gc runs/7b": lambda: appear(8, 50, without="00003"),
}
"""Command of an example → the changes that are made before it runs."""


def normal(text, top):
    text = text.replace(str(top), "/data")
    text = re.sub(r"\d{8}T\d{6}-[0-9a-f]{8}(-[0-9a-f]{12}-\d+)?", "ATTEMPT", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
    text = re.sub(r"by shardckpt \S+", "by shardckpt VERSION", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def shows(expected, printed):
    """Whether the lines of an example stand for the lines that were printed."""
    patterns = (
        r"(.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + r"\n"
        for line in expected
    )
    return re.fullmatch("".join(patterns), "".join(f"{line}\n" for line in printed)) is not None


@pytest.mark.long
def test_the_examples_of_the_command_line_show_what_it_says(runs, run, monkeypatch):
    monkeypatch.chdir(runs)
    documented, further = (
        EXAMPLE.findall(path.read_text(encoding="utf-8")) for path in (PAGE, FURTHER)
    )
    assert (
        " ".join(command.split()[0] for command, _ in documented)
        == "ls info info verify diff stats stats"
    )
    assert (
        " ".join(command.split()[0] for command, _ in further)
        == "ls info info fingerprint plan plan reshard export import commit gc"
    )
    for command, output in [*documented, *further]:
        BEFORE.get(command, lambda: None)()
        answer = run(*command.split(), width=100)
        assert answer.err == ""
        assert shows(normal(output, runs), normal(answer.out, runs)), answer.out
