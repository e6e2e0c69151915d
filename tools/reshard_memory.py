"""Measure the memory of resharding a checkpoint that is larger than memory.

One of its tensors is larger than the limit.

    python tools/reshard_memory.py --directory /disk/there  16 GiB, the largest tensor 4 GiB, 512
                                                            MiB allowed
    python tools/reshard_memory.py --gib 4 --largest 1 --workers 2

1. A checkpoint is saved, cut by rows over 12 devices, so that hardly a chunk border is one of the
   target's; of memory that is used again and again. Disk for twice its size is needed.
2. `shardckpt reshard` lays it out for 2 x 4 devices, in a process of its own that starts the
   workers.
3. All the while the high-water marks of its resident memory and of its workers' are read. Their sum
   must stay within the limit and what is stated for each process besides (`PROCESS_BYTES`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.options import parse_bytes
from shardckpt.streaming.memory import PROCESS_BYTES

SIDE = 8192
"""Rows and columns of the blocks of 256 MiB of which tensors consist."""


def save(place: Path, gib: float, largest: float) -> None:
    """One tensor of `largest` GiB, and others of at most 1 GiB."""
    sizes, left = [round(4 * largest)], round(4 * (gib - largest))
    while left > 0:
        sizes.append(min(4, left))
        left -= sizes[-1]
    elements = np.random.default_rng(0).random(SIDE * SIDE + len(sizes), np.float32)
    block = [elements[i : i + SIDE * SIDE].reshape(1, SIDE, SIDE) for i in range(len(sizes))]
    state = {f"w{i:02d}": np.broadcast_to(block[i], (n, SIDE, SIDE)) for i, n in enumerate(sizes)}
    rows = Sharding(Mesh((12,), ("x",)), PartitionSpec(None, "x"))
    shardckpt.save(place, state, options=SaveOptions(shardings={"*": rows}))


def processes(root: int) -> list[int]:
    """A process and its children."""
    try:
        return [
            root,
            *(
                int(pid)
                for task in Path(f"/proc/{root}/task").iterdir()
                for pid in (task / "children").read_text().split()
            ),
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def high_water(pid: int) -> int:
    """Bytes of resident memory that a process has had at most; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def measure(
    directory: Path, gib: float, largest: float, limit: str, workers: int | None
) -> dict[str, Any]:
    """The report of a reshard, its processes' memory peaks, and whether they kept the limit.

    The peaks are of resident memory, and the limit is what is allowed.
    """
    save(directory / "source", gib, largest)
    command = [
        shutil.which("shardckpt", path=str(Path(sys.executable).parent)) or "shardckpt",
        "reshard",
    ]
    command += [
        str(directory / "source"),
        str(directory / "target"),
        "--mesh",
        "a=2,b=4",
        "--rule",
        "*=(None,b,a)",
        "--json",
    ]
    command += ["--memory-limit", limit, *(["--workers", str(workers)] if workers else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        peaks: dict[int, int] = {}
        while job.poll() is None:
            for pid in processes(job.pid):
                peaks[pid] = max(peaks.get(pid, 0), high_water(pid))
            time.sleep(0.02)
        assert job.stdout is not None
        report = json.loads(job.stdout.read())
    assert job.returncode == 0, report
    allowed = parse_bytes(limit, "limit") + len(peaks) * PROCESS_BYTES
    took = {
        "processes": len(peaks),
        "peaks": sorted(peaks.values()),
        "sum": sum(peaks.values()),
        "allowed": allowed,
    }
    return {"report": report, **took, "kept": sum(peaks.values()) <= allowed}


def main() -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--largest", type=float, default=4)
    parser.add_argument("--memory-limit", default="512MiB")
    parser.add_argument("--workers", type=int, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        figures = measure(
            Path(directory),
            arguments.gib,
            arguments.largest,
            arguments.memory_limit,
            arguments.workers,
        )
    print(json.dumps(figures, indent=2))
    return 0 if figures["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
