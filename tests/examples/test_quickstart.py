"""The notebook examples/quickstart.ipynb, its cells run from top to bottom, twice, as a user
does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import ROOT

NOTEBOOK = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
SHOWN = """
def shown(cell):
    import ast
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), globals())
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), globals())
        html = getattr(value, "_repr_html_", None)
        print("shown:", type(value).__name__, len(html()) if html else repr(value))
"""


def test_the_cells_run_from_top_to_bottom_and_the_training_resumes(tmp_path):
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    program = SHOWN + "".join(f"shown({cell!r})\n" for cell in cells)
    for first in (1, 31):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"from step {first} to {first + 29}" in done.stdout
        for kind in ("Checkpoint", "LazyArray", "Comparison"):
            assert f"shown: {kind} " in done.stdout


def test_the_notebook_is_stored_without_outputs():
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] in ("code", "markdown")
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            assert cell["source"], pytest.fail("an empty cell")
