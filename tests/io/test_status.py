"""Looks at paths: typed errors for paths that cannot be looked at, and no other way to look in the
whole package."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from paths import CHILDREN, ROOT

import shardckpt
from shardckpt.errors import StorageError
from shardckpt.io.status import exists, is_directory, is_file, is_link, status

PACKAGE = ROOT / "shardckpt"
_OF_PATHS = {
    "exists",
    "is_dir",
    "is_file",
    "is_symlink",
    "is_mount",
    "is_fifo",
    "is_socket",
    "is_block_device",
    "is_char_device",
}
_OF_OS = {
    "exists",
    "lexists",
    "isdir",
    "isfile",
    "islink",
    "samefile",
    "getsize",
    "getmtime",
    "ismount",
}


def predicates(source):
    """Calls of the predicates of `pathlib` and `os.path`: line and text."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of, name = ast.unparse(node.func.value), node.func.attr
        of_entry = of in ("entry", "e")  # of os.scandir
        if (
            (of == "os.path" and name in _OF_OS)
            or name == "samefile"
            or (name in _OF_PATHS and not node.args and not of_entry)
        ):
            yield node.lineno, ast.unparse(node)


def test_the_package_looks_at_paths_by_its_own_functions_only():
    calls = [
        (str(path.relative_to(ROOT)), *call)
        for path in PACKAGE.rglob("*.py")
        for call in predicates(path.read_text())
    ]
    assert calls == []


def test_the_rule_finds_what_it_looks_for():
    source = (
        "path.exists(); os.path.isfile(p); store.exists(key); entry.is_dir(); (a / "
        "b).is_symlink(); a.samefile(b)"
    )
    assert [text for _, text in predicates(source)] == [
        "path.exists()",
        "os.path.isfile(p)",
        "(a / b).is_symlink()",
        "a.samefile(b)",
    ]


