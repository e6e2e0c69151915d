"""Entries that `catalog` finds below a directory."""

import json

import numpy as np
import pytest
from placeholders import put_placeholder, undo_commit

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import NotFoundError, UrlError
from shardckpt.format.documents import seal
from shardckpt.format.record import Tombstone
from shardckpt.frameworks.coordination.base import SingleProcess
from shardckpt.io.url import parse
from shardckpt.runs.catalog import CatalogEntry, catalog
from shardckpt.runs.collecting import collect
from shardckpt.runs.pinning import tag


def save(place, **options):
    shardckpt.save(
        place, {"w": np.ones((3, 4), np.float32), "step": 1}, options=SaveOptions(**options)
    )


def begin(place, attempt="20260101T000000-00000000"):
    """Leave what a killed save leaves."""
    lane = place / attempt / "hosts" / "00000" / "0"
    lane.mkdir(parents=True)
    (lane / "manifest.ocdbt").write_bytes(b"half")


def test_checkpoints_are_listed_in_natural_order_with_what_they_hold(tmp_path):
    for name in ("step_10", "step_9", "best"):
        save(tmp_path / name, layout="zarr")
    entries = catalog(tmp_path)
    assert [(entry.name, entry.step) for entry in entries] == [
        ("best", None),
        ("step_9", 9),
        ("step_10", 10),
    ]
    assert {(entry.state, entry.layout, entry.tensors, entry.nbytes) for entry in entries} == {
        ("committed", "zarr", 1, 48)
    }
    assert str(entries[0].location) == str(tmp_path / "best")


def test_other_files_and_directories_are_none_of_its_business(tmp_path):
    (tmp_path / "logs" / "records").mkdir(parents=True)
    (tmp_path / "a\\b").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert catalog(tmp_path, everything=True) == []


def test_a_root_that_is_a_checkpoint_is_listed_itself(tmp_path):
    save(tmp_path / "run")
    assert [entry.name for entry in catalog(tmp_path / "run")] == ["."]


def test_unfinished_attempts_are_listed_on_request_also_beside_a_checkpoint(tmp_path):
    save(tmp_path / "1")
    begin(tmp_path / "1")
    begin(tmp_path / "2")
    assert [entry.name for entry in catalog(tmp_path)] == ["1"]
    entries = catalog(tmp_path, everything=True)
    assert [(entry.name, entry.state) for entry in entries] == [
        ("1", "committed"),
        ("1", "uncommitted"),
        ("2", "uncommitted"),
    ]
    assert entries[2].attempt == "20260101T000000-00000000"


def test_a_root_that_holds_an_attempt_or_a_tombstone_hides_no_checkpoint_below(tmp_path):
    """Somebody once saved to the directory of all checkpoints, by mistake."""
    save(tmp_path / "1")
    begin(tmp_path)
    assert [entry.name for entry in catalog(tmp_path)] == ["1"]
    assert [(entry.name, entry.state) for entry in catalog(tmp_path, everything=True)] == [
        (".", "uncommitted"),
        ("1", "committed"),
    ]
    collect(tmp_path, grace=0)
    assert [(entry.name, entry.state) for entry in catalog(tmp_path, everything=True)] == [
        ("1", "committed")
    ]


def test_an_unfinished_attempt_is_listed_with_how_far_it_has_come(tmp_path):
    put_placeholder(tmp_path / "1")
    save(tmp_path / "1")
    put_placeholder(tmp_path / "1")
    begin(tmp_path / "2")
    whole, begun = catalog(tmp_path, everything=True)
    assert (whole.finished, whole.hosts, whole.committable) == (1, 1, True)
    assert (begun.finished, begun.hosts, begun.committable) == (0, None, False)
    assert 0 <= whole.idle < 600


def test_an_attempt_of_which_a_host_is_missing_cannot_be_committed(tmp_path):
    save(tmp_path / "1")
    undo_commit(tmp_path / "1")
    (path,) = tmp_path.rglob("records/00000.json")
    path.write_bytes(seal({**json.loads(path.read_bytes())["record"], "hosts": 4}))
    (entry,) = catalog(tmp_path, everything=True)
    assert (entry.finished, entry.hosts, entry.committable) == (1, 4, False)


def test_an_attempt_whose_save_found_another_record_cannot_be_committed(tmp_path):
    save(tmp_path / "1")
    (tmp_path / "1" / "checkpoint.json").write_bytes(seal(Tombstone("collected").to_json()))
    entry = catalog(tmp_path, everything=True)[1]
    assert (entry.finished, entry.hosts, entry.committable) == (1, 1, False)


