"""The code in the README and in pages of docs/ runs as it stands, from top to bottom."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

import shardckpt

README, INDEX, FRAMEWORKS, MESHES, WALKS = (
    ROOT / name
    for name in (
        "README.md",
        "docs/index.md",
        "docs/frameworks.md",
        "docs/meshes.md",
        "docs/walkthroughs.md",
    )
)
LINES = 220

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONTINUES = "In the interpreter of"
"""Begins a section whose code goes on with what the section before has made."""


def interpreters(document):
    """Lists of code blocks, one for each interpreter: the code of a section, and of the sections
    that go on with it."""
    pasted = []
    for section in re.split(r"^## ", document.read_text(), flags=re.MULTILINE):
        blocks = [block for block in PYTHON.findall(section) if not block.startswith("# train.py")]
        if blocks and section.split("\n", 2)[2].startswith(CONTINUES):
            pasted[-1] += blocks
        elif blocks:
            pasted.append(blocks)
    return pasted


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= LINES


@pytest.mark.long
@pytest.mark.xla
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("document", "sections"),
    [
        pytest.param(README, 3, id="README"),
        pytest.param(INDEX, 2, id="index"),
        pytest.param(FRAMEWORKS, 3, id="frameworks", marks=pytest.mark.slow),
        pytest.param(MESHES, 1, id="meshes", marks=pytest.mark.slow),
        pytest.param(WALKS, 3, id="walkthroughs"),
    ],
)
def test_the_code_of_each_section_can_be_pasted_into_a_fresh_interpreter(
    tmp_path, document, sections
):
    """A section may use the checkpoints of those before it, in the same directory."""
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in {"PJRT_DEVICE", "CPU_NUM_DEVICES", "PYTHONSTARTUP"}
    }
    assert len(interpreters(document)) >= sections
    for blocks in interpreters(document):
        pasted = "\n\n".join([*blocks, "print('at the end')\n"])
        done = subprocess.run(
            [sys.executable, "-i", "-q"],
            input=pasted,
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "at the end" in done.stdout
        assert not re.search(
            r"^(Traceback|\w*Error)|  File \"<stdin>\"", done.stderr, re.MULTILINE
        ), (blocks, done.stderr[-3000:])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_of_many_processes_runs_and_goes_on_with_fewer(tmp_path):
    (script,) = [
        block for block in PYTHON.findall(FRAMEWORKS.read_text()) if block.startswith("# train.py")
    ]
    (tmp_path / "train.py").write_text(script)
    torchrun = [
        Path(sys.executable).parent / "torchrun",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    for processes, steps in ((4, {"1", "2"}), (2, {"1", "2", "3", "4"})):
        command = [*torchrun, "--nproc-per-node", str(processes), "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-3000:]
        assert {path.name for path in (tmp_path / "fsdp").iterdir() if path.is_dir()} == steps
    for step in "1234":
        checkpoint = shardckpt.open(tmp_path / "fsdp" / step)
        assert len(checkpoint.record.hosts) == (4 if step in "12" else 2)
        assert checkpoint.verify().ok


@pytest.mark.long
def test_the_commands_in_the_readme_run(tmp_path):
    for step in (1, 2, 3):
        shardckpt.save(tmp_path / "run" / str(step), {"model": {"weight": np.ones((8, 8))}})
    blocks = [
        block
        for block in re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
        if block.startswith("shardckpt ")
    ]
    assert len(blocks) == 2
    for line in "".join(blocks).splitlines():
        command = line.partition("  #")[0].replace(
            "shardckpt", str(Path(sys.executable).with_name("shardckpt")), 1
        )
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert done.stdout or done.stderr
