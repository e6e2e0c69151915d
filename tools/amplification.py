"""Measure read amplification: what a host reads of a checkpoint, per byte that its devices need.

    python tools/amplification.py --pairs 200 --seed 0  layers of Llama 8B, all sizes divided by 4
    python tools/amplification.py --scale 1 --read 0    real sizes, counted by the planner alone
    python tools/amplification.py --json

1. A state of Llama-like layers, in float32 and bfloat16 and with vocabularies of uneven size too,
   gets a random source layout: a mesh of 8 to 64 devices, and per tensor a random spec (several
   axes in one dimension, partial replication, permuted device ids). It is saved.
2. For each of five random target layouts, unknown when it was saved, simulated hosts of 1, 2, 4 and
   8 devices each need the distinct boxes of their devices. The planner says which chunks those are
   and how many bytes they take.
3. Some hosts of one pair in ten then really read their boxes, and what comes through `os.preadv`
   must be the planner's count to the byte, and the elements those that were saved.

Counted are tensors of at least 1 MiB; records and chunk tables are reported apart. Layout changes
are grouped, tensor by tensor: (a) source and target split every dimension at most 8 ways; (b) the
number of parts of every dimension changes by a factor of at most 8, which includes (a); and the
rest. Half of the meshes have powers of two as sizes, half any sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import ml_dtypes
import numpy as np

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, frameworks
from shardckpt.format.zarr_arrays import CHECKSUM_BYTES
from shardckpt.io import extension
from shardckpt.layout.box import distinct_boxes
from shardckpt.layout.world import World
from shardckpt.plan.pieces import overlaps
from shardckpt.reading.locate import Request
from shardckpt.writing import tensor_storage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.layout.box import BoxArray

Array = np.ndarray[Any, Any]
Shapes = dict[str, tuple[int, ...]]

HOSTS = (1, 2, 4, 8)
"""Devices per simulated host."""
COUNTED_BYTES = 1 << 20
"""Tensors below this are not counted."""
PAIRS_PER_SOURCE = 5
READ_HOSTS = 3
"""Hosts that read, per pair that is read."""


def llama_shapes(scale: int, vocabularies: Sequence[int] = (128256, 50257, 32003)) -> Shapes:
    """One layer of Llama 8B, and embeddings; all but uneven vocabularies divided by `scale`."""
    d, ffn, kv = 4096 // scale, 14336 // scale, 1024 // scale
    embeddings = {f"embed{v}": (v if v % 2 else v // scale, d) for v in vocabularies}
    return embeddings | {
        "q": (d, d),
        "k": (kv, d),
        "v": (kv, d),
        "o": (d, d),
        "gate": (ffn, d),
        "up": (ffn, d),
        "down": (d, ffn),
        "norm": (d,),
    }


def new_state(shapes: Shapes) -> dict[str, Array]:
    """Every shape in float32 and in bfloat16; takes no memory until it is filled."""
    dtypes = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
    return {
        f"{dtype.name}.{name}": np.empty(shape, dtype)
        for dtype in dtypes
        for name, shape in shapes.items()
    }


def fill(state: Mapping[str, Array], rng: np.random.Generator) -> None:
    """Random bits."""
    for array in state.values():
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(rng.bytes(array.nbytes), np.uint8)


def random_mesh(rng: np.random.Generator, *, powers_of_two: bool) -> Mesh:
    """A mesh of 8 to 64 devices in any arrangement; one in three with permuted ids."""
    devices = int(rng.choice([8, 16, 32, 64])) if powers_of_two else int(rng.integers(8, 65))
    shape = []
    left = devices
    while left > 1:
        shape.append(int(rng.choice([n for n in range(2, left + 1) if left % n == 0])))
        left //= shape[-1]
    rng.shuffle(shape)
    ids = rng.permutation(devices) if rng.random() < 1 / 3 else None
    return Mesh(shape, tuple("abcdef"[: len(shape)]), ids)


def random_sharding(rng: np.random.Generator, mesh: Mesh, ndim: int) -> Sharding:
    """Every axis of the mesh cuts a random dimension, or none, in random order."""
    cuts: list[list[str]] = [[] for _ in range(ndim)]
    for axis in rng.permutation(mesh.ndim).tolist():
        d = int(rng.integers(-1, ndim))
        if d >= 0:
            cuts[d].append(mesh.axis_names[axis])
    return Sharding(mesh, PartitionSpec(*(tuple(cut) or None for cut in cuts)))


def change(source: tuple[int, ...], target: tuple[int, ...]) -> str:
    """The group of a layout change, "a", "b" or "rest", by the numbers of parts; see above."""
    if max(*source, *target) <= 8:
        return "a"
    return (
        "b"
        if all(p <= 8 * q and q <= 8 * p for p, q in zip(source, target, strict=True))
        else "rest"
    )


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The boxes that one simulated host needs of one tensor, and their bytes."""

    boxes: BoxArray
    """Distinct boxes of its devices."""
    read: int
    """Bytes of the chunks that they touch, each once, as stored."""
    needed: int
    """Bytes of the boxes."""


