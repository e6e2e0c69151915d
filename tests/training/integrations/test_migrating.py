"""What docs/migrating.md says of other libraries, and of this one, is so: their sources are read, and the script for DCP is run."""

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
from shardckpt.training import policies, retention

DOCUMENT = (DOCS / "migrating.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in DOCUMENT.split("\n## ")[1:]}
DCP, XLA, ORBAX, LIGHTNING, TRAINER = SECTIONS.values()


def blocks(section, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def rows(section):
    """What the tables say of the other library, and of this one."""
    return re.findall(r"^\| (`.*|a part.*) \| (.*) \|$", section, re.MULTILINE)


def class_in(package, path, name):
    """The definition of a class, without importing its package."""
    (root,) = find_spec(package).submodule_search_locations
    tree = ast.parse(Path(root, path).read_text())
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def methods(definition):
    return {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}


def public(definition):
    return {name for name in methods(definition) if not name.startswith("_")}


@pytest.mark.slow
def test_the_script_for_dcp_runs(tmp_path):
    script = "\n".join(blocks(DCP))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "dcp" / "200" / "checkpoint.json").exists()
    (command,) = blocks(DCP, "sh")
    shardckpt_command = [Path(sys.executable).with_name("shardckpt"), *command.split()[1:]]
    done = subprocess.run(shardckpt_command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    old, new = (shardckpt.restore(tmp_path / "runs" / "dcp" / step, only="model/**") for step in ("50", "100"))
    assert all((old["model"][name] == new["model"][name]).all() for name in ("weight", "bias"))


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_every_section_has_both_programs_and_a_command_for_old_checkpoints(section):
    assert re.findall(r"^### (.*)$", section, re.MULTILINE) == ["Before", "After", "What is different", "Old checkpoints"]
    assert all(block.startswith("shardckpt import ") for block in blocks(section, "sh"))
    assert len(blocks(section, "sh")) == 1


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_every_block_is_python(section):
    assert blocks(section)
    for block in blocks(section):
        compile(block, "docs/migrating.md", "exec")


def test_every_method_of_torch_xlas_manager_has_a_row():
    manager = class_in("torch_xla", "experimental/distributed_checkpoint/manager.py", "CheckpointManager")
    theirs = " ".join(left for left, _ in rows(XLA))
    named = set(re.findall(r"CheckpointManager\.(\w+)", theirs))
    assert named == public(manager)
    arguments = [argument.arg for argument in methods(manager)["__init__"].args.args if argument.arg != "self"]
    assert [name for name in arguments if not re.search(rf"\b{name}\b", theirs)] == []


def test_every_method_and_option_of_orbaxs_manager_has_a_row():
    manager = class_in("orbax", "checkpoint/checkpoint_manager.py", "CheckpointManager")
    theirs = " ".join(left for left, _ in rows(ORBAX))
    assert set(re.findall(r"CheckpointManager\.(\w+)", theirs)) == public(manager)
    options = class_in("orbax", "checkpoint/checkpoint_manager.py", "CheckpointManagerOptions")
    fields = {node.target.id for node in options.body if isinstance(node, ast.AnnAssign)}
    assert {name for name in fields if f"`{name}`" not in theirs} == set()


def test_every_name_of_shardckpt_in_the_text_exists():
    ours = " ".join(right for section in (DCP, XLA, ORBAX) for _, right in rows(section)) + LIGHTNING + TRAINER
    arguments = set(inspect.signature(shardckpt.CheckpointManager).parameters)
    methods = {name for name in dir(shardckpt.CheckpointManager) if not name.startswith("_")} | {"last_report"}
    for name in re.findall(r"CheckpointManager\.(\w+)", ours):
        assert name in methods, name
    for given in re.findall(r"CheckpointManager\((\w+)=", ours):
        assert given in arguments, given
    for name in re.findall(r"shardckpt\.(\w+)", ours):
        assert hasattr(shardckpt, name) or find_spec(f"shardckpt.{name}"), name
    for name in re.findall(r"\b([A-Z]\w+)\((?:n, |k\)|seconds\)|\(…\))", ours):
        assert hasattr(policies, name) or hasattr(retention, name), name
