"""Collects, deletes or commits over and over, each time in a fork that kills itself one storage
operation later than the last.

An operation is whatever changes the storage: making, removing or renaming a file or directory,
syncing one, and every write, copy and deletion of TensorStore's.

    python collect_kill_at_every_operation.py <root> collect|delete|commit

Fork k finds a copy of <root>/base in <root>/<k>, with the same times, and kills itself on the way
through collecting or deleting it, with a grace period of an hour, or committing it. JSON on stdout:
for each k, the operation that it died before.
"""

import functools
import sys
from pathlib import Path

import tensorstore as ts
from dying import Killer, tell_deaths

from shardckpt.runs import collecting, committing

FILES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "utime")
TENSORSTORE = {ts.KvStore: ("write", "delete_range", "experimental_copy_range_to")}


def main():
    root = Path(sys.argv[1])
    act = {
        "collect": functools.partial(collecting.collect, grace=3600),
        "delete": functools.partial(collecting.delete, grace=3600),
        "commit": committing.commit,
    }[sys.argv[2]]
    tell_deaths(root, functools.partial(Killer, FILES, TENSORSTORE), act)


main()
