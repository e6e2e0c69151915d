"""Advice in messages of storages: it fits the cause, and it fits the call."""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from interrupting import interrupted

import shardckpt
from shardckpt.errors import (
    BudgetError,
    CoordinationError,
    CorruptionError,
    FormatError,
    MissingDataError,
    MissingExtraError,
    NotFoundError,
    StorageError,
    extend,
    of_one_tensor,
)
from shardckpt.io import files
from shardckpt.io.failures import (
    is_denied,
    is_shutting_down,
    raise_unless_damage,
    storage_errors,
)
from shardckpt.io.store import Store
from shardckpt.options import leaves_out_with


def message(error, place="/data/c"):
    with pytest.raises(StorageError) as caught, storage_errors("write", place):
        raise error
    return str(caught.value)


@pytest.mark.parametrize(
    ("files", "free", "advice"),
    [(1000, 0, "has no inodes left"), (1000, 5, "the disk is full"), (0, 0, "the disk is full")],
    ids=["no inodes", "no bytes", "a file system without a number of inodes"],
)
def test_a_full_disk_is_told_from_one_without_inodes(tmp_path, monkeypatch, files, free, advice):
    looked = []

    def statvfs(path):
        looked.append(path)
        if not path.exists():
            raise FileNotFoundError(path)
        return SimpleNamespace(f_files=files, f_favail=free)

    monkeypatch.setattr(os, "statvfs", statvfs)
    place = tmp_path / "not yet" / "there"
    assert advice in message(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place)), place)
    assert looked[-1] == tmp_path


def test_a_quota_is_of_bytes_or_of_files():
    assert "the quota of bytes or of files is used up" in message(
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    )


def test_an_answer_without_a_field_says_so():
    assert message(KeyError("ContentLength"), "s3://bucket/c") == (
        "cannot write s3://bucket/c: the storage's answer lacks 'ContentLength'; its service "
        "does not follow the protocol; check the endpoint."
    )


def caused(cause, kind=StorageError):
    error = kind("cannot read it")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "denied"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/x"), True),
        (OSError(errno.EROFS, "Read-only file system", "/x"), True),
        (ValueError("PERMISSION_DENIED: Error reading gs://b/x"), True),
        (caused(PermissionError("403 Forbidden")), True),
        (OSError("Forbidden: https://storage.example/b/x"), True),
        (ValueError('UNAVAILABLE: Error reading "gs://b/forbidden/x"'), False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False),
    ],
)
def test_a_lack_of_permission_is_recognised_whatever_client_says_so(cause, denied):
    error = caused(cause)
    assert is_denied(error) == denied
    with pytest.raises(StorageError) if denied else nullcontext():
        raise_unless_damage(error, lambda _key: None)


def refuse(_key):
    raise StorageError("no answer")


@pytest.mark.parametrize("kind", [CorruptionError, MissingDataError, FormatError, NotFoundError])
def test_missing_and_wrong_bytes_are_damage_and_nothing_is_asked(kind):
    raise_unless_damage(caused(PermissionError(), kind), refuse)


@pytest.mark.parametrize("cause", [ConnectionResetError(), TimeoutError(), ValueError("UNKNOWN")])
def test_an_error_of_any_client_is_damage_only_if_the_storage_answers(cause):
    error = caused(cause)
    raise_unless_damage(error, lambda _key: None)
    with pytest.raises(StorageError) as raised:
        raise_unless_damage(error, refuse)
    assert raised.value is error
    assert error.__cause__ is cause, "the reason stays"


@pytest.mark.parametrize(
    "error",
    [
        BudgetError("no memory"),
        MissingExtraError("a package is not installed"),
        CoordinationError("forked"),
        caused(OSError(errno.EMFILE, "Too many open files")),
    ],
)
def test_an_error_of_this_process_is_no_damage(error):
    with pytest.raises(type(error)) as raised:
        raise_unless_damage(error, lambda _key: None)
    assert raised.value is error


@pytest.fixture
def damaged(tmp_path):
    """A checkpoint with one flipped bit."""
    shardckpt.save(tmp_path / "c", {"w": np.arange(1 << 16, dtype=np.float32), "v": np.ones(3)})
    data = max(
        (path for path in (tmp_path / "c").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(data.read_bytes())
    content[9999] ^= 1
    data.write_bytes(content)
    return tmp_path / "c"


CALLS = {
    "restore": (lambda c, to: shardckpt.restore(c), "with only=."),
    "reshard": (lambda c, to: shardckpt.reshard(c, to / "r", layout="zarr"), "with only=."),
    "export": (lambda c, to: shardckpt.export(c, to / "o.safetensors"), "with exclude=."),
    "export to torch": (
        lambda c, to: shardckpt.export(c, to / "o.pt", to="torch"),
        "with exclude=.",
    ),
    "read": (lambda c, to: shardckpt.open(c).read("w"), None),
    "fingerprint": (lambda c, to: shardckpt.open(c).fingerprint(), None),
}


@pytest.mark.parametrize(("call", "advice"), CALLS.values(), ids=CALLS)
def test_only_calls_that_can_leave_a_tensor_out_say_how(damaged, tmp_path, call, advice):
    with pytest.raises(CorruptionError, match=r"with a backup") as caught:
        call(damaged, tmp_path)
    match = re.search(r"or leave the tensor out (.*)", str(caught.value))
    assert (match and match[1]) == advice


def test_text_before_and_behind_an_error_leaves_its_advice_in_its_place():
    @leaves_out_with("only")
    def fail():
        error = of_one_tensor(CorruptionError("w is damaged; replace it."))
        extend(error, before="c: ")
        extend(error, after=" All is lost.")
        raise error

    with pytest.raises(CorruptionError) as caught:
        fail()
    assert str(caught.value) == (
        "c: w is damaged; replace it, or leave the tensor out with only=. All is lost."
    )


def test_a_report_of_damage_names_no_option(damaged):
    (damage,) = shardckpt.open(damaged).verify().damage
    assert damage.reason.endswith("Replace the file with a backup.")


def test_ctrl_c_amid_the_question_whether_python_shuts_down_leaves_the_main_thread_alive():
    for at in range(20):
        interrupted(
            at,
            threading.__file__,
            lambda code: code.co_filename == threading.__file__,
            is_shutting_down,
            lambda: None,
        )
        assert threading.main_thread().is_alive()
        assert not is_shutting_down()


def test_a_lock_that_another_process_holds_is_no_lack_of_permission(tmp_path, monkeypatch):
    def held(*_):
        raise PermissionError(errno.EACCES, "as some file systems report a lock that is held")

    monkeypatch.setattr(files, "_LOCK_SECONDS", 0)
    monkeypatch.setattr(files, "lock_file", held)
    with pytest.raises(StorageError, match="another process holds") as raised:
        Store.open(tmp_path).create("key", b"")
    assert not is_denied(raised.value)
