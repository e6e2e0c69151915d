"""Complete data whose publication failed stays, and is published by the next commit, save or
collection."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from failing import (
    STAYS,
    disk_full,
    record_refused,
    removal_refused,
    save,
    save_without_commit,
    state,
    sync_refused,
    value_of,
)
from placeholders import put_placeholder
from typer.testing import CliRunner

import shardckpt
from shardckpt import Mesh, SaveOptions, SingleProcess, errors
from shardckpt.cli.app import app
from shardckpt.commit.assemble import finished_hosts
from shardckpt.commit.markers import Protection
from shardckpt.commit.remove import StoredRecord, bury
from shardckpt.io.store import Store
from shardckpt.runs import cleaning, collecting
from shardckpt.runs.retention import Latest
from shardckpt.runs.steps import read_step, step_numbers
from shardckpt.writing.attempt import Attempt


def attempts(url):
    return (
        sorted(path.name for path in Path(url).iterdir() if path.is_dir())
        if Path(url).exists()
        else []
    )


def cli(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_and_a_commit_whose_record_is_refused_say_that_the_data_stays(tmp_path, overwrite):
    url = tmp_path / "c"
    if overwrite:
        save(url, 1)
    with record_refused():
        with pytest.raises(
            errors.StorageError, match=f"{STAYS} there: `shardckpt commit {url}` publishes it"
        ):
            save(url, 2, overwrite=overwrite)
        for _ in range(2):
            refused = cli("commit", url)
            assert refused.exit_code == 6
            assert f"`shardckpt commit {url}` publishes it" in " ".join(refused.output.split())
    assert value_of(url) == (1 if overwrite else None)
    assert cli("commit", url).exit_code == 0
    assert value_of(url) == 2
    assert len(attempts(url)) == 1


@pytest.mark.parametrize("name", ["00000", "records"])
def test_a_save_whose_own_data_could_not_be_synced_is_never_published(tmp_path, name):
    """The data file, or the directory that names the host's record."""
    with sync_refused(name), pytest.raises(errors.StorageError) as raised:
        save(tmp_path / "c", 2)
    assert STAYS not in str(raised.value)
    assert attempts(tmp_path / "c") == []


def test_a_record_of_one_host_of_several_that_could_not_be_synced_is_removed(tmp_path, monkeypatch):
    """Its process does not remove the attempt, in which others may be writing."""
    from shardckpt.writing import attempt

    monkeypatch.setattr(attempt.Attempt, "give_up", lambda *_: None)
    with sync_refused("records"), pytest.raises(errors.StorageError):
        save(tmp_path / "c", 2)
    (left,) = attempts(tmp_path / "c")
    assert finished_hosts(Store.open(tmp_path / "c" / left)) == []


def test_a_record_that_could_be_neither_synced_nor_removed_is_never_published(tmp_path):
    with (
        sync_refused("records"),
        removal_refused("records"),
        pytest.raises(errors.StorageError) as raised,
    ):
        save(tmp_path / "c", 2)
    assert STAYS not in str(raised.value)
    (left,) = attempts(tmp_path / "c")
    (outcome,) = shardckpt.commit(tmp_path / "c")
    assert (outcome.attempt, outcome.state) == (left, "refused")
    assert "records/00000.json" in outcome.reason
    with manager(tmp_path) as run:
        assert run.restore(state(0)) is None
    assert [one.outcome for one in collecting.collect(tmp_path / "c", grace=0)] == ["removed"]
    assert value_of(tmp_path / "c") is None


def test_unpublished_data_goes_when_another_checkpoint_is_published_there(tmp_path):
    with record_refused(), pytest.raises(errors.StorageError):
        save(tmp_path / "c", 2)
    save(tmp_path / "c", 3)
    assert [outcome.state for outcome in shardckpt.commit(tmp_path / "c")] == ["overtaken"]
    assert [one.outcome for one in collecting.collect(tmp_path / "c", grace=0)] == ["removed"]
    assert value_of(tmp_path / "c") == 3


def test_unpublished_data_goes_with_the_checkpoint_that_rm_deletes(tmp_path):
    save(tmp_path / "c", 1)
    with record_refused(), pytest.raises(errors.StorageError):
        save(tmp_path / "c", 2, overwrite=True)
    collecting.delete(tmp_path / "c", grace=0)
    assert not (tmp_path / "c").exists()


def test_gc_publishes_a_complete_save_before_it_removes_anything(tmp_path):
    url = tmp_path / "c"
    save_without_commit(url, 2)
    (complete,) = attempts(url)
    (url / "20200101T000000-0000000a" / "hosts").mkdir(parents=True)
    foretold = cli("gc", "--grace", "0", "--dry-run", "--json", url)
    done = cli("gc", "--grace", "0", "--json", url)
    for output in (foretold.output, done.output):
        assert '"published"' in output
        assert complete in output[output.index('"published"') :]
    assert value_of(url) == 2
    assert attempts(url) == [complete]
    assert "no unfinished saves" in cli("gc", "--grace", "0", url).output


