"""The repository is laid out as docs/architecture.md says: few names, small folders, and one name
for one thing."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import defaultdict
from typing import TYPE_CHECKING

import grimp
from paths import DOCS, ROOT, TESTS, TOOLS

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = ROOT / "shardckpt"
AT_THE_TOP = 21
"""Packages and modules, but for those with two underscores, `_version` and `py.typed`."""
IN_A_FOLDER = 25
IN_A_MODULE = 500
"""Lines."""


def test_few_names_are_at_the_top():
    names = {
        path.stem
        for path in PACKAGE.iterdir()
        if not path.name.startswith("_") and path.name != "py.typed"
    }
    assert len(names) <= AT_THE_TOP, sorted(names)


def test_folders_and_modules_are_small():
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= IN_A_FOLDER, folder
    long = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if len(path.read_text().splitlines()) > IN_A_MODULE
    }
    assert not long


def test_no_two_public_classes_have_one_name():
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: of_class for name, of_class in places.items() if len(of_class) > 1}


CIRCLES = {
    # `Coordinator.current` chooses a subclass, and imports that one alone.
    (
        "frameworks.coordination.base frameworks.coordination.jax_client "
        "frameworks.coordination.torch_store"
    ),
    # Tensors on CUDA have sources and sinks of their own, which programs without CUDA do not
    # import.
    "frameworks.cuda_fills frameworks.torch",
    # A type: the body of `Checkpoint.fingerprint`.
    "reading.checkpoint reading.stored_fingerprint",
    # `progress_line` imports rich only where a line is drawn.
    "training.events training.progress",
}
"""Modules that import each other, inside functions or for types alone, and the reason."""


def test_modules_import_each_other_only_where_a_reason_is_given():
    graph, circles = grimp.build_graph("shardckpt", cache_dir=None), set()
    for module in graph.modules:
        if circle := graph.find_upstream_modules(module) & graph.find_downstream_modules(module):
            circles.add(
                " ".join(name.removeprefix("shardckpt.") for name in sorted(circle | {module}))
            )
    assert circles == CIRCLES


ASKS_THE_KIND = {"bucket", "scheme", "is_web", "object_prefix"}
"""Attributes of a `Location` by which code could tell kinds of storage apart."""
KINDS = {
    f"shardckpt.io.stores.{name}" for name in ("azure", "bucket", "disk", "fsspec", "memory")
} | {"shardckpt.io.buckets.bucket"}
"""Modules of kinds of storage, which `Store.open` chooses."""
COMPARED = {
    "commit/base_places.py:check_base": "the scheme of a checkpoint and that of its base",
    "commit/base_places.py:base_location": "the scheme of a checkpoint and that of its base",
    "serve/roots.py:ident": "the scheme of a place and that of a root",
}
"""Functions that compare one attribute of two places, which guards bases and roots."""
TOLD = {
    "commit/base_places.py:check_base": "where a base must be copied to",
    "reshard/execute.py:run_job": "a url that exists only in this process",
}
"""Functions whose messages tell a person the scheme."""
NO_LOCATION = {"serve/jobs/webhook.py": "the url of a web hook is no place of checkpoints"}
"""Modules whose urls are not locations."""


def test_nothing_outside_of_io_asks_for_the_kind_of_a_storage():
    """Code asks a capability of `Store`; it may compare two places, and tell a person the
    scheme."""
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
        for function, nodes in _by_function(tree):
            shown = {
                id(part)
                for node in nodes
                if isinstance(node, ast.FormattedValue)
                for part in ast.walk(node)
            }
            compared = {
                id(part)
                for node in nodes
                if isinstance(node, ast.Compare)
                for part in _same_attribute(node)
            }
            for node in nodes:
                if isinstance(node, ast.Attribute) and node.attr in ASKS_THE_KIND:
                    allowed = (
                        TOLD if id(node) in shown else COMPARED if id(node) in compared else {}
                    )
                    asking += (
                        [f"{name}:{node.lineno} asks .{node.attr}"]
                        if f"{name}:{function}" not in allowed
                        else []
                    )
    assert not asking


def test_what_the_main_thread_waits_for_is_locked_by_the_lock_of_its_condition():
    """`with` on a Condition runs Python code, in which Ctrl-C leaves the lock locked; on the lock
    itself it does not."""
    entered, plain = [], []
    for path in (
        path
        for folder in ("io", "writing", "versions")
        for path in (PACKAGE / folder).rglob("*.py")
    ):
        tree = ast.parse(path.read_text())
        conditions = {
            ast.unparse(node.targets[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and "Condition(" in ast.unparse(node.value)
        }
        plain += [
            f"{path.relative_to(PACKAGE)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] == "Condition"
        ]
        entered += [
            f"{path.relative_to(PACKAGE)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.With)
            and {ast.unparse(item.context_expr) for item in node.items} & conditions
        ]
    assert not entered
    assert not plain, "use InterruptibleCondition"


def test_nothing_outside_of_io_asks_whether_a_place_has_a_path_without_using_the_path():
    """`local_path` is for code that opens, links or renames the file; other code asks a capability
    (`has_paths`, `has_directory`)."""
    asking = []
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name.startswith("io/"):
            continue
        for function, nodes in _by_function(ast.parse(path.read_text())):
            bound = {
                target.id
                for node in nodes
                if isinstance(node, ast.Assign | ast.NamedExpr) and _is_local_path(node.value)
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                if isinstance(target, ast.Name)
            }
            conditions = [part for node in nodes for part in _conditions(node)]
            asking += [
                f"{name}:{part.lineno} asks for a local path"
                for part in conditions
                if _is_local_path(part)
            ]
            asked = {id(part) for part in conditions}
            loaded = {
                node.id
                for node in nodes
                if isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Load)
                and id(node) not in asked
            }
            asking += [
                f"{name}:{function} uses {one} in a condition alone" for one in bound - loaded
            ]
    assert not asking


def _by_function(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """Each function or method of a module with its nodes, inner functions with theirs; then all
    nodes outside of functions, as ""."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    inside = {
        id(part) for function in functions for part in ast.walk(function) if part is not function
    }
    for function in functions:
        if id(function) not in inside:
            yield function.name, [*ast.walk(function)]
    yield "", [node for node in ast.walk(tree) if id(node) not in inside]


