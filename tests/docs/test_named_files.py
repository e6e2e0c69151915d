"""Files, folders, modules and functions of this repository that the documentation names are
there."""

from __future__ import annotations

import re

import pytest
from paths import DOCS, ROOT

PACKAGE = ROOT / "shardckpt"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(p for p in DOCS.rglob("*.md") if "lab" not in p.parts),
]
FILES = {
    f"/{path.relative_to(ROOT)}"
    for folder in ("docs", "examples", "shardckpt", "tests", "tools")
    for path in (ROOT / folder).rglob("*.py")
}
PACKAGES = "commit|convert|format|frameworks|io|plan|reading|reshard|writing"
"""The packages by whose names nothing else in the documentation begins, such as a state's
`training.values`."""
ELSEWHERE = {
    "train.py",
    "testbench/rest_server.py",
    "reshard.sbatch",
    "format.schema.json",
    "zero_to_fp32.py",
    "ds_to_universal.py",
}
"""Files of users and of other projects, and what looks like a module."""


def is_there(name):
    """Whether a dotted name is a module, or a word in the module that it begins with."""
    path, names = PACKAGE, name.removeprefix("shardckpt.").split(".")
    while names and (path / names[0]).is_dir():
        path /= names.pop(0)
    path = (
        path / f"{names.pop(0)}.py"
        if names and (path / f"{names[0]}.py").is_file()
        else path / "__init__.py"
    )
    return all(re.search(rf"\b{word}\b", path.read_text()) for word in names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_it_names_is_there(document):
    text = document.read_text()
    files = {
        name
        for quoted in re.findall(r"`([^`\n]+)`", text)
        for name in re.findall(r"(?<!…/)\b[\w./-]+\.py\b", quoted)
    } - ELSEWHERE
    assert {
        name for name in files if not any(there.endswith(f"/{name}") for there in FILES)
    } == set()
    folders = re.findall(r"`((?:docs|tests|tools)/[\w/]+)`", text)
    assert {name for name in folders if not (ROOT / name).is_dir()} == set()
    modules = (
        set(re.findall(rf"\bshardckpt(?:\.\w+)+|(?<=`)(?:{PACKAGES})(?:\.\w+)+", text)) - ELSEWHERE
    )
    assert {name for name in modules if not is_there(name)} == set()