def test_an_attempt_that_commit_would_refuse_is_not_recommended_to_it(tmp_path):
    put_placeholder(tmp_path / "1")
    for step in (1, 2):
        with shardckpt.CheckpointManager(tmp_path, coordinator=SingleProcess()) as manager:
            manager.save(step, {"w": 1}, force=True)
    put_placeholder(tmp_path / "1")  # complete, and of a run that another has taken over from
    left, _ = catalog(tmp_path, everything=True)
    assert (left.state, left.finished, left.committable) == ("uncommitted", 1, False)
    assert [outcome.state for outcome in shardckpt.commit(tmp_path)] == ["refused"]


def test_an_attempt_whose_records_make_no_sense_is_listed_all_the_same(tmp_path):
    begin(tmp_path / "1")
    (tmp_path / "1" / "20260101T000000-00000000" / "records").mkdir()
    (tmp_path / "1" / "20260101T000000-00000000" / "records" / "00000.json").write_bytes(b"?")
    (entry,) = catalog(tmp_path, everything=True)
    assert (entry.state, entry.finished, entry.hosts) == ("uncommitted", 1, None)


def test_a_deleted_checkpoint_is_listed_on_request_with_the_reason(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "checkpoint.json").write_bytes(seal(Tombstone("superseded").to_json()))
    assert catalog(tmp_path) == []
    assert [(entry.state, entry.reason) for entry in catalog(tmp_path, everything=True)] == [
        ("deleted", "superseded")
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"not a record",
        seal({"created": "now"}),
        seal(
            {
                "attempt": "a",
                "created": "now",
                "layout": "packed",
                "totals": {"tensors": 10**300, "bytes": 1, "stored_bytes": 1},
            }
        ),
        b'{"format":"shardckpt","version":[99,0],"sha256":"' + b"0" * 64 + b'","record":{}}\n',
    ],
)
def test_a_record_that_cannot_be_read_is_listed_with_the_reason_and_hides_no_other(
    tmp_path, content
):
    save(tmp_path / "1")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "checkpoint.json").write_bytes(content)
    entries = catalog(tmp_path)
    assert [(entry.name, entry.state) for entry in entries] == [
        ("1", "committed"),
        ("2", "unreadable"),
    ]
    assert "2/checkpoint.json" in entries[1].reason


def test_a_record_that_is_too_large_hides_no_other(tmp_path):
    save(tmp_path / "1")
    (tmp_path / "2").mkdir()
    with (tmp_path / "2" / "checkpoint.json").open("wb") as file:
        file.truncate((1 << 30) + 1)
    entries = catalog(tmp_path, everything=True)
    assert [entry.state for entry in entries] == ["committed", "unreadable"]
    assert "2/checkpoint.json" in entries[1].reason


def test_only_the_summary_of_a_record_is_read(tmp_path):
    """A record whose tensors make no sense still is in the list: opening it says what is wrong."""
    save(tmp_path / "1")
    path = tmp_path / "1" / "checkpoint.json"
    record = json.loads(path.read_bytes())["record"]
    path.write_bytes(seal({**record, "tensors": {"w": "?"}}))
    assert [entry.state for entry in catalog(tmp_path)] == ["committed"]


def test_a_place_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(NotFoundError, match="no such directory"):
        catalog(tmp_path / "nothing")
    with pytest.raises(UrlError):
        catalog("ftp://host/runs")


def test_an_empty_directory_holds_no_checkpoints(tmp_path):
    assert catalog(tmp_path) == []


def test_a_name_is_listed_before_those_that_begin_with_it(tmp_path):
    names = ["cont", "cont2", "step", "step-2", "step-10"]
    for name in names:
        save(tmp_path / name)
    assert [entry.name for entry in catalog(tmp_path)] == names


def test_entries_are_read_again_from_json_also_from_that_of_earlier_versions(tmp_path):
    save(tmp_path / "1")
    tag(tmp_path / "1", "best")
    (entry,) = catalog(tmp_path)
    assert (entry.pinned, entry.tags) == (False, ("best",))
    document = json.loads(json.dumps(entry.to_json()))
    assert CatalogEntry.from_json(document) == entry
    del document["tags"]
    assert CatalogEntry.from_json(document).tags == ()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("100", 100),
        ("step_100", 100),
        ("step100", 100),
        ("run-b-0100", 100),
        ("checkpoint-7", 7),
        ("epoch=3", 3),
        ("run-tp4", None),
        ("v2", None),
    ],
)
def test_a_number_at_the_end_of_a_word_is_no_step_unless_the_word_says_so(tmp_path, name, step):
    assert CatalogEntry(name, parse(str(tmp_path / name)), "committed").step == step
