"""A checkpoint exists entirely or not at all: one process that dies, two that race, and storage
that fails."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import shutil
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from shlex import quote

import numpy as np
import pytest
from failing import STAYS, record_refused, removal_refused
from paths import CHILDREN

import shardckpt
from shardckpt import SaveOptions, errors
from shardckpt.commit import assemble, index
from shardckpt.commit import publish as commit
from shardckpt.commit.attempts import is_attempt
from shardckpt.format import structure
from shardckpt.io import extension
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.runs.collecting import collect
from shardckpt.writing import attempt, host

LAYOUTS = ["packed", "zarr"]


def state(value):
    return {
        "w": np.full((40, 30), value, np.float32),
        "b": np.arange(value, value + 5),
        "leaf": value,
    }


def value_of(url):
    """Value of the `state` in a checkpoint, which must be whole and undamaged."""
    restored = shardckpt.restore(url)
    value = restored["leaf"]
    for name, array in state(value).items():
        np.testing.assert_array_equal(restored[name], array)
    assert shardckpt.open(url).verify().damage == []
    return value


def attempts(url):
    """Directories in a checkpoint's directory."""
    return sorted(p.name for p in Path(url).iterdir() if p.is_dir()) if Path(url).exists() else []


def contents(url):
    """All files of a directory."""
    return {p.relative_to(url): p.read_bytes() for p in Path(url).rglob("*") if p.is_file()}


def child(script, *arguments):
    return subprocess.run(
        [sys.executable, CHILDREN / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    ).stdout


# --- a process that dies --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("layout", ["packed", pytest.param("zarr", marks=pytest.mark.slow)])
def test_a_first_save_killed_at_any_operation_leaves_no_checkpoint_and_a_place_to_save_to(
    tmp_path, layout
):
    died_before = json.loads(child("kill_at_every_operation.py", tmp_path, layout, "first"))
    assert {"mkdir", "open", "write", "the second half of a write", "fsync", "rename"} <= set(
        died_before
    )
    if extension.moving and layout == "packed":
        assert {"pwrite", "the second half of a pwrite"} <= set(died_before), "where C writes, too"
    assert died_before[-2:] == ["rename", "fsync"]
    assert value_of(tmp_path / str(len(died_before) - 1) / "checkpoint") == 2
    for k in range(len(died_before) - 1):
        url = tmp_path / str(k) / "checkpoint"
        # Its parts are there, under a name that nothing refers to; before there are any, there is
        # just nothing.
        begun = any(is_attempt(Store.open(url), name) for name in attempts(url))
        with pytest.raises(errors.UncommittedError if begun else errors.NotFoundError):
            shardckpt.open(url)
        assert contents(tmp_path / str(k) / "earlier") == contents(tmp_path / "base" / "earlier")
        shardckpt.save(url, state(3), options=SaveOptions(layout=layout))
        assert shardckpt.restore(url)["leaf"] == 3
    assert begun
    assert value_of(tmp_path / "base" / "earlier") == 1


@pytest.mark.long
@pytest.mark.parametrize("layout", ["packed", pytest.param("zarr", marks=pytest.mark.slow)])
def test_an_overwrite_killed_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path, layout
):
    died_before = json.loads(child("kill_at_every_operation.py", tmp_path, layout, "overwrite"))
    values = [value_of(tmp_path / str(k) / "checkpoint") for k in range(len(died_before))]
    published = values.index(2)
    assert values == [1] * published + [2] * (len(values) - published)
    # Published by the last renaming; what follows makes it durable and removes the old one, and
    # only then anything is removed.
    assert died_before[published - 1 : published + 1] == ["rename", "fsync"]
    assert set(died_before[published + 1 :]) == {"unlink", "rmdir"}
    assert not {"unlink", "rmdir"} & set(died_before[:published])
    for k in (0, published - 1, published, len(values) - 1):
        shardckpt.save(
            tmp_path / str(k) / "checkpoint",
            state(3),
            options=SaveOptions(layout=layout, overwrite=True),
        )
        assert value_of(tmp_path / str(k) / "checkpoint") == 3


