"""Folds versions over and over, each time in a fork that kills itself one storage operation later
than the last.

    python fold_kill_at_every_operation.py <root>

Fork k finds a copy of <root>/base in <root>/<k> and folds it. JSON on stdout: for each k, the
operation that it died before.
"""

import functools
import sys
from pathlib import Path

from dying import Killer, tell_deaths

from shardckpt.versions.folding import fold

FILES = ("open", "write", "pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")

tell_deaths(Path(sys.argv[1]), functools.partial(Killer, FILES, {}), fold)
