"""`python -m shardckpt`: the `shardckpt` command, where no script is on the path."""

from __future__ import annotations

import sys

from shardckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
