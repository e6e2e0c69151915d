"""The code of docs/views.md runs as it stands there."""

import re

from paths import ROOT

PAGE = (ROOT / "docs" / "views.md").read_text()


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    exec(compile(code, "docs/views.md", "exec"), {})


def test_its_figures_are_those_of_the_code():
    from shardckpt.streaming.elements import AHEAD_BYTES, CACHE_BYTES, LARGEST_BLOCK

    for nbytes in (AHEAD_BYTES, CACHE_BYTES, LARGEST_BLOCK):
        assert f"{nbytes >> 20} MiB" in PAGE
