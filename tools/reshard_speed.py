"""Measure resharding beside a plain copy of the same files, on the same disk, in the same run.

    python tools/reshard_speed.py --directory /disk/there                  2 GiB, five rounds
    python tools/reshard_speed.py --gib 16 --json

1. A checkpoint of float32 matrices is saved, laid out over 8 devices by rows.
2. In each round: every file of it is copied and made durable, by one thread and by two, which read
   and write as `cp --reflink=never` does; it is resharded to 2 x 4 devices by rows and columns, and
   once more with the layout that it has. Every other round goes through these backwards. Before
   each, what the last one wrote is removed, and the disk is idle: all write the same number of
   bytes to fresh files, from a source that lies in the page cache, and end when their bytes are
   durable. A first round, which finds cold caches, does not count.
3. Told are medians: GB/s of elements, the ratio to the copy by one thread, and the seconds of
   processor time (user and system, of all processes) that a GB takes, which bear company on the
   machine better. Where Python may not keep bytecode (PYTHONDONTWRITEBYTECODE) workers start
   slowly.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from turns import in_turn, tell

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 8192
"""Elements of a matrix's rows and columns: 256 MiB in float32."""


def copy(source: Path, target: Path) -> None:
    """Copy a file, and make it durable."""
    target.parent.mkdir(parents=True, exist_ok=True)
    buffer = memoryview(bytearray(256 << 10))  # cp's
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        while got := read.readinto(buffer):
            write.write(buffer[:got])
        os.fsync(write.fileno())


def copy_all(source: Path, target: Path, at_once: int) -> None:
    """Copy all files below a directory."""
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(copy, files, [target / path.relative_to(source) for path in files]))


def measure(
    directory: Path, gib: float, rounds: int, workers: int | None, verify: bool
) -> dict[str, object]:
    """Medians in GB/s, ratios to the copy, and seconds of processor time per GB."""
    source, target = directory / "source", directory / "target"
    count = max(1, round(gib * 4))
    elements = np.random.default_rng(0).random(SIDE * SIDE + count, np.float32)
    # Different tensors, of the same memory for the most part.
    state = {f"w{i:03d}": elements[i : i + SIDE * SIDE].reshape(SIDE, SIDE) for i in range(count)}
    rows = Sharding(Mesh((8,), ("x",)), PartitionSpec("x"))
    shardckpt.save(source, state, options=SaveOptions(shardings={"*": rows}))
    nbytes = 4 * SIDE * SIDE * count
    mesh, rules = Mesh((2, 4), ("x", "y")), {"*": PartitionSpec("y", "x")}
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: copy_all(source, target, 1),
        "copy by two": lambda: copy_all(source, target, 2),
        "reshard": lambda: shardckpt.reshard(
            source, target, mesh=mesh, rules=rules, workers=workers, verify=verify
        ),
        "same layout": lambda: shardckpt.reshard(source, target, workers=workers, verify=verify),
    }
    return in_turn(
        ways,
        rounds,
        nbytes,
        beside="copy",
        before=lambda: shutil.rmtree(target, ignore_errors=True),
    )


def main() -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--directory",
        type=Path,
        default=None,
        help="on the disk to measure; by default the temporary directory",
    )
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        figures = measure(
            Path(directory),
            arguments.gib,
            arguments.rounds,
            arguments.workers,
            not arguments.no_verify,
        )
    tell(figures, "the copy", as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
