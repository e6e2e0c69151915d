"""The command line: typer commands that call the library and print the results.

No logic lives here. A command parses its arguments, calls the library, and turns the result into
text for people (`screen`, `text`, `picture`) or into one JSON document for programs. No other
package may import this one.

Modules that a command needs are imported when it runs, so that `--help` and shell completion are
fast.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the `shardckpt` command with the process's arguments, and return its exit status."""
    try:
        from shardckpt.io.streams import replace_missing_streams

        replace_missing_streams()
        from shardckpt.cli.app import app

        return int(app(standalone_mode=False))
    except KeyboardInterrupt:  # while modules were imported; `exits` handles later ones
        print("interrupted: nothing was begun", file=sys.stderr)
        return 130
