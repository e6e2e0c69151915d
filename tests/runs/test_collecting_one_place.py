"""Collection and deletion at one place: removed and kept files, and saves that can publish nothing
there afterwards."""

from __future__ import annotations

import functools
import os
import re
import threading
import time

import numpy as np
import pytest

import shardckpt
from shardckpt import SaveOptions
from shardckpt.commit.attempts import attempts, is_attempt, places
from shardckpt.commit.markers import PINNED, SUPERSEDED
from shardckpt.commit.publish import (
    RECORD,
    clear_place,
    hold_place,
    publish,
    read_prior,
    record_digest,
)
from shardckpt.errors import (
    AlreadyExistsError,
    FormatError,
    NotFoundError,
    ReplacedError,
    StorageError,
    VersionError,
)
from shardckpt.format.documents import open_envelope, seal
from shardckpt.format.record import Tombstone, parse_checkpoint
from shardckpt.io.status import exists
from shardckpt.io.store import Store
from shardckpt.runs.collecting import collect_place as collect
from shardckpt.runs.collecting import delete_place as delete
from shardckpt.writing.host import HostWriter

ORPHAN = "20260101T000000-0000000a"
OTHER = "20260101T000000-0000000b-7"
HOUR = 3600


def save(store, value=1, **options):
    shardckpt.save(store.location.url, {"w": np.full(9, value)}, options=SaveOptions(**options))


def leave_behind(store, attempt=ORPHAN):
    """Put an attempt there, as a killed save leaves it."""
    for name in (
        "contents/0.json",
        "hosts/00000/0/d/00000",
        "hosts/00000/table",
        "records/00000.json",
    ):
        store.write(f"{attempt}/{name}", b"x")


def hold(store):
    """Hold the place, as a save does first."""
    return hold_place(store, read_prior(store, overwrite=False), overwrite=False)


def age(store, *below, hours=25):
    """On disk: as if nothing had been written there for that long."""
    then = time.time() - hours * HOUR
    top = store.location.local_path.joinpath(*below)
    for path in [top, *top.rglob("*")]:
        os.utime(path, (then, then), follow_symlinks=False)


def attempts_in(store):
    return attempts(store, store.list_children())


def contents(path):
    return {
        p.relative_to(path): (p.is_symlink(), p.read_bytes() if p.is_file() else None)
        for p in path.rglob("*")
    }


def outcomes(results):
    return {one.attempt: one.outcome for one in results}


@pytest.fixture
def disk(tmp_path):
    return Store.open(tmp_path / "c")


# --- on every storage -----------------------------------------------------------------------------


@pytest.mark.long
def test_a_save_that_began_at_a_free_place_can_publish_nothing_once_the_place_is_collected(store):
    prior = hold(store)
    assert prior.holds
    leave_behind(store)
    assert outcomes(collect(store, grace=0)) == {ORPHAN: "removed"}
    assert store.list_children() == []
    assert not store.replace(RECORD, b"late", prior.generation)
    assert hold(store).digest != prior.digest
    assert not store.replace(RECORD, b"late", prior.generation)
    save(store)
    np.testing.assert_array_equal(shardckpt.restore(store.location.url)["w"], np.full(9, 1))


def test_a_record_read_before_a_collection_cannot_be_replaced_after_it(store):
    """Each time: storages that know a version by its contents must see new ones."""
    save(store)
    record = parse_checkpoint(store.read(RECORD), RECORD)
    for _ in range(2):
        leave_behind(store)
        prior = read_prior(store, overwrite=True)
        assert outcomes(collect(store, grace=0)) == {ORPHAN: "removed"}
        assert attempts_in(store) == [record.attempt]
        assert not store.replace(RECORD, b"late", prior.generation)
        assert read_prior(store, overwrite=True).digest != prior.digest
    opened = shardckpt.open(store.location.url)
    assert opened.record == record
    assert opened.verify().damage == []


def test_a_deleted_checkpoint_leaves_nothing_and_what_began_before_takes_its_place_no_more(store):
    save(store)
    prior = read_prior(store, overwrite=True)
    assert delete(store, reason="superseded", grace=0) == []
    assert store.list_children() == []
    assert not store.replace(RECORD, b"late", prior.generation)
    with pytest.raises(NotFoundError):
        shardckpt.open(store.location.url)
    save(store, 2)
    np.testing.assert_array_equal(shardckpt.restore(store.location.url)["w"], np.full(9, 2))


