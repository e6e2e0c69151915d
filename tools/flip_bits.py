"""Flip bits of a checkpoint, one at a time, and see whether anybody notices.

    python tools/flip_bits.py --flips 1000 --seed 0
        [--hosts 3] [--layout packed|zarr] [--compression zstd] [--json]

1. Save a state with every dtype, sharded, uneven, tied and empty tensors, small leaves and values
   of each process's own, over several data files; with one host, or with three in processes of
   their own.
2. For each flip choose a kind of file (all kinds equally often), a file of that kind and a bit of
   it; flip it in place.
3. Restore everything and compare it with the truth, bit by bit; then `verify`.
4. Where a chunk is damaged, restore the other tensors with `only=` and compare those.
5. Put the bit back.

The exit status is 1 if anything wrong was returned without an error, if an error was not a
ShardckptError, if `verify` did not report what `restore` refused, or if an undamaged tensor could
not be restored.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import struct
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import shardckpt
from shardckpt import Mesh, PartitionSpec, PerProcess, SaveOptions, ShardckptError, Sharding
from shardckpt.layout.dtypes import DTYPES
from shardckpt.plan import chunks
from shardckpt.writing import host as host_writer
from shardckpt.writing import save_plan
from shardckpt.writing.packed import PackedWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardckpt import Coordinator


from processes import Processes

__all__ = [
    "KINDS",
    "Outcome",
    "Tally",
    "file_kinds",
    "flip",
    "make_state",
    "options",
    "same",
    "save",
    "save_in_small_files",
]

DATA_FILE_BYTES = 20_000
LANE_KEYS = 25
SMALL_BYTES = 3000
HOST_FILES = {
    "chunk table": r"table",
    "a host's chunk table": r"hosts/\d{5}/table",
    "small tensors' table": r"hosts/small/table",
    "host record": r"records/\d{5}\.json",
    "contents": r"(contents/[0-9a-f]{64}|hosts/\d{5}/contents)\.json",
    "values": r"hosts/\d{5}/values\.json",
    "checksums of replicas": r"hosts/\d{5}/replicas\.json",
    "commit record": r"checkpoint\.json",
}
KINDS = {
    "packed": {
        "data file": r"hosts/\d{5}/\d+/d/\d{5}",
        "small tensors": r"small",
        **HOST_FILES,
        "merged index: manifest": r"manifest\.ocdbt",
        "merged index: nodes": r"d/\w+",
        "lane: manifest": r"hosts/\d{5}/\d+/manifest\.ocdbt",
        "lane: node": r"hosts/\d{5}/\d+/d/tree",
    },
    "zarr": {
        "chunk": r"zarr/(.+/)?c(/\d+)*",
        **HOST_FILES,
        "zarr.json": r"zarr/(.+/)?zarr\.json",
    },
}
"""Layout → kind of file → its path, relative to the attempt (or, of the commit record, to the
checkpoint)."""
SEVERAL_HOSTS = {
    "small tensors",
    "checksums of replicas",
    "small tensors' table",
    "merged index: nodes",
}
"""Kinds of files that a checkpoint of one host does not have: it has all nodes in the file of its
lane's."""


@dataclass
class Outcome:
    """Outcome of one flip."""

    restored: str
    """`right`, `refused`, `wrong` (silently) or `untyped` (an error that is not ours)."""
    reported: bool
    """Whether `verify` says that something is not as it was written."""
    error: str = ""
    damaged: list[str] = field(default_factory=list)
    """Tensors that `verify` says have lost something to this file; without a table all are lost,
    and none is named here."""
    located: bool = True
    """Whether the report names this file (of an index's node, the index) and no other, and every
    damaged chunk's tensor and index range; the error says the same."""
    undamaged: int = 0
    """Tensors that were restored with `only=`, all but the damaged ones."""
    undamaged_right: bool = True
    """Whether they were as they had been saved."""

    @property
    def verdict(self) -> str:
        """The column it is counted in."""
        if self.restored == "right":
            return "reported" if self.reported else "unreported"
        return {"refused": "refused", "wrong": "WRONG", "untyped": "UNTYPED"}[self.restored]

    @property
    def detected(self) -> bool:
        """Whether anybody noticed."""
        return self.reported or self.restored in ("refused", "untyped")

    @property
    def failed(self) -> bool:
        """Whether a promise was broken."""
        missed = self.restored == "refused" and not self.reported
        return (
            self.restored in ("wrong", "untyped")
            or missed
            or not self.located
            or not self.undamaged_right
        )


