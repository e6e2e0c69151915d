"""Measure how often a reshard reads a stored byte.

This also measures what reading the layout that the reshard made takes afterwards.

    python tools/reshard_amplification.py  200 pairs of layouts, layers of Llama 8B at their real
                                           size, planned
    python tools/reshard_amplification.py --scale 8 --really 5
                                           one in 40 pairs is also resharded, and what was read is
                                           counted

1. As in tools/amplification.py, a state of Llama-like layers gets random source and target layouts
   over 8 to 64 devices.
2. The planner says which chunks every step of the job reads: their bytes per byte of the source's
   chunks is the amplification of the whole job. Rooms are what a worker of `--memory-limit` has.
3. Of the target, devices that are laid out so read their boxes: bytes of the chunks they touch per
   byte that they need.
4. What really was read (`ReadStats`) must be the planner's count to the byte.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import amplification as layouts
import numpy as np

import shardckpt
from shardckpt import SaveOptions
from shardckpt.format.structure import Structure
from shardckpt.plan.chunks import Floor
from shardckpt.reshard.options import ReshardOptions
from shardckpt.reshard.plan import plan_reshard
from shardckpt.reshard.rules import Rules
from shardckpt.reshard.rules.like import Like
from shardckpt.writing.tensor_storage import tensor_record

if TYPE_CHECKING:
    from shardckpt import Sharding

PAIRS_PER_READ = 40


class Recorded:
    """A checkpoint of which there is only the record, for the planner."""

    native = True

    def __init__(self, template: shardckpt.Checkpoint, shardings: dict[str, Sharding]) -> None:
        """The template's tensors as if they had been saved laid out so."""
        self.location = template.location
        tensors = {
            n: tensor_record(n, t.shape, t.dtype, shardings[n], Floor())
            for n, t in template.record.structure.tensors.items()
        }
        self.record = replace(
            template.record, structure=Structure(template.record.structure.tree, tensors)
        )


def measure(
    scale: int, pairs: int, seed: int, memory_limit: str, really: int, directory: Path
) -> dict[str, Any]:
    """Amplification of every pair; whether what was read is what was planned."""
    rng = np.random.default_rng(seed)
    state = layouts.new_state(layouts.llama_shapes(scale))
    shardckpt.save(
        directory / "template", {name: np.zeros(0, array.dtype) for name, array in state.items()}
    )
    template = shardckpt.open(directory / "template")
    for name, tensor in template.record.structure.tensors.items():
        object.__setattr__(tensor, "shape", state[name].shape)
    jobs, restores, wrong = [], [], []
    for pair in range(pairs):
        meshes = [layouts.random_mesh(rng, powers_of_two=pair % 2 == 0) for _ in range(2)]
        source, target = (
            {n: layouts.random_sharding(rng, mesh, a.ndim) for n, a in state.items()}
            for mesh in meshes
        )
        rules = Rules((Like(tuple((n, state[n].shape, layout) for n, layout in target.items())),))
        options = ReshardOptions(rules=rules, memory_limit=memory_limit)
        plan = plan_reshard(Recorded(template, source), options)  # type: ignore[arg-type]  # what a planner asks of it, it has
        jobs.append(plan.amplification)
        hosts = [
            h
            for n, t in plan.target.tensors.items()
            if t.nbytes >= layouts.COUNTED_BYTES
            for h in layouts.plan(t, target[n], 1)
        ]
        restores.append(sum(h.read for h in hosts) / max(1, sum(h.needed for h in hosts)))
        if really and pair % PAIRS_PER_READ < really:
            layouts.fill(state, rng)
            shardckpt.save(
                directory / "source", state, options=SaveOptions(shardings=source, overwrite=True)
            )
            report = shardckpt.reshard(
                directory / "source",
                directory / "target",
                rules=rules,
                memory_limit=memory_limit,
                workers=1,
                overwrite=True,
            )
            made, planned = (
                shardckpt.open(directory / "target"),
                plan_reshard(shardckpt.open(directory / "source"), options),
            )
            if report.read_bytes != planned.read_bytes or any(
                made.read(n).tobytes() != a.tobytes() for n, a in state.items()
            ):
                wrong.append(pair)
    return {
        "pairs": pairs,
        "job": {"worst": max(jobs), "mean": sum(jobs) / len(jobs), "median": median(jobs)},
        "restore": {"worst": max(restores), "median": median(restores)},
        "wrong": wrong,
    }


def main() -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-limit", default="512MiB")
    parser.add_argument(
        "--really",
        type=int,
        default=0,
        metavar="N",
        help=f"of {PAIRS_PER_READ} pairs that are also resharded",
    )
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        figures = measure(
            arguments.scale,
            arguments.pairs,
            arguments.seed,
            arguments.memory_limit,
            arguments.really,
            Path(directory),
        )
    print(json.dumps(figures, indent=2))
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
