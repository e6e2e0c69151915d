"""One process misses a save that all others take part in, or comes to it when they have given it
up.

Attempts are told apart by counting: whoever has missed one is behind by one from then on. What it
writes must not complete what the others have left of a save before; no word, digest or record says
whose values are whose.
"""

from __future__ import annotations

import numpy as np
import pytest
from aftermath import attempts

import shardckpt
from shardckpt import errors
from shardckpt.runs import collecting

pytestmark = pytest.mark.slow


PROCESSES = 3
SHORT, LONG = 3, 60
"""Timeouts of saves that fail, and of those that do not."""


def value_of(url):
    """The one value that all elements have; None: no checkpoint."""
    try:
        (value,) = np.unique(shardckpt.restore(url)["w"])
    except errors.NotFoundError:
        return None
    return value


def saves(jobs, url, odd, values, timeouts, *, late=False):
    """Outcomes that the processes got, save after save."""
    answers = jobs.run("save_out_of_step", PROCESSES, url, odd, late, values, timeouts)
    assert all(isinstance(answer, list) for answer in answers), answers
    return list(zip(*answers, strict=True))


@pytest.mark.parametrize("odd", [0, 1])
def test_a_process_that_comes_too_late_fails_and_takes_part_in_the_next_save(tmp_path, jobs, odd):
    url = tmp_path / "latest"
    first, *later = saves(jobs, url, odd, [1, 2, 3], [SHORT, LONG, LONG], late=True)
    assert all(message.startswith("CommitError: ") for message in first)
    assert f"gave up this save before process {odd} began it" in first[odd]
    assert later == [("saved",) * PROCESSES] * 2
    assert value_of(url) == 3


@pytest.mark.parametrize("odd", [0, 1])
def test_a_process_that_missed_a_save_completes_no_other_and_takes_part_in_the_next_but_one(
    tmp_path, jobs, odd
):
    url = tmp_path / "latest"
    first, *later = saves(jobs, url, odd, [1, 2, 3], [SHORT, SHORT, LONG])
    assert first[odd] == "absent"
    assert all(message.startswith("CommitError: ") for message in later[0])
    assert "must make the same saves" in later[0][odd]
    assert later[-1] == ("saved",) * PROCESSES
    assert value_of(url) == 3
    # Elsewhere, or when the job has started anew, all count from one again.
    for place in (tmp_path / "another", url):
        (outcomes,) = saves(jobs, place, None, [4], [LONG])
        assert outcomes == ("saved",) * PROCESSES
        assert value_of(place) == 4
    collecting.collect(url, grace=0)
    assert attempts(url) == [shardckpt.open(url).record.attempt]
