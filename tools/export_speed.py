"""Measure an export to safetensors beside plain writing of the same number of bytes.

Both are on the same disk, in the same run.

    python tools/export_speed.py --directory /dev/shm                 1 GiB, five rounds
    python tools/export_speed.py --gib 16 --dtype bfloat16 --json

1. A checkpoint of float32 matrices is saved, laid out over 2 x 4 devices by rows and columns.
2. In each round: as many bytes as the export writes go to a fresh file by write(2), 4 MiB at a
   time, from memory that is there already, and are made durable; the checkpoint is exported without
   reading back, and once more with it. Every other round goes through these backwards. Before each,
   what the last one wrote is removed, and the disk is idle; the source lies in the page cache. A
   first round, which finds cold caches, does not count.
3. Told are medians: GB/s of elements, the ratio to plain writing, and the seconds of processor time
   (user and system) that a GB takes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
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
AT_ONCE = 4 << 20


def write(target: Path, nbytes: int, buffer: memoryview) -> None:
    """Write so many bytes to a file, and make them durable."""
    with target.open("wb", buffering=0) as file:
        for left in range(nbytes, 0, -len(buffer)):
            file.write(buffer[:left])
        os.fsync(file.fileno())


def measure(
    directory: Path, gib: float, rounds: int, dtype: str | None, limit: str
) -> dict[str, object]:
    """Medians in GB/s, ratios to plain writing, and seconds of processor time per GB."""
    source, target = directory / "source", directory / "target.safetensors"
    count = max(1, round(gib * 4))
    elements = np.random.default_rng(0).random(SIDE * SIDE + count, np.float32)
    # Different tensors, of the same memory for the most part.
    state = {f"w{i:03d}": elements[i : i + SIDE * SIDE].reshape(SIDE, SIDE) for i in range(count)}
    layout = Sharding(Mesh((2, 4), ("x", "y")), PartitionSpec("x", "y"))
    shardckpt.save(source, state, options=SaveOptions(shardings={"*": layout}))
    buffer = memoryview(np.random.default_rng(1).bytes(AT_ONCE))
    nbytes = shardckpt.export(source, target, dtype=dtype).nbytes

    def export(*, verify: bool) -> object:
        return shardckpt.export(source, target, dtype=dtype, memory_limit=limit, verify=verify)

    ways: dict[str, Callable[[], object]] = {
        "write(2)": lambda: write(target, nbytes, buffer),
        "export, not read back": lambda: export(verify=False),
        "export": lambda: export(verify=True),
    }
    return in_turn(
        ways, rounds, nbytes, beside="write(2)", before=lambda: target.unlink(missing_ok=True)
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
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--memory-limit", default="512MiB")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
        figures = measure(Path(directory), asked.gib, asked.rounds, asked.dtype, asked.memory_limit)
    tell(figures, "write(2)", as_json=asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
