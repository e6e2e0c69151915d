"""Pins and tags: both protect, neither undoes the other, and changes at the same time lose
nothing."""

import re
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interleaving import VERSIONS, Stage, finish

import shardckpt
from shardckpt import SaveOptions
from shardckpt.commit.markers import (
    MOST_TAGS,
    PINNED,
    SUPERSEDED,
    Protection,
    protection,
)
from shardckpt.errors import (
    AlreadyExistsError,
    FormatError,
    NotFoundError,
    OptionError,
    StorageError,
)
from shardckpt.format.documents import seal
from shardckpt.io.store import Store
from shardckpt.runs import collecting, pinning
from shardckpt.serve import hub

SOON = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def save(url, **options):
    shardckpt.save(url, {"w": np.arange(4)}, options=SaveOptions(layout="zarr", **options))


def protected(url):
    store = Store.open(url)
    return protection(store, shardckpt.open(url).record.attempt)


@pytest.fixture
def url(tmp_path):
    save(tmp_path / "7")
    return tmp_path / "7"


def test_pins_and_tags_are_changed_one_by_one(url):
    pinning.tag(url, "released")
    pinning.pin(url)
    pinning.tag(url, "best")
    pinning.tag(url, "best")
    assert protected(url) == Protection(pinned=True, tags=("best", "released"))
    assert pinning.unpin(url)
    assert not pinning.unpin(url)
    assert protected(url) == Protection(tags=("best", "released"))
    assert pinning.untag(url, "best")
    assert not pinning.untag(url, "best")
    assert (url / PINNED).exists()
    assert pinning.untag(url, "released")
    assert not (url / PINNED).exists()
    assert collecting.delete(url) == []


@pytest.mark.parametrize(
    ("pin", "tags", "message"),
    [
        (False, ["best"], "is tagged best, so it is not deleted; `shardckpt untag best` it first"),
        (
            True,
            ["best"],
            (
                "is pinned and tagged best, so it is not deleted; `shardckpt unpin` and `shardckpt "
                "untag best` it first"
            ),
        ),
        (
            False,
            ["a", "b"],
            (
                "is tagged a, b, so it is not deleted; `shardckpt untag a` and `shardckpt untag b` "
                "it first"
            ),
        ),
    ],
)
def test_a_tagged_checkpoint_is_not_deleted(url, pin, tags, message):
    for name in tags:
        pinning.tag(url, name)
    if pin:
        pinning.pin(url)
    with pytest.raises(OptionError, match=re.escape(message)):
        collecting.delete(url)


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "a" * 65, "é", "a\n", None])
def test_names_have_a_form(url, name):
    for change in (pinning.tag, pinning.untag):
        with pytest.raises(OptionError, match="is not a tag; give 1 to 64"):
            change(url, name)


@pytest.mark.parametrize(
    "name", ["main", "pinned", "superseded", "step-100", "100", "0" * 40, "a" * 40]
)
def test_words_of_the_service_are_no_tags(url, name):
    assert (
        name in ("main", "pinned", "superseded")
        or hub._STEP.fullmatch(name)
        or hub._COMMIT.fullmatch(name)
    )
    with pytest.raises(OptionError, match="is reserved"):
        pinning.tag(url, name)
    assert not pinning.untag(url, name)


def test_tags_are_few(url):
    for i in range(MOST_TAGS):
        pinning.tag(url, f"tag-{i}")
    with pytest.raises(OptionError, match="has 32 tags, which is the limit"):
        pinning.tag(url, "more")
    pinning.pin(url)
    assert len(protected(url).tags) == MOST_TAGS


def test_a_marker_of_an_earlier_version_is_a_pin(url):
    attempt = shardckpt.open(url).record.attempt
    (url / PINNED).write_bytes(seal({"attempt": attempt}))
    assert protected(url) == Protection(pinned=True)
    pinning.tag(url, "best")
    assert protected(url) == Protection(pinned=True, tags=("best",))
    assert pinning.unpin(url)
    assert protected(url) == Protection(tags=("best",))


def test_an_empty_marker_does_not_protect(url):
    (url / PINNED).write_bytes(Protection().sealed(shardckpt.open(url).record.attempt))
    assert not protected(url)
    assert collecting.delete(url) == []


@pytest.mark.parametrize(
    "fields",
    [{"pinned": 1}, {"tags": "best"}, {"tags": ["a b"]}, {"tags": [1]}, {"tags": ["a"] * 33}, None],
)
def test_a_damaged_marker_is_a_pin_until_it_is_replaced_or_unpinned(url, fields):
    attempt = shardckpt.open(url).record.attempt
    damaged = b"{" if fields is None else seal({"attempt": attempt, **fields})
    (url / PINNED).write_bytes(damaged)
    assert not pinning.untag(url, "best"), "it may be a pin"
    with pytest.raises(OptionError, match="is pinned"):
        collecting.delete(url)
    pinning.tag(url, "best")
    assert protected(url) == Protection(pinned=True, tags=("best",))
    (url / PINNED).write_bytes(damaged)
    assert pinning.unpin(url)
    assert not (url / PINNED).exists()


def test_a_marker_says_nothing_of_the_checkpoint_that_takes_the_place(url):
    pinning.tag(url, "best")
    marker = (url / PINNED).read_bytes()
    pinning.untag(url, "best")
    save(url, overwrite=True)
    (url / PINNED).write_bytes(marker)
    assert not protected(url)
    assert not pinning.untag(url, "best")
    pinning.tag(url, "new")
    assert protected(url) == Protection(tags=("new",))