def plan(tensor: TensorRecord, target: Sharding, devices: int) -> list[HostPlan]:
    """Plans of all hosts, with so many devices each; hosts have consecutive device ids."""
    tiles = target.device_boxes(tensor.shape)  # devices in ascending order
    boxes, of_device = distinct_boxes(tiles.boxes)
    itemsize = tensor.dtype.storage.itemsize
    box, chunk, length = [], [], []
    chunks = 0
    for piece in tensor.pieces:
        pairs = overlaps(piece, boxes)
        box.append(pairs.box)
        chunk.append(pairs.chunk + chunks)
        length.append(np.full(piece.num_chunks, prod(piece.chunks) * itemsize + CHECKSUM_BYTES))
        chunks += piece.num_chunks
    by_box = np.argsort(np.concatenate(box), kind="stable")
    chunk_of_pair, lengths = np.concatenate(chunk)[by_box], np.concatenate(length)
    begin = np.searchsorted(np.concatenate(box)[by_box], np.arange(len(boxes) + 1))
    plans = []
    for first in range(0, len(of_device), devices):
        mine = np.unique(of_device[first : first + devices])
        mine = mine[mine >= 0]
        if len(mine):
            touched = np.unique(
                np.concatenate([chunk_of_pair[begin[b] : begin[b + 1]] for b in mine.tolist()])
            )
            own = type(boxes)(boxes.start[mine], boxes.stop[mine])
            plans.append(
                HostPlan(own, int(lengths[touched].sum()), int(own.sizes().sum()) * itemsize)
            )
        else:
            plans.append(HostPlan(type(boxes)(boxes.start[:0], boxes.stop[:0]), 0, 0))
    return plans


@contextmanager
def storage_meter() -> Iterator[list[int]]:
    """Notes the bytes of every `os.preadv`.

    Data files are read with it where the C extension is off, as it is here.
    """
    seen: list[int] = []
    preadv = os.preadv

    def counted(*args: Any) -> int:
        got = preadv(*args)
        seen.append(got)
        return got

    with mock.patch.object(os, "preadv", counted), mock.patch.object(extension, "moving", None):
        yield seen


def read(
    checkpoint: shardckpt.Checkpoint, tensors: Sequence[TensorRecord], plans: Sequence[HostPlan]
) -> tuple[int, list[list[Array]]]:
    """Really read one host's boxes of some tensors.

    The results are the bytes that storage gave, and the elements per tensor and box.
    """
    arrays = [
        [np.empty(p.boxes[i].shape, t.dtype.storage) for i in range(len(p.boxes))]
        for t, p in zip(tensors, plans, strict=True)
    ]
    requests = [
        Request(t.name, t.dtype.storage, t.pieces, p.boxes, a)
        for t, p, a in zip(tensors, plans, arrays, strict=True)
    ]
    reader = checkpoint.reader
    before = reader.stats.bytes_read
    with storage_meter() as seen:
        reader.read(requests)
    assert sum(seen) == reader.stats.bytes_read - before, "the reader's own count is wrong"
    return sum(seen), arrays


