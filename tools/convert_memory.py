"""Measure the memory and the rate of exporting a large checkpoint as safetensors, and of importing the file again.

    python tools/convert_memory.py --directory /disk/there                     16 GiB, the largest tensor 4 GiB, 512 MiB allowed
    python tools/convert_memory.py --gib 2

1. A checkpoint is saved, cut by rows over 12 devices (`reshard_memory`). Disk for three times its size is needed.
2. Plain write(2) writes as many bytes to one file, in pieces of 8 MiB, and makes them durable.
3. `shardckpt export` and `shardckpt import` run in processes of their own, of which the high-water marks of resident memory are read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from reshard_memory import high_water, processes, save

from shardckpt.options import parse_bytes
from shardckpt.reshard.memory import PROCESS_BYTES

PIECE = 8 << 20
"""Bytes that plain write(2) is given at once."""


def write_plainly(file: Path, nbytes: int) -> float:
    """Seconds for so many bytes to be durable."""
    piece = np.random.default_rng(0).integers(0, 256, PIECE, np.uint8).data
    began = time.monotonic()
    with file.open("wb", buffering=0) as out:
        for at in range(0, nbytes, PIECE):
            out.write(piece[: min(PIECE, nbytes - at)])
        os.fdatasync(out.fileno())
    return time.monotonic() - began


def run(limit: str, *command: str | Path) -> dict[str, Any]:
    """What a command of shardckpt took: seconds, and the peaks of its processes' resident memory."""
    program = shutil.which("shardckpt", path=str(Path(sys.executable).parent)) or "shardckpt"
    began, peaks = time.monotonic(), dict[int, int]()
    with subprocess.Popen([program, *map(str, command), "--memory-limit", limit, "--json"], stdout=subprocess.PIPE, text=True) as job:
        while job.poll() is None:
            for pid in processes(job.pid):
                peaks[pid] = max(peaks.get(pid, 0), high_water(pid))
            time.sleep(0.02)
        assert job.stdout is not None
        said = job.stdout.read()
    assert job.returncode == 0, said
    allowed = parse_bytes(limit, "limit") + len(peaks) * PROCESS_BYTES
    return {
        "seconds": time.monotonic() - began,
        "peaks": sorted(peaks.values()),
        "allowed": allowed,
        "kept": sum(peaks.values()) <= allowed,
    }


def measure(directory: Path, gib: float, limit: str) -> dict[str, Any]:
    """What both ways took, and the plain writes before and after the first of them."""
    save(directory / "source", gib, gib / 4)
    plain, file = directory / "plain", directory / "model.safetensors"
    nbytes = round(gib * (1 << 30))
    before = write_plainly(plain, nbytes)
    plain.unlink()
    exported = run(limit, "export", directory / "source", file)
    after = write_plainly(plain, nbytes)
    plain.unlink()
    shutil.rmtree(directory / "source")
    imported = run(limit, "import", file, directory / "imported")
    rates = {"write": nbytes / min(before, after), "export": nbytes / exported["seconds"], "import": nbytes / imported["seconds"]}
    return {
        "bytes": nbytes,
        "export": exported,
        "import": imported,
        "plain write": [before, after],
        "bytes per second": rates,
        "export beside write": rates["export"] / rates["write"],
    }


def main() -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--memory-limit", default="512MiB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        found = measure(Path(directory), arguments.gib, arguments.memory_limit)
    print(json.dumps(found, indent=2))
    return 0 if found["export"]["kept"] and found["import"]["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
