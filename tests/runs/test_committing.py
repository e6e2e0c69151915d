"""Committing what others have left, with processes that die, sleep or race at the worst moment."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from paths import CHILDREN
from placeholders import put_placeholder
from processes import Processes

import shardckpt
from shardckpt import SaveOptions
from shardckpt.commit import index
from shardckpt.commit.assemble import assemble
from shardckpt.commit.index import index_values, packed_documents
from shardckpt.commit.publish import discard, publish, read_prior
from shardckpt.errors import CommitError, NotFoundError, StorageError
from shardckpt.format.documents import open_envelope, seal
from shardckpt.format.zarr_arrays import encoded_documents
from shardckpt.io.store import Store
from shardckpt.runs.collecting import collect, delete
from shardckpt.state.names import natural_key

LAYOUTS = ["packed", "zarr"]
DAY = 24 * 3600


def save(url, value=1, **options):
    shardckpt.save(url, {"w": np.full(100, value)}, options=SaveOptions(**options))


def save_without_commit(url, value=1, **options):
    """A whole save that lacks its commit; the attempt's name."""
    put_placeholder(url)
    save(url, value, **options)
    put_placeholder(url)
    (attempt,) = directories(url)
    return attempt


def value_of(url):
    """Value of a checkpoint, which must be whole and undamaged."""
    (value,) = set(shardckpt.restore(url)["w"].tolist())
    assert shardckpt.open(url).verify().damage == []
    return value


def bytes_of(path):
    """None: there is no such file."""
    return path.read_bytes() if path.exists() else None


def directories(url):
    return sorted(p.name for p in Path(url).iterdir() if p.is_dir())


def age(top):
    then = time.time() - 2 * DAY
    for path in [top, *top.rglob("*")]:
        os.utime(path, (then, then))


def states(outcomes):
    return [outcome.state for outcome in outcomes]


# --- from the records alone -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def job():
    with Processes("committing_hosts") as processes:
        yield processes


def digests(url):
    """Of every file, but what is never written the same twice: the record has a time in it, an
    OCDBT database a random id."""
    files = {p.relative_to(url).as_posix(): p for p in Path(url).rglob("*") if p.is_file()}
    (attempt,) = directories(url)
    own = ("checkpoint.json", f"{attempt}/manifest.ocdbt", f"{attempt}/d/")
    return {
        name: hashlib.sha256(p.read_bytes()).hexdigest()
        for name, p in files.items()
        if not name.startswith(own)
    }


def index_of(url):
    """Content of the merged index: places of chunks, and documents."""
    opened = shardckpt.open(url)
    place = Store.open(url).sub(opened.record.attempt)
    keys = dict(
        packed_documents(encoded_documents(opened.record.structure, opened.record.compression))
    )
    return {key: value for key, value in index_values(place) if not isinstance(value, bytes)}, {
        key: value for key, value in index_values(place) if key in keys
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_commit_from_the_records_alone_writes_what_the_save_s_own_commit_writes(
    tmp_path, job, layout
):
    assert (
        job.run("save_and_copy", 3, tmp_path / "own", tmp_path / "late", {"layout": layout})
        == ["saved"] * 3
    )
    with pytest.raises(NotFoundError):
        shardckpt.open(tmp_path / "late")
    assert states(shardckpt.commit(tmp_path / "late")) == ["committed"]
    assert digests(tmp_path / "late") == digests(tmp_path / "own")
    records = [
        open_envelope((tmp_path / name / "checkpoint.json").read_bytes(), "")
        for name in ("own", "late")
    ]
    for record in records:
        del record["created"]
    assert records[0] == records[1]
    if layout == "packed":
        assert index_of(tmp_path / "late") == index_of(tmp_path / "own")
    assert shardckpt.open(tmp_path / "late").verify().damage == []


def test_a_later_commit_of_a_lone_process_s_save_leaves_its_index_and_table_as_they_are(tmp_path):
    attempt = tmp_path / "c" / save_without_commit(tmp_path / "c")
    before = {path: path.stat().st_ino for path in attempt.rglob("*") if path.is_file()}
    assert states(shardckpt.commit(tmp_path / "c")) == ["committed"]
    assert {path: path.stat().st_ino for path in attempt.rglob("*") if path.is_file()} == before
    assert value_of(tmp_path / "c") == 1


@pytest.mark.parametrize("step", ["merged_index", "check"])
def test_where_a_lone_process_could_not_write_the_index_the_committer_does(
    tmp_path, monkeypatch, step
):
    of = index if step == "merged_index" else index.MergedIndex
    tried, do = [], getattr(of, step)

    def refuses_once(*arguments):
        tried.append(arguments)
        done = do(*arguments)
        if len(tried) == 1:
            raise StorageError("the disk is full")
        return done

    monkeypatch.setattr(of, step, refuses_once)
    save(tmp_path / "c")
    (attempt,) = directories(tmp_path / "c")
    assert (len(tried), (tmp_path / "c" / attempt / "d" / "leaf").exists()) == (2, True)
    assert value_of(tmp_path / "c") == 1


@pytest.mark.parametrize("layout", ["packed", pytest.param("zarr", marks=pytest.mark.slow)])
def test_what_a_killed_committer_leaves_the_command_line_commits(tmp_path, job, layout):
    killed, *others = job.run("save_and_be_killed", 3, tmp_path / "c", {"layout": layout})
    assert killed == {"signal": signal.SIGKILL}
    assert {other["error"] for other in others} == {"CommitError"}
    assert all("shardckpt commit" in other["message"] for other in others)
    command = [Path(sys.executable).with_name("shardckpt"), "commit", str(tmp_path), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stderr) == (0, "")
    (outcome,) = json.loads(ended.stdout)["attempts"]
    assert (outcome["name"], outcome["state"]) == ("c", "committed")
    assert shardckpt.restore(tmp_path / "c")["scalar"] == 2.5
    assert shardckpt.open(tmp_path / "c").verify().damage == []


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_commit_killed_at_any_operation_leaves_what_the_next_one_commits(tmp_path, layout):
    save_without_commit(tmp_path / "base", layout=layout)
    command = [sys.executable, CHILDREN / "collect_kill_at_every_operation.py", tmp_path, "commit"]
    died_before = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=250).stdout
    )
    assert died_before[-2:] == ["rename", "fsync"]
    assert value_of(tmp_path / str(len(died_before) - 1)) == 1
    for k in range(len(died_before) - 1):
        with pytest.raises(NotFoundError):
            shardckpt.open(tmp_path / str(k))
        assert states(shardckpt.commit(tmp_path / str(k))) == ["committed"]
        assert value_of(tmp_path / str(k)) == 1


