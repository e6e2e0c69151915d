"""Imports that run when a name is first used, from several threads at once."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from paths import CHILDREN

import shardckpt

PACKAGE = Path(shardckpt.__file__).parent
"""Root of the source."""
FIRST_USES = {
    "public names": ["shardckpt.save", "shardckpt.restore", "shardckpt.CheckpointManager", "shardckpt.train_state", "shardckpt.Mesh"],
    "documented modules": [
        "shardckpt.CheckpointManager",
        "import shardckpt.training.policies",
        "import shardckpt.training.retention",
        "import shardckpt.training.events",
    ],
}


@pytest.mark.parametrize("uses", FIRST_USES.values(), ids=FIRST_USES)
def test_first_uses_in_several_threads_at_once_succeed(uses):
    for delay in range(4):
        program = [sys.executable, CHILDREN / "first_uses.py", str(delay), *uses]
        assert subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout == ""


def test_a_first_save_and_a_first_restore_of_compressed_chunks_succeed_at_once(tmp_path):
    program = [sys.executable, CHILDREN / "first_uses.py", tmp_path]
    assert subprocess.run(program, capture_output=True, text=True, check=True, timeout=100).stdout == ""


def test_a_module_of_another_library_is_imported_after_its_package():
    """Otherwise a thread that imports the module and one that imports the package wait for each other, and one gets half a module."""
    sources = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "cli"]  # a command has one thread then
    wrong = [f"{path.relative_to(PACKAGE)}:{line}: {name}" for path in sources for line, name in too_early(path)]
    assert wrong == []


def too_early(path):
    """Imports of modules of other libraries inside of functions, without an import of their package before, at their lines."""
    tree = ast.parse(path.read_text())
    at_top = {split(name)[0] for node in tree.body for name in imported(node) if not split(name)[2]}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            known = set(at_top)
            for node in ast.walk(function):
                for name in imported(node):
                    package, _, inner = split(name)
                    if not inner:
                        known.add(package)
                    elif package not in {*known, *sys.stdlib_module_names, "shardckpt"}:
                        yield node.lineno, name


def split(name):
    """The package of a library, and the rest of a module's name; `google` itself is a directory of several libraries."""
    package, dot, inner = name.removeprefix("google.").partition(".")
    return ("google." * name.startswith("google.") + package, dot, inner)


def imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) else []
