"""Saves over and over, each time in a fork that kills itself one storage operation later than the
last.

An operation is whatever changes the storage: making, writing, syncing, renaming or removing a file
or directory, and every write, copy and commit of TensorStore's. Of a write to a file there are two:
it is cut off in the middle, too.

Modules are imported before the first fork, which saves most of the time.

    python kill_at_every_operation.py <root> <layout> first|overwrite

Fork k finds in <root>/k a checkpoint of state(1), `earlier`, and, to be overwritten, another one,
`checkpoint`. It saves state(2) to <root>/k/checkpoint and kills itself on the way. JSON on stdout:
for each k, the operation that it died before.
"""

import functools
import sys
from pathlib import Path

import numpy as np
import tensorstore as ts
from dying import Killer, in_a_fork, tell_deaths

import shardckpt
import shardckpt.frameworks.numpy
import shardckpt.writing.save

FILES = ("open", "write", "pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
TENSORSTORE = {
    ts.KvStore: ("write", "delete_range", "experimental_copy_range_to"),
    ts.Transaction: ("__exit__",),
}


def state(value):
    return {
        "w": np.full((40, 30), value, np.float32),
        "b": np.arange(value, value + 5),
        "leaf": value,
    }


def main():
    root, layout, scenario = Path(sys.argv[1]), *sys.argv[2:]

    def save(url, value, *, overwrite=False):
        shardckpt.save(
            url, state(value), options=shardckpt.SaveOptions(layout=layout, overwrite=overwrite)
        )

    def prepare():
        save(root / "base" / "earlier", 1)
        if scenario == "overwrite":
            save(root / "base" / "checkpoint", 1)

    def act(place):
        save(place / "checkpoint", 2, overwrite=scenario == "overwrite")

    assert in_a_fork(prepare) == 0
    tell_deaths(root, functools.partial(Killer, FILES, TENSORSTORE), act)


main()
