"""Paths in this repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS, TESTS, TOOLS = ROOT / "docs", ROOT / "tests", ROOT / "tools"
CHILDREN, GOLDEN = TESTS / "children", TESTS / "golden"
