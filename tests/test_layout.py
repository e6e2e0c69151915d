"""The repository is laid out as docs/architecture.md says: few names, small folders, and one name for one thing."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import defaultdict

import grimp
from paths import DOCS, ROOT, TESTS, TOOLS

PACKAGE = ROOT / "shardckpt"
AT_THE_TOP = 21
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
    "frameworks.cuda_fills frameworks.torch",
    # A type: the body of `Checkpoint.fingerprint`.
    "reading.checkpoint reading.stored_fingerprint",
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


ASKS_THE_KIND = {"bucket", "scheme", "is_web", "object_prefix"}
"""Attributes of a `Location` by which code could tell kinds of storage apart."""
KINDS = {f"shardckpt.io.stores.{name}" for name in ("azure", "bucket", "disk", "fsspec", "memory")} | {"shardckpt.io.buckets.bucket"}
"""Modules of kinds of storage, which `Store.open` chooses."""
NO_LOCATION = {"serve/jobs/webhook.py": "the url of a web hook is no place of checkpoints"}
"""Modules whose urls are not locations."""


def test_nothing_outside_of_io_asks_for_the_kind_of_a_storage():
    """Code asks a capability of `Store`; it may compare two places, and tell a person the scheme."""
    asking = []
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name.startswith("io/") or name in NO_LOCATION:
            continue
        tree = ast.parse(path.read_text())
        asking += [
            f"{name}:{node.lineno} imports {node.module}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in KINDS
        ]
        told = {id(part) for node in ast.walk(tree) if isinstance(node, ast.FormattedValue) for part in ast.walk(node)}
        compared = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Compare) for part in _same_attribute(node)}
        asking += [
            f"{name}:{node.lineno} asks .{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in ASKS_THE_KIND and id(node) not in told | compared
        ]
    assert not asking


def _same_attribute(comparison: ast.Compare) -> list[ast.expr]:
    """The sides of a comparison, if all are one attribute of several objects."""
    sides = [comparison.left, *comparison.comparators]
    names = {side.attr if isinstance(side, ast.Attribute) else "" for side in sides}
    return sides if len(names) == 1 else []


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


def test_the_quick_tests_have_some_of_each_folder():
    listed = subprocess.run(
        ["make", "--no-print-directory", "--eval=quick-files: ; @echo $(QUICK)", "quick-files"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert not [path for path in listed if not (ROOT / path).exists()]
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} - {"cuda", "examples", "faults"}
    assert folders <= {path.split("/")[1] for path in listed}