# --- two at once ----------------------------------------------------------------------------------


def test_two_commits_of_one_attempt_publish_it_once_and_both_know_that_it_is_published(tmp_path):
    urls = [tmp_path / str(i) for i in range(12)]
    attempts = [save_without_commit(url, i, layout=LAYOUTS[i % 2]) for i, url in enumerate(urls)]
    command = [sys.executable, CHILDREN / "committing_race.py", *map(str, urls)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for i, url in enumerate(urls):
            assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
            for racer in racers[:: 1 if i % 2 else -1]:
                racer.stdin.write("go\n")
                racer.stdin.flush()
            answers = {racer.stdout.readline() for racer in racers}
            # Two that write the same bytes, in the same second, are told the same.
            assert "committed True\n" in answers <= {"committed True\n", "committed False\n"}
            assert value_of(url) == i
            assert shardckpt.open(url).record.attempt == attempts[i]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate(timeout=200)


# --- a committer that sleeps ----------------------------------------------------------------------


class StoppedCommitter:
    """A process that has done all but publish, and was stopped just before that."""

    def __init__(self, url, *action):
        command = [
            sys.executable,
            CHILDREN / "collect_stopped_committer.py",
            str(url),
            *map(str, action),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self):
        """Wake the committer; returns the outcome that it prints."""
        self.process.send_signal(signal.SIGCONT)
        out, _ = self.process.communicate(timeout=200)
        assert self.process.returncode == 0
        return out.strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(60)


@pytest.mark.long
@pytest.mark.parametrize(
    "action", [("save", 2), ("overwrite", 2), ("commit",)], ids=lambda action: action[0]
)
@pytest.mark.parametrize("meanwhile", ["collected", "deleted", "replaced"])
def test_a_committer_that_sleeps_while_its_place_changes_publishes_nothing_and_says_so(
    tmp_path, action, meanwhile
):
    """`deleted`: another save committed in between, where there was no checkpoint, and that was
    deleted. `collected`: a collection has published the attempt, because it was complete."""
    url = tmp_path / "c"
    committed = action[0] == "overwrite"
    if committed:
        save(url, 1)
    elif action[0] == "commit":
        save_without_commit(url, 2)
    kept = [shardckpt.open(url).record.attempt] if committed else []
    with StoppedCommitter(url, *action) as committer:
        (attempt,) = set(directories(url)) - set(kept)
        if meanwhile == "collected":
            age(url)
            (published,) = collect(url)
            assert (published.attempt, published.outcome) == (attempt, "published")
        else:
            if meanwhile == "replaced" or not committed:
                save(url, 3, overwrite=committed)
            if meanwhile == "deleted":
                (left,) = delete(url)
                assert (left.attempt, left.outcome, left.reason) == (
                    attempt,
                    "kept",
                    "it may be a save under way",
                )
        record = bytes_of(url / "checkpoint.json")
        overtaken, saved = (
            ("overtaken", "committed") if action[0] == "commit" else ("AlreadyExistsError", "saved")
        )
        assert committer.go_on() == (saved if meanwhile == "collected" else overtaken)
    assert bytes_of(url / "checkpoint.json") == record
    expected = {"collected": 2, "deleted": None, "replaced": 3}[meanwhile]
    if expected is None:
        # The committer has removed what nobody can publish any more.
        assert not url.exists() or directories(url) == []
        with pytest.raises(NotFoundError):
            shardckpt.open(url)
        save(url, 4)
        assert value_of(url) == 4
    else:
        assert value_of(url) == expected
        assert directories(url) == [shardckpt.open(url).record.attempt]


@pytest.mark.parametrize("action", [("save", 2), ("commit",)], ids=lambda action: action[0])
def test_a_committer_that_sleeps_and_was_left_alone_publishes(tmp_path, action):
    url = tmp_path / "c"
    if action[0] == "commit":
        save_without_commit(url, 2)
    with StoppedCommitter(url, *action) as committer:
        assert [one.outcome for one in collect(url)] == ["kept"]
        assert committer.go_on() == ("committed" if action[0] == "commit" else "saved")
    assert value_of(url) == 2


def test_a_save_that_could_not_publish_its_attempt_removes_it_unless_somebody_else_is_publishing_it(
    tmp_path,
):
    """As a save does that is told, at its very end, that the disk is full, while `shardckpt commit`
    has found room."""
    url = tmp_path / "c"
    attempt = save_without_commit(url, 2)
    with StoppedCommitter(url, "commit") as committer:
        discard(Store.open(url / attempt))
        assert committer.go_on() == "committed"
    assert value_of(url) == 2
    attempt = save_without_commit(tmp_path / "d", 3)
    discard(Store.open(tmp_path / "d" / attempt))
    assert directories(tmp_path / "d") == []


def test_an_attempt_that_was_removed_before_it_is_published_is_not(tmp_path):
    attempt = save_without_commit(tmp_path / "c", 2)
    store = Store.open(tmp_path / "c")
    record = assemble(store.sub(attempt))
    discard(store.sub(attempt))
    with pytest.raises(CommitError, match="another process has removed this save"):
        publish(store, record, read_prior(store, overwrite=False))
    with pytest.raises(NotFoundError):
        shardckpt.open(tmp_path / "c")


# --- which attempt --------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [True, False])
def test_of_two_whole_attempts_the_newest_counts_and_the_other_is_overtaken(tmp_path, by_name):
    older = save_without_commit(tmp_path / "c", 1)
    shutil.move(tmp_path / "c" / older, tmp_path / older)
    newest = save_without_commit(tmp_path / "c", 2)
    shutil.move(tmp_path / older, tmp_path / "c" / older)
    older, newest = sorted((older, newest), key=natural_key, reverse=not by_name)
    age(tmp_path / "c" / older)
    by_attempt = {one.attempt: one for one in shardckpt.commit(tmp_path / "c")}
    assert (by_attempt[newest].state, by_attempt[older].state) == ("committed", "overtaken")
    assert by_attempt[older].reason == "a later attempt was committed"
    assert shardckpt.open(tmp_path / "c").record.attempt == newest


def test_a_place_without_anything_is_an_error(tmp_path):
    with pytest.raises(NotFoundError, match="no checkpoint and no unfinished save"):
        shardckpt.commit(tmp_path / "nothing")


def test_where_the_commit_record_cannot_be_read_all_attempts_are_refused(tmp_path):
    attempt = save_without_commit(tmp_path / "c")
    newer = b'{"format":"shardckpt","version":[9,0],"sha256":"' + b"0" * 64 + b'","record":{}}\n'
    (tmp_path / "c" / "checkpoint.json").write_bytes(newer)
    (outcome,) = shardckpt.commit(tmp_path / "c")
    assert (outcome.attempt, outcome.state) == (attempt, "refused")
    assert "newer than this shardckpt reads" in outcome.reason
    assert (tmp_path / "c" / "checkpoint.json").read_bytes() == newer


@pytest.mark.parametrize("commit_killed", [False, True])
def test_what_an_earlier_version_left_whole_is_committed(tmp_path, commit_killed):
    """Its hosts found no commit record, and put no placeholder there; a commit that was killed
    has."""
    attempt = save_without_commit(tmp_path / "c", 2)
    (record,) = (tmp_path / "c" / attempt / "records").iterdir()
    record.write_bytes(seal({**open_envelope(record.read_bytes(), ""), "prior": None}))
    if not commit_killed:
        (tmp_path / "c" / "checkpoint.json").unlink()
    assert [outcome.state for outcome in shardckpt.commit(tmp_path / "c")] == ["committed"]
    assert value_of(tmp_path / "c") == 2
