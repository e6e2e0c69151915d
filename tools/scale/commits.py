"""Time of a save from the last host's record to its commit, by the number of hosts and chunks.

1. Simulated hosts write an attempt with the product's own writer: tensors of one-byte chunks, each
   laid out over all hosts, and the hosts' tables and records. That takes a while, and is not
   measured.
2. The committer's part: it lists the records, reads them and the chunk tables, checks that they
   cover every chunk once, merges the indexes, writes all tables as one and publishes. `measure`
   says how long each of these took.
3. The *floor* is what no committer can do without: reading the records' and tables' bytes, one file
   after another, and writing the table of all once, durably.

On a file system in memory (`/dev/shm`): on a disk one measures the disk.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from shardckpt import Box, Mesh, PartitionSpec, Sharding
from shardckpt.commit import assemble, index, waiting
from shardckpt.commit.publish import RECORD, publish, read_prior
from shardckpt.format.record import Contents
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.io.store import Store
from shardckpt.layout import dtypes
from shardckpt.plan.pieces import Piece
from shardckpt.state.names import array_path
from shardckpt.writing.host import HostWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNKS_PER_TENSOR = 4
"""Of each tensor, so many chunks are each host's."""
ATTEMPT = "20300101T000000-00000000-1"
PHASES = {
    "listing": ((assemble, "finished_hosts"), (waiting, "finished_hosts")),
    "records": ((assemble, "_host_records"), (assemble, "_contents")),
    "tables": ((assemble, "_tables"),),
    "coverage": (
        (assemble, "_merge_tables"),
        (assemble, "_check_coverage"),
        (assemble, "_check_counts"),
    ),
    "documents": ((assemble, "encoded_documents"),),
    "index": ((index, "write_index"), (index, "write_plain_documents")),
    "table": ((assemble, "write_table"),),
}
"""Phase of `assemble` → the functions that it is made of. One within another counts as the inner
one's."""
PUBLISH, REST = "publish", "rest"


def contents_of(hosts: int, chunks: int) -> Contents:
    """Of a job: tensors of one-byte chunks, whose rows are split over all hosts."""
    mesh = Mesh((hosts,), ("fsdp",))
    shape = (hosts, CHUNKS_PER_TENSOR)
    tensors = {}
    for i in range(chunks // CHUNKS_PER_TENSOR):
        name = f"model/layers.{i // 10}/weight_{i % 10}"
        piece = Piece(array_path(name), (0, 0), shape, (1, 1))
        tensors[name] = TensorRecord(
            name, shape, dtypes.by_name("uint8"), Sharding(mesh, PartitionSpec("fsdp")), (piece,)
        )
    tree: dict[str, Any] = {}
    for name in tensors:
        *above, last = name.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = "$tensor"
    return Contents(Structure(tree, tensors), {}, {})


def write_attempt(root: Store, contents: Contents, hosts: int, layout: str = "packed") -> Store:
    """Write the files that all hosts of a job leave; the attempt."""
    place = root.sub(ATTEMPT)
    elements = np.zeros((1, CHUNKS_PER_TENSOR), np.uint8)
    for host in range(hosts):
        writer = HostWriter(
            place, ATTEMPT, host, layout=layout, compression=None, memory_limit=1 << 26
        )
        box = Box((host, 0), (host + 1, CHUNKS_PER_TENSOR))
        blocks = [
            (tensor.pieces[0], box, elements) for tensor in contents.structure.tensors.values()
        ]
        writer.append(writer.portions(blocks, 1 << 20, len(blocks) * elements.nbytes))
        writer.finish(contents, hosts=hosts, prior=None)
    return place


def commit(root: Store, place: Store, hosts: int) -> None:
    """The committer's part."""
    prior = read_prior(root, overwrite=False)
    waiting.wait_for_hosts(place, hosts, 0)
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
        """Count the time of a `with` block for that phase."""
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
                stack.enter_context(
                    mock.patch.object(module, name, clock.wrap(phase, getattr(module, name)))
                )
        stack.enter_context(
            mock.patch.object(sys.modules[__name__], "publish", clock.wrap(PUBLISH, publish))
        )
        with clock.during(REST):
            commit(root, place, hosts)
    return clock.seconds


def floor(place: Path) -> float:
    """Seconds for reading the records and tables and writing the table of all.

    Run it after a commit.
    """
    table = (place / "table").read_bytes()
    begun = time.perf_counter()
    for path in [
        *place.glob("records/*.json"),
        *place.glob("contents/*"),
        *place.glob("hosts/*/table"),
    ]:
        path.read_bytes()
    with (place.parent / "floor").open("wb") as file:
        file.write(table)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    (place.parent / "floor").unlink()
    return seconds


def prepared(hosts: int, chunks: int) -> Callable[[], dict[str, Any]]:
    """Write what so many hosts leave, of so many chunks each; what is measured is the commit."""
    top = Path(tempfile.mkdtemp(prefix="scale-", dir="/dev/shm"))
    try:
        _committed(top / "small", 2, CHUNKS_PER_TENSOR)  # what is imported and made once
        root, place = _written(top / "measured", hosts, chunks)
    except BaseException:
        shutil.rmtree(top)
        raise

    def run() -> dict[str, Any]:
        try:
            phases = measure(root, place, hosts)
            directory = place.local_path("")
            assert directory is not None
            return {
                "hosts": hosts,
                "chunks": hosts * chunks,
                "phases": phases,
                "floor": floor(directory),
            }
        finally:
            shutil.rmtree(top)

    return run


def _written(top: Path, hosts: int, chunks: int) -> tuple[Store, Store]:
    root = Store.open(top)
    return root, write_attempt(root, contents_of(hosts, chunks), hosts)


def _committed(top: Path, hosts: int, chunks: int) -> None:
    root, place = _written(top, hosts, chunks)
    measure(root, place, hosts)


MEASURED = {"commit": prepared}