VERDICTS = ("refused", "reported", "unreported", "WRONG", "UNTYPED")
COLUMNS = (*VERDICTS, "detected", "located")


# --- the state ------------------------------------------------------------------------------------


def make_state(seed: int, hosts: int = 1) -> dict[str, Any]:
    """About 200 KB of everything that can be stored, as it is restored."""
    rng = np.random.default_rng(seed)

    def array(name: str, *shape: int) -> np.ndarray[Any, Any]:
        dtype = DTYPES[name].numpy
        raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
        # Types that do not fill their byte, and bools, have values up to 1 or 3 that all of them
        # know.
        return (
            (
                raw & 1
                if "4" in name[-5:] or name == "bool" or name.startswith(("int", "uint", "float6"))
                else raw
            )
            .view(dtype)
            .reshape(shape)
        )

    shared = array("bfloat16", 16, 12)
    return {
        "dtypes": {name: array(name, 3, 5) for name in sorted(DTYPES)},
        "even": array("float32", 64, 48),
        "uneven": array("float32", 45, 130),
        "pieces": array("float16", 3, 997),
        "flat": array("complex64", 999),
        "many chunks": array("uint8", 190, 370),
        "scalar": array("float64"),
        "empty": array("float32", 0, 3),
        "tied": {"first": shared, "second": shared},
        "leaves": [
            None,
            True,
            2**70,
            -0.0,
            float("nan"),
            1j,
            "é",
            b"\0",
            np.float32(0.1),
            {1: "one", "1": ("one",)},
        ],
        "ranks": {
            "strided": array("int32", 24, 30),
            "replicated": array("float32", 60, 30),
            "own rows": array("uint8", 30, 50),
        },
        "own": [{"words": array("uint32", 9), "host": host} for host in range(hosts)],
    }


def state_of_host(seed: int, host: int, hosts: int) -> dict[str, Any]:
    """One host's part of the state of `make_state`, as it is saved; the hosts are one or three."""
    state = make_state(seed, hosts)
    state["own"] = PerProcess(state["own"][host])
    if hosts > 1:
        import golden_held as held

        ranks = state["ranks"]
        ranks["strided"] = held.over((hosts,), ["_S(0,2)"], ranks["strided"], host)
        ranks["replicated"] = held.over((hosts,), ["R"], ranks["replicated"], host)
        ranks["own rows"] = held.own_rows(
            ranks["own rows"], [(5 * host, 5 * host + 5), (15 + 5 * host, 20 + 5 * host)], host
        )
    return state


def options(layout: str, compression: str | None = None) -> SaveOptions:
    """Save with shardings, so that chunks and pieces are of all kinds."""
    mesh = Mesh((2, 4), ("data", "model"), [3, 1, 4, 7, 5, 2, 6, 0])
    shardings = {
        "even": Sharding(mesh, PartitionSpec("data", "model")),
        "uneven": Sharding(mesh, PartitionSpec("model", "data")),
        "pieces": Sharding(mesh, PartitionSpec(None, "data")),
        "tied/*": Sharding(mesh, PartitionSpec()),
    }
    return SaveOptions(layout=layout, compression=compression, shardings=shardings)  # type: ignore[arg-type]