def _is_local_path(node: ast.AST) -> bool:
    """Whether an expression is the path of a place or a key."""
    node = node.func if isinstance(node, ast.Call) else node
    return isinstance(node, ast.Attribute) and node.attr == "local_path"


def _conditions(node: ast.AST) -> list[ast.expr]:
    """The expressions that a node compares, or takes for a truth value."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert) else []


def _same_attribute(comparison: ast.Compare) -> list[ast.expr]:
    """The sides of a comparison, if all are one attribute of several objects."""
    sides = [comparison.left, *comparison.comparators]
    names = {side.attr if isinstance(side, ast.Attribute) else "" for side in sides}
    return sides if len(names) == 1 else []


def test_tests_mirror_the_package():
    shared = {
        "children",
        "cuda",
        "damage",
        "docs",
        "end_to_end",
        "examples",
        "faults",
        "golden",
        "hostile",
        "support",
        "torture",
    }
    packages = {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__")
    }
    folders = {
        path.name for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith("__")
    }
    assert packages <= folders
    assert folders <= packages | shared


def test_the_packages_of_the_documentation_are_in_import_order():
    (table,) = re.findall(
        r"^\| package .*?(?=\n\n|\Z)",
        (DOCS / "architecture.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    listed = [
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1])
    ]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ][0]
    layers = [set(layer.replace("shardckpt.", "").split(" | ")) for layer in contract["layers"]]
    for layer in layers:
        assert set(listed[: len(layer)]) == layer
        listed = listed[len(layer) :]
    assert not listed


def test_tools_import_nothing_of_the_tests():
    helpers = {
        path.stem for folder in ("support", "children") for path in (TESTS / folder).glob("*.py")
    } - {path.stem for path in TOOLS.rglob("*.py")}
    for path in TOOLS.rglob("*.py"):
        if "tests" in path.relative_to(TOOLS).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                )
                assert helpers.isdisjoint(name.partition(".")[0] for name in names), path


def test_helpers_of_the_tests_are_in_one_folder():
    others = [
        path
        for path in TESTS.rglob("*.py")
        if path.name != "conftest.py" and not path.name.startswith("test_")
    ]
    assert {path.relative_to(TESTS).parts[0] for path in others} <= {"children", "support"}


def test_the_quick_tests_have_some_of_each_folder():
    listed = subprocess.run(
        ["make", "--no-print-directory", "--eval=quick-files: ; @echo $(QUICK)", "quick-files"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert not [path for path in listed if not (ROOT / path).exists()]
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} - {
        "cuda",
        "examples",
        "faults",
    }
    assert folders <= {path.split("/")[1] for path in listed}
