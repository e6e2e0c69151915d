"""Help: every command has an example, arguments as the documentation names them, and hints for
names of other tools."""

from __future__ import annotations

import shlex

import pytest

from shardckpt.cli.app import _COMMANDS, _JOB_COMMANDS
from shardckpt.cli.help import EXAMPLES, HINTS, server_first

COMMANDS = [*([name] for name in _COMMANDS), *(["job", name] for name in _JOB_COMMANDS)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples_of_the_command_and_plain_metavars(run, command):
    out = run(*command, "--help").out
    examples = EXAMPLES[command[-1]]
    assert examples
    for example in examples:
        assert f"  {example}\n" in out
        assert shlex.split(example)[: 1 + len(command)] == ["shardckpt", *command]
    usage = out.split("\n\n")[0]
    assert "{" not in usage
    assert "[[" not in usage
    assert "<str>" not in out
    assert "<int" not in out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_options_of_examples_exist(run, command):
    out = run(*command, "--help").out
    for example in EXAMPLES[command[-1]]:
        for word in shlex.split(example):
            if word.startswith("--") and word != "--server":
                assert word in out


def test_every_example_belongs_to_a_command():
    assert set(EXAMPLES) == {*_COMMANDS, *_JOB_COMMANDS}


@pytest.mark.parametrize("name", HINTS)
def test_a_name_of_another_tool_gets_a_hint(run, name):
    if name in _COMMANDS:
        pytest.fail("it is a command")
    answer = run(name, "a", "b")
    assert answer.status == 2
    assert answer.err == f"error: There is no command {name!r}: {HINTS[name]}.\n"


def test_the_server_may_come_before_or_after_the_command():
    expected = ["--server", "URL", "ls", "-a"]
    assert server_first(["--server", "URL", "ls", "-a"]) == expected
    assert server_first(["ls", "--server", "URL", "-a"]) == expected
    assert server_first(["ls", "-a", "--server=URL"]) == ["--server=URL", "ls", "-a"]
    assert server_first(["ls", "--", "--server", "x"]) == ["ls", "--", "--server", "x"]


@pytest.mark.parametrize(
    "args",
    [
        ["ls", "--server"],
        ["--server"],
        ["ls", "--server", "--", "x"],
        ["ls", "--server", "--all"],
    ],
)
def test_a_server_without_a_url_is_said_so(run, args):
    answer = run(*args)
    assert (answer.status, answer.err) == (2, "error: Option '--server' requires an argument.\n")
    assert "requires an argument" in run("--json", *args).json["error"]["message"]


def test_a_command_with_the_server_behind_it_asks_the_server(run):
    answer = run("jobs", "--server", "http://127.0.0.1:9")
    assert answer.status == 6
    assert "http://127.0.0.1:9" in answer.err
