"""An export that replaces a directory, and is killed or fails at any operation, always leaves a
complete directory to be found."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import forks
import numpy as np
import pytest
from paths import CHILDREN

import shardckpt
from shardckpt import errors
from shardckpt.convert.files import replacement

CHILD = CHILDREN / "export_replaces_killed.py"
COMPLETE = ("old", "new")


@pytest.fixture
def place(tmp_path):
    """Two checkpoints, and an export of the first one, in `base`."""
    base = tmp_path / "base"
    for number, name in enumerate(("one", "two")):
        shardckpt.save(base / name, {"w": np.full((6, 5), number, np.float32)})
    shardckpt.export(base / "one", base / "out", to="dcp")
    return tmp_path


def fates(place, how, act):
    finished = forks.run(
        [sys.executable, CHILD, place, how, act],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def check(fate, *, atomic):
    """One of the two directories is complete at every moment, and the following exports find it."""
    then, (refused, after), (again, finally_there) = fate["then"], fate["refused"], fate["again"]
    complete = {name: what for name, what in then.items() if what in COMPLETE}
    assert complete, fate
    assert not atomic or then["out"] in COMPLETE, fate
    assert refused.startswith("AlreadyExistsError"), fate
    assert after["out"] in COMPLETE, fate
    if then["out"] in COMPLETE:  # the refused call has removed no finished directory
        finished = {name for name, what in complete.items() if name.endswith(".complete")}
        assert finished <= after.keys(), fate
        assert all(name in refused for name in finished), fate
    if then["out"] not in COMPLETE and len(complete) == 2:
        (replaced,) = (name for name in after if name.endswith(".replaced"))
        assert replaced in refused, fate
        assert (after["out"], after[replaced]) == ("new", "old"), fate
    assert (again, finally_there) == ("exported", {"out": "new"}), fate


@pytest.mark.long
@pytest.mark.parametrize("act", ["kill", "fail"])
@pytest.mark.parametrize("how", ["exchange", "steps", "layers"])
def test_a_complete_directory_is_found_whichever_operation_ends_the_export(place, how, act):
    outcomes = fates(place, how, act)
    operations = [fate["operation"] for fate in outcomes]
    assert operations[0] == "fsync"
    assert operations.count("exchange" if how == "exchange" else "rename") >= (
        1 if how == "exchange" else 3
    )
    for fate in outcomes:
        check(fate, atomic=how == "exchange" or act == "fail")
        if act == "fail" and fate["then"]["out"] == "nothing":
            assert ".complete" in fate["said"]
            assert ".replaced" in fate["said"]


def test_an_error_names_both_directories_if_neither_can_get_the_name(place, monkeypatch):
    base = place / "base"
    rename = os.rename

    def never_to_the_name(src, dst):
        if Path(dst).name == "out":
            raise OSError(errno.EIO, "Input/output error")
        rename(src, dst)

    monkeypatch.setattr(replacement, "exchange", lambda _one, _other: False)
    monkeypatch.setattr(os, "rename", never_to_the_name)
    for _ in range(2):  # the next export finds the same, and deletes nothing
        with pytest.raises(
            errors.StorageError,
            match=r"neither the new export nor the old one .*\.complete, .*\.replaced; rename one",
        ):
            shardckpt.export(base / "two", base / "out", to="dcp", overwrite=True)
        assert sorted(path.suffix for path in base.iterdir()) == ["", "", ".complete", ".replaced"]
    monkeypatch.undo()
    shardckpt.export(base / "two", base / "out", to="dcp", overwrite=True)
    assert sorted(path.name for path in base.iterdir()) == ["one", "out", "two"]


def test_files_that_somebody_puts_under_the_free_name_are_not_removed(place, monkeypatch):
    base = place / "base"
    (base / "out").rename(base / ".out.0123abcd.replaced")
    shardckpt.export(base / "two", base / ".out.0123abcd.complete", to="dcp")
    (base / "out").mkdir()
    (base / "out" / "thesis.tex").write_text("…")
    with pytest.raises(errors.StorageError, match="neither the new export nor the old one"):
        shardckpt.export(base / "two", base / "out", to="dcp", overwrite=True)
    assert (base / "out" / "thesis.tex").read_text() == "…"
    assert {".out.0123abcd.replaced", ".out.0123abcd.complete"} <= {
        path.name for path in base.iterdir()
    }


def test_names_are_exchanged_where_the_file_system_can(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert replacement.exchange(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    with pytest.raises(FileNotFoundError):
        replacement.exchange(tmp_path / "a", tmp_path / "c")


DURABLE = """
import json, os, sys, tensorstore, shardckpt
synced = {}
def noted(sync):
    def run(fd):
        sync(fd)
        found = os.fstat(fd)
        synced[f"{found.st_dev} {found.st_ino}"] = [found.st_size, found.st_mtime_ns]
    return run
os.fsync, os.fdatasync = noted(os.fsync), noted(os.fdatasync)
shardckpt.export(sys.argv[1], sys.argv[2], to=sys.argv[3])
print(json.dumps(synced))
"""


@pytest.mark.long
@pytest.mark.parametrize("to", ["dcp", "orbax", "torch", "safetensors"])
def test_every_file_and_every_new_directory_of_an_export_is_synced_after_its_last_change(place, to):
    """A directory's time of change tells its last entry."""
    top = place / "base"
    final = top / "new" / "models" / "export"
    code = [sys.executable, "-c", DURABLE, top / "two", final, to]
    synced = json.loads(
        subprocess.run(code, capture_output=True, text=True, check=True, timeout=250).stdout
    )
    paths = [
        top,
        top / "new",
        top / "new" / "models",
        final,
        *(final.rglob("*") if final.is_dir() else ()),
    ]
    for path in paths:
        status = path.stat()
        seen = synced.get(f"{status.st_dev} {status.st_ino}")
        assert seen is not None, path
        # The hidden directory is removed after the files have their names.
        if (to, path) != ("safetensors", final):
            assert seen == [status.st_size, status.st_mtime_ns], path