def test_what_was_written_a_moment_ago_stays(store):
    leave_behind(store)
    (kept,) = collect(store, grace=HOUR)
    assert (kept.attempt, kept.outcome, kept.location) == (ORPHAN, "kept", store.location)
    if store.location.scheme == "memory":
        assert (kept.idle, kept.reason) == (
            None,
            "its age is not known: the storage keeps no times",
        )
    else:
        assert 0 <= kept.idle < HOUR
        assert kept.reason == "it may be a save under way"
    assert attempts_in(store) == [ORPHAN]
    assert not store.exists(RECORD)


# --- which attempts go ----------------------------------------------------------------------------


def test_what_nobody_has_written_into_for_the_grace_period_goes(disk):
    leave_behind(disk)
    age(disk)
    assert outcomes(collect(disk, grace=26 * HOUR)) == {ORPHAN: "kept"}
    (removed,) = collect(disk, grace=24 * HOUR)
    assert (removed.outcome, removed.reason) == ("removed", None)
    assert 25 * HOUR <= removed.idle < 26 * HOUR
    assert attempts_in(disk) == []


def test_where_a_save_may_be_under_way_all_stay_for_a_fence_would_foil_it(disk):
    leave_behind(disk)
    leave_behind(disk, OTHER)
    age(disk, ORPHAN)
    reasons = {one.attempt: one.reason for one in collect(disk, grace=HOUR)}
    assert reasons == {
        ORPHAN: "another save to this place may be under way, and would fail if this were removed",
        OTHER: "it may be a save under way",
    }
    assert not disk.exists(RECORD)
    age(disk, OTHER)
    assert outcomes(collect(disk, grace=HOUR)) == {ORPHAN: "removed", OTHER: "removed"}


def test_what_the_record_names_stays_however_old_it_is(disk):
    save(disk)
    before = contents(disk.location.local_path)
    age(disk)
    assert collect(disk, grace=0) == []
    assert contents(disk.location.local_path) == before


def test_a_fence_changes_nothing_in_the_record_but_its_mark(disk):
    """Of a record of a newer minor version, too, of which this reader does not know all members."""
    save(disk)
    plain = seal({**open_envelope(disk.read(RECORD), RECORD), "novelty": [1.0, {"é": 1e-08}]})
    disk.write(RECORD, plain.replace(b'"version":[1,0]', b'"version":[1,7]'))
    leave_behind(disk)
    collect(disk, grace=0)
    fenced = disk.read(RECORD)
    assert fenced.startswith(b'{"format":"shardckpt","version":[1,7],')
    doc = open_envelope(fenced, RECORD)
    assert re.fullmatch("[0-9a-f]{16}", doc.pop("fence"))
    assert seal(doc) == plain


def test_a_tombstone_stays_with_its_reason_as_long_as_data_cannot_be_removed(disk, monkeypatch):
    save(disk)
    leave_behind(disk)
    with monkeypatch.context() as refusing:
        refusing.setattr(
            os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError("Input/output error"))
        )
        assert set(outcomes(delete(disk, reason="superseded", grace=0)).values()) == {"failed"}
    with pytest.raises(NotFoundError, match=r"deleted \(20\d\d-.*: superseded\)"):
        shardckpt.open(disk.location.url)
    assert set(outcomes(collect(disk, grace=0)).values()) == {"removed"}
    assert not disk.location.local_path.exists()


@pytest.mark.parametrize("begun", [False, True])
def test_a_tombstone_of_an_earlier_version_goes_and_a_placeholder_of_a_killed_save(disk, begun):
    disk.write(RECORD, seal(Tombstone("left alone", "1", begun=begun).to_json()))
    if begun:
        assert collect(disk, grace=HOUR) == []
        assert disk.exists(RECORD), "a save may be about to begin"
        age(disk)
    assert collect(disk, grace=HOUR, dry_run=True) == []
    assert disk.exists(RECORD)
    assert collect(disk, grace=HOUR) == []
    assert not disk.location.local_path.exists()


