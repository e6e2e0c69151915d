"""The mark of an ended run, and the proof that nobody has saved there since."""

import json
import os
import time

import jsonschema
import numpy as np
import pytest
from paths import DOCS
from placeholders import put_placeholder

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import CommitError, FormatError, NotFoundError, OptionError, StorageError
from shardckpt.io.store import Store
from shardckpt.runs import pinning
from shardckpt.runs.ended import ENDED, check_idle, ended, mark_ended, unmark_ended

ATTEMPT = "20260101T000000-0000000a"


def save(place, **options):
    shardckpt.save(place, {"w": np.ones(3)}, options=SaveOptions(**options))


def train(root, *steps):
    """Save steps as a job of its own; its run id."""
    with shardckpt.CheckpointManager(root, every=1) as manager:
        for step in steps:
            manager.save(step, {"w": np.ones(3)})
    return json.loads((root / "job.json").read_text())["record"]["run"]


def begin(place, *, hours=0.0):
    """Put a file of an attempt there, as of a save that is in flight or was killed so long ago."""
    file = place / ATTEMPT / "hosts" / "00000" / "table"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    then = time.time() - 3600 * hours
    os.utime(file, (then, then))


def test_a_mark_names_the_run_who_and_what_was_there(tmp_path):
    run = train(tmp_path, 1, 2)
    root = Store.open(tmp_path)
    assert ended(root) is None
    mark_ended(root, "ann")
    mark = ended(root)
    assert (mark.run, mark.by) == (run, "ann")
    assert mark.checkpoints == {
        str(step): shardckpt.open(tmp_path / str(step)).record.attempt for step in (1, 2)
    }
    assert check_idle(root) == {"1", "2"}
    schema = json.loads((DOCS / "format.schema.json").read_text())
    document = json.loads((tmp_path / ENDED).read_text())
    jsonschema.Draft202012Validator({**schema, "$ref": "#/$defs/endedFile"}).validate(document)
    mark_ended(root, "bob")
    assert ended(root).by == "bob"
    assert unmark_ended(root)
    assert not unmark_ended(root)
    with pytest.raises(OptionError, match="not marked as ended"):
        check_idle(root)


def test_a_root_that_no_job_has_claimed_can_end_too(tmp_path):
    save(tmp_path / "1")
    root = Store.open(tmp_path)
    mark_ended(root, "ann")
    assert ended(root).run is None
    check_idle(root)
    run = train(tmp_path, 2)
    with pytest.raises(
        CommitError,
        match=f"run {run} saves there now, "
        "but no job did when the run was marked as ended by 'ann'",
    ):
        check_idle(root)


def test_a_job_that_claims_the_root_is_noticed_before_it_has_saved(tmp_path):
    from shardckpt.runs.job import JobFence

    train(tmp_path, 1)
    root = Store.open(tmp_path)
    mark_ended(root, "ann")
    known = check_idle(root)
    JobFence(root, "20270101T000000-00000000").hold()
    for names in (frozenset(), known):
        with pytest.raises(CommitError, match="run 20270101T000000-00000000 saves there now"):
            check_idle(root, names)


@pytest.mark.parametrize("again", [False, True])
def test_what_was_saved_after_the_mark_is_noticed(tmp_path, again):
    save(tmp_path / "1")
    root = Store.open(tmp_path)
    mark_ended(root, "ann")
    save(tmp_path / ("1" if again else "2"), overwrite=again)
    with pytest.raises(
        CommitError, match=f"{'1' if again else '2'} was saved after the run was marked as ended"
    ):
        check_idle(root)
    mark_ended(root, "ann")
    check_idle(root)


def test_pins_and_tags_are_no_saves(tmp_path):
    save(tmp_path / "1")
    root = Store.open(tmp_path)
    mark_ended(root, "ann")
    pinning.pin(tmp_path / "1")
    pinning.tag(tmp_path / "1", "best")
    check_idle(root)


def test_a_save_in_flight_is_noticed_and_one_that_was_killed_long_ago_is_not(tmp_path):
    save(tmp_path / "1")
    root = Store.open(tmp_path)
    mark_ended(root, "ann")
    known = check_idle(root)
    begin(tmp_path / "2", hours=25)
    check_idle(root)
    begin(tmp_path / "3", hours=23)
    for names in (frozenset(), known):
        with pytest.raises(
            CommitError, match=rf"an unfinished save wrote to 3/{ATTEMPT}/ 23 h ago"
        ):
            check_idle(root, names)


def test_a_save_that_has_only_begun_is_noticed(tmp_path):
    save(tmp_path / "1")
    root = Store.open(tmp_path)
    mark_ended(root, "ann")
    put_placeholder(tmp_path / "2")
    with pytest.raises(CommitError, match=r"an unfinished save wrote to 2/checkpoint\.json"):
        check_idle(root)


def test_this_machines_clock_does_not_matter(tmp_path, monkeypatch):
    save(tmp_path / "1")
    root = Store.open(tmp_path)
    mark_ended(root, "ann")
    begin(tmp_path / "2")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 30 * 86400)
    with pytest.raises(CommitError, match="an unfinished save wrote to"):
        check_idle(root)


def test_on_any_storage(store):
    url = str(store.location.join("run"))
    save(f"{url}/1")
    root = Store.open(url)
    mark_ended(root, "ann")
    assert check_idle(root) == {"1"}
    save(f"{url}/2")
    with pytest.raises(CommitError, match="2 was saved after"):
        check_idle(root)


def test_a_damaged_mark_marks_nothing_and_is_replaced(tmp_path):
    save(tmp_path / "1")
    root = Store.open(tmp_path)
    (tmp_path / ENDED).write_bytes(b"{")
    with pytest.raises(FormatError):
        check_idle(root)
    mark_ended(root, "ann")
    check_idle(root)


def test_bad_marks_are_refused(tmp_path, monkeypatch):
    for by in ("", "a" * 201, None):
        with pytest.raises(OptionError, match="give the name of the operator"):
            mark_ended(Store.open(tmp_path), by)
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(NotFoundError, match="there is no run here"):
            mark_ended(Store.open(place), "ann")
    save(tmp_path / "1")
    monkeypatch.setattr(Store, "create", lambda *_: False)
    with pytest.raises(StorageError, match="other processes keep changing it"):
        mark_ended(Store.open(tmp_path), "ann")
