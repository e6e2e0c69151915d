"""Rules that choose the steps to keep: each by itself, and together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import OptionError
from shardckpt.runs.retention import (
    Best,
    EveryKth,
    KeepAnyOf,
    Latest,
    SavedStep,
    Younger,
    any_of,
    as_retention,
    best,
)

NAN = float("nan")
STEPS = st.dictionaries(st.integers(0, 200), st.one_of(st.none(), st.floats())).map(
    lambda losses: [
        SavedStep(step, metrics={} if loss is None else {"loss": loss})
        for step, loss in sorted(losses.items())
    ]
)


def saved(*steps, **metrics):
    return [
        SavedStep(step, metrics={name: values[i] for name, values in metrics.items()})
        for i, step in enumerate(steps)
    ]


@given(STEPS, st.integers(1, 10))
def test_latest_keeps_the_last_ones(steps, n):
    kept = Latest(n).kept(steps)
    assert len(kept) == min(n, len(steps))
    assert all(s.step in kept or all(s.step < k for k in kept) for s in steps)


@given(STEPS, st.integers(1, 10), st.sampled_from(["min", "max"]))
def test_best_keeps_none_that_is_worse_than_one_that_goes(steps, n, mode):
    kept = Best(n, "loss", mode).kept(steps)
    losses = {
        s.step: s.metrics["loss"]
        for s in steps
        if "loss" in s.metrics and s.metrics["loss"] == s.metrics["loss"]
    }
    assert len(kept) == min(n, len(losses))
    for step in kept:
        for other in losses.keys() - kept:
            assert losses[step] <= losses[other] if mode == "min" else losses[step] >= losses[other]


def test_best_ignores_nan_and_takes_infinity_for_the_worst_or_the_best():
    steps = saved(1, 2, 3, 4, loss=[NAN, float("inf"), 2.0, float("-inf")])
    assert Best(1, "loss").kept(steps) == {4}
    assert Best(1, "loss", "max").kept(steps) == {2}
    assert Best(9, "loss").kept(steps) == {2, 3, 4}


def test_the_later_of_equally_good_steps_is_kept():
    assert Best(1, "loss").kept(saved(1, 2, 3, loss=[1.0, 0.5, 0.5])) == {3}


def test_every_kth_is_kept_for_ever():
    assert EveryKth(100).kept(saved(*range(0, 1000, 50))) == set(range(0, 1000, 100))


def test_the_young_are_kept():
    assert Younger(60).kept([SavedStep(1, 60.0), SavedStep(2, 59.0), SavedStep(3, -5.0)]) == {2, 3}


def test_any_of_keeps_what_one_of_them_keeps():
    rule = any_of(2, EveryKth(10), Best(1, "loss"))
    assert rule.kept(saved(5, 10, 15, 20, 25, 27, loss=[0.1, 1, 1, 1, 1, 1])) == {5, 10, 20, 25, 27}
    assert rule.measures == (Best(1, "loss"),)


def test_the_best_of_some_steps():
    assert best(saved(1, 2, loss=[3.0, 4.0]), "loss", "min") == 1
    assert best(saved(1, 2, loss=[3.0, 4.0]), "loss", "max") == 2
    assert best(saved(1, 2), "loss", "min") is None


def test_none_keeps_everything_and_a_number_the_latest():
    assert as_retention(None) is None
    assert as_retention(3) == as_retention(np.int64(3)) == Latest(np.int64(3)) == Latest(3)
    assert repr(Latest(np.int64(3))) == "Latest(n=3)"
    assert KeepAnyOf((3,)) == any_of(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Latest(0),
        lambda: Best(0, "loss"),
        lambda: Best(1, 7),
        lambda: Best(1, "loss", "least"),
        lambda: EveryKth(0),
        lambda: Younger(-1),
        lambda: as_retention("3"),
        lambda: as_retention(True),
    ],
)
def test_what_is_no_rule_is_refused_by_name(make):
    with pytest.raises(OptionError, match=r"Latest|Best|EveryKth|Younger|keep="):
        make()


@pytest.mark.parametrize("rules", [(), (None,), (None, EveryKth(10))])
def test_any_of_nothing_is_an_error_rather_than_a_deletion(rules):
    with pytest.raises(OptionError, match="None would keep all"):
        any_of(*rules)


def test_a_number_alone_is_refused_where_several_rules_belong():
    with pytest.raises(OptionError, match="give rules, not 3"):
        KeepAnyOf(3)
