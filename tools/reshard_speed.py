"""Measure resharding beside a plain copy of the same files, on the same disk, in the same run.

    python tools/reshard_speed.py --directory /disk/there                  2 GiB, three rounds
    python tools/reshard_speed.py --gib 16 --rounds 5 --json

1. A checkpoint of float32 matrices is saved, laid out over 8 devices by rows.
2. In each round, in turn: every file of it is copied (`copy_file_range`, as cp does it) and made durable; then it is resharded
   to 2 x 4 devices by rows and columns, and once more with the layout that it has. Before each, what the last one wrote is removed.
3. Told are the medians, in GB/s of elements, and the ratio of each reshard to the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 8192
"""Elements of a matrix's rows and columns: 256 MiB in float32."""


def copy(source: Path, target: Path) -> None:
    """Copy all files below a directory, and make them durable."""
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as read, place.open("wb") as write:
                left = path.stat().st_size
                while left:
                    left -= os.copy_file_range(read.fileno(), write.fileno(), left)
                os.fsync(write.fileno())


def measure(directory: Path, gib: float, rounds: int, workers: int | None, verify: bool) -> dict[str, object]:
    """Medians in GB/s, and ratios to the copy."""
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
        "copy": lambda: copy(source, target),
        "reshard": lambda: shardckpt.reshard(source, target, mesh=mesh, rules=rules, workers=workers, verify=verify),
        "same layout": lambda: shardckpt.reshard(source, target, workers=workers, verify=verify),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            began = time.perf_counter()
            run()
            rates[way].append(nbytes / (time.perf_counter() - began) / 1e9)
    found = {way: median(rate) for way, rate in rates.items()}
    return {"bytes": nbytes, "GB/s": found, "rounds": rates, "ratio": {way: rate / found["copy"] for way, rate in found.items()}}


def main() -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; by default the temporary directory")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        found = measure(Path(directory), arguments.gib, arguments.rounds, arguments.workers, not arguments.no_verify)
    if arguments.json:
        print(json.dumps(found))
    else:
        for way, rate in found["GB/s"].items():  # type: ignore[attr-defined]
            print(f"{way:12} {rate:6.2f} GB/s  {found['ratio'][way]:5.2f} of the copy   {[round(r, 2) for r in found['rounds'][way]]}")  # type: ignore[index]
    return 0


if __name__ == "__main__":
    sys.exit(main())
