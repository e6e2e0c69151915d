"""A run of a small training, in a directory of its own."""

from __future__ import annotations

import pytest
from training_runs import Run


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "run")
    yield made
    for manager in made.open:
        manager.close()