class _SmallFiles(PackedWriter):
    """Several data files and lanes for a state that would fit into one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, data_file_bytes=DATA_FILE_BYTES, lane_keys=LANE_KEYS, **kwargs)


def save_in_small_files(
    path: Path, state: Any, save_options: SaveOptions, coordinator: Coordinator | None = None
) -> None:
    """Save with limits so low that the state has several data files and lanes.

    The state also has tensors in pieces, and plain tensors of either kind.
    """
    before = host_writer.PackedWriter, chunks.LARGEST_COMMON_CHUNK, save_plan.SMALL_BYTES  # type: ignore[attr-defined]
    host_writer.PackedWriter, chunks.LARGEST_COMMON_CHUNK, save_plan.SMALL_BYTES = (
        _SmallFiles,
        2500,
        SMALL_BYTES,
    )  # type: ignore[attr-defined]
    try:
        shardckpt.save(path, state, options=save_options, coordinator=coordinator)
    finally:
        host_writer.PackedWriter, chunks.LARGEST_COMMON_CHUNK, save_plan.SMALL_BYTES = before  # type: ignore[attr-defined]


def save(
    path: Path,
    seed: int,
    layout: str,
    compression: str | None = None,
    processes: Processes | None = None,
) -> dict[str, Any]:
    """Save the state of that seed, with one host or with three; returns it.

    Args:
        path: where.
        seed: of the state.
        layout: "packed" or "zarr".
        compression: None or "zstd".
        processes: `Processes("damage_hosts")`, for three hosts.
    """
    if processes is None:
        save_in_small_files(path, state_of_host(seed, 0, 1), options(layout, compression))
        return make_state(seed)
    answers = processes.run("damage_hosts:save", 3, path, layout, compression, seed)
    assert answers == ["saved"] * 3, answers
    return make_state(seed, 3)


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, types, keys and their order included."""
    if isinstance(a, np.ndarray):
        return (
            type(b) is np.ndarray
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and a.tobytes() == b.tobytes()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(
            same(a[k], b[k]) for k in a
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float | np.generic):
        return struct.pack(">d", a) == struct.pack(">d", b)
    return bool(a == b)


# --- one flip -------------------------------------------------------------------------------------


def file_kinds(checkpoint: Path, layout: str) -> dict[str, list[Path]]:
    """All files of a checkpoint by kind; every file is of one."""
    by_kind: dict[str, list[Path]] = {kind: [] for kind in KINDS[layout]}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file()):
        relative = path.relative_to(checkpoint)
        name = str(relative if len(relative.parts) == 1 else Path(*relative.parts[1:]))
        kind = next(
            (k for k, pattern in KINDS[layout].items() if re.fullmatch(pattern, name)), None
        )
        assert kind is not None, f"{name} is of no known kind"
        by_kind[kind].append(path)
    return {kind: paths for kind, paths in by_kind.items() if paths}


def indexes_of(file: str) -> set[str]:
    """Names that verify may give a file: for nodes it names the index.

    A lone host has the merged index's nodes in its own file.
    """
    of_all = {f"{Path(file).parts[0]}/manifest.ocdbt"} if file.endswith("/d/tree") else set()
    return {file, re.sub(r"d/\w+$", "manifest.ocdbt", file)} | of_all


def flip(checkpoint: Path, path: Path, bit: int, truth: dict[str, Any]) -> Outcome:
    """Flip a bit of a file, see what happens, and put it back."""
    before = path.read_bytes()
    damaged = bytearray(before)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    try:
        return observe(checkpoint, truth, path)
    finally:
        path.write_bytes(before)


def observe(checkpoint: Path, truth: dict[str, Any], path: Path) -> Outcome:
    """Restore and verify a checkpoint of which one file is not as it was written."""
    try:
        restored = shardckpt.restore(checkpoint)
        right = same(truth, restored) and restored["tied"]["first"] is restored["tied"]["second"]
        outcome = Outcome("right" if right else "wrong", reported=False)
    except ShardckptError as e:
        outcome = Outcome("refused", reported=False, error=str(e))
    except Exception as e:  # noqa: BLE001  (to be counted)
        return Outcome("untyped", reported=False, error=repr(e))
    here = str(path.relative_to(checkpoint))
    named = indexes_of(here)
    try:
        opened = shardckpt.open(checkpoint)
        report = opened.verify()
    except ShardckptError as e:
        outcome.reported, outcome.located = True, here in str(e)
        return outcome
    except Exception as e:  # noqa: BLE001
        return Outcome("untyped", reported=False, error=repr(e))
    outcome.reported = not report.ok
    chunks = [d for d in report.damage if d.tensor is not None and d.box is not None]
    outcome.located = all(d.file in named for d in report.damage) and (
        outcome.restored == "right" or here in outcome.error
    )
    if any(d.file == here for d in chunks):
        outcome.damaged = sorted({d.tensor for d in chunks if d.tensor is not None})
        outcome.located &= any(f"{d.tensor}{d.box}" in outcome.error for d in chunks)
    if outcome.restored == "refused":
        _restore_the_others(opened, truth, outcome)
    return outcome


def _restore_the_others(
    opened: shardckpt.Checkpoint, truth: dict[str, Any], outcome: Outcome
) -> None:
    """Restore all tensors that are not damaged."""
    lost = {alias for name in outcome.damaged for alias in (name, *opened.info(name).tied_names)}
    fine = [name for name in opened.names() if name not in lost]
    try:
        part = dict(_arrays(shardckpt.restore(opened, only=set(fine).__contains__)))
    except ShardckptError as e:
        outcome.undamaged_right, outcome.error = False, str(e)
        return
    expected = {name: array for name, array in _arrays(truth) if name not in lost}
    outcome.undamaged = len(fine)
    outcome.undamaged_right = part.keys() == expected.keys() and all(
        same(expected[name], part[name]) for name in expected
    )


