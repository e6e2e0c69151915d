"""The site: every public name is in the reference, and every page is in the navigation."""

from __future__ import annotations

import re

import yaml
from paths import DOCS, ROOT

import shardckpt

CONFIGURATION = ROOT / "mkdocs.yml"
GENERATED = {"reference/cli.md"}
"""Pages that `make docs` writes."""


def test_every_public_name_is_in_the_reference():
    shown = {
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: shardckpt\.([\w.]+)$", page.read_text(), re.MULTILINE)
    }
    # Functions whose name in `shardckpt` is a package that can be called.
    for module in ("reshard.execute.", "commit.committing."):
        shown |= {name.removeprefix(module) for name in shown}
    # The error is in shardckpt.errors, which is shown whole.
    public = set(shardckpt.__all__) - {"__version__", "ShardckptError"}
    assert public <= shown | {name.rpartition(".")[2] for name in shown}
    assert "errors" in shown


def test_every_page_can_be_found():
    listed = set(re.findall(r"[\w/-]+\.md", CONFIGURATION.read_text()))
    pages = {
        str(path.relative_to(DOCS))
        for path in DOCS.rglob("*.md")
        if path.relative_to(DOCS).parts[0] not in {"lab", "decisions"}
    }
    assert listed - {"decisions/index.md"} == pages | GENERATED


def test_the_configuration_is_read_by_other_generators_too():
    assert yaml.safe_load(CONFIGURATION.read_text())["theme"]["name"] == "material"


def test_pictures_are_small_are_shown_and_load_nothing_from_elsewhere():
    pictures = sorted(path.name for path in (DOCS / "pictures").iterdir())
    assert len(pictures) == 10
    for page in (ROOT / "README.md", DOCS / "index.md"):
        shown = re.findall(r"pictures/([\w-]+\.(?:svg|png))", page.read_text())
        assert sorted(shown) == pictures
    for name in pictures:
        data = (DOCS / "pictures" / name).read_bytes()
        assert len(data) <= 150_000
        assert not name.endswith(".svg") or b"url(http" not in data
