"""Measure what memory a process gains from save to save: nothing that is used up may stay.

    python tools/save_growth.py --saves 100 --tensors 10
    python tools/save_growth.py --saves 100 --tensors 400 --chunks 16

A state of numpy arrays is saved in the background, over and over, to one place. Resident memory
after each save, once the first ones have warmed up, is fitted by a line: its slope is what a save
leaves behind.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path

import numpy as np

from shardckpt import SaveOptions
from shardckpt.writing.background import Saver

CHUNK = (64, 256)
"""Of float32, 64 KiB: none is smaller, unless its tensor is."""
_WARM_UP = 20
"""Saves that are not counted."""


def resident() -> int:
    """Bytes."""
    gc.collect()
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS:")
    )
    return int(line.split()[1]) << 10


def measure(place: str, *, saves: int, tensors: int, chunks: int) -> dict[str, float]:
    """Bytes per save, and what there was of the rest."""
    saver = Saver()
    state = {
        f"layer{i}": np.full((chunks * CHUNK[0], CHUNK[1]), i, np.float32) for i in range(tensors)
    }
    sizes = []
    for _ in range(_WARM_UP + saves):
        saver.begin(f"{place}/c", state, SaveOptions(overwrite=True)).wait()
        sizes.append(resident())
    slope, _ = np.polyfit(range(saves), sizes[_WARM_UP:], 1)
    return {
        "bytes_per_save": round(float(slope)),
        "first": sizes[0],
        "warm": sizes[_WARM_UP],
        "last": sizes[-1],
    }


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--tensors", type=int, default=10)
    parser.add_argument("--chunks", type=int, default=1, help="of each tensor, 64 KiB each")
    parser.add_argument("--to", default="/dev/shm", help="where to save")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.to) as place:
        print(
            json.dumps(
                measure(place, saves=options.saves, tensors=options.tensors, chunks=options.chunks)
            )
        )


if __name__ == "__main__":
    main()
