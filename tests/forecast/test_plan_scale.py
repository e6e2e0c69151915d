"""Planning very large jobs takes little memory; `tools/plan_scale.py` says how much, and how long."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "plan_scale.py"


@pytest.mark.slow
def test_planning_for_a_thousand_tensors_and_a_hundred_thousand_devices_takes_less_than_half_a_gibibyte(tmp_path):
    command = [sys.executable, TOOL, "--json", "--html", tmp_path / "plan.html"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=100)

    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert found["plan"]["tensors"] > 1000
    assert found["one-host"]["devices"] == 100_000
    for results in found.values():
        assert results["peak bytes"] < 512 << 20
    assert found["plan"]["reshard amplification"] <= 1.05
    # The page does not grow with the hosts, and little with the tensors.
    assert (tmp_path / "plan.html").stat().st_size < 1 << 20
