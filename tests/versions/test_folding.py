"""Folding: every version keeps its contents, few differences lead to each, and a fold that fails or
is killed changes nothing."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from one_of_several import on_threads
from paths import CHILDREN
from typer.testing import CliRunner

import shardckpt
from shardckpt import SaveOptions
from shardckpt.cli.app import app
from shardckpt.commit.attempts import attempts
from shardckpt.commit.dependants import Dependants, users_beside
from shardckpt.commit.markers import SUPERSEDED
from shardckpt.commit.publish import published_attempt, read_prior
from shardckpt.commit.remove import bury, renew
from shardckpt.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    MissingDataError,
    NotFoundError,
    OptionError,
    ShardckptError,
    StorageError,
)
from shardckpt.format.differences import Joined, apply, difference, needs_older, whole
from shardckpt.format.documents import open_envelope, seal
from shardckpt.io.store import Store
from shardckpt.runs.catalog import catalog
from shardckpt.runs.collecting import collect
from shardckpt.runs.ended import check_idle, mark_ended
from shardckpt.runs.pinning import pin
from shardckpt.runs.steps import list_steps, read_step
from shardckpt.versions import folding
from shardckpt.versions.folding import bases_after_folding, fold
from shardckpt.writing import attempt

COUNT = 14
STEPS = {3: 0, 6: 0, 9: 0}
"""Of so many versions, the steps that are folded, and the base of each."""


def links(count, most):
    """The number of differences to apply for each version of a chain, after folding."""
    bases, counts = bases_after_folding(count, most), [0]
    for number in range(1, count):
        counts.append(1 + counts[bases.get(number, number - 1)])
    return counts


@pytest.mark.parametrize("most", [8, 9, 12, 40])
def test_no_version_is_more_differences_from_the_anchor_than_allowed(most):
    for count in range(2, 129):
        assert max(links(count, most)) <= most, count
        # A version is due once and then keeps its base, however long the chain becomes.
        assert not {number for number in bases_after_folding(count, most) if number > count - 3}


def test_too_few_differences_for_a_chain_are_refused():
    with pytest.raises(
        OptionError, match="3 differences are too few for chains of 50 versions: allow more"
    ):
        bases_after_folding(50, 3)
    with pytest.raises(OptionError, match="3 differences are too few"):
        shardckpt.Publisher("memory://nowhere", catch_up=3)
    assert bases_after_folding(4, 3) == {}


@settings(max_examples=200, deadline=None)
@given(data=st.data(), itemsize=st.sampled_from([1, 2, 4, 8, 3, 16]), elements=st.integers(1, 70))
def test_joined_differences_lead_to_the_last_elements(data, itemsize, elements):
    first = np.frombuffer(
        data.draw(st.binary(min_size=elements * itemsize, max_size=elements * itemsize)), np.uint8
    ).copy()
    now, joined, was_whole = first.copy(), Joined(first.nbytes, itemsize), False
    for _ in range(data.draw(st.integers(0, 5))):
        before = now.copy()
        for at in data.draw(st.lists(st.integers(0, first.nbytes - 1), max_size=4)):
            now[at] ^= data.draw(st.sampled_from([1, 255]))
        stored = (
            whole(now)
            if data.draw(st.booleans()) and data.draw(st.booleans())
            else difference(before, now, itemsize)[0]
        )
        was_whole = was_whole or not needs_older(np.frombuffer(stored, np.uint8)) & bool(stored)
        joined.add(np.frombuffer(stored, np.uint8), "chunk")
    stored = joined.stored()
    if stored is None:
        assert len(difference(first.copy(), now, itemsize)[0]) > first.nbytes // 2
    else:
        apply(np.frombuffer(stored, np.uint8), first, itemsize, "chunk")
        assert (first == now).all()
        assert was_whole or not stored or needs_older(np.frombuffer(stored, np.uint8))


def state_of(step):
    rng = np.random.default_rng(0)
    state = {
        "w": rng.standard_normal((64, 96), np.float32),
        "still": np.arange(3000.0),
        "small": np.zeros(3),
        "step": np.array(step),
    }
    for s in range(1, step + 1):
        state["w"].reshape(-1)[rng.integers(0, state["w"].size, 20)] += 1
        if s == 5:
            state["w"] += 1  # all elements change
        if s >= 7:
            state["new"] = np.arange(2000) + s // 9
    return state


def publish(url, count=COUNT, **options):
    with shardckpt.Publisher(
        url, anchor_every=64, keep=None, **{"catch_up": None, **options}
    ) as publisher:
        for step in range(count):
            publisher.publish(step, state_of(step))
            publisher.wait()


def check(url, count=COUNT, steps=None):
    """Check all versions; the number of differences that each is made from."""
    needed = {}
    for entry in catalog(url):
        step = int(entry.name)
        restored, expected = shardckpt.restore(str(entry.location)), state_of(step)
        assert restored.keys() == expected.keys()
        assert all((restored[name] == expected[name]).all() for name in expected), step
        assert shardckpt.open(str(entry.location)).verify().ok, step
        needed[step] = 0
        place = entry.location
        while chain := shardckpt.open(str(place)).record.structure.chain:
            needed[step] += 1
            place = entry.location.parent.join(chain[0].url.removeprefix("../"))
    assert sorted(needed) == list(range(count)) if steps is None else steps
    return needed


@pytest.mark.long
def test_versions_keep_their_contents_and_marks_and_few_differences_lead_to_each(store):
    url = str(store)
    publish(url)
    pin(f"{url}/3")
    before = {step: shardckpt.open(f"{url}/{step}").record for step in range(COUNT)}
    assert max(check(url).values()) == COUNT - 1
    done = fold(url)
    assert {one.step: one.base for one in done} == STEPS
    assert all(one.new_bytes < 1.1 * one.old_bytes for one in done)
    assert max(check(url).values()) == 5
    assert fold(url) == []
    # By a process that had read its record before.
    store.sub("6").write(SUPERSEDED, seal({"attempt": before[6].attempt}))
    for step, record in before.items():
        now = shardckpt.open(f"{url}/{step}").record
        assert (now.attempt != record.attempt) == (step in STEPS)
        assert (now.fingerprint, now.created, now.metadata) == (
            record.fingerprint,
            record.created,
            record.metadata,
        )
        info = read_step(store, step)
        assert (info.pinned, info.state) == (step == 3, "superseded" if step == 6 else "committed")
    # The replaced attempts stay for the grace period, which begins with the fold.
    assert all(
        len(attempts(store.sub(str(step)), store.list_children(f"{step}/"))) == 2 for step in STEPS
    )
    assert {one.outcome for one in collect(url, grace=600)} == {"kept"}
    assert {one.outcome for one in collect(url, grace=0)} == {"removed"}
    assert max(check(url).values()) == 5


def test_a_publisher_folds_what_is_due_and_followers_that_keep_up_read_only_differences(tmp_path):
    like, seen = state_of(0), []
    with (
        shardckpt.Publisher(tmp_path, anchor_every=64, keep=None) as publisher,
        shardckpt.follow(
            tmp_path,
            like={name: like[name] for name in ("w", "small", "step")},
            mode="each",
            strict=False,
        ) as follower,
    ):
        for step in range(COUNT):
            publisher.publish(step, state_of(step))
            publisher.wait()
            version = follower.poll()
            assert (version.step, version.went_back) == (step, False)
            version.prepare()
            version.apply()
            version.prove()
            seen.append(follower.cache.contents)
            assert follower.poll() is None
            assert all((like[name] == state_of(step)[name]).all() for name in ("w", "small"))
    assert max(check(tmp_path).values()) <= 8
    folded = {
        step
        for step in range(COUNT)
        if "-folded-" in shardckpt.open(tmp_path / str(step)).record.attempt
    }
    assert folded == set(STEPS)


def test_a_version_that_is_pinned_superseded_or_replaced_during_the_fold_is_left_as_it_is(
    tmp_path, monkeypatch
):
    publish(tmp_path)
    publish_it, asked = folding.publish, []

    def meanwhile(store, record, prior):
        asked.append(int(store.location.name))
        if asked[-1] == 3:
            pin(str(store))
        if asked[-1] == 6:
            store.write(SUPERSEDED, seal({"attempt": published_attempt(store)}))
        return publish_it(store, record, prior)

    monkeypatch.setattr(folding, "publish", meanwhile)
    assert {one.step for one in fold(tmp_path)} == {6, 9}
    assert asked == list(STEPS)
    assert read_step(Store.open(tmp_path), 3).pinned
    assert read_step(Store.open(tmp_path), 6).state == "superseded"
    check(tmp_path)
    monkeypatch.undo()
    assert {one.step for one in fold(tmp_path)} == {3}
    assert read_step(Store.open(tmp_path), 3).pinned


def test_a_fold_just_before_a_new_version_replaces_it_does_not_cost_the_new_one(
    tmp_path, monkeypatch
):
    publish(tmp_path)
    new = {"w": np.ones((64, 96), np.float32)}
    publish_it = folding.publish

    def late(store, folded, prior):
        """The fold has looked at the version for the last time; so has the publisher then."""

        def meanwhile(*arguments):
            assert publish_it(store, folded, prior)
            return publish_it(*arguments)

        with monkeypatch.context() as patch, shardckpt.Publisher(tmp_path, catch_up=None) as again:
            patch.setattr(attempt, "publish", meanwhile)
            again.publish(6, new)
            again.wait()

    monkeypatch.setattr(
        folding, "publish", lambda *a: (late if a[0].location.name == "6" else publish_it)(*a)
    )
    fold(tmp_path)
    assert (shardckpt.restore(tmp_path / "6")["w"] == new["w"]).all()
    assert shardckpt.open(tmp_path / "6").verify().ok
    assert (
        len(attempts(Store.open(tmp_path / "6"), Store.open(tmp_path / "6").list_children())) == 2
    )


@pytest.mark.parametrize("fold_is", ["whole", "damaged"])
def test_two_folds_while_a_new_version_is_written_do_not_cost_the_new_one(
    tmp_path, monkeypatch, fold_is
):
    publish(tmp_path)
    new = {"w": np.ones((64, 96), np.float32)}
    assemble_it = attempt.assemble

    def meanwhile(*arguments):
        monkeypatch.undo()
        for most in (12, 8):
            assert 6 in {one.step for one in fold(tmp_path, most=most)}
        if fold_is == "damaged":
            for path in (tmp_path / "6").glob("*-folded-*/records/*"):
                path.unlink()
        return assemble_it(*arguments)

    with shardckpt.Publisher(tmp_path, catch_up=None) as again:
        monkeypatch.setattr(attempt, "assemble", meanwhile)
        again.publish(6, new)
        again.wait()
    assert (shardckpt.restore(tmp_path / "6")["w"] == new["w"]).all()
    assert shardckpt.open(tmp_path / "6").verify().ok


def test_a_new_version_that_finds_a_fold_and_then_another_save_leaves_nothing(
    tmp_path, monkeypatch
):
    publish(tmp_path)
    assemble_it, publish_it, other = attempt.assemble, attempt.publish, {"w": np.zeros(3)}

    def meanwhile(*arguments):
        monkeypatch.undo()
        assert 6 in {one.step for one in fold(tmp_path)}
        monkeypatch.setattr(attempt, "publish", late)
        return assemble_it(*arguments)

    def late(store, record, prior, check):
        monkeypatch.undo()

        def check_and_save(fold):
            check(fold)
            shardckpt.save(tmp_path / "6", other, options=SaveOptions(overwrite=True))
            assert not (tmp_path / "6" / fold.attempt).exists()

        return publish_it(store, record, prior, check_and_save)

    with shardckpt.Publisher(tmp_path, catch_up=None) as again:
        monkeypatch.setattr(attempt, "assemble", meanwhile)
        again.publish(6, {"w": np.ones((64, 96), np.float32)})
        with pytest.raises(AlreadyExistsError, match="nothing of it was kept"):
            again.wait()
    assert (shardckpt.restore(tmp_path / "6")["w"] == other["w"]).all()


def test_a_version_that_a_collection_has_marked_before_a_fold_is_not_replaced(
    tmp_path, monkeypatch
):
    """The collection may have removed the data of the new version."""
    publish(tmp_path)
    assemble_it = attempt.assemble

    def meanwhile(*arguments):
        monkeypatch.undo()
        store = Store.open(tmp_path / "6")
        assert renew(store, published_attempt(store))
        assert 6 in {one.step for one in fold(tmp_path)}
        return assemble_it(*arguments)

    with shardckpt.Publisher(tmp_path, catch_up=None) as again:
        monkeypatch.setattr(attempt, "assemble", meanwhile)
        again.publish(6, {"w": np.ones((64, 96), np.float32)})
        with pytest.raises(AlreadyExistsError):
            again.wait()
    assert (shardckpt.restore(tmp_path / "6")["w"] == state_of(6)["w"]).all()


def test_a_new_version_whose_data_a_collection_has_removed_is_not_published(monkeypatch):
    """The collection may not publish it: later versions, which it does not know to be superseded,
    need the one that is there."""
    url = f"memory://{uuid.uuid4().hex}"
    publish(url)
    assemble_it = attempt.assemble

    def meanwhile(*arguments):
        record = assemble_it(*arguments)
        assert "removed" in [one.outcome for one in collect(f"{url}/6", grace=0)]
        return record

    monkeypatch.setattr(attempt, "assemble", meanwhile)
    with shardckpt.Publisher(url, catch_up=None) as again:
        again.publish(6, {"w": np.ones((64, 96), np.float32)})
        with pytest.raises(AlreadyExistsError):
            again.wait()
    assert (shardckpt.restore(f"{url}/6")["w"] == state_of(6)["w"]).all()


def test_what_named_a_version_before_a_fold_means_it_afterwards(tmp_path):
    publish(tmp_path)
    left = SaveOptions(base=tmp_path / "6", skip=("w",))
    shardckpt.save(tmp_path / "tuned", state_of(6), options=left)
    root = Store.open(tmp_path)
    place = root.sub("6")
    mark_ended(root, "ann")
    before = published_attempt(place)
    pickled = pickle.dumps(shardckpt.open(tmp_path / "6"))
    assert {one.step for one in fold(tmp_path)} == {3, 6, 9}
    after = published_attempt(place)
    assert before != after
    assert (shardckpt.restore(tmp_path / "tuned")["w"] == state_of(6)["w"]).all()
    assert (pickle.loads(pickled).read("w") == state_of(6)["w"]).all()
    with pytest.raises(OptionError, match=r"is the base of checkpoints beside it.* 7, .* tuned;"):
        Dependants(place).check_unused(after, "deleted")
    assert users_beside(root)(6, after)
    assert check_idle(root)
    # A pin or a deletion that has read the record before the fold.
    assert renew(place, before)
    assert bury(place, "test", before) == after


def test_a_fold_of_several_hosts_opens_each_version_once(tmp_path, monkeypatch):
    results = on_threads(2, lambda coordinator: publish(tmp_path, coordinator=coordinator))
    assert results == [None, None]
    opened, open_it = [], folding.open_reader

    def count(place, record, **options):
        opened.append(place)
        return open_it(place, record, **options)

    monkeypatch.setattr(folding, "open_reader", count)
    assert {one.step: one.base for one in fold(tmp_path)} == STEPS
    assert len(shardckpt.open(tmp_path / "6").record.hosts) == 2
    assert len(opened) == 11  # 1 to 3, then a folded one and the three after it, twice
    assert max(check(tmp_path).values()) == 5


def test_contents_that_the_record_does_not_name_are_not_folded(tmp_path):
    publish(tmp_path)
    before = published_attempt(Store.open(tmp_path / "3"))
    (path,) = (tmp_path / "3" / before).glob("**/contents*")
    path.write_bytes(seal(open_envelope(path.read_bytes(), "contents") | {"metadata": {"by": 1}}))
    with pytest.raises(FormatError, match=f"{path}: not the file that the checkpoint's record"):
        fold(tmp_path)
    assert published_attempt(Store.open(tmp_path / "3")) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fold_of_which_any_operation_fails_leaves_every_version(tmp_path):
    publish(tmp_path / "base", 11)
    k, failed = 0, 0
    while True:
        place = shutil.copytree(tmp_path / "base", tmp_path / str(k))
        with failing(place, k) as fault:
            try:
                fold(place)
            except ShardckptError:
                failed += 1
        fold(place)
        assert max(check(place, 11).values()) <= 8
        if not fault.operation:
            break
        shutil.rmtree(place)
        k += 5  # of some hundred operations
    assert failed > 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fold_that_is_killed_at_any_operation_leaves_every_version(tmp_path):
    publish(tmp_path / "base", 10)
    command = [sys.executable, CHILDREN / "fold_kill_at_every_operation.py", tmp_path]
    died = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    )
    assert {"mkdir", "write", "fsync", "rename"} <= set(died)
    for k in range(0, len(died), max(1, len(died) // 40)):
        place = tmp_path / str(k)
        collect(place, grace=0)
        check(place, 10)
        fold(place)
        assert max(check(place, 10).values()) <= 8


def test_the_command_folds_and_says_what_it_did(tmp_path):
    publish(tmp_path)
    shown = CliRunner().invoke(app, ["fold", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "version 9 differs from version 0 now" in shown.output
    assert "3 versions folded; any is at most 8 differences from its anchor" in shown.output
    again = CliRunner().invoke(app, ["fold", str(tmp_path), "--json"])
    assert json.loads(again.output) == {"url": str(tmp_path), "most": 8, "folded": []}
    assert (
        CliRunner().invoke(app, ["fold", str(tmp_path)]).output
        == "0 versions folded; any is at most 8 differences from its anchor\n"
    )
    assert CliRunner().invoke(app, ["fold", str(tmp_path), "--most", "3"]).exit_code == 2
    with pytest.raises(NotFoundError, match="no version is there; give the url of a `Publisher`"):
        fold(tmp_path / "nowhere")
    shardckpt.save(tmp_path / "plain" / "1", {"w": np.zeros(3)})
    assert fold(tmp_path / "plain") == []


@pytest.mark.parametrize("what", ["superseded", "deleted"])
def test_a_version_that_goes_while_it_is_folded_is_left_as_it_is_and_the_others_are_folded(
    tmp_path, monkeypatch, what
):
    publish(tmp_path)
    assemble_it = folding.assemble

    def meanwhile(place):
        store = Store.open(place.location.parent)
        if store.location.name == "3" and what == "superseded":
            store.write(SUPERSEDED, seal({"attempt": published_attempt(store)}))
        elif store.location.name == "3":
            for path in (tmp_path / "3").glob("*/records/*"):
                path.unlink()
            (tmp_path / "3" / "checkpoint.json").unlink()
            raise MissingDataError("gone")
        return assemble_it(place)

    monkeypatch.setattr(folding, "assemble", meanwhile)
    if what == "deleted":
        with pytest.raises(MissingDataError):  # what is folded later needs it
            fold(tmp_path)
        assert not (tmp_path / "3" / "checkpoint.json").exists()
    else:
        assert {one.step for one in fold(tmp_path)} == {6, 9}
        # The fold is complete, so another process may be publishing it.
        assert len([*(tmp_path / "3").glob("*/")]) == 2
        collect(tmp_path, grace=0)
        assert [path.name for path in (tmp_path / "3").glob("*/")] == [
            shardckpt.open(tmp_path / "3").record.attempt
        ]
        assert read_step(Store.open(tmp_path), 3).state == "superseded"
        check(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "then", ["it looks for rollbacks", "the storage fails", "the answer to its record is lost"]
)
def test_a_fold_that_another_process_has_published_is_not_removed_by_its_own(
    tmp_path, monkeypatch, then
):
    """Training goes back: versions that are superseded keep nobody from publishing the fold."""
    publish(tmp_path)
    last = "write_record" if then == "the answer to its record is lost" else "assemble"
    last_step = getattr(folding, last)

    def meanwhile(place, *arguments):
        result, store = last_step(place, *arguments), Store.open(place.location.parent)
        if store.location.name == "3":
            for info in list_steps(Store.open(tmp_path))[3:]:
                Store.open(tmp_path / str(info.step)).write(
                    SUPERSEDED, seal({"attempt": info.attempt})
                )
            assert [one.state for one in shardckpt.commit(store.location)] == ["committed"]
            if then != "it looks for rollbacks":
                raise StorageError("the disk is full")
        return result

    monkeypatch.setattr(folding, last, meanwhile)
    with suppress(StorageError):
        fold(tmp_path)
    assert "-folded-" in shardckpt.open(tmp_path / "3").record.attempt
    check(tmp_path)


def test_a_fold_that_gives_other_sums_is_never_published(monkeypatch):
    """Not by a process that has found it complete already, either."""
    url = f"memory://{uuid.uuid4().hex}"
    publish(url)
    assemble_it, publish_later = folding.assemble, []

    def meanwhile(place):
        record, store = assemble_it(place), Store.open(place.location.parent)
        publish_later.append(
            partial(folding.publish, store, record, read_prior(store, overwrite=True))
        )
        return replace(record, fingerprint=other)

    monkeypatch.setattr(folding, "assemble", meanwhile)
    other = shardckpt.open(f"{url}/1").record.fingerprint
    with pytest.raises(CorruptionError, match="gives other sums than it has"):
        fold(url)
    with pytest.raises(AlreadyExistsError):
        publish_later[0]()
    assert {one.outcome for one in collect(url, grace=0)} == set()
    check(url)
