"""A process that is forked after TensorStore was used is told so by every call; one that is forked
before works."""

import json
import subprocess
import sys

import pytest
from paths import CHILDREN

CHILD = CHILDREN / "forked.py"


def answers_of(tmp_path, when):
    done = subprocess.run(
        [sys.executable, CHILD, when, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("when", ["after a save", "while a save is in flight"])
def test_every_call_in_a_fork_that_came_too_late_is_refused_and_names_spawn(tmp_path, when):
    answers = answers_of(tmp_path, when)
    assert len(answers) == 19
    for call, (kind, message) in answers.items():
        assert kind == "CoordinationError", call
        assert "forked" in message, call
        assert 'get_context("spawn")' in message, call


def test_a_fork_before_the_first_use_saves_and_restores(tmp_path):
    assert set(answers_of(tmp_path, "before").values()) == {"ok"}