def test_nothing_is_removed_beside_a_young_placeholder(disk):
    leave_behind(disk)
    age(disk)
    hold(disk)
    assert {one.reason for one in collect(disk, grace=HOUR)} == {
        "another save to this place may be under way, and would fail if this were removed"
    }
    assert read_prior(disk, overwrite=False).holds


def test_a_directory_in_which_somebody_keeps_something_stays(disk):
    save(disk)
    disk.write("notes.txt", b"precious")
    delete(disk, reason="test", grace=0)
    assert disk.list() == ["notes.txt"]


def test_a_save_that_fails_leaves_nothing_where_nothing_was(store, monkeypatch):
    monkeypatch.setattr(HostWriter, "finish", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(store)
    assert store.list_children() == []
    assert store.location.local_path is None or not store.location.local_path.exists()


def test_a_save_begins_where_a_deletion_removes_the_empty_directory_at_that_moment(disk):
    """Over and over: neither hinders the other."""
    ended = threading.Event()

    def remove():
        # A deletion does it once, and not as often as the save tries, on a busy machine too.
        while not ended.wait(0.02):
            disk.remove_empty()

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(100):
            prior = hold(disk)
            assert prior.holds
            clear_place(disk, prior.generation)
    finally:
        ended.set()
        thread.join(60)


def test_a_dry_run_tells_the_same_and_changes_nothing(disk):
    leave_behind(disk)
    before = contents(disk.location.local_path)
    assert outcomes(collect(disk, grace=0, dry_run=True)) == {ORPHAN: "removed"}
    assert contents(disk.location.local_path) == before


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-9], lambda data: data.replace(b'"version":[1,', b'"version":[9,')],
)
def test_nothing_is_removed_if_the_record_cannot_be_read(disk, damage):
    save(disk)
    leave_behind(disk)
    disk.write(RECORD, damage(disk.read(RECORD)))
    before = contents(disk.location.local_path)
    with pytest.raises(FormatError):
        collect(disk, grace=0)
    assert contents(disk.location.local_path) == before


def test_a_storage_that_refuses_to_delete_says_so_and_keeps_no_other_from_going(disk, monkeypatch):
    leave_behind(disk)
    leave_behind(disk, OTHER)
    remove = os.rmdir

    def refuse(path, **options):
        if ORPHAN in str(path):
            raise OSError("Input/output error")
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", refuse)
    by_attempt = {one.attempt: one for one in collect(disk, grace=0)}
    assert outcomes(by_attempt.values()) == {ORPHAN: "failed", OTHER: "removed"}
    assert "Input/output error" in by_attempt[ORPHAN].reason
    monkeypatch.undo()
    assert outcomes(collect(disk, grace=0)) == {ORPHAN: "removed"}


def test_a_record_that_changes_all_the_time_is_given_up_for_now(disk, monkeypatch):
    save(disk)
    leave_behind(disk)
    monkeypatch.setattr(Store, "replace", lambda *_: False)
    (kept,) = collect(disk, grace=0)
    assert (kept.outcome, kept.reason) == (
        "kept",
        "other processes keep changing the commit record",
    )
    with pytest.raises(StorageError, match="keep changing the commit record; try again"):
        delete(disk, reason="test", grace=0)
    assert len(attempts_in(disk)) == 2


# --- what is none of our business -----------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        f"{ORPHAN}/checkpoint.json",  # a checkpoint by itself
        f"{ORPHAN}/notes.txt",
        f"{ORPHAN}/hosts",  # a file
        "logs/hosts/00000/table",
        "logs/records/00000.json",
        "20260101-0000000a/hosts/00000/table",
        f"x{ORPHAN}/hosts/00000/table",
        f"{ORPHAN}x/hosts/00000/table",
        ORPHAN,
    ],
)
def test_only_what_a_save_has_made_is_taken_for_an_attempt(disk, file):
    disk.write(file, b"precious")
    assert attempts_in(disk) == []
    assert collect(disk, grace=0) == []
    assert disk.list() == [file]


@pytest.mark.parametrize("left", ["", "records", "hosts", "hosts/00000/0/d", "zarr/w/c", "d"])
def test_what_an_interrupted_removal_leaves_is_still_an_attempt(disk, left):
    (disk.location.local_path / ORPHAN / left).mkdir(parents=True)
    assert attempts_in(disk) == [ORPHAN]
    assert outcomes(collect(disk, grace=0)) == {ORPHAN: "removed"}


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_every_part_that_a_save_writes_is_known(disk, layout):
    save(disk, layout=layout)
    (name,) = (child for child in disk.list_children() if child.endswith("/"))
    assert is_attempt(disk, name.removesuffix("/"))