def test_gc_keeps_a_complete_save_if_publishing_it_fails_again(tmp_path):
    url = tmp_path / "c"
    save_without_commit(url, 2)
    with record_refused():
        (one,) = collecting.collect(url, grace=0)
    assert (one.outcome, one.attempt) == ("failed", None)
    assert STAYS in one.reason
    assert [one.outcome for one in collecting.collect(url, grace=0)] == ["published"]
    assert value_of(url) == 2


def test_gc_keeps_a_complete_save_if_it_has_no_right_to_publish_it(tmp_path, monkeypatch):
    url = tmp_path / "c"
    # Of a packed one, the only host has written the table.
    save_without_commit(url, 2, layout="zarr")
    write = Store.write

    def denied(store, key, data):
        if key == "table":
            raise errors.StorageError(f"cannot write {key}: 403 Forbidden.")
        write(store, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", denied)
        assert [one.outcome for one in collecting.collect(url, grace=0)] == ["failed"]
    assert [one.outcome for one in collecting.collect(url, grace=0)] == ["published"]


def test_gc_leaves_a_complete_save_alone_beside_a_save_under_way(tmp_path):
    save_without_commit(tmp_path / "c", 2)
    assert [one.outcome for one in collecting.collect(tmp_path / "c")] == ["kept"]
    assert value_of(tmp_path / "c") is None


def test_gc_removes_a_complete_save_that_may_not_be_published(tmp_path):
    save(tmp_path / "c", 1)
    save_without_commit(tmp_path / "c", 3, overwrite=True)
    shardckpt.save(
        tmp_path / "c2", state(2), options=SaveOptions(base=str(tmp_path / "c"), skip="w")
    )
    assert [one.outcome for one in collecting.collect(tmp_path / "c", grace=0)] == ["removed"]
    assert value_of(tmp_path / "c") == 1


@pytest.mark.parametrize("reason", ["its base is away", "of a newer version"])
def test_gc_keeps_a_complete_save_that_may_be_published_later(tmp_path, reason):
    url, base = tmp_path / "c", tmp_path / "elsewhere" / "base"
    save(base, 2)
    put_placeholder(url)
    shardckpt.save(url, state(2), options=SaveOptions(base=str(base), skip="w"))
    put_placeholder(url)
    (record,) = url.glob("*/records/*.json")
    whole = record.read_bytes()
    if reason == "its base is away":
        base.parent.rename(tmp_path / "away")
    else:
        record.write_bytes(whole.replace(b'"version":[1,', b'"version":[99,'))
    (one,) = collecting.collect(url, grace=0)
    assert one.outcome == "kept"
    assert {
        "its base is away": "and no checkpoint is there",
        "of a newer version": "newer than this shardckpt reads",
    }[reason] in one.reason
    if reason == "its base is away":
        (tmp_path / "away").rename(base.parent)
    record.write_bytes(whole)
    assert [one.outcome for one in collecting.collect(url, grace=0)] == ["published"]
    assert value_of(url) == 2


@pytest.mark.parametrize("options", [{"publishes": False}, {"dry_run": True}])
def test_a_collection_that_publishes_nothing_says_that_a_save_is_of_another_version(
    tmp_path, options
):
    url = tmp_path / "c"
    save_without_commit(url, 1)
    (one,) = collecting.collect_place(Store.open(url), grace=0, **options)
    assert one.outcome == ("published" if "dry_run" in options else "kept")
    (record,) = url.glob("*/records/*.json")
    record.write_bytes(record.read_bytes().replace(b'"version":[1,', b'"version":[99,'))
    (one,) = collecting.collect_place(Store.open(url), grace=0, **options)
    assert one.outcome == "kept"
    assert "newer than this shardckpt reads" in one.reason


@pytest.mark.parametrize("left", ["a placeholder", "a dead attempt", "a checkpoint"])
def test_a_save_over_old_remains_is_not_collected_before_its_first_chunk_is_visible(tmp_path, left):
    url = tmp_path / "c"
    if left == "a checkpoint":
        save(url, 1)
    else:
        put_placeholder(url)
    if left != "a placeholder":
        (url / "20200101T000000-0000000a" / "hosts").mkdir(parents=True)
    for path in [url, *url.rglob("*")]:
        os.utime(path, (1, 1))

    # Without an element to write, so that nothing but what the save writes first is there.
    with Attempt.at(url, SingleProcess(), SaveOptions(overwrite=True)) as attempt:
        share = attempt.take({"step": 2})
        with attempt.writer(share.contents, share.values, memory=64 << 20):
            outcomes = [one.outcome for one in collecting.collect(url, grace=1000)]
        attempt.commit()
    assert outcomes == ["kept"] * (1 if left == "a placeholder" else 2)
    assert shardckpt.restore(url) == {"step": 2}


@pytest.mark.parametrize("record", ["a placeholder", "a tombstone"])
def test_gc_frees_a_full_disk(tmp_path, record):
    url = tmp_path / "c"
    put_placeholder(url)
    if record == "a tombstone":
        store = Store.open(url)
        assert StoredRecord.of(store, *store.read_versioned("checkpoint.json")).fence(store)
    (url / "20200101T000000-0000000a" / "d").mkdir(parents=True)
    (url / "20200101T000000-0000000a" / "d" / "0").write_bytes(bytes(1000))
    with disk_full(tmp_path):
        with pytest.raises(errors.StorageError, match="is full"):
            save(tmp_path / "other", 1)
        assert [one.outcome for one in collecting.collect(url, grace=0)] == ["removed"]
    assert not url.exists()


def test_a_pin_that_comes_when_a_deletion_has_emptied_the_record_of_a_full_disk_is_too_late(
    tmp_path,
):
    url = tmp_path / "c"
    save(url, 1)
    place, attempt = Store.open(url), shardckpt.open(url).record.attempt
    record = url / "checkpoint.json"

    def pinned_then(source, target, **options):
        rename(source, target, **options)
        if Path(target) == record and record.stat().st_size == 0:
            (url / "pinned.json").write_bytes(Protection(pinned=True).sealed(attempt))

    with disk_full(tmp_path), pytest.MonkeyPatch.context() as patch:
        rename = os.rename
        patch.setattr(os, "rename", pinned_then)
        assert bury(place, "test", None) == attempt
    collecting.collect(url, grace=0)
    assert not url.exists()


# --- reshards


def reshard(root, **options):
    return shardckpt.reshard(
        root / "source",
        root / "new",
        mesh=Mesh((2,), ("x",)),
        dtype="bfloat16",
        workers=1,
        **options,
    )


@pytest.mark.parametrize("publish", ["again", "commit"])
def test_a_reshard_whose_record_is_refused_keeps_the_work_of_its_tasks(tmp_path, publish):
    save(tmp_path / "source", 2)
    with record_refused(), pytest.raises(errors.StorageError, match=STAYS):
        reshard(tmp_path)
    if publish == "again":
        again = reshard(tmp_path)
        assert again.done_before == again.tasks
    else:
        assert [outcome.state for outcome in shardckpt.commit(tmp_path / "new")] == ["committed"]
    assert value_of(tmp_path / "new") == 2


def test_a_replaced_checkpoint_stays_while_the_record_of_the_new_one_is_not_durable(tmp_path):
    """A crash of the machine may bring the old record back."""
    for name in ("source", "new"):
        save(tmp_path / name, 2)
    old = attempts(tmp_path / "new")
    record = tmp_path / "new" / "checkpoint.json"
    with (
        sync_refused("new", lambda: old[0] not in record.read_text()),
        pytest.raises(errors.StorageError, match="is committed, but a crash of the machine"),
    ):
        reshard(tmp_path, overwrite=True)
    assert set(old) < set(attempts(tmp_path / "new"))


# --- managers


def manager(root, **options):
    return shardckpt.CheckpointManager(
        root, every=1, coordinator=SingleProcess(), progress=False, **options
    )


def test_a_manager_publishes_a_failed_save_when_the_next_one_begins_and_before_it_collects(
    tmp_path,
):
    with manager(tmp_path / "run", keep=2) as run:
        with record_refused():
            run.save(1, state(1))
            with pytest.raises(errors.StorageError, match=STAYS):
                run.wait()
        assert run.all_steps() == []
        run.save(2, state(2))
        run.wait()
        assert run.all_steps() == [1, 2]
        run.save(3, state(3))
        run.wait()
        assert run.all_steps() == [2, 3]


def test_a_step_whose_save_failed_after_it_was_published_is_deleted_like_any_other(tmp_path):
    record = tmp_path / "run" / "2" / "checkpoint.json"
    with manager(tmp_path / "run", keep=1) as run:
        run.save(1, state(1))
        run.wait()
        with sync_refused("2", lambda: record.exists() and b'"tensors"' in record.read_bytes()):
            run.save(2, state(2))
            with pytest.raises(errors.StorageError, match="is committed, but a crash"):
                run.wait()
        assert run.all_steps() == [1, 2]
        run.save(3, state(3))
        run.wait()
        assert run.all_steps() == [3]


def test_a_save_succeeds_though_publishing_an_earlier_one_fails_in_an_unknown_way(tmp_path, caplog):
    with manager(tmp_path / "run") as run:
        with record_refused("1"):
            run.save(1, state(1))
            with pytest.raises(errors.StorageError, match=STAYS):
                run.wait()
        with record_refused("1", MemoryError("no memory to publish it")):
            run.save(2, state(2))
            run.wait()
        assert run.all_steps() == [2]
        run.save(3, state(3))
        run.wait()
        assert run.all_steps() == [1, 2, 3]
    assert "no memory to publish it" in caplog.text


def test_the_step_that_an_unpublished_save_replaces_after_a_rollback_stays_until_it_is_published(
    tmp_path,
):
    root = tmp_path / "run"
    with manager(root, keep=3) as run:
        run.save(90, state(90))
        run.save(100, state(-100))
        run.wait()
        run.restore(step=90)
        with record_refused("100"):
            run.save(100, state(100))
            with pytest.raises(errors.StorageError, match=STAYS):
                run.wait()
            run.save(105, state(105))
            run.wait()
            assert value_of(root / "100") == -100
        run.save(110, state(110))
        run.wait()
        assert run.all_steps() == [100, 105, 110]
    assert value_of(root / "100") == 100


def record_of_a_complete_save(url, value):
    """The host's record of a save over a checkpoint that was not published."""
    (published,) = attempts(url)
    save_without_commit(url, value, overwrite=True)
    (complete,) = {*attempts(url)} - {published}
    return url / complete / "records" / "00000.json"


@pytest.mark.parametrize("restores", [False, True])
def test_a_step_with_a_complete_save_of_a_newer_version_stays_until_that_is_published(
    tmp_path, restores
):
    save(tmp_path / "1", 1)
    record = record_of_a_complete_save(tmp_path / "1", 10)
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b'"version":[1,', b'"version":[99,'))
    with manager(tmp_path, keep=1) as run:
        if restores:
            assert run.restore().step == 1
        for step in (2, 3):
            run.save(step, state(step))
            run.wait()
        assert run.all_steps() == [1, 3]
    record.write_bytes(whole)
    shardckpt.commit(tmp_path)
    assert value_of(tmp_path / "1") == 10


