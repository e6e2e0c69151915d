"""Measure what host memory a save takes beside the state itself.

    python tools/save_memory.py --gibibytes 4 --memory-limit 512MiB --to /dev/shm/measured
    python tools/save_memory.py --gibibytes 1 --to gs  Cloud Storage's emulator, started for this
    python tools/save_memory.py --gibibytes 1 --to s3 --layout zarr

1. The state is made of numpy arrays, all of it resident before anything is measured.
2. A tiny save to the same place comes first: libraries are then loaded, and connections and threads
   there.
3. The kernel forgets the process's peak (`/proc/self/clear_refs`), the state is saved, and the new
   peak of resident memory minus what was resident before is what the save took. A page cache is not
   counted, it is nobody's.
4. The checkpoint is verified, unless `--no-verify`, and removed.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from emulators import environment, gcs_emulator, s3_emulator

import shardckpt
from shardckpt import SaveOptions
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Measured", "measure"]

MiB = 1 << 20
TENSOR_BYTES = 64 * MiB
EMULATORS = {"gs": gcs_emulator, "s3": s3_emulator}


@dataclass(frozen=True, slots=True)
class Measured:
    """One save; bytes and seconds."""

    state: int
    memory_limit: int
    growth: int
    """Of resident memory, at its peak."""
    seconds: float


def measure(
    place: str,
    *,
    state_bytes: int,
    memory_limit: int | str,
    layout: str = "packed",
    verify: bool = True,
) -> Measured:
    """Save a state of that size to `place`, where nothing may be yet and nothing stays."""
    options = SaveOptions(layout=layout, memory_limit=memory_limit)
    rows = np.arange(TENSOR_BYTES // 4, dtype=np.uint32).reshape(-1, 4096)
    state = {
        f"block{i}": {"w": rows + np.uint32(i)} for i in range(max(1, state_bytes // TENSOR_BYTES))
    }
    shardckpt.save(f"{place}/first", {"w": rows[:1]}, options=options)
    before, began = _restarted_peak(), time.monotonic()
    shardckpt.save(f"{place}/measured", state, options=options)
    growth, seconds = _status("VmHWM") - before, time.monotonic() - began
    if verify and not shardckpt.open(f"{place}/measured").verify().ok:
        raise RuntimeError(f"{place}: what was saved is damaged")
    Store.open(place).delete_prefix()
    return Measured(
        sum(block["w"].nbytes for block in state.values()),
        options.budget,
        growth,
        round(seconds, 2),
    )


@contextmanager
def _at(to: str) -> Iterator[str]:
    """A url to save to: as it is, or of an emulator."""
    with ExitStack() as stack:
        if to in EMULATORS:
            emulator = stack.enter_context(EMULATORS[to]())
            stack.enter_context(environment(emulator.env()))
            to = emulator.url("run")
        yield to


def _restarted_peak() -> int:
    """Resident bytes, from which the peak is counted anew (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--gibibytes", type=float, default=1, help="of the state")
    parser.add_argument("--memory-limit", default="512MiB")
    parser.add_argument("--layout", choices=["packed", "zarr"], default="packed")
    parser.add_argument(
        "--to",
        default="checkpoint-of-save-memory",
        help="a path or url where nothing is yet, or `gs` or `s3`: an emulator",
    )
    parser.add_argument("--no-verify", action="store_true")
    asked = parser.parse_args()
    with _at(asked.to) as place:
        figures = measure(
            place,
            state_bytes=int(asked.gibibytes * (1 << 30)),
            memory_limit=asked.memory_limit,
            layout=asked.layout,
            verify=not asked.no_verify,
        )
    print(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