@dataclass(slots=True)
class Measured:
    """Amplification of hosts, by group: "powers of two" or "any", and "a", "b" or "rest"."""

    hosts: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Per host and pair: all tensors of the group together."""
    tensors: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Per host, pair and tensor."""
    worst: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    pairs: int = 0
    hosts_read: int = 0
    bytes_read: int = 0
    mismatches: list[str] = field(default_factory=list)
    """Hosts that did not read what the planner said; none, one hopes."""
    chunk_bytes: list[float] = field(default_factory=list)
    """Mean chunk of every source."""
    pieces: Counter[int] = field(default_factory=Counter)
    """Arrays per tensor → tensors."""
    metadata: list[int] = field(default_factory=list)
    """Bytes of commit record, host record and table of every source that was saved."""

    def add(
        self,
        kind: str,
        changes: Mapping[str, str],
        plans: Mapping[str, Sequence[HostPlan]],
        sources: Mapping[str, Any],
    ) -> None:
        """One pair, for one number of devices per host."""
        totals: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
        for name, of_hosts in plans.items():
            groups = ("a", "b") if changes[name] == "a" else (changes[name],)
            for host, p in enumerate(of_hosts):
                for group in groups if p.needed else ():
                    ratio = p.read / p.needed
                    self.tensors[kind, group].append(ratio)
                    if ratio > self.worst.get((kind, group), (0.0, ""))[0]:
                        self.worst[kind, group] = ratio, f"{name} {sources[name]}"
                    totals[group, host][0] += p.read
                    totals[group, host][1] += p.needed
        for (group, _), (got, needed) in totals.items():
            self.hosts[kind, group].append(got / needed)


def measure(
    shapes: Shapes, *, pairs: int, seed: int, read_one_in: int, directory: Path
) -> Measured:
    """Everything; see above."""
    rng = np.random.default_rng(seed)
    measured = Measured()
    state = new_state(shapes)
    if read_one_in:
        fill(state, rng)
    for begin in range(0, pairs, PAIRS_PER_SOURCE):
        powers = begin // PAIRS_PER_SOURCE % 2 == 0
        mesh = random_mesh(rng, powers_of_two=powers)
        shardings = {name: random_sharding(rng, mesh, array.ndim) for name, array in state.items()}
        tensors, checkpoint = _save(
            state, shardings, directory / "checkpoint" if read_one_in else None, measured
        )
        for pair in range(begin, min(begin + PAIRS_PER_SOURCE, pairs)):
            target_mesh = random_mesh(rng, powers_of_two=powers)
            targets = {t.name: random_sharding(rng, target_mesh, len(t.shape)) for t in tensors}
            parts = {
                t.name: (shardings[t.name].parts(len(t.shape)), targets[t.name].parts(len(t.shape)))
                for t in tensors
            }
            changes = {name: change(*p) for name, p in parts.items()}
            described = {
                t.name: f"{'×'.join(map(str, t.shape))} {p[0]} → {p[1]}"
                for t in tensors
                for p in [parts[t.name]]
            }
            for devices in HOSTS:
                plans = {t.name: plan(t, targets[t.name], devices) for t in tensors}
                measured.add("powers of two" if powers else "any", changes, plans, described)
            measured.pairs += 1
            if checkpoint is not None and pair % read_one_in == 0:
                _compare(checkpoint, tensors, targets, state, rng, measured)
        shutil.rmtree(directory / "checkpoint", ignore_errors=True)
    return measured


def _save(
    state: dict[str, Array],
    shardings: dict[str, Sharding],
    directory: Path | None,
    measured: Measured,
) -> tuple[list[TensorRecord], shardckpt.Checkpoint | None]:
    """Save as if it were laid out so, or only plan it; the records of tensors that are counted."""
    options = SaveOptions(shardings=shardings)
    checkpoint = None
    if directory is None:
        records = tensor_storage.tensor_records(
            frameworks.sources(state, World()), options, World()
        )
    else:
        shardckpt.save(directory, state, options=options)
        checkpoint = shardckpt.open(directory)
        records = checkpoint.record.structure.tensors
        files = [
            directory / "checkpoint.json",
            *directory.glob("*/records/*"),
            *directory.glob("*/hosts/*/table"),
        ]
        measured.metadata.append(sum(f.stat().st_size for f in files))
    counted = [t for t in records.values() if t.nbytes >= COUNTED_BYTES]
    measured.chunk_bytes.append(sum(t.nbytes for t in counted) / sum(t.num_chunks for t in counted))
    measured.pieces.update(len(t.pieces) for t in counted)
    return counted, checkpoint