def test_kinds_of_files(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    kinds = {
        name: [one(tmp_path / name) for one in (exists, is_directory, is_file, is_link)]
        for name in (".", "file", "link", "broken", "loop", "nothing", "file/below")
    }
    assert kinds == {
        ".": [True, True, False, False],
        "file": [True, False, True, False],
        "link": [True, False, True, True],
        "broken": [False, False, False, True],
        "loop": [False, False, False, True],
        "nothing": [False, False, False, False],
        "file/below": [False, False, False, False],
    }
    assert exists(tmp_path / "broken", follow=False)


def test_a_name_that_is_too_long_is_a_storage_error(tmp_path):
    with pytest.raises(
        StorageError,
        match=r"cannot look at .*File name too long; a name on the way is too long for the file "
        r"system",
    ):
        status(tmp_path / ("a" * 300))


@pytest.fixture(scope="module")
def places():
    """Checkpoints, one of them in a directory that other users may not enter."""
    top = Path(tempfile.mkdtemp())  # other users may not enter pytest's directories
    top.chmod(0o755)
    (top / "closed" / "in").mkdir(parents=True)
    (top / "mine").mkdir()
    (top / "mine").chmod(0o777)
    for name in ("ok", "closed/c", "secret"):
        shardckpt.save(top / name, {"w": np.ones((3, 3), np.float32)})
    (top / "closed").chmod(0)
    for file in (top / "secret").rglob("d/00000"):
        file.chmod(0)
    yield top
    (top / "closed").chmod(0o700)
    shutil.rmtree(top)


def as_another_user(places, entries):
    command = [sys.executable, CHILDREN / "another_user.py", places / "mine"]
    env = os.environ | {"COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}
    finished = subprocess.run(
        command,
        input=json.dumps(entries),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=env,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


LONG = "a" * 300
COMMANDS = [
    ["ls", "CLOSED/c"],
    ["info", "CLOSED/c"],
    ["verify", "CLOSED/c"],
    ["verify", "SECRET"],
    ["diff", "CLOSED/c", "OK"],
    ["fingerprint", "CLOSED/c"],
    ["plan", "OK", "CLOSED/y"],
    ["reshard", "CLOSED/c", "x"],
    ["reshard", "OK", "CLOSED/y"],
    ["export", "OK", "CLOSED/o.safetensors"],
    ["export", "OK", "CLOSED/directory"],
    ["export", "--to", "dcp", "OK", "CLOSED/in"],
    ["export", "--to", "torch", "OK", "CLOSED/o.pt"],
    ["export", "--config", "CLOSED/config.json", "OK", "o"],
    ["import", "CLOSED/m.safetensors", "y"],
    ["import", "CLOSED/in", "y"],
    ["import", "OK", "CLOSED/y"],
    ["commit", "CLOSED/c"],
    ["gc", "CLOSED"],
    ["rm", "--yes", "CLOSED/c"],
    ["pin", "CLOSED/c"],
    ["ls", LONG],
    ["info", LONG],
    ["gc", LONG],
    ["reshard", "OK", LONG],
    ["export", "OK", LONG],
    ["import", LONG, "y"],
    ["serve", "a=CLOSED/c", "--state", "s"],
]


@pytest.mark.timeout(700)  # it starts some dozen programs, one after another
def test_every_command_of_a_user_who_may_not_enter_a_directory_says_so(places):
    entries = [
        [
            one.replace("CLOSED", str(places / "closed"))
            .replace("OK", str(places / "ok"))
            .replace("SECRET", str(places / "secret"))
            for one in each
        ]
        for each in COMMANDS
    ]
    for command, (code, err) in zip(COMMANDS, as_another_user(places, entries), strict=True):
        assert "Traceback" not in err, (command, err)
        assert "bug in shardckpt" not in err, (command, err)
        assert code in (2, 3, 6), (command, code, err)
        assert any(
            text in err
            for text in ("ermission denied", "ame too long", "is a shardckpt checkpoint already")
        ), (command, err)


SAVE = "import numpy; shardckpt.save({!r}, {{'w': numpy.ones(3)}})"


def test_a_user_without_a_home_saves_and_restores_on_a_disk(places):
    nothing_odd = "assert not __import__('os').path.exists('~')"
    calls = [
        SAVE.format("c"),
        "assert shardckpt.restore('c')['w'].tolist() == [1, 1, 1]",
        SAVE.format("~/c"),
        nothing_odd,
    ]
    saved, restored, tilde, left = as_another_user(places, calls)
    assert (saved, restored, left) == (None, None, None)
    assert tilde[0] == "UrlError"
    assert "this user has no home directory; set HOME, or give an absolute path" in tilde[1]


def test_a_checkpoint_beside_a_directory_that_may_not_be_entered_is_neither_replaced_nor_removed(
    places,
):
    """The directory may be a checkpoint that stores tensors in this one."""
    save = (
        f"import numpy; shardckpt.save({str(places / 'ok')!r}, {{'w': numpy.ones(3)}}, "
        "options=shardckpt.SaveOptions(overwrite=True))"
    )
    (code, removed), (kind, replaced) = as_another_user(
        places, [["rm", "--yes", str(places / "ok")], save]
    )
    assert (code, kind) == (6, "StorageError")
    keep = (
        "import os, numpy, shardckpt; os.mkdir('kept'); os.mkdir('kept/closed', 0);"
        "manager = shardckpt.CheckpointManager('kept', every=1, keep=1);"
        "[manager.save(step, {'w': numpy.ones(3)}) for step in (1, 2)]; manager.close()"
    )
    ((kept_kind, kept),) = as_another_user(places, [keep])
    assert kept_kind == "StorageError"
    assert "no step is deleted" in kept
    for text in (removed, replaced):
        assert "may be the base of closed beside it, which this user may not enter" in " ".join(
            text.split()
        )
    (places / "closed").chmod(0o700)
    shardckpt.save(places / "ok", {"w": np.ones(3)}, options=shardckpt.SaveOptions(overwrite=True))


@pytest.mark.skipif(
    os.geteuid() != 0, reason="a directory of another user is needed, which root can make"
)
def test_directories_of_others_in_a_public_directory_do_not_count(places):
    places.chmod(0o1777)
    save = (
        f"import numpy; shardckpt.save({str(places / 'own')!r}, {{'w': numpy.ones(3)}}, "
        "options=shardckpt.SaveOptions(overwrite=True))"
    )
    assert as_another_user(places, [save, save]) == [None, None]
