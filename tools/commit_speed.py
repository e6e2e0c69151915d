"""Measure how long a save takes from the last host's record to its commit, by the number of hosts and chunks.

    python tools/commit_speed.py                                  8 × 8000, 64 × 8000 and 256 × 2000 (hosts × chunks)
    python tools/commit_speed.py --root /dev/shm 64x8000 --json

1. Simulated hosts write an attempt with the product's own writer: tensors of one-byte chunks, each laid out over all
   hosts, and the hosts' tables and records. That takes a while, and is not measured.
2. The committer's part is run once to warm up and then `--repeat` times: it lists the records, reads them and the chunk
   tables, checks that they cover every chunk once, merges the indexes, writes all tables as one and publishes. What it
   wrote is removed in between. Reported are the medians.
3. The *floor* is what no committer can do without: reading the records' and tables' bytes, one file after another, and
   writing the table of all once, durably.

Keep the root on a file system in memory (`/dev/shm`): on a disk one measures the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from shardckpt import Box, Mesh, PartitionSpec, Sharding, dtypes
from shardckpt.contents import Contents
from shardckpt.io import assemble, index
from shardckpt.io.commit import RECORD, publish, read_prior
from shardckpt.io.host import HostWriter
from shardckpt.io.store import Store
from shardckpt.names import array_path
from shardckpt.planning.plan import Piece
from shardckpt.structure import Structure, TensorRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JOBS = ("8x8000", "64x8000", "256x2000")
CHUNKS_PER_TENSOR = 4
"""Of each tensor, so many chunks are each host's."""
ATTEMPT = "20300101T000000-00000000-1"
PHASES = {
    "listing": ((assemble, "finished_hosts"),),
    "records": ((assemble, "_host_records"), (assemble, "_contents")),
    "tables": ((assemble, "_tables"),),
    "coverage": ((assemble, "_merged"), (assemble, "_check_coverage"), (assemble, "_check_counts")),
    "documents": ((assemble, "zarr_documents"),),
    "index": ((index, "merge_lanes"), (index, "write_plain_documents")),
    "table": ((assemble, "write_table"),),
}
"""Phase of `assemble` → the functions that it is made of. One within another counts as the inner one's."""
PUBLISH, REST = "publish", "rest"