@pytest.mark.parametrize("linked", [ORPHAN, f"{ORPHAN}/records", f"{ORPHAN}/hosts/00000/0"])
def test_links_are_removed_and_not_followed(disk, tmp_path, linked):
    leave_behind(disk)
    elsewhere = tmp_path / "elsewhere"
    link = disk.location.local_path / linked
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        link.rename(elsewhere)
    else:
        elsewhere.mkdir()
    link.symlink_to(elsewhere)
    before = contents(elsewhere)
    assert outcomes(collect(disk, grace=0)) == {ORPHAN: "removed"}
    assert disk.list_children() == []
    assert contents(elsewhere) == before


def test_checkpoints_may_lie_at_a_root_and_directly_below_it_but_not_in_an_attempt(disk):
    for name in ("step_10", "step_9", ORPHAN, "a\\b"):
        (disk.location.local_path / name).mkdir(parents=True)
    disk.write("notes.txt", b"")
    assert [name for name, _ in places(disk, disk.list_children())] == [".", "step_9", "step_10"]


# --- deleting -------------------------------------------------------------------------------------


def test_deleting_collects_what_else_is_old_there(disk):
    save(disk)
    leave_behind(disk)
    age(disk)
    assert outcomes(delete(disk, reason="test", grace=HOUR)) == {ORPHAN: "removed"}
    assert disk.list_children() == []


def test_deleting_stays_away_from_a_save_under_way_which_then_publishes_nothing(disk):
    save(disk)
    record = shardckpt.open(disk.location.url).record
    prior = read_prior(disk, overwrite=True)
    leave_behind(disk)
    assert outcomes(delete(disk, reason="test", grace=HOUR)) == {ORPHAN: "kept"}
    assert attempts_in(disk) == [ORPHAN]
    with pytest.raises(AlreadyExistsError, match="deleted"):
        publish(disk, record, prior)


def test_deleting_what_is_deleted_collects_what_was_left(disk):
    disk.write(RECORD, seal(Tombstone("first", "1").to_json()))
    leave_behind(disk)
    assert outcomes(delete(disk, reason="second", grace=0)) == {ORPHAN: "removed"}
    with pytest.raises(NotFoundError, match="no checkpoint there"):
        delete(disk, reason="third", grace=0)


def test_where_no_checkpoint_is_there_is_nothing_to_delete(disk):
    leave_behind(disk)
    for _ in range(2):
        with pytest.raises(NotFoundError, match="shardckpt gc"):
            delete(disk, reason="test", grace=0)
        assert attempts_in(disk) == [ORPHAN]
        hold(disk)


@pytest.mark.parametrize("markers", [[PINNED], [SUPERSEDED], [PINNED, SUPERSEDED]])
def test_markers_of_a_checkpoint_that_is_gone_are_collected(disk, markers):
    for marker in markers:
        disk.write(marker, seal({"attempt": ORPHAN}))
    assert collect(disk, grace=0) == []
    assert not exists(disk.local_path(""))


def test_a_damaged_checkpoint_can_be_deleted_and_its_data_is_an_orphan_then(disk):
    save(disk)
    (attempt,) = attempts_in(disk)
    disk.write(RECORD, disk.read(RECORD)[:-9])
    assert outcomes(delete(disk, reason="test", grace=HOUR)) == {attempt: "kept"}
    assert outcomes(delete(disk, reason="test", grace=0)) == {attempt: "removed"}


@pytest.mark.parametrize("wrong", ["commit record", "host record"])
def test_gc_removes_nothing_beside_a_record_from_elsewhere(disk, wrong):
    save(disk.sub("1"))
    save(disk.sub("2"), 2)
    record = disk.read("2/checkpoint.json")
    (other,) = attempts_in(disk.sub("1"))
    key = RECORD if wrong == "commit record" else f"{other}/records/00000.json"
    disk.write("2/checkpoint.json", disk.read(f"1/{key}"))
    if wrong == "commit record":
        (kept,) = collect(disk.sub("2"), grace=0)
        assert kept.outcome == "kept"
        assert other in kept.reason
    else:
        with pytest.raises(FormatError, match=re.escape("2/checkpoint.json")):
            collect(disk.sub("2"), grace=0)
    disk.write("2/checkpoint.json", record)
    np.testing.assert_array_equal(shardckpt.restore(disk.sub("2").location.url)["w"], np.full(9, 2))


