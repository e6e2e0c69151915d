"""Imports: from several threads at once, and of every path that users were told."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from paths import CHILDREN, DOCS, ROOT

import shardckpt

PACKAGE = Path(shardckpt.__file__).parent
"""Root of the source."""
FIRST_USES = {
    "public names": [
        "shardckpt.save",
        "shardckpt.restore",
        "shardckpt.CheckpointManager",
        "shardckpt.train_state",
        "shardckpt.Mesh",
    ],
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
        assert (
            subprocess.run(program, capture_output=True, text=True, check=True, timeout=200).stdout
            == ""
        )


def test_a_first_save_and_a_first_restore_of_compressed_chunks_succeed_at_once(tmp_path):
    program = [sys.executable, CHILDREN / "first_uses.py", tmp_path]
    assert (
        subprocess.run(program, capture_output=True, text=True, check=True, timeout=250).stdout
        == ""
    )


def test_importlib_is_complete_before_a_second_thread_can_import_a_part_of_it():
    """A thread that imports `importlib.util` while another imports `importlib` replaces the import
    system by a broken copy (CPython)."""
    program = "import shardckpt, sys; print('importlib._bootstrap' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "True\n"
    )


def test_a_module_of_another_library_is_imported_after_its_package():
    """Otherwise a thread that imports the module and one that imports the package wait for each
    other, and one gets half a module."""
    # A command has one thread then.
    sources = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "cli"]
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in sources
        for line, name in too_early(path)
    ]
    assert wrong == []


def too_early(path):
    """Imports of modules of other libraries inside of functions, without an import of their package
    before, at their lines."""
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
    """The package of a library, and the rest of a module's name; `google` itself is a directory of
    several libraries."""
    package, dot, inner = name.removeprefix("google.").partition(".")
    return ("google." * name.startswith("google.") + package, dot, inner)


def imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) else []


PATHS = {
    "commit.collecting.delete", "commit.committing.commit", "reshard.batch_dims",
    "reshard.execute.reshard", "reshard.rules", "reshard.rules.parse_mesh", "training.events",
    "training.generators.Generators", "training.integrations.dcp.StorageReader",
    "training.integrations.dcp.StorageWriter", "training.integrations.hf_trainer.ShardckptCallback",
    "training.integrations.lightning.ShardckptIO", "training.integrations.orbax.OrbaxCheckpointer",
    "training.integrations.orbax.OrbaxCheckpointManager", "training.metrics", "training.policies",
    "training.retention", "versions.follower.FollowedVersion", "versions.follower.Follower",
    "views.model_view.safetensors_view",
}  # fmt: skip
"""Paths in `shardckpt` that users were told to import. They stay, wherever the code moves."""
ELSEWHERE = {
    "training.integrations.ray_train.RayTrainManager",
    "training.integrations.ray_train.checkpoint_url",
    "training.integrations.torchtitan.TorchtitanCheckpointer", "views.vllm_follow.FollowWorker",
}  # fmt: skip
"""Those that need a framework with an environment of its own, whose tests import them."""


def test_documented_paths_can_be_imported():
    assert [path for path in sorted(PATHS) if resolve(f"shardckpt.{path}") is None] == []


def test_documented_paths_of_frameworks_that_are_not_here_are_defined():
    for path in ELSEWHERE:
        module, _, name = f"shardckpt.{path}".rpartition(".")
        tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
        assert name in {
            node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }


def test_every_path_in_the_documentation_is_one_that_stays():
    pages = [
        *DOCS.glob("*.md"),
        *DOCS.glob("reference/*.md"),
        ROOT / "README.md",
        *(ROOT / "examples").rglob("*.py"),
    ]
    shown = set()
    for page in pages:
        shown |= set(re.findall(r"(?<![/\w])shardckpt\.([a-z_]+\.\w+(?:\.\w+)*)", page.read_text()))
    known = {".".join(path.split(".")[:n]) for path in PATHS | ELSEWHERE for n in range(2, 5)}
    assert (
        sorted(
            path
            for path in shown
            if not any(path == one or path.startswith(f"{one}.") for one in known)
        )
        == []
    )


def test_old_paths_lead_to_the_same_objects():
    for path in ("commit.collecting", "commit.committing", "training.retention"):
        old, new = (
            importlib.import_module(f"shardckpt.{p}")
            for p in (path, f"runs.{path.partition('.')[2]}")
        )
        assert [getattr(old, name) for name in old.__all__] == [
            getattr(new, name) for name in old.__all__
        ]


def test_entry_points_lead_to_objects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    for group, points in groups.items():
        for name, target in points.items():
            module, _, attribute = target.partition(":")
            # vLLM is in an environment of its own, and the module imports it.
            if group.startswith("vllm."):
                source = Path(importlib.util.find_spec(module).origin)
                defined = {
                    node.name
                    for node in ast.parse(source.read_text()).body
                    if isinstance(node, ast.FunctionDef)
                }
                assert attribute in defined
            else:
                assert EntryPoint(name, target, group).load() is not None


def resolve(path):
    """The module or attribute with a path; None: there is none."""
    names = path.split(".")
    for n in range(len(names), 0, -1):
        try:
            value = importlib.import_module(".".join(names[:n]))
        except ModuleNotFoundError as e:
            if e.name and ".".join(names[:n]).startswith(e.name):
                continue
            raise
        for name in names[n:]:
            value = getattr(value, name, None)
        return value
    return None
