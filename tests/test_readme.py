"""The README's code runs as it stands, from top to bottom."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.xla
def test_the_code_in_the_readme_runs(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_commands_in_the_readme_run(tmp_path):
    import numpy as np

    import shardckpt

    for step in (1, 2):
        shardckpt.save(tmp_path / "run" / str(step), {"model": {"weight": np.ones((8, 8))}})
    (commands,) = [b for b in re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL) if "shardckpt ls" in b]
    for line in commands.splitlines():
        words = line.split("#")[0].split()
        done = subprocess.run(
            [Path(sys.executable).parent / words[0], *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert done.stdout
