"""The code in docs/cuda.md runs as it stands; without a GPU, on the CPU."""

from __future__ import annotations

import re

from paths import DOCS

import shardckpt


def test_the_training_saves_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "cuda.md").read_text(), re.MULTILINE | re.DOTALL
    )
    for _ in range(2):
        exec(compile(code, "docs/cuda.md", "exec"), {})
    assert shardckpt.open("cuda-run/3").tree["step"] == 3
