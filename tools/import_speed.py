"""Measure imports beside a plain copy of the same bytes, and beside torch's own way.

All of them are on the same disk, in the same run.

    python tools/import_speed.py --directory /dev/shm --part 4              0.67 GB, five rounds
    python tools/import_speed.py --state many --formats safetensors --json  20,000 tensors of 16 KiB

1. A state is written by each format's own library: one safetensors file, a directory of
   torch.distributed.checkpoint, an Orbax checkpoint. Of `many` the safetensors file alone, unless
   asked.
2. In each round: every file of the first of them is copied and made durable, as `cp
   --reflink=never` does; what torch has for it is done, `safetensors.torch.load_file` and then
   `torch.distributed.checkpoint.save`; each is imported. Every other round goes through these
   backwards. Before each, what the last one wrote is removed, and the disk is idle; sources lie in
   the page cache. A first round, which finds cold caches, does not count.
3. Told are medians: GB/s of elements, the ratio to the copy, and the seconds of processor time
   (user and system, of all processes) that a GB takes.

Needs disk for the state once per format, and twice more; memory for the state twice.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from bench.states import STATES, elements, scaled
from reshard_speed import copy_all
from safetensors.torch import load_file, save_file
from turns import in_turn, tell

import shardckpt

if TYPE_CHECKING:
    from collections.abc import Callable

MANY = (20_000, (64, 64))
"""Tensors of the state `many`, and the shape of each."""


def many() -> dict[str, np.ndarray]:
    """Many small tensors, of 16 KiB."""
    count, shape = MANY
    values = np.random.default_rng(0).random((count, *shape), np.float32)
    return {f"layers.{i:05d}.w": values[i] for i in range(count)}


def write(state: dict[str, np.ndarray], formats: list[str], directory: Path) -> dict[str, Path]:
    """A checkpoint of each format, by its own library."""
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    places = {name: directory / name for name in formats}
    for name, place in places.items():
        if name == "safetensors":
            place.mkdir()
            save_file(tensors, place / "model.safetensors")
        elif name == "dcp":
            dcp.save(tensors, checkpoint_id=place, no_dist=True)
        else:
            import orbax.checkpoint as ocp

            with ocp.PyTreeCheckpointer() as checkpointer:
                checkpointer.save(place.resolve(), state)
    return places


def measure(
    directory: Path, state: str, part: int, formats: list[str], rounds: int, workers: int | None
) -> dict[str, object]:
    """Medians in GB/s, ratios to the copy, and seconds of processor time per GB."""
    values = many() if state == "many" else elements(scaled(STATES[state], part))
    nbytes = sum(value.nbytes for value in values.values())
    places = write(values, formats, directory)
    del values
    first, target = places[formats[0]], directory / "target"
    ways: dict[str, Callable[[], object]] = {"copy": lambda: copy_all(first, target, 1)}
    if "safetensors" in places:
        file = places["safetensors"] / "model.safetensors"
        ways["load_file, dcp.save"] = lambda: dcp.save(
            load_file(file), checkpoint_id=target, no_dist=True
        )

    def importing(source: Path) -> Callable[[], object]:
        return lambda: shardckpt.import_checkpoint(
            source, target, trust_pickle=True, workers=workers
        )

    ways |= {f"import {name}": importing(place) for name, place in places.items()}
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
    parser.add_argument("--state", choices=["many", *STATES], default="llama")
    parser.add_argument(
        "--part", type=int, default=1, help="of the llama state, so many times fewer bytes"
    )
    parser.add_argument("--formats", default="safetensors,dcp,orbax")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
        figures = measure(
            Path(directory),
            asked.state,
            asked.part,
            asked.formats.split(","),
            asked.rounds,
            asked.workers,
        )
    tell(figures, "the copy", as_json=asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
