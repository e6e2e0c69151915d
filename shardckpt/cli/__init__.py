"""The command line: typer commands that ask the library and show the answer.

No logic lives here. A command parses its arguments, calls the library, and turns what comes back into text for
people (`screen`, `text`, `picture`) or one JSON document for programs. Nothing may import this package.

Modules that commands need are imported when the command runs, so that `--help` and shell completion are quick.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """Run the `shardckpt` command with the process's arguments, and return its exit status."""
    try:
        from shardckpt.cli.app import app

        return int(app(standalone_mode=False))
    except KeyboardInterrupt:  # while modules were imported; later ones are seen to by `exits`
        return 130
