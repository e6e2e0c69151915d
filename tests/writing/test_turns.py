"""Jobs in which a process misses a save to a place that is saved to again and again."""

from __future__ import annotations

import signal
import sys
import uuid
from datetime import timedelta
from itertools import count

import pytest
import torch.distributed as dist
from ranks import run_ranks

from shardckpt.errors import CommitError
from shardckpt.frameworks.coordination.base import SingleProcess
from shardckpt.io.store import Store
from shardckpt.writing import turns
from shardckpt.writing.committer import CommitterWord

RANKS, SAVES = 3, 7


@pytest.fixture
def job(tmp_path):
    """A function that runs the ranks, and returns what each printed."""
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )

    def run(misses, how):
        return run_ranks("out_of_step.py", server, RANKS, tmp_path / "c", misses, how)

    return run


@pytest.mark.long
@pytest.mark.parametrize("misses", [0, 1])
def test_a_process_that_misses_a_save_is_named_by_process_0_and_the_saves_after_that_succeed(
    job, misses
):
    answers = job(misses, "skips")
    first_good = min(i for i, came in enumerate(answers[0]["came"]) if i > 2 and came == "saved")
    assert first_good <= 4 + (misses == 0)
    for rank, answer in enumerate(answers):
        came = answer["came"]
        assert came[:2] == ["saved"] * 2, rank
        assert all(message == "" or "Error" in message for message in came[2:first_good]), rank
        assert came[first_good:] == ["saved"] * (SAVES - first_good), rank
        assert answer["names"] == answers[0]["names"]
        assert len({*answer["names"]}) == len(answer["names"])
    words = (
        "process 1 is out of step with process 0"
        if misses
        else "the other processes gave up this save before process 0 began it"
    )
    assert any(words in message for message in answers[0]["came"][3:first_good])


@pytest.mark.long
def test_a_process_whose_own_part_fails_saves_again_with_the_others_at_once(job):
    answers = job(1, "raises")
    for answer in answers:
        assert "LeafError" in answer["came"][2] or "'leaf'" in answer["came"][2]
        assert answer["came"][3:] == ["saved"] * 4
        assert answer["names"] == answers[0]["names"]


@pytest.mark.long
def test_a_late_process_never_adds_its_share_to_an_attempt_of_another_save(job):
    answers = job(1, "lags")
    assert "did not finish within 8 s" in answers[0]["came"][2]
    assert "gave up this save before process 1 began it" in answers[1]["came"][2]
    for answer in answers:
        assert answer["came"][4:] == ["saved"] * 3
        assert answer["names"] == answers[0]["names"]


@pytest.mark.long
def test_processes_that_fail_while_process_0_misses_a_save_meet_in_one_and_the_same_save(job):
    answers = job(0, "skips while another raises")
    assert "'leaf'" in answers[1]["came"][2]
    for answer in answers:
        assert answer["came"][5:] == ["saved"] * 2
        assert answer["names"] == answers[0]["names"]


def test_a_save_that_closes_the_series_while_a_process_waits_is_told_as_its_own():
    class ClosedMeanwhile:
        """Turns and announcements: process 0 gives up the attempt between two looks."""

        word = None

        def why_closed(self):
            self.word = {"error": "host 1 did not finish", "process": 0}
            return "host 1 did not finish"

        def heard(self, kind, attempt):
            return self.word

    job = ClosedMeanwhile()
    word = CommitterWord(Store.open(f"memory://{uuid.uuid4().hex}"), 2, job, job, 60)
    with pytest.raises(CommitError, match="process 0 did not commit the save: host 1 did not"):
        word.wait("attempt", stopped=lambda: "", look=lambda: None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("failed", [False, True])
def test_a_signal_handler_that_saves_amid_the_count_of_a_save_gets_a_number_of_its_own(
    failed,
):
    """At every line of the module that the interrupted call comes to."""

    def interrupt_at(instant):
        coordinator, instants, names, held = SingleProcess(), count(), [], []
        store = Store.open(f"memory://{uuid.uuid4().hex}")

        def save(*_):
            held.append(turns.turns_at(coordinator, store))
            names.append(held[-1].next_name())

        def trace(frame, event, _):
            if frame.f_code.co_filename != turns.__file__:
                return None
            if event == "line" and next(instants) == instant:
                signal.raise_signal(signal.SIGUSR1)
            return trace

        if failed:
            save()
            held[0].fail(names.pop())
        before = signal.signal(signal.SIGUSR1, save)
        tracing = sys.gettrace()
        sys.settrace(trace)
        try:
            save()
        finally:
            sys.settrace(tracing)
            signal.signal(signal.SIGUSR1, before)
        return names

    for instant in count():
        names = interrupt_at(instant)
        if len(names) == 1:
            break
        assert names == [None, None] if failed else len({*names}) == 2
    assert instant > 5
