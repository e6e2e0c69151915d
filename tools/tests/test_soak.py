"""The soak: a training that is killed at random moments, over and over, resumes from what it saved,
bit by bit."""

import json
import subprocess
import sys

import pytest
from paths import TOOLS

pytestmark = pytest.mark.slow


TOOL = TOOLS / "soak.py"


@pytest.mark.timeout(1000)
def test_whatever_kills_a_training_it_resumes_from_what_it_saved():
    run = subprocess.run(
        [sys.executable, TOOL, "--saves", "40", "--json"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, (run.stdout, run.stderr)
    outcome = json.loads(run.stdout)
    assert outcome["wrong"] == []
    assert outcome["committed"] >= 40
    assert outcome["compared"] > outcome["left"] > 0