def _compare(
    checkpoint: shardckpt.Checkpoint,
    tensors: Sequence[TensorRecord],
    targets: Mapping[str, Sharding],
    state: Mapping[str, Array],
    rng: np.random.Generator,
    measured: Measured,
) -> None:
    """Let some hosts of a pair read, and compare with the plan and with what was saved."""
    for _ in range(READ_HOSTS):
        devices = int(rng.choice(HOSTS))
        plans = [plan(t, targets[t.name], devices) for t in tensors]
        host = int(rng.integers(len(plans[0])))
        mine = [p[host] for p in plans]
        got, arrays = read(checkpoint, tensors, mine)
        same = all(
            array.tobytes()
            == state[t.name][p.boxes[i].slices].tobytes()  # bits: NaNs are not equal to themselves
            for t, p, boxes in zip(tensors, mine, arrays, strict=True)
            for i, array in enumerate(boxes)
        )
        planned = sum(p.read for p in mine)
        if got != planned or not same:
            measured.mismatches.append(
                f"host {host} of {devices} devices: read {got}, planned {planned}, elements "
                f"{'' if same else 'not '}equal"
            )
        measured.hosts_read += 1
        measured.bytes_read += got


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Statistics of many amplifications."""
    values = np.array(ratios)
    return {
        "n": len(values),
        "median": float(np.median(values)),
        "p90": float(np.percentile(values, 90)),
        "p99": float(np.percentile(values, 99)),
        "worst": float(values.max()),
        "above 1.5": float((values > 1.5).mean()),
    }


def to_json(measured: Measured) -> dict[str, Any]:
    """All results."""
    groups = sorted(measured.hosts, reverse=True)
    return {
        "pairs": measured.pairs,
        "per host": {
            f"{kind}, {group}": summary(measured.hosts[kind, group]) for kind, group in groups
        },
        "per host and tensor": {
            f"{kind}, {group}": summary(measured.tensors[kind, group]) for kind, group in groups
        },
        "worst tensors": {
            f"{kind}, {group}": measured.worst[kind, group] for kind, group in groups
        },
        "hosts that really read": measured.hosts_read,
        "bytes really read": measured.bytes_read,
        "mismatches": measured.mismatches,
        "mean chunk KiB": float(np.median(measured.chunk_bytes)) / 1024,
        "arrays per tensor": dict(sorted(measured.pieces.items())),
        "record and table bytes": measured.metadata,
    }


def show(results: dict[str, Any]) -> None:
    """Print the results as tables."""
    for what in ("per host", "per host and tensor"):
        print(f"\n{what:32}{'n':>8}{'median':>9}{'p90':>9}{'p99':>9}{'worst':>9}{'above 1.5':>11}")
        for group, s in results[what].items():
            line = "".join(f"{s[key]:9.3f}" for key in ("median", "p90", "p99", "worst"))
            print(f"  meshes of {group:20}{s['n']:8d}{line}{s['above 1.5']:11.2%}")
    print("\nworst tensor of each group")
    for group, (ratio, where) in results["worst tensors"].items():
        print(f"  meshes of {group:20}{ratio:8.3f}  {where}")
    print(
        "\n"
        f"mean chunk {results['mean chunk KiB']:.0f} KiB (median of the sources); arrays per "
        f"tensor: {results['arrays per tensor']}"
    )
    if results["hosts that really read"]:
        print(
            f"{results['hosts that really read']} hosts really read "
            f"{results['bytes really read'] / 1e9:.2f} GB: {len(results['mismatches'])} differ "
            "from the plan or from what was saved"
        )
        print(
            f"records and chunk tables: {max(results['record and table bytes'])} bytes at most, "
            "not counted above"
        )
    for line in results["mismatches"]:
        print(f"  {line}")


def main() -> int:
    """Measure and print; 1 where a host did not read what was planned."""
    parser = argparse.ArgumentParser(
        description="Measure read amplification over random layout changes."
    )
    parser.add_argument("--pairs", type=int, default=200, help="layout changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scale", type=int, default=4, help="what the sizes of Llama 8B are divided by"
    )
    parser.add_argument(
        "--read",
        type=int,
        default=10,
        metavar="N",
        help="really read in one of N pairs; 0: save nothing, only plan",
    )
    parser.add_argument(
        "--directory", type=Path, help="where to save; by default in memory, /dev/shm"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    memory = Path("/dev/shm")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix="amplification-", dir=args.directory or (memory if memory.is_dir() else None)
    ) as directory:
        shapes = llama_shapes(args.scale)
        results = to_json(
            measure(
                shapes,
                pairs=args.pairs,
                seed=args.seed,
                read_one_in=args.read,
                directory=Path(directory),
            )
        )
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)
        print(f"{args.pairs} pairs in {time.monotonic() - began:.0f} s")
    return 1 if results["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
