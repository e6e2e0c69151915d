"""The command itself, in a process of its own."""

import os
import pty
import re
import signal
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("shardckpt")
ENVIRONMENT = {
    key: value
    for key, value in os.environ.items()
    if key not in {"COLUMNS", "NO_COLOR", "FORCE_COLOR"}
} | {"TERM": "xterm-256color"}


def command(*args, **options):
    return subprocess.run(
        [COMMAND, *args],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=ENVIRONMENT,
        timeout=200,
        **options,
    )


def on_terminal(*args, columns=80, **environment):
    """Output of a command on a terminal of that width, both streams together."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [COMMAND, *args], stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT | environment
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        output += part
    os.close(ours)
    assert process.wait(60) == 0
    return output.decode().replace("\r\n", "\n")


def test_without_a_command_there_is_help():
    plain, asked = command(), command("--help")
    assert plain.returncode == asked.returncode == 0
    assert plain.stdout == asked.stdout
    for name in ("ls", "info", "verify", "diff"):
        assert re.search(rf"^  {name} ", plain.stdout, re.MULTILINE)
    assert "..." not in plain.stdout.split("Commands:")[1]  # no summary is cut off


@pytest.mark.parametrize("args", [["--help"], ["reshard", "--help"]])
def test_help_names_the_documentation_that_the_package_names(args):
    urls = dict(line.split(", ", 1) for line in metadata("shardckpt").get_all("Project-URL"))
    assert {"Documentation", "Source", "Issues", "Changelog"} <= set(urls)
    assert command(*args).stdout.endswith(f"\nDocumentation: {urls['Documentation']}\n")


@pytest.mark.long
def test_the_module_is_the_command(checkpoint):
    run = subprocess.run(
        [sys.executable, "-m", "shardckpt", "info", checkpoint],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    assert run.stdout == command("info", checkpoint).stdout
    lost = subprocess.run(
        [sys.executable, "-m", "shardckpt", "info", "nothing"], capture_output=True, check=False
    )
    assert lost.returncode == 3


def test_the_version_is_the_packages():
    from shardckpt import __version__
    from shardckpt.io.extension import ENGINE

    engine = "with" if ENGINE == "C" else "without"
    assert command("--version").stdout == f"shardckpt {__version__} ({engine} its C extension)\n"


def test_help_and_completion_import_nothing_heavy():
    heavy = ["numpy", "rich", "tensorstore", "zarr", "torch", "jax"]
    run = "import sys; sys.argv = ['shardckpt', '--help']; from shardckpt.cli import main; main()"
    code = f"{run}; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.endswith("\n[]\n")


def test_the_shell_completes_commands_and_options():
    environment = ENVIRONMENT | {
        "_SHARDCKPT_COMPLETE": "complete_bash",
        "COMP_CWORD": "1",
        "COMP_WORDS": "shardckpt ve",
    }
    assert (
        subprocess.run(
            [COMMAND], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "verify"
    )


@pytest.mark.long
def test_statuses_are_those_of_the_process(checkpoint, tmp_path):
    assert command("info", checkpoint).returncode == 0
    missing = command("info", tmp_path / "nothing")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert missing.stderr.startswith("error: ")


def test_a_reader_that_has_seen_enough_is_no_error(saver, tmp_path):
    saver(tmp_path / "1", {f"leaf{i}": i for i in range(20_000)})
    with subprocess.Popen(
        [COMMAND, "info", tmp_path / "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_an_interrupt_ends_it_quietly():
    code = """
import os, signal, sys, threading
from shardckpt.convert import opening
from shardckpt.cli import main

def slow(url):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60)

opening.open = slow
sys.argv = ["shardckpt", "info", "anything"]
sys.exit(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("command", "function", "advice"),
    [
        (
            ["reshard", "a", "b"],
            "shardckpt.reshard.execute.reshard",
            "run the same command again to continue",
        ),
        (
            ["import", "a", "b"],
            "shardckpt.convert.importing.import_checkpoint",
            "run the same command again to continue",
        ),
        (
            ["export", "a", "b"],
            "shardckpt.convert.export.export",
            "run the same command again to continue",
        ),
        (
            ["export", "a", "b", "--to", "torch"],
            "shardckpt.convert.export.export",
            "run the same command again to start over",
        ),
    ],
)
def test_an_interrupt_of_long_work_says_how_it_is_gone_on_with(command, function, advice):
    module, _, name = function.rpartition(".")
    code = f"""
import os, signal, sys, threading, importlib
from shardckpt.cli import main

def slow(*args, **options):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60)

setattr(importlib.import_module("{module}"), "{name}", slow)
sys.argv = {["shardckpt", *command]}
sys.exit(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (
        130,
        "",
        f"interrupted: {advice}\n",
    )


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_gets_colours_and_lines_that_fit(checkpoint, columns):
    out = on_terminal("info", checkpoint, columns=columns)
    assert "\x1b[1" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "\x1b" not in plain
    assert (
        max(len(line) for line in plain.splitlines() if not line.startswith("checkpoint "))
        <= columns
    )


def test_no_color_is_respected(checkpoint):
    assert "\x1b" not in on_terminal("info", checkpoint, NO_COLOR="1")


def test_verify_draws_a_progress_bar_on_a_terminal_and_takes_it_away(checkpoint):
    out = on_terminal("verify", checkpoint)
    assert "verifying" in out
    assert out.rstrip("\n").splitlines()[-1].endswith("all as written")


def test_a_terminal_without_unicode_gets_ascii(checkpoint):
    result = subprocess.run(
        [COMMAND, "info", checkpoint, "model/embed"],
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert result.stdout.isascii()
    assert b"| " in result.stdout
    assert b"\\u" not in result.stdout


def test_an_interrupt_before_the_command_begins_says_so():
    code = """
import os, signal, sys, threading
from shardckpt.cli import main

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "shardckpt.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(60)

sys.meta_path.insert(0, Slow())
sys.argv = ["shardckpt", "reshard", "a", "b"]
sys.exit(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (
        130,
        "",
        "interrupted: nothing was begun\n",
    )


@pytest.mark.parametrize("command", ["reshard", "import", "export"])
def test_an_interrupt_while_long_work_imports_its_modules_is_reported(command):
    code = f"""
import os, signal, sys, threading
from shardckpt.cli import main

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("shardckpt.reshard", "shardckpt.convert")):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(60)

import shardckpt.cli.app
sys.meta_path.insert(0, Slow())
sys.argv = ["shardckpt", "{command}", "a", "b"]
sys.exit(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "interrupted: run the same command again to continue\n"
