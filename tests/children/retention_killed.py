"""Deletes steps of an ended run by a rule over and over, each time in a fork that dies one storage
operation later than the last.

    python retention_killed.py <root>

Fork k finds a copy of <root>/base in <root>/<k>, and what it may delete in <root>/expected.json.
JSON on stdout: for each k, the operation that it died before.
"""

import functools
import json
import sys
from pathlib import Path

from dying import Killer, tell_deaths

from shardckpt.io.store import Store
from shardckpt.runs.retention import Latest
from shardckpt.serve.jobs.retention import retain

FILES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "utime")

root = Path(sys.argv[1])
expected = json.loads((root / "expected.json").read_text())
tell_deaths(
    root,
    functools.partial(Killer, FILES, {}),
    lambda place: retain(Store.open(place), Latest(1), expected),
)
