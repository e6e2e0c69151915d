"""The repository is laid out as docs/architecture.md says: few names, small folders, and one name for one thing."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict

import grimp
from paths import DOCS, ROOT, TESTS, TOOLS

PACKAGE = ROOT / "shardckpt"
AT_THE_TOP = 18
"""Packages and modules, but for those with two underscores, `_version` and `py.typed`."""
IN_A_FOLDER = 25
IN_A_MODULE = 500
"""Lines."""


def test_few_names_are_at_the_top():
    names = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_") and path.name != "py.typed"}
    assert len(names) <= AT_THE_TOP, sorted(names)


def test_folders_and_modules_are_small():
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= IN_A_FOLDER, folder
    long = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > IN_A_MODULE}
    assert not long


def test_no_two_public_classes_have_one_name():
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


CIRCLES = {
    # `Coordinator.current` chooses a subclass, and imports that one alone.
    "frameworks.coordination.base frameworks.coordination.jax_client frameworks.coordination.torch_store",
    # Tensors on CUDA have sources and sinks of their own, which programs without CUDA do not import.
    "frameworks.cuda frameworks.torch",
    # A type: the body of `Checkpoint.fingerprint`.
    "reading.checkpoint reading.stored_fingerprint",
    # A type: a job asks whether files can be reused, and what reuses them takes the job.
    "reshard.job reshard.reuse",
    # A type: the options of the service.
    "serve.jobs.upkeep serve.service",
    # A type: the context of a running operation.
    "serve.jobs.operations serve.jobs.verification",
    # `progress_line` imports rich only where a line is drawn.
    "training.events training.progress",
}
"""Modules that import each other, inside functions or for types alone, and the reason."""


def test_modules_import_each_other_only_where_a_reason_is_given():
    graph, found = grimp.build_graph("shardckpt", cache_dir=None), set()
    for module in graph.modules:
        if circle := graph.find_upstream_modules(module) & graph.find_downstream_modules(module):
            found.add(" ".join(name.removeprefix("shardckpt.") for name in sorted(circle | {module})))
    assert found == CIRCLES


def test_tests_mirror_the_package():
    shared = {"children", "cuda", "damage", "docs", "end_to_end", "examples", "faults", "golden", "hostile", "support", "torture"}
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__")}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert packages <= folders
    assert folders <= packages | shared


def test_the_packages_of_the_documentation_are_in_import_order():
    (table,) = re.findall(r"^\| package .*?(?=\n\n|\Z)", (DOCS / "architecture.md").read_text(), re.MULTILINE | re.DOTALL)
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1])]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [set(layer.replace("shardckpt.", "").split(" | ")) for layer in contract["layers"]]
    for layer in layers:
        assert set(listed[: len(layer)]) == layer
        listed = listed[len(layer) :]
    assert not listed


def test_tools_import_nothing_of_the_tests():
    helpers = {path.stem for folder in ("support", "children") for path in (TESTS / folder).glob("*.py")} - {
        path.stem for path in TOOLS.rglob("*.py")
    }
    for path in TOOLS.rglob("*.py"):
        if "tests" in path.relative_to(TOOLS).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert helpers.isdisjoint(name.partition(".")[0] for name in names), path


def test_helpers_of_the_tests_are_in_one_folder():
    others = [path for path in TESTS.rglob("*.py") if path.name != "conftest.py" and not path.name.startswith("test_")]
    assert {path.relative_to(TESTS).parts[0] for path in others} <= {"children", "support"}