def test_steps_beside_one_that_cannot_be_read_are_deleted(tmp_path):
    for step in range(1, 5):
        save(tmp_path / str(step), step)
    record = record_of_a_complete_save(tmp_path / "2", 10)
    record.unlink()
    record.symlink_to(record)
    run = manager(tmp_path, keep=1)
    for step in range(5, 8):
        run.save(step, state(step))
        run.wait()
    assert run.all_steps() == [2, 7]
    with pytest.raises(errors.StorageError, match="symbolic links"):
        run.close()


def test_a_deletion_alone_sees_that_a_step_has_a_complete_save(tmp_path):
    root = Store.open(tmp_path)
    for step in (1, 2):
        save(tmp_path / str(step), step)
    save_without_commit(tmp_path / "1", 10, overwrite=True)
    cleaner = cleaning.Cleaner(root, Latest(1), grace=1000, deleted=lambda _: None)
    cleaner.clean(read_step(root, 2))
    shardckpt.commit(tmp_path)
    assert value_of(tmp_path / "1") == 10
    cleaner.forget()
    cleaner.clean(read_step(root, 2))
    assert step_numbers(root) == [2]


def test_a_failed_step_that_is_saved_again_is_the_new_save(tmp_path):
    with manager(tmp_path / "run") as run:
        with record_refused():
            run.save(1, state(1))
            with pytest.raises(errors.StorageError, match=STAYS):
                run.wait()
        run.save(1, state(10))
        run.wait()
    assert value_of(tmp_path / "run" / "1") == 10


