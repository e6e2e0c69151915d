"""The demo, small: two training processes, one of them killed, and its proofs."""

import json
import re
import subprocess
import sys

import pytest
from paths import TOOLS

pytestmark = [pytest.mark.xla, pytest.mark.slow, pytest.mark.timeout(400)]


def python(script, *arguments):
    return subprocess.run(
        [sys.executable, TOOLS / script, *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo") / "run"
    return directory, python("demo.py", "--small", f"--keep={directory}")


def test_the_demo_trains_is_killed_restores_onto_another_mesh_and_proves_that_nothing_was_lost(
    demo,
):
    _, finished = demo
    printed = finished.stdout
    assert finished.returncode == 0, printed + finished.stderr
    assert finished.stderr == ""
    for line in (
        r"step 3 is committed: 49 tensors",
        r"SIGKILL .* in the middle of step 7: exit status -9",
        r"✓ the checkpoint survived the kill",
        r"✓ a host with all devices reads [\d,]+ bytes and needs [\d,]+",
        r"✓ restoring straight onto the devices compiled 0 XLA programs",
        r"✓ all 36 sharded tensors have the requested layouts",
        r"✓ 49 tensors and \d+ other values are equal to what was saved, bit by bit",
        r"✓ the first loss after the restore differs by \S+ \(at most",
        r"All 8 proofs hold\.",
    ):
        assert re.search(line, printed), line
    assert "✗" not in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_the_demo_would_notice_a_tensor_that_came_back_different(demo):
    directory, _ = demo
    saved = json.loads((directory / "digests.json").read_text())
    changed = directory / "changed.json"
    changed.write_text(
        json.dumps(saved | {"model/lm_head.weight": saved["model/model.norm.weight"]})
    )
    resumed = python(
        "demo_train.py",
        "--layout=after",
        "--resume",
        f"--checkpoint={directory / 'checkpoint'}",
        f"--digests={changed}",
        "--steps=3",
        "--small",
    )
    events = {event["event"]: event for event in map(json.loads, resumed.stdout.splitlines())}
    assert events["digests"]["different"] == ["model/lm_head.weight"]
