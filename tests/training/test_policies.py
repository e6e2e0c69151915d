"""Policies that choose the steps to save: each by itself, and together."""

import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import OptionError
from shardckpt.training.policies import (
    AnyOf,
    AtSteps,
    Continuous,
    EverySeconds,
    EverySteps,
    Moment,
    OnPreemption,
    Policy,
    any_of,
    as_policy,
)

ASCENDING = st.sets(st.integers(0, 300), min_size=1).map(sorted)


def due_at(policy, steps):
    return [
        step
        for step, previous in zip(steps, [None, *steps], strict=False)
        if policy.due(step, previous)
    ]


def moment(**changes):
    return Moment(
        **{"step": 7, "since_last": 0.0, "in_flight": False, "preempted": False} | changes
    )


@given(st.integers(1, 40))
def test_every_n_steps_is_at_the_multiples_and_not_at_step_0(n):
    assert due_at(EverySteps(n), range(121)) == list(range(n, 121, n))


@given(st.integers(1, 40), ASCENDING)
def test_every_n_steps_is_due_once_per_multiple_that_was_passed(n, steps):
    due = due_at(EverySteps(n), steps)
    for step, previous in zip(steps[1:], steps, strict=False):
        assert (step in due) == any(m % n == 0 for m in range(previous + 1, step + 1))


@given(ASCENDING, ASCENDING)
def test_given_steps_are_due_at_the_first_step_that_reaches_them(given_steps, steps):
    due = due_at(AtSteps(given_steps), steps)
    for step, previous in zip(steps[1:], steps, strict=False):
        assert (step in due) == any(previous < w <= step for w in given_steps)
    assert due_at(AtSteps(given_steps), range(301)) == given_steps


def test_seconds_are_wanted_when_they_have_passed_and_none_is_in_flight():
    policy = EverySeconds(60)
    assert not policy.wanted(moment(since_last=59.9))
    assert policy.wanted(moment(since_last=60))
    assert not policy.wanted(moment(since_last=600, in_flight=True))


def test_continuous_wants_the_next_when_the_last_is_done():
    assert Continuous().wanted(moment())
    assert not Continuous().wanted(moment(in_flight=True))


def test_a_notice_of_preemption_is_wanted_even_while_one_is_in_flight():
    assert OnPreemption().wanted(moment(preempted=True, in_flight=True))
    assert not OnPreemption().wanted(moment())


def test_any_of_is_due_or_wanted_when_one_of_them_is():
    policy = any_of(10, AtSteps([3]), EverySeconds(5), OnPreemption())
    assert due_at(policy, range(21)) == [3, 10, 20]
    assert policy.wanted(moment(since_last=6))
    assert not policy.wanted(moment())
    assert policy.by_leader
    assert policy.notices == (OnPreemption(),)
    assert not any_of(10, AtSteps([3])).by_leader


def test_policies_are_values():
    assert AnyOf((3,)) == any_of(3)
    assert repr(EverySteps(np.int64(5))) == repr(as_policy(np.int64(5))) == "EverySteps(n=5)"
    assert AtSteps(np.array([3, 1])) == AtSteps([1, 3])
    assert EverySteps(5) == EverySteps(5)
    assert AtSteps({3, 1}) == AtSteps([1, 3, 3])
    assert repr(any_of(2, Continuous())) == "AnyOf(policies=(EverySteps(n=2), Continuous()))"
    assert OnPreemption(signals=(15,)) == OnPreemption(signals=(signal.SIGTERM,))


def test_none_never_saves_by_itself():
    assert due_at(as_policy(None), range(50)) == []
    assert not Policy().by_leader


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(0),
        lambda: EverySteps(True),
        lambda: EverySteps(2.5),
        lambda: AtSteps(7),
        lambda: AtSteps("12"),
        lambda: AtSteps([-1]),
        lambda: EverySeconds(0),
        lambda: EverySeconds(float("inf")),
        lambda: EverySeconds("60"),
        lambda: OnPreemption(signals=()),
        lambda: OnPreemption(signals=(999,)),
        lambda: OnPreemption(signals=(signal.SIGTERM, signal.SIGSTOP)),
        lambda: OnPreemption(when=7),
        lambda: OnPreemption(file=""),
        lambda: OnPreemption(file=5),
        lambda: OnPreemption(file="gs://bucket/notice"),
        lambda: OnPreemption(file=Path("gs://bucket/notice")),
        lambda: as_policy("500"),
        lambda: as_policy(True),
        lambda: any_of(10, None, "x"),
        lambda: AnyOf(("x",)),
        lambda: AnyOf(3),
        any_of,
    ],
)
def test_what_is_no_policy_is_refused_by_name(make):
    with pytest.raises(OptionError, match=r"EverySteps|AtSteps|EverySeconds|OnPreemption|every="):
        make()