def test_a_manager_that_restores_nothing_publishes_what_earlier_runs_have_left_before_it_collects(
    tmp_path, monkeypatch
):
    root = tmp_path / "run"
    with manager(root) as run:
        run.save(1, state(1))
        run.wait()
        with record_refused():
            run.save(2, state(2))
            with pytest.raises(errors.StorageError, match=STAYS):
                run.wait()
    monkeypatch.setattr(cleaning.Cleaner, "__init__", _without_grace(cleaning.Cleaner.__init__))
    with manager(root) as run:
        run.save(3, state(3))
        run.wait()
        assert run.all_steps() == [1, 2, 3]
    assert value_of(root / "2") == 2


def _without_grace(init):
    return lambda self, *arguments, **options: init(self, *arguments, **{**options, "grace": 0.0})


def test_a_manager_leaves_a_complete_save_of_a_step_after_the_newest_as_it_is(tmp_path):
    """It is from before a rollback."""
    root = tmp_path / "run"
    for step in (1, 2):
        save(root / str(step), step)
    save_without_commit(root / "7", 7)
    cleaner = cleaning.Cleaner(Store.open(root), None, grace=0, deleted=lambda _: None)
    cleaner._collect(2)
    assert len(attempts(root / "7")) == 1
    cleaner._collect(8)
    assert value_of(root / "7") == 7
