"""Saves by one host or several, overwrites, commits, collections, deletions and readers of one
checkpoint at once.

`interleaving` checks after every operation that nothing is lost, published twice or published too
late.
"""

from __future__ import annotations

from functools import partial
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interleaving import GRACE, VERSIONS, Actor, Stage, finish

import shardckpt
from shardckpt import SaveOptions
from shardckpt.commit.publish import RECORD, hold_place, read_prior
from shardckpt.errors import (
    AlreadyExistsError,
    CommitError,
    MissingDataError,
    NotFoundError,
    ReplacedError,
)
from shardckpt.format.documents import seal
from shardckpt.format.record import Tombstone
from shardckpt.runs import collecting, committing

HOSTS = 2
"""Of a job, where it has several."""
LARGE = 20_000
"""Elements of a tensor that the hosts of a job deal out between them: two chunks."""


def state(value, hosts):
    return {
        "w": np.full(LARGE if hosts > 1 else 3, value, np.float32),
        "small": np.full(3, value),
        "leaf": value,
    }


def value_of(restored):
    """Value of a restored state, which must not be a mixture of two."""
    values = {restored["leaf"], *restored["w"].tolist(), *restored["small"].tolist()}
    assert len(values) == 1, values
    return values.pop()


# --- who there is: each begins its actors on a stage ----------------------------------------------


def save(stage, *, hosts=1, overwrite=False):
    stage.value = getattr(stage, "value", 0) + 1
    value, options = stage.value, SaveOptions(layout="zarr", overwrite=overwrite)

    def one(coordinator=None):
        shardckpt.save(stage.url, state(value, hosts), options=options, coordinator=coordinator)
        return "saved"

    job = [stage.begin(one)] if hosts == 1 else stage.begin_job(one, hosts)
    for actor in job:
        actor.value = value
    return job


def overwrite(stage):
    return save(stage, overwrite=True)


def hosts_save(stage):
    return save(stage, hosts=HOSTS)


def hosts_overwrite(stage):
    return save(stage, hosts=HOSTS, overwrite=True)


def commit(stage):
    """An actor that commits, as `shardckpt commit` does at each place."""
    actor = stage.begin(lambda: committing.commit_place(".", stage.store))
    actor.commits = True
    return [actor]


def collect(stage):
    return [stage.begin(lambda: collecting.collect_place(stage.store, grace=GRACE))]


def delete(stage):
    return [stage.begin(lambda: collecting.delete_place(stage.store, reason="test", grace=GRACE))]


def read(stage):
    """An actor that reads: it gets the whole of a checkpoint that was there meanwhile, or an error
    that is true."""

    def action():
        since = stage.changes
        try:
            value = value_of(shardckpt.restore(stage.url))
        except ReplacedError:
            assert stage.changes > since, "nothing came in between"
        except NotFoundError:
            assert None in stage.history[since:], "there is a checkpoint all the time"
        else:
            assert value in {
                stage.savers[attempt][0].value for attempt in stage.history[since:] if attempt
            }
            return value

    return [stage.begin(action)]


# --- what is there before -------------------------------------------------------------------------


def leave_behind(stage, attempt):
    """Put an attempt there, as a killed save leaves it."""
    for name in ("hosts/00000/table", "records/00000.json", "zarr/w/c/0"):
        stage.store.write(f"{attempt}/{name}", b"x")


def prepare(stage, before):
    """Nothing, a tombstone of an earlier version, a placeholder, a checkpoint, or a whole save of
    several hosts that lacks its commit.

    All of it is old. Others have left something behind, but where all was "deleted" by an earlier
    version. A checkpoint has been fenced before.
    """
    if before == "a checkpoint":
        finish(save(stage))
    elif before == "a whole save":
        job = hosts_save(stage)
        for actor in job[::-1]:  # the committer last: it must not see the last record
            while not any(
                key.endswith(f"/records/{job.index(actor):05}.json") for key in stage.times
            ):
                actor.step()
        for actor in job:
            actor.kill()
    if before == "a checkpoint":
        stage.begin(partial(leave_behind, stage, "20260101T000000-0000000a")).finish()
        stage.pass_time()
        finish(collect(stage))
    if before in ("a tombstone", "deleted"):
        stage.store.write(RECORD, seal(Tombstone("deleted", "1").to_json()))
    if before == "a placeholder":
        hold_place(stage.store, read_prior(stage.store, overwrite=False), overwrite=False)
    if before != "deleted":
        stage.begin(partial(leave_behind, stage, "20260101T000000-0000000b")).finish()
    stage.pass_time()


def go(actors, operations):
    """So many operations, turn by turn, the committer's turn last; how many they did."""
    for n in range(operations):
        waiting = [actor for actor in actors if not actor.done]
        if not waiting:
            return n
        waiting[-1 - n % len(waiting)].step()
    return operations


def operations(action, past):
    """Number of operations of an action when no other actor is there."""
    with Stage.set(after=past) as stage:
        return go(action(stage), 10_000)


FORESEEN = AlreadyExistsError | CommitError | MissingDataError | NotFoundError | ReplacedError
"""Errors of a save whose attempt was collected while it slept or that was overtaken, and errors of
a deletion."""


def all_end(stage, *parties):
    for outcome in finish([actor for party in parties for actor in party]):
        assert not isinstance(outcome, Exception) or isinstance(outcome, FORESEEN)
    stage.check_end()


