"""The statements of docs/migrating.md hold: the other libraries' sources are read, and the programs
are run."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import DOCS

import shardckpt
from shardckpt.runs import retention
from shardckpt.training import policies

DOCUMENT = (DOCS / "migrating.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in DOCUMENT.split("\n## ")[1:]}
DCP, XLA, ORBAX, LIGHTNING, TRAINER = SECTIONS.values()


def blocks(section, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def rows(section):
    """Rows of the tables: the other library's name, and ours."""
    return re.findall(r"^\| (`.*|a part.*) \| (.*) \|$", section, re.MULTILINE)


def class_in(package, path, name):
    """The definition of a class, without importing its package."""
    (root,) = find_spec(package).submodule_search_locations
    tree = ast.parse(Path(root, path).read_text())
    return next(
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name
    )


def methods(definition):
    return {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}


def public(definition):
    return {name for name in methods(definition) if not name.startswith("_")}


IN_TORCH_XLA = """
import os
os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
import torch, torch_xla, torch_xla.runtime as xr
import torch.distributed as dist
xr.use_spmd()
xr.get_master_ip = lambda: "127.0.0.1"  # torch_xla finds no address without a TPU
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(8, 4).to("xla")
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.ones(STEPS, 2, 8)

def train(batch):
    optimizer.zero_grad()
    model(batch.to("xla")).sum().backward()
    optimizer.step()
    torch_xla.sync()
"""
IN_JAX = """
import jax, jax.numpy as jnp
state = {"w": jnp.zeros((8, 4)), "trained": jnp.zeros((), jnp.int32)}
abstract_state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
)
steps = STEPS

def train_step(state):
    return {"w": state["w"] + 1, "trained": state["trained"] + 1}, 0.5
"""
"""Names that the programs of the page expect; `STEPS` is replaced."""


def run(place, *command):
    done = subprocess.run(
        [str(part) for part in command], cwd=place, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]


def convert(place, section):
    """Run the command for old checkpoints."""
    (command,) = blocks(section, "sh")
    words = command.replace("gs://bucket", str(place)).split()
    run(place, Path(sys.executable).with_name("shardckpt"), *words[1:])


@pytest.mark.slow
def test_the_programs_with_dcp_run(tmp_path):
    *programs, resuming = blocks(DCP)
    for program in programs:
        run(
            tmp_path,
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "import torch; torch.manual_seed(0)\n" + program,
        )
    convert(tmp_path, DCP)
    run(tmp_path, sys.executable, "-W", "ignore", "-c", resuming)
    old, new = (
        shardckpt.restore(tmp_path / place / "100", only="model/**")
        for place in ("imported", "run")
    )
    assert all(shardckpt.open(tmp_path / "run" / step).verify().ok for step in ("100", "200"))
    assert all((old["model"][name] == new["model"][name]).all() for name in ("weight", "bias"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("section", "prelude", "trained"),
    [
        pytest.param(
            XLA, IN_TORCH_XLA, "optimizer/state/weight/step", marks=pytest.mark.xla, id="torch_xla"
        ),
        pytest.param(ORBAX, IN_JAX, "trained", id="orbax"),
    ],
)
def test_a_training_goes_on_with_shardckpt_from_a_converted_checkpoint(
    tmp_path, section, prelude, trained
):
    """The program before trains to step 300; the program after goes on from it to step 400."""
    before, after = (program.replace("gs://bucket", str(tmp_path)) for program in blocks(section))
    run(tmp_path, sys.executable, "-W", "ignore", "-c", prelude.replace("STEPS", "301") + before)
    convert(tmp_path, section)
    if "strict=False" in section:
        assert "manager.restore(state, strict=False)" in section
        after = after.replace("manager.restore(state)", "manager.restore(state, strict=False)")
    last = "101" if "loader" in prelude else "401"
    run(
        tmp_path,
        sys.executable,
        "-W",
        "ignore",
        "-c",
        prelude.replace("STEPS", last) + after + "\nassert first == 301\n",
    )
    saved = shardckpt.open(tmp_path / "run" / "400")
    assert saved.verify().ok
    assert saved.read(trained) == 401


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_every_section_has_both_programs_and_a_command_for_old_checkpoints(section):
    assert re.findall(r"^### (.*)$", section, re.MULTILINE) == [
        "Before",
        "After",
        "Differences",
        "Old checkpoints",
    ]
    assert all(block.startswith("shardckpt import ") for block in blocks(section, "sh"))
    assert len(blocks(section, "sh")) == 1


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_every_block_is_python(section):
    assert blocks(section)
    for block in blocks(section):
        compile(block, "docs/migrating.md", "exec")


@pytest.mark.xla
def test_every_method_of_torch_xlas_manager_has_a_row():
    manager = class_in(
        "torch_xla", "experimental/distributed_checkpoint/manager.py", "CheckpointManager"
    )
    theirs = " ".join(left for left, _ in rows(XLA))
    named = set(re.findall(r"CheckpointManager\.(\w+)", theirs))
    assert named == public(manager)
    arguments = [
        argument.arg
        for argument in methods(manager)["__init__"].args.args
        if argument.arg != "self"
    ]
    assert [name for name in arguments if not re.search(rf"\b{name}\b", theirs)] == []


def test_every_method_and_option_of_orbaxs_manager_has_a_row():
    manager = class_in("orbax", "checkpoint/checkpoint_manager.py", "CheckpointManager")
    theirs = " ".join(left for left, _ in rows(ORBAX))
    assert set(re.findall(r"CheckpointManager\.(\w+)", theirs)) == public(manager)
    options = class_in("orbax", "checkpoint/checkpoint_manager.py", "CheckpointManagerOptions")
    fields = {node.target.id for node in options.body if isinstance(node, ast.AnnAssign)}
    assert {name for name in fields if f"`{name}`" not in theirs} == set()


def test_every_name_of_shardckpt_in_the_text_exists():
    ours = (
        " ".join(right for section in (DCP, XLA, ORBAX) for _, right in rows(section))
        + LIGHTNING
        + TRAINER
    )
    arguments = set(inspect.signature(shardckpt.CheckpointManager).parameters)
    methods = {name for name in dir(shardckpt.CheckpointManager) if not name.startswith("_")} | {
        "last_report"
    }
    for name in re.findall(r"CheckpointManager\.(\w+)", ours):
        assert name in methods, name
    for given in re.findall(r"CheckpointManager\((\w+)=", ours):
        assert given in arguments, given
    for name in re.findall(r"shardckpt\.(\w+)", ours):
        assert hasattr(shardckpt, name) or find_spec(f"shardckpt.{name}"), name
    for name in re.findall(r"\b([A-Z]\w+)\((?:n, |k\)|seconds\)|\(…\))", ours):
        assert hasattr(policies, name) or hasattr(retention, name), name