def test_a_marker_that_never_stays_is_an_error(url, monkeypatch):
    monkeypatch.setattr(Store, "replace", lambda *_: False)
    with pytest.raises(StorageError, match="other processes keep changing it"):
        pinning.tag(url, "best")


def test_where_the_storage_has_no_conditional_deletion_an_empty_marker_stays(url, monkeypatch):
    pinning.tag(url, "best")
    monkeypatch.setattr(Store, "remove", lambda *_: False)
    assert pinning.untag(url, "best")
    assert (url / PINNED).exists()
    assert not protected(url)


def test_threads_that_tag_at_once_lose_nothing(url):
    names = [f"tag-{i}" for i in range(8)]
    threads = [threading.Thread(target=pinning.tag, args=(url, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert protected(url).tags == tuple(names)


# --- interleaved at every operation of the storage ------------------------------------------------


def orders(actors):
    """Strategy for lists of turns: an actor, and the number of its operations of the storage."""
    return st.lists(
        st.tuples(st.integers(0, actors - 1), st.sampled_from([1, 2, 3, 4, 6, 8, 100])), max_size=12
    )


@pytest.mark.long
@SOON
@given(orders(5), st.sampled_from(VERSIONS), st.booleans())
def test_changes_at_once_lose_nothing_and_a_deletion_comes_before_or_too_late(
    order, versions, tagged
):
    with Stage.set(versions) as stage:
        stage.begin(lambda: save(stage.url)).finish()
        if tagged:
            stage.begin(lambda: pinning.tag(stage.url, "old")).finish()
        pin = stage.begin(lambda: pinning.pin(stage.url))
        tags = [stage.begin(lambda name=name: pinning.tag(stage.url, name)) for name in ("a", "b")]
        untag = stage.begin(lambda: pinning.untag(stage.url, "old"))
        delete = stage.begin(lambda: collecting.delete(stage.url))
        actors = [pin, *tags, untag, delete]
        for i, operations in order:
            for _ in range(operations):
                actors[i].step()
        finish(actors)
        if stage.named is None:
            assert delete.outcome == []
            assert all(isinstance(one.outcome, NotFoundError) for one in (pin, *tags))
            assert untag.outcome is tagged or isinstance(untag.outcome, NotFoundError)
            stage.check_end()
        else:
            assert isinstance(delete.outcome, OptionError)
            assert [one.outcome for one in (pin, *tags, untag)] == [None, None, None, tagged]
            assert protection(stage.store, stage.named) == Protection(pinned=True, tags=("a", "b"))


@pytest.mark.long
@SOON
@given(orders(2), st.sampled_from(VERSIONS))
def test_a_slow_pin_does_not_undo_that_of_the_checkpoint_which_took_the_place(order, versions):
    with Stage.set(versions) as stage:
        stage.begin(lambda: save(stage.url)).finish()

        def replaced():
            save(stage.url, overwrite=True)
            pinning.tag(stage.url, "new")

        slow, other = actors = [stage.begin(lambda: pinning.pin(stage.url)), stage.begin(replaced)]
        for i, operations in order:
            for _ in range(operations):
                actors[i].step()
        finish(actors)
        marks = protection(stage.store, stage.named)
        assert slow.outcome is None or isinstance(slow.outcome, NotFoundError)
        assert ("new" in marks.tags) == (other.outcome is None)
        assert other.outcome is None or isinstance(other.outcome, AlreadyExistsError | OptionError)


@pytest.mark.parametrize("versions", VERSIONS)
@pytest.mark.parametrize("marker", [None, SUPERSEDED])
def test_a_slow_deletion_does_not_undo_the_pin_of_the_checkpoint_which_took_the_place(
    versions, marker
):
    saved_anew = 0
    for operations in range(30):
        with Stage.set(versions) as stage:
            stage.begin(lambda stage=stage: save(stage.url)).finish()
            if marker:
                stage.store.write(marker, seal({"attempt": stage.named}))
            slow = stage.begin(lambda stage=stage: collecting.delete(stage.url))
            for _ in range(operations):
                slow.step()
            other = stage.begin(lambda stage=stage: save(stage.url))
            other.finish()
            if other.outcome is None:
                saved_anew += 1
                stage.begin(lambda stage=stage: pinning.pin(stage.url)).finish()
            slow.finish()
            assert isinstance(slow.outcome, list)
            if other.outcome is None:
                assert protection(stage.store, stage.named).pinned
            else:
                assert isinstance(other.outcome, AlreadyExistsError)
                stage.check_end()
    assert saved_anew > 3


def test_the_pin_of_a_damaged_checkpoint_can_be_removed_so_that_it_can_be_deleted(url):
    pinning.pin(url)
    record = url / "checkpoint.json"
    record.write_bytes(record.read_bytes()[:-20] + b"x" * 20)
    with pytest.raises(FormatError):
        pinning.tag(url, "best")
    with pytest.raises(FormatError):
        pinning.untag(url, "best")  # the pin would stay
    with pytest.raises(OptionError, match="pinned"):
        collecting.delete(url)
    assert pinning.unpin(url)
    # Without a record, nothing says that its data is not a save under way.
    collecting.delete(url, grace=0)
    assert not url.exists()
