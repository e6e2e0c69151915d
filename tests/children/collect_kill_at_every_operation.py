"""Collects, deletes or commits over and over, each time in a fork that kills itself one storage operation later than the last.

An operation is whatever changes the storage: making, removing or renaming a file or directory, syncing one, and every
write, copy and deletion of TensorStore's.

    python collect_kill_at_every_operation.py <root> collect|delete|commit

Fork k finds a copy of <root>/base in <root>/<k>, with the same times, and kills itself on the way through collecting
or deleting it, with a grace period of an hour, or committing it. JSON on stdout: for each k, the operation that it died before.
"""

import functools
import os
import signal
import sys
from pathlib import Path

import tensorstore as ts
from dying import tell_deaths

from shardckpt import collecting, committing

FILES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "utime")


class Killer:
    """Counts operations, and dies before the k-th."""

    def __init__(self, k, report):
        self.left = k
        self.report = report

    def arm(self):
        for name in FILES:
            setattr(os, name, self.operation(name, getattr(os, name)))
        for name in ("write", "delete_range", "experimental_copy_range_to"):
            setattr(ts.KvStore, name, self.operation(f"tensorstore {name}", getattr(ts.KvStore, name)))

    def operation(self, name, function):
        def wrapped(*arguments, **options):
            if self.left == 0:
                os.pwrite(self.report, name.encode(), 0)
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return function(*arguments, **options)

        return wrapped


def main():
    root = Path(sys.argv[1])
    act = {
        "collect": functools.partial(collecting.collect, grace=3600),
        "delete": functools.partial(collecting.delete, grace=3600),
        "commit": committing.commit,
    }[sys.argv[2]]
    tell_deaths(root, Killer, act)


main()
