"""Planning a reshard of a very large checkpoint takes little memory; docs/scale.md says how much,
and how long."""

import json
import subprocess
import sys

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_planning_a_thousand_tensors_on_sixteen_thousand_devices_takes_under_half_a_gibibyte(
    tmp_path,
):
    asked = json.dumps({"what": "reshard", "html": str(tmp_path / "plan.html")})
    command = [sys.executable, "-m", "tools.scale.child"]
    finished = subprocess.run(
        command, input=asked, capture_output=True, text=True, timeout=250, cwd=ROOT
    )

    assert finished.returncode == 0, finished.stderr
    figures = json.loads(finished.stdout)
    assert figures["tensors"] > 1000
    assert figures["peak"] < 512 << 20
    assert figures["reshard amplification"] <= 1.05
    # The page does not grow with the hosts, and little with the tensors.
    assert (tmp_path / "plan.html").stat().st_size < 1 << 20
