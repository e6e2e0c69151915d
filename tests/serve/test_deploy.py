"""The programs and options that deploy/ uses exist."""

import re

import pytest
from paths import ROOT
from typer.testing import CliRunner

from shardckpt.cli.app import app


@pytest.mark.parametrize("name", ["Dockerfile", "shardckpt-serve.service"])
def test_it_starts_the_service_with_options_that_it_has(name):
    text = (ROOT / "deploy" / name).read_text()
    start = next(line for line in text.splitlines() if line.startswith(("ENTRYPOINT", "ExecStart")))
    assert re.search(r"shardckpt\W+serve", start)
    known = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    options = set(re.findall(r"--[a-z-]+", start))
    assert options >= {"--token-file", "--state"}
    assert all(f"{option} " in known for option in options)
