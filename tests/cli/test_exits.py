"""Errors of commands: one line or one document, and a status per kind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paths import DOCS

import shardckpt
from shardckpt import errors
from shardckpt.cli import exits

PAGE = DOCS / "cli.md"


def begin(place):
    path = place / "20260101T000000-00000000" / "records"
    path.mkdir(parents=True)
    (path / "00000.json").write_bytes(b"")


@pytest.fixture
def places(tmp_path, saver):
    """Checkpoints that are wrong in one way each."""
    begin(tmp_path / "unfinished")
    broken = saver(tmp_path / "broken") / "checkpoint.json"
    broken.write_bytes(broken.read_bytes()[:-9])
    newer = saver(tmp_path / "newer") / "checkpoint.json"
    newer.write_bytes(newer.read_bytes().replace(b'"version":[1,', b'"version":[9,'))
    saver(tmp_path / "sound")
    (tmp_path / "file").write_text("x")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "checkpoint.json")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize(
    ("args", "code", "status", "words"),
    [
        (["info", "nothing"], "not-found", 3, "no checkpoint there"),
        (["ls", "nothing"], "not-found", 3, "no such directory"),
        (["verify", "unfinished"], "uncommitted", 3, "never committed"),
        (["info", "broken"], "format", 4, "broken/checkpoint.json"),
        (["diff", "sound", "newer"], "version", 4, "upgrade"),
        (["info", "sound", "model/embd"], "names", 5, "did you mean 'model/embed'"),
        (["info", "ftp://host/x"], "url", 2, "ftp://"),
        (["ls", "file"], "storage", 6, "a file stands where a directory is needed"),
        (["verify", "pipe"], "storage", 6, "checkpoint.json: it is not a regular file; remove"),
        (["info", "loop"], "storage", 6, "a link leads to itself"),
        (["info", "memory://"], "url", 2, "memory:// names no place; write memory://NAME."),
        (
            ["export", "sound", "out", "--to", "canonical-delta"],
            "option",
            2,
            "canonical-delta needs --since: give the step",
        ),
        (["info"], "usage", 2, "Missing argument"),
        (["inof", "x"], "usage", 2, "Did you mean 'info'"),
        (["ls", "--frobnicate"], "usage", 2, "--frobnicate"),
        (["info", "sound", "--depth", "0"], "usage", 2, "--depth"),
        (["diff", "sound", "sound", "--memory", "1"], "option", 2, "1 MiB"),
    ],
)
def test_a_mistake_is_one_line_or_one_document_and_a_status(
    run, places, monkeypatch, args, code, status, words
):
    monkeypatch.chdir(places)
    plain = run(*args)
    assert (plain.status, plain.out) == (status, "")
    assert plain.err.startswith("error: ")
    assert plain.err.count("\n") == 1
    assert words in plain.err
    with_json = run(*args, "--json")
    assert with_json.status == status
    assert set(with_json.json) == {"error"}
    assert with_json.json["error"]["code"] == code
    assert words in with_json.json["error"]["message"]


def test_every_error_has_a_status_and_answers_have_theirs_alone():
    codes = {getattr(errors, name).code for name in errors.__all__}
    assert codes <= set(exits.STATUS)
    assert {"usage", "internal"} == set(exits.STATUS) - codes
    assert all(2 <= status < 126 for status in exits.STATUS.values())


def test_the_documentation_has_the_same_table():
    rows = re.findall(
        r"^\| (\d+) \| .* \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    documented = {
        code: int(status) for status, codes in rows for code in re.findall(r"`([a-z-]+)`", codes)
    }
    assert documented == exits.STATUS


def test_the_keys_of_json_are_documented(run, places):
    text = (DOCS / "json.md").read_text(encoding="utf-8")

    def keys(doc):
        if isinstance(doc, dict):
            return set(doc) | {
                key
                for name, value in doc.items()
                if name not in {"metadata", "tensorstore"}
                for key in keys(value)
            }
        return {key for item in doc for key in keys(item)} if isinstance(doc, list) else set()

    sound, broken = places / "sound", places / "broken"
    commands = [
        ["ls", places],
        ["info", sound],
        ["info", sound, "model/embed"],
        ["verify", sound],
        ["diff", sound, sound],
        ["info", broken],
    ]
    for args in commands:
        for key in keys(run(*args, "--json").json):
            assert f"`{key}`" in text, (args, key)


def test_a_message_cannot_reach_the_terminal(run, places):
    answer = run("info", places / "sound", "\x1b[2J\nname")
    assert answer.err.rstrip("\n").isprintable()
    assert answer.status == 5


def test_a_bug_of_ours_shows_where_it_is_and_is_no_answer(capsys):
    def broken():
        raise ZeroDivisionError("\x1b[31m")

    assert exits.run(broken, as_json=False) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert r"error: ZeroDivisionError: \x1b[31m. This is a bug in shardckpt" in err
    assert err.replace("\n", "").isprintable()
    assert exits.run(broken, as_json=True) == 70
    assert '"code": "internal"' in capsys.readouterr().out


def test_an_interrupt_is_status_130():
    def interrupted():
        raise KeyboardInterrupt

    assert exits.run(interrupted, as_json=False) == 130


@pytest.mark.parametrize(
    "command",
    [
        ["diff", "A", "B"],
        ["verify", "B"],
        ["fingerprint", "B"],
        ["export", "B", "o.safetensors"],
        ["reshard", "B", "r", "--layout", "zarr"],
    ],
)
def test_a_command_advises_its_own_options_only(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    for name in "AB":
        shardckpt.save(name, {"w": np.arange(1 << 16, dtype=np.float32)})
    data = max(
        (path for path in Path("B").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(data.read_bytes())
    content[9999] ^= 1
    data.write_bytes(content)
    answer = run(*command)
    assert "with a backup" in answer.out + answer.err
    advised = set(re.findall(r"(?<![\w-])(--[a-z-]+|[a-z_]+=)(?=[.,) ])", answer.err + answer.out))
    assert advised == (
        {"--exclude"}
        if command[0] == "export"
        else {"--only"}
        if command[0] == "reshard"
        else set()
    )
    helped = run(command[0], "--help").out
    assert all(option in helped for option in advised)


@pytest.mark.long
@pytest.mark.parametrize(
    "args",
    [
        ["info", "{c}"],
        ["stats", "{c}"],
        ["ls", "{c}", "--json"],
        ["--help"],
        ["info", "--help"],
        ["--version"],
    ],
)
def test_output_that_cannot_be_written_is_an_error_of_the_storage(tmp_path, args):
    shardckpt.save(tmp_path / "c", {"w": np.arange(5.0)})
    command = [sys.executable, "-m", "shardckpt", *(arg.format(c=tmp_path / "c") for arg in args)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        6,
        "error: cannot write to standard output: No space left on device\n",
    )
