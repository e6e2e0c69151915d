"""All processes save the same steps, in whatever order they come to them, whatever the leader's
clock and saves do."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import CoordinationError
from shardckpt.frameworks.coordination import Coordinator
from shardckpt.layout.world import World
from shardckpt.training.decisions import Decisions
from shardckpt.training.policies import (
    AtSteps,
    Continuous,
    EverySeconds,
    EverySteps,
    OnPreemption,
    any_of,
)
from shardckpt.training.timeline import Timeline


class Words(Coordinator):
    """Messages between the processes of one test; they need not agree on anything first."""

    def __init__(self, process, processes, announced, counts=None):
        self.world = World(process, processes)
        self.run_id = "run"
        self.announced = announced
        self.looks = 0
        self.words = 0

    def _set(self, key, value):
        self.words += 1
        self.announced[key] = value

    def _get(self, key):
        self.looks += 1
        return self.announced.get(key)


class Job:
    """Some processes that go through the same steps, each at its own pace."""

    def __init__(self, processes, policy, steps, **options):
        announced = {}
        self.steps = steps
        self.in_flight = False
        self.notices = [None] * processes
        self.words = [Words(p, processes, announced) for p in range(processes)]
        self.decisions = [
            Decisions(
                words,
                policy,
                key="k",
                timeout=0,
                in_flight=lambda: self.in_flight,
                notice=lambda p=p: self.notices[p],
                **options,
            )
            for p, words in enumerate(self.words)
        ]
        self.answers = [[] for _ in range(processes)]

    def step(self, process):
        """Let a process come to its next step; one that is ahead of what is decided stays where it
        is."""
        done = self.answers[process]
        if len(done) < len(self.steps):
            with contextlib.suppress(CoordinationError):
                done.append(self.decisions[process].at(self.steps[len(done)]))

    def finish(self):
        while any(len(done) < len(self.steps) for done in self.answers):
            for process in range(len(self.answers)):
                self.step(process)

    def saved(self, process):
        return [
            step
            for step, answer in zip(self.steps, self.answers[process], strict=True)
            if answer.save
        ]


POLICIES = st.lists(
    st.one_of(
        st.integers(1, 12).map(EverySteps),
        st.sets(st.integers(0, 60), max_size=5).map(AtSteps),
        st.just(EverySeconds(1e-6)),
        st.just(Continuous()),
        st.just(OnPreemption(signals=(), when=bool)),
    ),
    min_size=1,
    max_size=3,
).map(lambda policies: any_of(*policies))
ASCENDING = st.one_of(
    st.integers(1, 9).map(lambda stride: list(range(0, 60, stride))),
    st.sets(st.integers(0, 60), min_size=1).map(sorted),
)


@settings(max_examples=300, deadline=None)
@given(
    st.data(),
    POLICIES,
    ASCENDING,
    st.integers(2, 4),
    st.booleans(),
    st.sampled_from([0.0, 1e-4, 1.0]),
)
def test_all_processes_answer_alike_in_every_interleaving(
    data, policy, steps, processes, skips, lead_time
):
    job = Job(processes, policy, steps, skips=skips, lead_time=lead_time)
    for event in data.draw(st.lists(st.integers(0, processes + 1), max_size=150)):
        if event < processes:
            job.step(event)
        elif event == processes:
            job.in_flight = not job.in_flight
        else:
            job.notices[data.draw(st.integers(0, processes - 1))] = "SIGTERM"
    job.in_flight = False
    job.finish()
    for answers in job.answers[1:]:
        assert answers == job.answers[0]
    for answer, before in zip(job.answers[0][1:], job.answers[0], strict=False):
        assert answer.notice or not before.notice  # once known, it stays so
        if answer.notice and not before.notice:
            assert answer.save


@given(st.integers(1, 10), st.integers(1, 50))
def test_policies_of_step_numbers_alone_exchange_no_words(n, steps):
    job = Job(3, any_of(n, AtSteps([7])), list(range(steps)))
    job.finish()
    assert [words.looks + words.words for words in job.words] == [0, 0, 0]
    assert job.saved(0) == [s for s in range(steps) if (s and s % n == 0) or s == 7]


def test_in_step_the_others_look_at_most_every_second_step_and_the_leader_announces_as_often():
    job = Job(3, OnPreemption(signals=(), when=bool), list(range(1000)), lead_time=0)
    job.finish()
    assert [words.looks for words in job.words] == [500, 500, 500]
    assert [words.words for words in job.words] == [500, 0, 0]


def test_dozens_of_quick_steps_are_decided_at_a_time():
    job = Job(3, OnPreemption(signals=(), when=bool), list(range(1024)), lead_time=60)
    job.finish()
    assert max(words.looks for words in job.words) <= 1024 // 32 + 3
    assert job.words[0].words <= 1024 // 32 + 3


@pytest.mark.parametrize("receiver", [0, 1, 2])
def test_a_notice_to_one_process_saves_once_on_all_within_a_few_steps(receiver):
    job = Job(3, OnPreemption(signals=(), when=bool), list(range(40)), lead_time=0)
    for _ in range(10):
        for process in range(3):
            job.step(process)
    job.notices[receiver] = "SIGTERM"
    job.finish()
    (saved,) = job.saved(0)
    assert 10 <= saved <= 15
    assert job.saved(1) == job.saved(2) == [saved]
    assert [bool(answer.notice) for answer in job.answers[1]] == [
        step >= saved for step in range(40)
    ]
    assert job.answers[1][-1].notice.startswith("SIGTERM")
    assert ("process" in job.answers[1][-1].notice) == (receiver > 0)


def test_a_process_that_is_ahead_of_the_leader_waits_and_says_for_what():
    job = Job(2, Continuous(), list(range(10)), lead_time=0)
    with pytest.raises(
        CoordinationError, match=r"step 0: process 0 has not decided within 0 s .* process 1"
    ):
        job.decisions[1].at(0)
    job.step(0)
    for _ in range(10):
        job.step(1)
    assert len(job.answers[1]) == 3  # the leader is at step 0, and has decided two steps more


def test_a_process_that_has_missed_decisions_says_so_and_guesses_nothing():
    job = Job(2, Continuous(), list(range(1000)), lead_time=0)
    for _ in range(1000):
        job.step(0)
    with pytest.raises(CoordinationError, match="so far behind process 0 that it has missed"):
        job.decisions[1].at(0)


def test_a_step_that_is_due_while_a_save_is_in_flight_is_skipped_by_choice_on_all():
    job = Job(2, EverySteps(5), list(range(21)), skips=True, lead_time=0)
    for _ in range(6):
        job.step(0)
        job.step(1)
    job.in_flight = True  # the save of step 5
    for _ in range(6):
        job.step(0)
        job.step(1)
    job.in_flight = False
    job.finish()
    assert job.saved(0) == job.saved(1) == [5, 15, 20]
    assert [step for step, answer in enumerate(job.answers[1]) if answer.skipped] == [10]


def test_asked_again_about_a_step_the_answer_is_the_same_and_about_earlier_ones_no():
    job = Job(1, EverySteps(5), [])
    (decisions,) = job.decisions
    assert [decisions.at(step).save for step in (4, 5, 5, 4, 6)] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_after_a_restore_steps_are_asked_about_anew():
    job = Job(2, any_of(10, Continuous()), list(range(100, 130)), lead_time=0)
    job.finish()
    for decisions in job.decisions:
        decisions.restart(90)
    job.steps, job.answers = list(range(91, 121)), [[], []]
    job.in_flight = True
    job.finish()
    assert job.saved(0) == job.saved(1) == [100, 110, 120]


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), max_size=100))
def test_a_timeline_has_no_gaps_and_passes_through_json(windows):
    line = Timeline(3)
    for length, save, busy in windows:
        line = line.extended(line.until + length, save=save, busy=busy)
    assert len(line.windows) <= 64
    for window, before in zip(line.windows[1:], line.windows, strict=False):
        assert window.start == before.until + 1
    assert line.since == (line.windows[0].start if line.windows else 3)
    assert Timeline.from_json(json.loads(json.dumps(line.to_json()))) == line
    assert Timeline.from_json(json.loads(json.dumps(line.noticed("x").to_json()))) == line.noticed(
        "x"
    )
