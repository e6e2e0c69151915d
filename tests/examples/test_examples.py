"""The programs in examples/, run by the commands in their docstrings: killed in the middle, they go
on where they were."""

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from paths import ROOT

import shardckpt

EXAMPLES = ROOT / "examples"
LOSS = re.compile(
    r"^(?:step|epoch) (?P<step>\d+) loss (?P<loss>\S+)$|'loss': '(?P<of_hf>\S+)'.*'epoch': "
    r"'(?P<epoch>\S+)'"
)
HF_EPOCH = 64
"""Steps in an epoch of trainer.py."""
LINES, SECONDS = 80, 250

pytestmark = pytest.mark.timeout(300)


def commands(name, *, comments=False):
    """The commands in an example's docstring, or in its comments: lines that are indented."""
    text = (EXAMPLES / f"{name}.py").read_text()
    if comments:
        return re.findall(r"^#    (shardckpt .*)$", text.replace(" \\\n#     ", ""), re.MULTILINE)
    return re.findall(r"^    (\S.*)$", ast.get_docstring(ast.parse(text)), re.MULTILINE)


@pytest.fixture
def run(tmp_path):
    """Runs a command as a user in a clone does; the lines that it printed. It is killed, with all
    its processes, at a loss."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in {"PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS"}
    }
    env |= {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def run(command, kill_at=None):
        lines, errors = [], (tmp_path / "stderr").open("w+")
        program = psutil.Popen(
            shlex.split(command),
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            for line in program.stdout:
                lines.append(line.rstrip("\n"))
                if len(losses(lines)) == kill_at:
                    kill(program)
            expected = 0 if kill_at is None else -signal.SIGKILL
            assert program.wait(SECONDS) == expected, (tmp_path / "stderr").read_text()[-3000:]
            return lines
        finally:
            kill(program)
            program.stdout.close()
            errors.close()

    return run


def kill(program):
    """SIGKILL to a program and to all that it has started."""
    if program.is_running():
        family = [program, *program.children(recursive=True)]
        for process in family:
            process.kill()
        psutil.wait_procs(family)


def losses(lines):
    """The losses that were printed, by step; the Trainer prints a part of an epoch instead."""
    matches = filter(None, map(LOSS.search, lines))
    return {
        int(line["step"] or round(HF_EPOCH * float(line["epoch"]))): float(
            line["loss"] or line["of_hf"]
        )
        for line in matches
    }


def assert_goes_on(before, after, last, every):
    """The second run begins after a saved step and ends with the last; steps of both runs have
    equal losses. The saved step."""
    first, second = losses(before), losses(after)
    assert any(line.startswith("resum") for line in after)
    assert not any(line.startswith("resum") for line in before)
    resumed = min(second) - 1
    assert sorted(second) == list(range(resumed + 1, last + 1))
    assert resumed % every == 0
    assert every <= resumed <= max(first)
    both = sorted(first.keys() & second.keys())
    assert both or resumed == max(first)
    assert [second[step] for step in both] == pytest.approx(
        [first[step] for step in both], rel=1e-4
    )
    return resumed


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain_torch", "lora"])
def test_a_loop_in_torch(run, tmp_path, name):
    first, second = commands(name)
    before = run(first, kill_at=25)
    after = run(second)
    resumed = assert_goes_on(before, after, 100, 10)
    assert f"resumed from step {resumed}" in after
    assert shardckpt.CheckpointManager(tmp_path / "runs" / name).all_steps() == [90, 100]
    if name == "lora":
        tuned = shardckpt.open(tmp_path / "runs" / name / "100")
        stored = {
            name
            for name in tuned.names()
            if name.startswith("model/") and tuned.info(name).base is None
        }
        assert stored == {f"model/{layer}.lora_{part}" for layer in (0, 2, 4) for part in "ab"}
        assert "a step stores 405,528 bytes" in after[-1]


@pytest.mark.slow
def test_processes_are_killed_and_others_resume(run, tmp_path):
    first, second = commands("fsdp2")
    before = run(first, kill_at=25)
    after = run(second)
    resumed = assert_goes_on(before, after, 100, 10)
    assert f"resumed from step {resumed} on 2 processes" in after
    assert len(shardckpt.open(tmp_path / "runs" / "fsdp2" / "100").record.hosts) == 2


def mesh_of(root, step, tensor):
    """The shape of the mesh that a tensor was saved from."""
    return shardckpt.open(root / str(step))[tensor].sharding.mesh.shape


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("jax_optax", "params/up"),
        pytest.param("torch_xla_spmd", "model/0.weight", marks=pytest.mark.xla),
    ],
)
def test_another_mesh_resumes(run, tmp_path, name, tensor):
    first, second = commands(name)
    before = run(first, kill_at=25)
    root = tmp_path / "runs" / name
    saved = {
        step: mesh_of(root, step, tensor) for step in shardckpt.CheckpointManager(root).all_steps()
    }
    after = run(second)
    resumed = assert_goes_on(before, after, 100, 10)
    assert any(line.startswith(f"resumed from step {resumed} on a mesh of ") for line in after)
    # The second run commits what the first one had written but not committed.
    assert set(saved.values()) <= {(4, 2)}
    assert mesh_of(root, 100, tensor) == (2, 4)


@pytest.mark.long
def test_the_trainer_of_hugging_face(run, tmp_path):
    first, second = commands("trainer")
    before = run(first, kill_at=25)
    after = run(second)
    assert_goes_on(before, after, 100, 10)
    assert after[-1] == "trained 100 steps; the log has 101 entries"
    assert shardckpt.CheckpointManager(tmp_path / "runs" / "trainer").all_steps() == [90, 100]


@pytest.mark.slow
def test_lightning(run):
    first, second = commands("lightning_loop")
    before = run(first, kill_at=8)
    after = run(second)
    assert_goes_on(before, after, 39, 1)


def laid_out(url):
    """Layout of each tensor of a checkpoint."""
    checkpoint = shardckpt.open(url)
    return {name: str(checkpoint[name].sharding) for name in checkpoint.names()}


@pytest.mark.long
def test_resharding_exporting_and_serving(run, tmp_path):
    """The commands in the comments make what the program makes."""
    (command,) = commands("reshard_and_serve")
    lines = run(command)
    assert (
        lines[0]
        == "resharded: committed True; down_proj is laid out as PartitionSpec(None, 'model')"
    )
    assert lines[-1] == "the same file over HTTP: True"
    resharded, file = (
        tmp_path / "runs" / "serve" / "tp4",
        tmp_path / "runs" / "serve" / "model.safetensors",
    )
    made, exported = laid_out(resharded), file.read_bytes()
    reshard, export, serve = commands("reshard_and_serve", comments=True)
    assert serve.startswith("shardckpt serve ")
    shutil.rmtree(resharded)
    file.unlink()
    run(reshard)
    run(export)
    assert laid_out(resharded) == made
    assert file.read_bytes() == exported


@pytest.mark.slow
def test_a_sampler_follows_a_trainer(run):
    (command,) = commands("rl_publish_follow")
    lines = run(command)
    versions = [int(line.split()[2]) for line in lines if line.startswith("sampler: ")]
    assert versions == sorted(set(versions))
    assert len(versions) > 5
    assert [line for line in lines if line.startswith("sampler: ")][-1].startswith(
        "sampler: version 120 wins 1.00"
    )


def test_each_example_is_short_and_in_the_table():
    rows = dict(
        re.findall(
            r"^\| \[`(\w+)\.py`\]\(\1\.py\) \|.*\| `(.*)` \| \d+ \|$",
            (EXAMPLES / "README.md").read_text(),
            re.MULTILINE,
        )
    )
    assert rows == {path.stem: commands(path.stem)[0] for path in EXAMPLES.glob("*.py")}
    assert all(len(path.read_text().splitlines()) <= LINES for path in EXAMPLES.glob("*.py"))