# --- two processes at once ------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_processes_that_publish_at_once_one_wins_and_the_other_leaves_nothing(
    tmp_path, overwrite
):
    urls = [tmp_path / str(i) for i in range(8)]
    for url in urls:
        if overwrite:
            shardckpt.save(url, {"w": np.zeros(3)})
    command = [sys.executable, CHILDREN / "kill_race.py"]
    racers = [
        subprocess.Popen(
            [*command, str(i), str(int(overwrite)), *map(str, urls)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for url in urls:
        assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        became = [racer.stdout.readline().strip() for racer in racers]
        assert sorted(became) == ["AlreadyExistsError", "saved"]
        assert (shardckpt.restore(url)["w"] == became.index("saved")).all()
        checkpoint = shardckpt.open(url)
        assert checkpoint.verify().damage == []
        assert attempts(url) == [checkpoint.record.attempt]
    for racer in racers:
        racer.communicate()


def lose_the_race(url, monkeypatch, *, overwrite):
    """Save `state(1)` to a url where somebody saves `state(2)` at the last moment."""

    def publish(*arguments):
        monkeypatch.undo()
        shardckpt.save(url, state(2), options=SaveOptions(overwrite=overwrite))
        commit.publish(*arguments)

    monkeypatch.setattr(attempt, "publish", publish)
    shardckpt.save(url, state(1), options=SaveOptions(overwrite=overwrite))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_is_overtaken_says_so_and_leaves_the_winner_alone(
    tmp_path, monkeypatch, overwrite
):
    if overwrite:
        shardckpt.save(tmp_path / "c", state(0))
    with pytest.raises(errors.AlreadyExistsError, match="another save committed there"):
        lose_the_race(tmp_path / "c", monkeypatch, overwrite=overwrite)
    assert value_of(tmp_path / "c") == 2
    assert attempts(tmp_path / "c") == [shardckpt.open(tmp_path / "c").record.attempt]


def test_threads_of_one_process_race_alike(tmp_path):
    barrier = threading.Barrier(4)
    became = []

    def save(value):
        barrier.wait()
        try:
            shardckpt.save(tmp_path / "c", state(value))
            became.append(value)
        except errors.AlreadyExistsError:
            pass

    threads = [threading.Thread(target=save, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [value_of(tmp_path / "c")] == became
    assert len(attempts(tmp_path / "c")) == 1


def test_a_save_where_a_checkpoint_is_committed_writes_nothing(tmp_path):
    shardckpt.save(tmp_path / "c", state(1))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(errors.AlreadyExistsError, match="overwrite=True"):
        shardckpt.save(tmp_path / "c", state(2))
    assert sorted(tmp_path.rglob("*")) == before


# --- what a failing storage answers ---------------------------------------------------------------


class Answers:
    """A storage that writes the commit record and then says something else about it."""

    def __init__(self, monkeypatch, answer, *, write=True):
        original = Store.replace

        def replace(store, key, data, generation):
            if b'"tombstone"' in data:
                return original(store, key, data, generation)
            if write:
                original(store, key, data, generation)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        monkeypatch.setattr(Store, "replace", replace)


def test_an_answer_that_says_lost_is_not_believed_when_the_record_is_ours(tmp_path, monkeypatch):
    """A storage loses its own answer, tries again, and finds that somebody was first: us."""
    Answers(monkeypatch, answer=False)
    shardckpt.save(tmp_path / "c", state(1))
    assert value_of(tmp_path / "c") == 1


def test_an_error_after_the_record_is_visible_keeps_the_data_that_it_names(tmp_path, monkeypatch):
    Answers(monkeypatch, errors.StorageError("cannot sync"))
    with pytest.raises(errors.StorageError, match="is committed, but"):
        shardckpt.save(tmp_path / "c", state(1))
    assert value_of(tmp_path / "c") == 1


def test_an_error_before_the_record_is_visible_keeps_the_data_and_says_how_to_publish_it(
    tmp_path, monkeypatch
):
    Answers(monkeypatch, errors.StorageError("no."), write=False)
    with pytest.raises(
        errors.StorageError,
        match=r"no\. The data of the save is complete and stays there: `shardckpt commit .*c` "
        r"publishes it",
    ):
        shardckpt.save(tmp_path / "c", state(1))
    monkeypatch.undo()
    assert [outcome.state for outcome in shardckpt.commit(tmp_path / "c")] == ["committed"]
    assert value_of(tmp_path / "c") == 1


def test_an_interrupt_while_publishing_deletes_nothing(tmp_path, monkeypatch):
    """The storage may still be at it."""
    Answers(monkeypatch, KeyboardInterrupt(), write=False)
    with pytest.raises(KeyboardInterrupt):
        shardckpt.save(tmp_path / "c", state(1))
    assert len(attempts(tmp_path / "c")) == 1
    with pytest.raises(errors.UncommittedError):
        shardckpt.open(tmp_path / "c")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "failing", ["_host_records", "_check_coverage", "merged_index", "write_plain_documents"]
)
def test_a_save_that_fails_after_its_data_is_durable_keeps_it_whatever_the_error(
    tmp_path, monkeypatch, layout, failing
):
    if failing not in {"packed": {"write_plain_documents"}, "zarr": {"merged_index"}}[layout]:
        place = assemble if failing.startswith("_") else index
        with monkeypatch.context() as patch:
            patch.setattr(place, failing, lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                shardckpt.save(tmp_path / "c", state(1), options=SaveOptions(layout=layout))
        assert [outcome.state for outcome in shardckpt.commit(tmp_path / "c")] == ["committed"]
        assert value_of(tmp_path / "c") == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_that_fails_before_its_data_is_durable_leaves_nothing(tmp_path, monkeypatch, layout):
    monkeypatch.setattr(host, "write_table", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shardckpt.save(tmp_path / "c", state(1), options=SaveOptions(layout=layout))
    assert attempts(tmp_path / "c") == []


@pytest.mark.parametrize("by", ["the save", "a commit", "a reshard"])
def test_an_old_attempt_that_cannot_be_removed_fails_nothing_and_is_collected_later(
    tmp_path, caplog, by
):
    url = tmp_path / "c"
    shardckpt.save(url, state(1))
    if by == "a commit":
        with record_refused(), pytest.raises(errors.StorageError, match=STAYS):
            shardckpt.save(url, state(2), options=SaveOptions(overwrite=True))
    with removal_refused("00000"):
        if by == "the save":
            shardckpt.save(url, state(2), options=SaveOptions(overwrite=True))
        elif by == "a commit":
            assert [outcome.state for outcome in shardckpt.commit(url)] == ["committed"]
        else:
            shardckpt.reshard(url, url, overwrite=True, workers=1)
    (warning,) = [one.getMessage() for one in caplog.records if str(url) in one.getMessage()]
    assert "Input/output error" in warning
    assert value_of(url) == (1 if by == "a reshard" else 2)
    assert len(attempts(url)) == 2
    assert [one.outcome for one in collect(url, grace=0)] == ["removed"]
    assert len(attempts(url)) == 1


def test_a_record_that_names_another_checkpoint_as_its_attempt_does_not_get_it_removed(tmp_path):
    """run/checkpoint.json says that run/100, a checkpoint by itself, is its data: not something
    that we wrote."""
    shardckpt.save(tmp_path / "run" / "100", state(1))
    shardckpt.save(tmp_path / "run", state(2))
    store = Store.open(tmp_path / "run")
    opened = shardckpt.open(tmp_path / "run")
    document = {**opened.record.to_json(), "attempt": "100"}
    store.write(commit.RECORD, commit.seal(document))
    shardckpt.save(tmp_path / "run", state(3), options=SaveOptions(overwrite=True))
    assert value_of(tmp_path / "run") == 3
    assert value_of(tmp_path / "run" / "100") == 1


# --- a full disk, a disk that cannot be written ---------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(nbytes):
    """Every write beyond that many bytes of a file fails, as on a full disk. (Python ignores the
    signal.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk_is_a_storage_error_and_leaves_what_was_there(tmp_path, layout):
    """Whichever file it is that does not fit: data, table, index, record."""
    shardckpt.save(tmp_path / "c", state(1), options=SaveOptions(layout=layout))
    large = {**state(2), "many names": {f"{i:03}": np.arange(i) for i in range(30)}}
    shardckpt.save(tmp_path / "whole", large, options=SaveOptions(layout=layout))
    sizes = sorted({p.stat().st_size for p in (tmp_path / "whole").rglob("*") if p.is_file()})
    for size in sorted({0, *sizes[::3], sizes[-1]}):
        for url, overwrite in (
            (shutil.copytree(tmp_path / "c", tmp_path / f"old {size}"), True),
            (tmp_path / f"new {size}", False),
        ):
            with files_of_at_most(max(size - 20, 0)), pytest.raises(errors.StorageError) as raised:
                shardckpt.save(url, large, options=SaveOptions(layout=layout, overwrite=overwrite))
            assert "allows no file of that size" in str(raised.value)
            complete = len(attempts(url)) > overwrite
            assert complete == (f"`shardckpt commit {quote(str(url))}`" in str(raised.value))
            if overwrite:
                assert value_of(url) == 1
            assert (
                [outcome.state for outcome in shardckpt.commit(url)] == ["committed"]
                if complete
                else not attempts(url)[overwrite:]
            )


def test_a_directory_that_may_not_be_written_is_a_storage_error(tmp_path):
    places = [tmp_path / "a directory" / "c", tmp_path / "c"]
    places[0].parent.mkdir()
    shardckpt.save(places[1], state(1))
    for path in (places[0].parent, places[1]):
        path.chmod(0o555)
    errors_told = json.loads(child("kill_rights.py", *places))
    for path, (kind, message) in zip(places, errors_told, strict=True):
        assert kind == "StorageError"
        assert str(path) in message
        assert "give this user permission there" in message
    assert attempts(places[0].parent) == []
    assert value_of(places[1]) == 1


def test_a_file_in_place_of_the_directory_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"precious")
    for url in (tmp_path / "file", tmp_path / "file" / "c"):
        for overwrite in (False, True):
            with pytest.raises(
                errors.StorageError, match="a file stands where a directory is needed"
            ):
                shardckpt.save(url, state(1), options=SaveOptions(overwrite=overwrite))
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_link_to_nothing_in_place_of_the_directory_is_named(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    for url in (tmp_path / "link", tmp_path / "link" / "c"):
        with pytest.raises(errors.StorageError, match="or a link to nothing; choose another place"):
            shardckpt.save(url, state(1))
    assert not (tmp_path / "nowhere").exists()


# --- names ----------------------------------------------------------------------------------------


def test_attempts_have_names_of_their_own():
    names = list(itertools.islice(iter(commit.new_attempt, None), 100))
    assert len(set(names)) == 100


# --- saves of the same tensors --------------------------------------------------------------------


def test_tensors_of_later_saves_are_neither_encoded_nor_tried_to_be_read_again(
    tmp_path, monkeypatch
):
    counts = Counter()

    def counted(module, name):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (counts.update([name]), real(*a, **k))[1])

    counted(structure, "_tensors")
    counted(structure.Structure, "to_json")
    name = f"not saved before {tmp_path}"
    for step in range(3):
        shardckpt.save(tmp_path / str(step), {"step": step, name: np.full(3, step)})
    assert counts == {"_tensors": 1, "to_json": 1}
    for step in range(3):
        restored = shardckpt.restore(tmp_path / str(step))
        assert (restored["step"], restored[name].tolist()) == (step, [step] * 3)


def test_a_tree_that_readers_would_refuse_is_not_published_though_its_tensors_are_known(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.zeros(3)})
    record = shardckpt.open(tmp_path / "c").record
    store = Store.open(parse(str(tmp_path / "other")))
    commit._check_readable(store, record, record.seal())
    assert record.structure.known_to_be_readable
    for tree in (
        {"w": "$odd"},
        {"v": "$tensor"},
        {"w": "$tensor", "v": "$tensor"},
        {"w": "$tensor", "n": {"$tied": "v"}},
    ):
        other = replace(record, structure=record.structure.with_tree(tree))
        assert other.structure.known_to_be_readable
        with pytest.raises(errors.CommitError, match="could not be read again"):
            commit._check_readable(store, other, other.seal())


def test_a_record_that_this_process_has_published_is_not_parsed_by_its_next_save_there(
    tmp_path, monkeypatch
):
    place, over = tmp_path / "c", SaveOptions(overwrite=True)
    store, parsed = Store.open(parse(str(place))), []
    monkeypatch.setattr(
        commit,
        "_parse",
        lambda store, data, parse=commit._parse: (parsed.append(data is None), parse(store, data))[
            1
        ],
    )
    shardckpt.save(place, {"w": np.zeros(3)})
    parsed.clear()
    first = commit.read_prior(store, overwrite=True)
    with pytest.raises(errors.AlreadyExistsError):
        commit.read_prior(store, overwrite=False)
    assert parsed == []
    assert first.attempt == shardckpt.open(place).record.attempt
    shardckpt.save(tmp_path / "other", {"w": np.ones(3)})  # another record is the last one now
    assert commit.read_prior(store, overwrite=True) == first
    assert len(parsed) > 0
    shardckpt.save(place, {"w": np.ones(3)}, options=over)
    path = place / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(b'"w"', b'"v"'))
    with pytest.raises(errors.FormatError):
        commit.read_prior(store, overwrite=False)