def contents_of(hosts: int, chunks: int) -> Contents:
    """Of a job: tensors of one-byte chunks, whose rows are split over all hosts."""
    mesh = Mesh((hosts,), ("fsdp",))
    shape = (hosts, CHUNKS_PER_TENSOR)
    tensors = {}
    for i in range(chunks // CHUNKS_PER_TENSOR):
        name = f"model/layers.{i // 10}/weight_{i % 10}"
        piece = Piece(array_path(name), (0, 0), shape, (1, 1))
        tensors[name] = TensorRecord(name, shape, dtypes.by_name("uint8"), Sharding(mesh, PartitionSpec("fsdp")), (piece,))
    tree: dict[str, Any] = {}
    for name in tensors:
        *above, last = name.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = "$tensor"
    return Contents(Structure(tree, tensors), {}, {})


def write_attempt(root: Store, contents: Contents, hosts: int, layout: str = "packed") -> Store:
    """What all hosts of a job leave; the attempt."""
    place = root.sub(ATTEMPT)
    elements = np.zeros((1, CHUNKS_PER_TENSOR), np.uint8)
    for host in range(hosts):
        writer = HostWriter(place, ATTEMPT, host, layout=layout, compression=None, memory_limit=1 << 26)
        for tensor in contents.structure.tensors.values():
            writer.put(tensor.pieces[0], Box((host, 0), (host + 1, CHUNKS_PER_TENSOR)), elements)
        writer.finish(contents, hosts=hosts, prior=None)
    return place


def commit(root: Store, place: Store, hosts: int) -> None:
    """The committer's part."""
    prior = read_prior(root, overwrite=False)
    assemble.wait_for_hosts(place, hosts, 0)
    publish(root, assemble.assemble(place), prior)


def forget_commit(place: Path) -> None:
    """Remove what a committer has written."""
    (place.parent / RECORD).unlink(missing_ok=True)
    for name in ("table", "manifest.ocdbt"):
        (place / name).unlink(missing_ok=True)
    shutil.rmtree(place / "d", ignore_errors=True)


class Clock:
    """Seconds by phase. Phases do not overlap: the time of an inner one is not the outer one's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = time.perf_counter()

    def _change(self) -> None:
        now = time.perf_counter()
        if self._running:
            phase = self._running[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What runs inside is of that phase."""
        self._change()
        self._running.append(phase)
        try:
            yield
        finally:
            self._change()
            self._running.pop()

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as a part of that phase."""

        def timed(*arguments: Any, **options: Any) -> Any:
            with self.during(phase):
                return function(*arguments, **options)

        return timed


def measure(root: Store, place: Store, hosts: int) -> dict[str, float]:
    """Seconds by phase, of one commit."""
    clock = Clock()
    with ExitStack() as stack:
        for phase, functions in PHASES.items():
            for module, name in functions:
                stack.enter_context(mock.patch.object(module, name, clock.wrap(phase, getattr(module, name))))
        stack.enter_context(mock.patch.object(sys.modules[__name__], "publish", clock.wrap(PUBLISH, publish)))
        with clock.during(REST):
            commit(root, place, hosts)
    return clock.seconds


def floor(place: Path) -> float:
    """Seconds for reading the records and tables and writing the table of all; run it after a commit."""
    table = (place / "table").read_bytes()
    begun = time.perf_counter()
    for path in [*place.glob("records/*.json"), *place.glob("contents/*"), *place.glob("hosts/*/table")]:
        path.read_bytes()
    with (place.parent / "floor").open("wb") as file:
        file.write(table)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    (place.parent / "floor").unlink()
    return seconds


def report(top: Path, hosts: int, chunks: int, repeat: int) -> dict[str, Any]:
    """Write one job's attempt and commit it several times."""
    root = Store.open(top / f"{hosts}x{chunks}")
    contents = contents_of(hosts, chunks)
    place = write_attempt(root, contents, hosts)
    directory = place.local_path("")
    assert directory is not None
    runs, floors = [], []
    for _ in range(1 + repeat):
        forget_commit(directory)
        runs.append(measure(root, place, hosts))
        floors.append(floor(directory))
    runs, floors = runs[1:], floors[1:]
    middle = sorted(runs, key=lambda run: sum(run.values()))[len(runs) // 2]
    written = len(contents.structure.tensors) * CHUNKS_PER_TENSOR * hosts
    shutil.rmtree(top / f"{hosts}x{chunks}")
    return {
        "hosts": hosts,
        "chunks": written,
        "tensors": len(contents.structure.tensors),
        "seconds": sum(middle.values()),
        "floor": statistics.median(floors),
        "phases": middle,
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=JOBS, metavar="HOSTSxCHUNKS", help="chunks are each host's")
    parser.add_argument("--root", default=None, help="a directory, best on a file system in memory")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = [*PHASES, PUBLISH, REST]
    if not options.json:
        print(f"{'hosts':>5} {'chunks':>9} {'tensors':>7} {'total':>8} {'floor':>8}  " + " ".join(f"{name:>9}" for name in names))
    with tempfile.TemporaryDirectory(dir=options.root, prefix="commit-speed-") as top:
        for job in options.jobs:
            hosts, chunks = map(int, job.split("x"))
            found = report(Path(top), hosts, chunks, options.repeat)
            if options.json:
                print(json.dumps(found))
                continue
            split = " ".join(f"{found['phases'].get(name, 0):9.3f}" for name in names)
            head = f"{hosts:5} {found['chunks']:9,} {found['tensors']:7,} {found['seconds']:7.2f}s {found['floor']:7.3f}s"
            print(f"{head}  {split}", flush=True)


if __name__ == "__main__":
    main()
