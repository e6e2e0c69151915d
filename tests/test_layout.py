"""The repository is laid out as docs/architecture.md says: few names, small folders, and one name for one thing."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict

from paths import DOCS, ROOT, TESTS

PACKAGE = ROOT / "shardckpt"
AT_THE_TOP = 18
"""Packages and modules, but for those with two underscores, `_version` and `py.typed`."""
IN_A_FOLDER = 25
IN_A_MODULE = 400
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


def test_tests_mirror_the_package():
    shared = {"children", "cuda", "damage", "docs", "end_to_end", "examples", "faults", "golden", "hostile", "support", "torture"}
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__")}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert packages <= folders
    assert folders <= packages | shared


def test_the_packages_of_the_documentation_are_in_import_order():
    (table,) = re.findall(r"^\| package .*?(?=\n\n)", (DOCS / "architecture.md").read_text(), re.MULTILINE | re.DOTALL)
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1])]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [set(layer.replace("shardckpt.", "").split(" | ")) for layer in contract["layers"]]
    for layer in layers:
        assert set(listed[: len(layer)]) == layer
        listed = listed[len(layer) :]
    assert not listed