def _arrays(state: Any, name: str = "") -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    if isinstance(state, dict):
        for key, child in state.items():
            yield from _arrays(child, f"{name}/{key}" if name else str(key))
    elif isinstance(state, np.ndarray):
        yield name, state


# --- many flips -----------------------------------------------------------------------------------


class Tally:
    """Outcomes by kind of file."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self.verdicts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        """By kind: how many of each verdict, and how many were detected and located."""
        self.chunk_damage = 0
        self.undamaged = 0
        self.failures: list[dict[str, Any]] = []
        self.unreported: list[dict[str, Any]] = []

    def add(self, kind: str, file: str, bit: int, outcome: Outcome) -> None:
        """Count one."""
        self.verdicts[kind].update(
            [
                outcome.verdict,
                *["detected"] * outcome.detected,
                *["located"] * (outcome.detected and outcome.located),
            ]
        )
        self.chunk_damage += bool(outcome.damaged)
        self.undamaged += outcome.undamaged
        entry = {"kind": kind, "file": file, "bit": bit, **dataclasses.asdict(outcome)}
        if outcome.failed:
            self.failures.append(entry)
        elif outcome.verdict == "unreported":
            self.unreported.append(entry)

    def lines(self) -> Iterator[str]:
        """The table, for people."""
        yield f"{'':24}{'flips':>8}" + "".join(f"{column:>12}" for column in COLUMNS)
        total: Counter[str] = Counter()
        for kind, counts in [*self.verdicts.items(), ("all", total)]:
            yield f"{kind:24}{sum(counts[verdict] for verdict in VERDICTS):>8}" + "".join(
                f"{counts[column]:>12}" for column in COLUMNS
            )
            total.update(counts)
        yield ""
        yield (
            "refused: restore raised a ShardckptError; reported, unreported: restored to the "
            "last bit, and verify saw it or not;"
        )
        yield (
            "WRONG: restored something else without an error; UNTYPED: another error than ours; "
            "located: the error and verify name"
        )
        yield "this file and no other, and of a chunk the tensor and the index range"
        yield (
            f"{self.chunk_damage} flips damaged a chunk; the {self.undamaged} other tensors were "
            "then restored with only=."
        )
        for entry in self.unreported[:20]:
            yield f"not reported: {entry['kind']}, bit {entry['bit']} of {entry['file']}"
        for entry in self.failures[:20]:
            yield f"FAILED: {entry!s:.1000}"


def run(
    layout: str,
    compression: str | None,
    flips: int,
    seed: int,
    directory: Path,
    processes: Processes | None = None,
) -> Tally:
    """Save, flip and count."""
    checkpoint = directory / f"{layout}-{compression}"
    truth = save(checkpoint, seed, layout, compression, processes)
    assert shardckpt.open(checkpoint).verify().ok, (
        "the checkpoint was damaged before anybody damaged it"
    )
    kinds = file_kinds(checkpoint, layout)
    assert set(kinds) == KINDS[layout].keys() - (set() if processes else SEVERAL_HOSTS), (
        "the state has no file of some kind"
    )
    rng = np.random.default_rng(seed)
    tally = Tally(kinds)
    for _ in range(flips):
        kind = str(rng.choice(list(kinds)))
        path = kinds[kind][rng.integers(len(kinds[kind]))]
        bit = int(rng.integers(path.stat().st_size * 8))
        tally.add(kind, str(path.relative_to(checkpoint)), bit, flip(checkpoint, path, bit, truth))
    assert same(truth, shardckpt.restore(checkpoint)), "a flip was not undone"
    return tally


def main() -> None:
    """Flip as asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, choices=[1, 3], default=1)
    parser.add_argument("--layout", choices=list(KINDS), default="packed")
    parser.add_argument("--compression", choices=["zstd"])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        Processes("damage_hosts") if asked.hosts > 1 else nullcontext() as processes,
    ):
        tally = run(
            asked.layout, asked.compression, asked.flips, asked.seed, Path(directory), processes
        )
    if asked.json:
        print(json.dumps(vars(tally)))
    else:
        print("\n".join(tally.lines()))
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