def test_gc_keeps_what_lies_beside_a_checkpoint_without_its_data_until_that_is_deleted(disk):
    save(disk)
    (attempt,) = attempts_in(disk)
    leave_behind(disk)
    disk.delete_prefix(f"{attempt}/")
    (kept,) = collect(disk, grace=0)
    assert kept.outcome == "kept"
    assert "shardckpt rm" in kept.reason
    delete(disk, reason="test", grace=0)
    assert attempts_in(disk) == []


def test_a_newer_versions_checkpoint_is_not_deleted(disk):
    save(disk)
    disk.write(RECORD, disk.read(RECORD).replace(b'"version":[1,', b'"version":[9,'))
    before = contents(disk.location.local_path)
    with pytest.raises(VersionError):
        delete(disk, reason="test", grace=0)
    assert contents(disk.location.local_path) == before


@pytest.mark.parametrize("named", ["logs", "100"])
def test_a_record_that_names_what_is_no_attempt_does_not_get_it_removed(disk, named):
    """Somebody else has made this record."""
    save(disk)
    save(disk.sub("100"), 5)
    disk.write("logs/hosts/00000/table", b"precious")
    disk.write(RECORD, seal({**open_envelope(disk.read(RECORD), RECORD), "attempt": named}))
    (kept, _) = delete(disk, reason="test", grace=0)
    assert (kept.attempt, kept.outcome) == (named, "kept")
    assert disk.read("logs/hosts/00000/table") == b"precious"
    np.testing.assert_array_equal(
        shardckpt.restore(disk.sub("100").location.url)["w"], np.full(9, 5)
    )


def just_before_the_tombstone(monkeypatch, action):
    """Somebody does something after `delete` has read the record."""
    replace = Store.replace

    def overtaken(*arguments):
        monkeypatch.undo()
        action()
        return replace(*arguments)

    monkeypatch.setattr(Store, "replace", overtaken)


def test_a_checkpoint_that_came_meanwhile_is_not_deleted_in_place_of_the_one_that_was_meant(
    disk, monkeypatch
):
    save(disk)
    just_before_the_tombstone(monkeypatch, functools.partial(save, disk, 2, overwrite=True))
    with pytest.raises(ReplacedError, match="nothing was deleted"):
        delete(disk, reason="test", grace=0)
    np.testing.assert_array_equal(shardckpt.restore(disk.location.url)["w"], np.full(9, 2))


def test_a_good_record_that_is_put_back_meanwhile_is_not_deleted_in_place_of_the_damaged_one(
    disk, monkeypatch
):
    save(disk)
    good = disk.read(RECORD)
    disk.write(RECORD, good[:-9])
    damaged = record_digest(good[:-9])
    just_before_the_tombstone(monkeypatch, functools.partial(disk.write, RECORD, good))
    with pytest.raises(ReplacedError, match="nothing was deleted"):
        delete(disk, reason="test", grace=0, record=damaged)
    assert shardckpt.open(disk.location.url).verify().ok
    disk.write(RECORD, good[:-9])
    delete(disk, reason="test", grace=0, record=damaged)
    assert disk.list_children() == []


def test_a_collection_in_between_does_not_keep_a_checkpoint_from_being_deleted(disk, monkeypatch):
    save(disk)
    leave_behind(disk)
    just_before_the_tombstone(monkeypatch, functools.partial(collect, disk, grace=0))
    assert delete(disk, reason="test", grace=0) == []
    assert disk.list_children() == []


def test_no_two_placeholders_and_no_two_tombstones_are_alike(disk, monkeypatch):
    seen = []
    replace = Store.replace
    monkeypatch.setattr(
        Store,
        "replace",
        lambda store, key, data, generation: (
            seen.append(data) or replace(store, key, data, generation)
        ),
    )
    for _ in range(5):
        save(disk)
        delete(disk, reason="test", grace=0)
    assert len(set(seen)) == len(seen) == 3 * 5