@pytest.mark.parametrize("saving", [save, hosts_save])
def test_a_save_that_is_collected_while_it_runs_asks_for_no_backup(saving):
    """A collection may come before any of its operations."""
    with Stage.set() as stage:
        past = stage.past
    messages = set()
    for i in range(operations(saving, past)):
        with Stage.set(after=past) as stage:
            job = saving(stage)
            go(job, i)
            stage.pass_time()
            finish(collect(stage))
            messages |= {str(outcome) for outcome in finish(job)}
    assert any("collected (`shardckpt gc`), while this one was" in message for message in messages)
    assert not any("backup" in message for message in messages)


# --- every order of two that matters --------------------------------------------------------------


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "before", "stride"),
    [
        (overwrite, collect, "nothing", 1),
        (overwrite, collect, "a tombstone", 1),
        (overwrite, collect, "a checkpoint", 2),
        (overwrite, delete, "a checkpoint", 3),
        (overwrite, overwrite, "a checkpoint", 3),
        (collect, overwrite, "nothing", 1),
        (collect, overwrite, "a checkpoint", 2),
        (delete, overwrite, "a checkpoint", 2),
        (overwrite, commit, "nothing", 1),
        (collect, collect, "a checkpoint", 1),
        (collect, delete, "a checkpoint", 1),
        (delete, collect, "a checkpoint", 1),
        (hosts_overwrite, collect, "a checkpoint", 4),
        (hosts_overwrite, delete, "a checkpoint", 5),
        (hosts_overwrite, commit, "a checkpoint", 3),
        (hosts_overwrite, hosts_overwrite, "a checkpoint", 7),
        (hosts_overwrite, read, "a checkpoint", 2),
        (delete, read, "a checkpoint", 1),
        (read, overwrite, "a checkpoint", 2),
        (commit, collect, "a whole save", 2),
        (collect, commit, "a whole save", 2),
        (commit, commit, "a whole save", 2),
        (commit, overwrite, "a whole save", 2),
        (commit, read, "a whole save", 2),
        (overwrite, collect, "deleted", 1),
        (collect, overwrite, "deleted", 1),
        (hosts_overwrite, collect, "deleted", 2),
        (collect, hosts_overwrite, "deleted", 2),
        (collect, collect, "deleted", 1),
        (save, collect, "a placeholder", 1),
        (collect, save, "a placeholder", 1),
        (hosts_save, collect, "nothing", 2),
        (hosts_save, save, "nothing", 2),
        (save, delete, "nothing", 1),
    ],
)
def test_two_at_once_do_no_harm_wherever_each_of_them_is_interrupted(
    first, second, before, stride, record_property
):
    """The first stops after i operations, long enough to be taken for dead; the second after j.
    Then both go on.

    Of all pairs (i, j) every one, or one in `stride`, to save time.
    """
    tried = count()
    with Stage.set() as stage:
        prepare(stage, before)
        past = stage.past
    of_second = operations(second, past)
    for i in range(operations(first, past)):
        for j in range(1 + i % stride, of_second + 1, stride):
            with Stage.set(after=past) as stage:
                a = first(stage)
                go(a, i)
                stage.pass_time()
                b = second(stage)
                go(b, j)
                all_end(stage, a, b)
            next(tried)
    record_property("interleavings", next(tried))


@pytest.mark.parametrize("overwriting", [overwrite, hosts_overwrite])
def test_an_overwrite_shows_the_old_or_the_new_after_every_operation_of_every_host(overwriting):
    with Stage.set() as stage:
        prepare(stage, "a checkpoint")
        job = overwriting(stage)
        seen = []
        while not all(actor.done for actor in job):
            for actor in job:
                actor.step()
                seen.append(read(stage)[0].finish())
        old, new = 1, 2
        published = seen.index(new)
        assert seen == [old] * published + [new] * (len(seen) - published)
        assert [actor.outcome for actor in job] == ["saved"] * len(job)


@pytest.mark.long
@pytest.mark.parametrize("who", range(HOSTS))
def test_a_host_killed_at_any_operation_leaves_the_old_or_the_new_and_a_collection_what_is_whole(
    who,
):
    values = set()
    for k in count():
        with Stage.set() as stage:
            prepare(stage, "a checkpoint")
            job = hosts_overwrite(stage)
            for _ in range(k):
                go(job, len(job))
            if job[who].done:
                break
            job[who].kill()
            finish(job)
            values.add(read(stage)[0].finish())
            stage.pass_time()
            finish(commit(stage))
            finish(collect(stage))
            values.add(read(stage)[0].finish())
            stage.check_end()
    assert values == {1, 2}


# --- any order of any number ----------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kinds=st.lists(
        st.sampled_from(
            [save, overwrite, hosts_save, hosts_overwrite, commit, collect, delete, read]
        ),
        min_size=2,
        max_size=4,
    ),
    versions=st.sampled_from(VERSIONS),
    before=st.sampled_from(
        ["nothing", "a tombstone", "a placeholder", "a checkpoint", "a whole save", "deleted"]
    ),
    schedule=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), max_size=40),
    ends=st.lists(st.sampled_from([None, Actor.kill]), min_size=8, max_size=8),
)
def test_any_number_at_once_do_no_harm_in_any_order_killed_or_not(
    kinds, versions, before, schedule, ends
):
    """The schedule says who does how many operations; at the end some are killed where they are,
    the others go on."""
    with Stage.set(versions) as stage:
        prepare(stage, before)
        actors = [actor for kind in kinds for actor in kind(stage)]
        for who, operations in schedule:
            if who >= len(actors):
                stage.pass_time()
                continue
            for _ in range(operations):
                actors[who].step()
        for actor, end in zip(actors, ends, strict=False):
            if end is not None:
                end(actor)
        all_end(stage, actors)
