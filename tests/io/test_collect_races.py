"""Saves, overwrites, collections and deletions of one checkpoint at once, in every order that matters.

`interleaving` checks after every operation that nothing is lost, published twice or published too late.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interleaving import GRACE, Actor, Stage

import shardckpt
from shardckpt import SaveOptions, committing
from shardckpt.errors import AlreadyExistsError, CommitError, MissingDataError, NotFoundError, ReplacedError
from shardckpt.io import collect as collecting


def save(stage, *, overwrite=False):
    shardckpt.save(stage.url, {"w": np.arange(3)}, options=SaveOptions(layout="zarr", overwrite=overwrite))
    return "saved"


def overwrite(stage):
    return save(stage, overwrite=True)


def commit(stage):
    """What `shardckpt commit` does."""
    return committing.commit(stage.url)


def collect(stage):
    return collecting.collect(stage.store, grace=GRACE)


def delete(stage):
    return collecting.delete(stage.store, reason="test", grace=GRACE)


def leave_behind(stage, attempt):
    """What a save leaves that was killed."""
    for name in ("hosts/00000/table", "records/00000.json", "zarr/w/c/0"):
        stage.store.write(f"{attempt}/{name}", b"x")


def prepare(stage, before):
    """What is there before: nothing, a tombstone, a checkpoint, or a whole save that lacks its commit; and what others have left behind.

    All of it is old. A tombstone and a checkpoint have been fenced before.
    """
    if before == "a checkpoint":
        stage.begin(partial(save, stage)).finish()
    elif before == "a whole save":
        killed = stage.begin(partial(save, stage))
        while not any(key.endswith("/records/00000.json") for key in stage.times):
            killed.step()
        killed.kill()
    if before in ("a tombstone", "a checkpoint"):
        stage.begin(partial(leave_behind, stage, "20260101T000000-0000000a")).finish()
        stage.pass_time()
        stage.begin(partial(collect, stage)).finish()
    stage.begin(partial(leave_behind, stage, "20260101T000000-0000000b")).finish()
    stage.pass_time()


def steps(action, before):
    """How many operations it does by itself."""
    with Stage.set() as stage:
        prepare(stage, before)
        actor = stage.begin(partial(action, stage))
        n = 0
        while not actor.done:
            actor.step()
            n += 1
        return n


FORESEEN = AlreadyExistsError | CommitError | MissingDataError | NotFoundError | ReplacedError
"""What a save says whose attempt was collected while it slept, or that was overtaken; and what a deletion says."""


@pytest.mark.parametrize(
    ("first", "second", "before"),
    [
        (overwrite, collect, "nothing"),
        (overwrite, collect, "a tombstone"),
        (overwrite, collect, "a checkpoint"),
        (overwrite, delete, "a checkpoint"),
        (collect, overwrite, "nothing"),
        (collect, overwrite, "a checkpoint"),
        (delete, overwrite, "a checkpoint"),
        (overwrite, commit, "nothing"),
        (commit, collect, "a whole save"),
        (collect, commit, "a whole save"),
        (commit, commit, "a whole save"),
        (collect, collect, "a checkpoint"),
        (collect, delete, "a checkpoint"),
        (delete, collect, "a checkpoint"),
    ],
)
def test_two_at_once_do_no_harm_wherever_each_of_them_is_interrupted(first, second, before):
    """The first stops after i operations, long enough to be taken for dead; the second after j. Then both go on."""
    ends = steps(first, before), steps(second, before)
    for i in range(ends[0]):
        for j in range(1 + i % 2, ends[1] + 1, 2):  # every other pair, to save time
            with Stage.set() as stage:
                prepare(stage, before)
                a = stage.begin(partial(first, stage))
                for _ in range(i):
                    a.step()
                stage.pass_time()
                b = stage.begin(partial(second, stage))
                for _ in range(j):
                    b.step()
                for outcome in (a.finish(), b.finish()):
                    assert not isinstance(outcome, Exception) or isinstance(outcome, FORESEEN)
                stage.check_end()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kinds=st.lists(st.sampled_from([save, overwrite, commit, collect, delete]), min_size=2, max_size=4),
    before=st.sampled_from(["nothing", "a tombstone", "a checkpoint", "a whole save"]),
    schedule=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), max_size=30),
    ends=st.lists(st.sampled_from([Actor.finish, Actor.kill]), min_size=4, max_size=4),
)
def test_any_number_at_once_do_no_harm_in_any_order_killed_or_not(kinds, before, schedule, ends):
    """The schedule says who does how many operations; at the end some are killed where they are, the others go on."""
    with Stage.set() as stage:
        prepare(stage, before)
        actors = [stage.begin(partial(kind, stage)) for kind in kinds]
        for who, operations in schedule:
            if who >= len(actors):
                stage.pass_time()
                continue
            for _ in range(operations):
                actors[who].step()
        for actor, end in zip(actors, ends, strict=False):
            outcome = end(actor)
            assert not isinstance(outcome, Exception) or isinstance(outcome, FORESEEN)
        stage.check_end()


def test_what_wakes_up_between_the_choice_and_the_fence_is_left_alone_for_now():
    with Stage.set() as stage:
        prepare(stage, "a checkpoint")
        collector = stage.begin(partial(collect, stage))
        before = stage.changes
        while stage.changes == before:
            collector.step()
        stage.begin(partial(stage.store.write, "20260101T000000-0000000b/zarr/w/c/1", b"x")).finish()
        (kept,) = collector.finish()
        assert (kept.outcome, kept.idle) == ("kept", 0)
        assert "may be a save under way" in kept.reason
        stage.check_end()
