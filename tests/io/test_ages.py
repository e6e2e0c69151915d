"""For how long nothing has been written below a place."""

from __future__ import annotations

import os
import time

import pytest

from shardckpt.io.ages import idle_seconds, last_written
from shardckpt.io.store import Store

NOW = time.time()


@pytest.fixture
def disk(tmp_path):
    return Store.open(tmp_path)


def write(disk, key, *, at):
    """A file that was written then; its directories later, as when another file in them was
    removed."""
    disk.write(key, b"x")
    os.utime(disk.local_path(key), (at, at))


def test_a_place_with_the_same_beginning_is_another(disk):
    write(disk, "step1/x", at=NOW - 1000)
    write(disk, "step10/x", at=NOW)
    assert last_written(disk, "step1/") == pytest.approx(NOW - 1000)


def test_files_tell_the_age_and_not_the_directories_that_lose_some(disk):
    """Else an interrupted removal would make what is left look alive."""
    write(disk, "a/x", at=NOW - 1000)
    write(disk, "a/b/y", at=NOW - 2000)
    assert last_written(disk, "a/") == pytest.approx(NOW - 1000)


def test_directories_tell_it_where_there_are_no_files_yet(disk):
    place = disk.location.local_path / "a"
    (place / "b" / "c").mkdir(parents=True)
    for path, at in ((place, 3000), (place / "b", 2000), (place / "b" / "c", 4000)):
        os.utime(path, (NOW - at, NOW - at))
    assert last_written(disk, "a/") == pytest.approx(NOW - 2000)


def test_links_are_as_old_as_they_are_themselves(disk, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "new").write_bytes(b"x")
    write(disk, "a/x", at=NOW - 2000)
    for name in ("file", "directory"):
        link = disk.location.local_path / "a" / name
        link.symlink_to(elsewhere if name == "directory" else elsewhere / "new")
        os.utime(link, (NOW - 1000, NOW - 1000), follow_symlinks=False)
    assert last_written(disk, "a/") == pytest.approx(NOW - 1000)


def test_the_storages_clock_decides_and_not_this_machines(disk, monkeypatch):
    """This machine is a day ahead."""
    disk.write("a/x", b"")
    monkeypatch.setattr(time, "time", lambda: NOW + 86400)
    assert idle_seconds(disk, ["a/"])["a/"] < 600


def test_a_date_in_the_future_counts_as_now(disk):
    write(disk, "a/x", at=NOW + 86400)
    assert idle_seconds(disk, ["a/"]) == {"a/": 0.0}


def test_a_look_at_what_is_not_there_makes_nothing(disk):
    place = disk.sub("run").sub("100")
    assert idle_seconds(place, ["a/", "key"]) == {"a/": None, "key": None}
    assert disk.list_children() == []
