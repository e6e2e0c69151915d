"""Write the golden checkpoints below tests/golden.

These are v1/{one-host,three-hosts}/{packed,zarr}, v2/bases/{0,1,2}, v3/axis, v4/local, v5/composite
and v6/differences/{0,1,2}.

    python tools/make_golden.py [directory for v1, v2, …]

They are made once, when a version of the format is released, and read by the tests for ever after:
run this again for a new version, never to make a failing test pass. What is in them is told beside
them, in expected.json. The elements are SHAKE-128 of the tensor's name, so that nothing here
depends on a random generator that may change.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from golden_facts import Interval, facts, layout_facts

import shardckpt
from shardckpt import Mesh, OpSharding, PartitionSpec, PerProcess, Sharding
from shardckpt.format.documents import (
    AXIS_VERSION,
    BASES_VERSION,
    COMPOSITE_VERSION,
    DIFFERENCE_VERSION,
    FORMAT_VERSION,
    LOCAL_VERSION,
)
from shardckpt.layout.dtypes import DTYPES
from shardckpt.plan import chunks
from shardckpt.state.composites import CompositeTensor
from shardckpt.writing import save_plan

TESTS = Path(__file__).parents[1] / "tests"
GOLDEN = TESTS / "golden"

YOUNG = {"int1", "uint1", "complex32", "bcomplex32"}
"""Dtypes that the oldest supported ml_dtypes lacks: a record that names them could not be read with
it."""
LOW_BITS = {
    "bool": 1,
    "int2": 2,
    "uint2": 2,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
}
"""Bits that count in a byte, of the types that do not fill one."""
ODD_KEYS = [
    "",
    "a/b",
    "~",
    "zarr.json",
    ".",
    "..",
    "__x",
    "é",
    "$tensor",
    "\ud800",
    "w.00000",
    "=",
    " ",
    "x" * 250,
    0,
    "0",
    -1,
    2**70,
    True,
    None,
]
METADATA = {"step": 7, "note": "é", "nested": {"list": [1, 2.5, None, True]}}
LAYOUTS = {"packed": None, "zarr": "zstd"}
"""Layout → compression of the checkpoint in it."""
LARGEST_BYTES = 200 << 10
"""Of one checkpoint: it stays in the repository for ever."""


def elements(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A tensor with bits of every kind."""
    native = DTYPES[dtype].numpy
    raw = np.frombuffer(
        hashlib.shake_128(name.encode()).digest(math.prod(shape) * native.itemsize), np.uint8
    )
    if dtype in LOW_BITS:
        raw = raw & ((1 << LOW_BITS[dtype]) - 1)
    return raw.copy().view(native).reshape(shape)


def state() -> dict[str, Any]:
    """A state with every dtype, every kind of leaf and container, odd names and tied tensors.

    It also has shapes at the edge of what there is.
    """
    shared = elements("tied", "bfloat16", (4, 6))
    return {
        "dtypes": {name: elements(name, name, (3, 5)) for name in sorted(DTYPES.keys() - YOUNG)},
        "shapes": {
            "scalar": elements("scalar", "float32", ()),
            "one": elements("one", "int64", (1, 1, 1)),
            "empty": elements("empty", "float32", (0, 3)),
            "many chunks": elements("many chunks", "uint8", (190, 170)),
        },
        "sharded": {
            "even": elements("even", "float32", (16, 8)),
            "uneven": elements("uneven", "float32", (13, 10)),
            "replicated": elements("replicated", "bfloat16", (8,)),
            "permuted": elements("permuted", "int16", (8, 12)),
            "pieces": elements("pieces", "uint8", (9, 97)),
        },
        "tied": {"first": shared, "second": shared},
        "keys": {key: elements(repr(key), "uint8", (2,)) for key in ODD_KEYS},
        "containers": {
            "tuple": ([1], (), {}),
            "list": [elements("in a list", "int8", (2,)), [[]]],
            "empty": {},
        },
        "leaves": leaves(),
        "rng": PerProcess(generator(0)),
    }


def generator(process: int) -> dict[str, Any]:
    """State that a process owns by itself: arrays of numpy's and of torch's, and leaves."""
    import torch

    words = elements(f"words {process}", "uint32", (5,))
    return {
        "words": words,
        "torch": torch.from_numpy(elements(f"torch {process}", "int8", (2, 3))),
        "seen": [process, 2**70 + process],
    }


def job_state(process: int | None) -> dict[str, Any]:
    """State of one process in a job of three; for None, of all together, as it is restored.

    Sharded, replicated, strided and own parts of tensors; tensors and values that only some
    processes have; plain tensors that are told of (up to `make_small`'s limit) and that are written
    by all.
    """
    shared = elements("tied", "bfloat16", (4, 6))
    stages = {
        f"stage {p}": over((1,), ["R"], elements(f"stage {p}", "int16", (9, 4)), process, ids=[p])
        for p in range(3)
    }
    return {
        "sharded": {
            "rows": over((3,), ["S(0)"], elements("rows", "float32", (7, 5)), process),
            "replicated": over((3,), ["R"], elements("replicated", "bfloat16", (24, 24)), process),
            "strided": over((3,), ["_S(0,2)"], elements("strided", "uint8", (12, 3)), process),
            "on two": over(
                (2,), ["S(1)"], elements("on two", "float16", (6, 6)), process, ids=[2, 0]
            ),
            "own": own_rows(
                elements("own", "int32", (10, 3)), [[(0, 2), (9, 10)], [(4, 9)], [(2, 4)]], process
            ),
        },
        "stages": {
            name: stage
            for name, stage in stages.items()
            if process is None or name == f"stage {process}"
        },
        "plain": {
            "large": elements("large", "float32", (40, 30)),
            "pieces": elements("pieces", "uint8", (13, 97)),
            "small": {
                name: elements(name, name, (3, 5))
                for name in ("bool", "bfloat16", "float64", "int4", "complex64")
            },
            "scalar": elements("scalar", "float32", ()),
            "empty": elements("empty", "float32", (0, 3)),
            "tied": [shared, shared],
        },
        "leaves": leaves(),
        "rng": [generator(p) for p in range(3)]
        if process is None
        else PerProcess(generator(process)),
        **(
            {}
            if process == 1
            else {"loader": ["0", "2"] if process is None else PerProcess(str(process))}
        ),
    }


def over(
    mesh: tuple[int, ...],
    placements: list[str],
    array: np.ndarray[Any, Any],
    process: int | None,
    ids: list[int] | None = None,
) -> Any:
    """An array over a mesh of processes, by DTensor's placements."""
    if process is None:
        return array
    import golden_held

    return golden_held.over(Mesh(mesh, tuple("xyz"[: len(mesh)]), ids), placements, array, process)


def own_rows(
    array: np.ndarray[Any, Any], spans: list[list[tuple[int, int]]], process: int | None
) -> Any:
    """An array of which each process knows its own rows."""
    if process is None:
        return array
    import golden_held

    return golden_held.own_rows(array, spans[process], process)


def leaves() -> dict[str, Any]:
    """Every kind of small leaf, and the awkward ones of each kind."""
    import torch

    nan = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    shardckpt.register_leaf(
        Interval,
        name="golden.Interval",
        encode=lambda i: [i.low, i.high],
        decode=lambda pair: Interval(*pair),
    )
    return {
        "none and bools": [None, True, False],
        "int": [0, -1, 2**53 - 1, 2**53, -(2**53), 2**200],
        "float": [0.0, -0.0, 0.1, 1e300, 5e-324, 2.0**60, math.inf, -math.inf, nan],
        "complex": [1 + 2j, complex(-0.0, nan), complex(math.inf, 0)],
        "str": ["", "text", "$", "$tensor", "$$", 'é\0\n"', "\ud800", "😀"],
        "bytes": [b"", bytes(range(256))],
        "numpy": [
            np.float32(0.1),
            np.bool_(True),
            np.int64(-5),
            np.complex64(1j),
            np.str_("é"),
            np.bytes_(b"\0x"),
        ],
        "ml_dtypes": [ml_dtypes.bfloat16(1.5), ml_dtypes.float8_e4m3fn(0.5), ml_dtypes.int4(-3)],
        "times": [
            np.datetime64("2024-02-29T12:00", "s"),
            np.timedelta64(-7, "D"),
            np.datetime64("NaT"),
        ],
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
        "registered": Interval([1, -1], 2.5),
    }


def shardings() -> dict[str, Any]:
    """A `Sharding` with names in several variants, and OpShardings without names.

    The variants are uneven, with a replicated axis, and with permuted devices.
    """
    mesh = Mesh((2, 4), ("data", "model"))
    return {
        "sharded/even": Sharding(mesh, PartitionSpec("data", "model")),
        "sharded/uneven": Sharding(mesh, PartitionSpec("model", None)),
        "sharded/replicated": OpSharding.parse("{replicated}"),
        "sharded/permuted": OpSharding.parse(
            "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
        ),
        "sharded/pieces": Sharding(Mesh((3,), ("x",), [2, 0, 1]), PartitionSpec(None, ("x",))),
    }


def job_options(layout: str, compression: str | None) -> shardckpt.SaveOptions:
    """Options with which the three hosts save."""
    pieces = Sharding(Mesh((4,), ("x",)), PartitionSpec(None, "x"))
    return shardckpt.SaveOptions(
        layout=layout,
        compression=compression,
        shardings={"plain/pieces": pieces},
        metadata=METADATA,
    )  # type: ignore[arg-type]


def make_small() -> None:
    """Limits so low that golden tensors come in pieces, and plain ones of either kind."""
    chunks.LARGEST_COMMON_CHUNK = 256
    save_plan.SMALL_BYTES = 1000


def job_layouts() -> dict[str, Any]:
    """Layouts of the tensors of `job_state`: name → layout and shape."""
    by_name = {"plain/pieces": (job_options("packed", None).shardings["plain/pieces"], (13, 97))}
    for process in range(3):
        state = job_state(process)
        held = {
            f"{group}/{name}": leaf
            for group in ("sharded", "stages")
            for name, leaf in state[group].items()
        }
        by_name |= {
            name: (leaf.layout, leaf.array.shape)
            for name, leaf in held.items()
            if leaf.layout is not None
        }
    return by_name


def tell(place: Path, stored: dict[str, Any], layouts: dict[str, Any]) -> None:
    """Say beside the checkpoints what is in each of them; they hold the same."""
    expected = {
        "metadata": METADATA,
        "state": facts(stored),
        "layouts": {name: layout_facts(*layout) for name, layout in layouts.items()},
    }
    (place / "expected.json").write_text(json.dumps(expected) + "\n")
    for layout in LAYOUTS:
        size = sum(path.stat().st_size for path in (place / layout).rglob("*") if path.is_file())
        print(
            f"{place / layout}: {size} bytes, {len(shardckpt.open(place / layout).names())} tensors"
        )
        if size > LARGEST_BYTES:
            sys.exit(
                f"{place / layout} has {size} bytes, at most {LARGEST_BYTES} are to stay in the "
                "repository; make its tensors smaller."
            )


def write_bases(directory: Path) -> None:
    """A checkpoint, one that has left tensors in it, and one that has left tensors in both.

    The contents of each one are written, too.
    """
    shutil.rmtree(directory, ignore_errors=True)
    kinds = [
        ("packed", "zstd", ()),
        ("zarr", None, ("frozen", "pieces", "tied")),
        ("packed", None, ("frozen", "pieces", "tied", "once")),
    ]
    expected = {}
    for step, (layout, compression, skip) in enumerate(kinds):
        frozen = elements("frozen", "bfloat16", (40, 30))
        state = {
            "frozen": frozen,
            "tied": frozen if step == 0 else frozen.copy(),
            "pieces": elements("pieces", "int16", (13, 97)),
            "once": elements(f"once {min(step, 1)}", "float32", (7,)),
            "trained": elements(f"trained {step}", "float32", (8, 3)),
        }
        options = shardckpt.SaveOptions(
            layout=layout,  # type: ignore[arg-type]
            compression=compression,  # type: ignore[arg-type]
            shardings={"pieces": Sharding(Mesh((4,), ("x",)), PartitionSpec(None, "x"))},
            base=directory / str(step - 1),
            skip=skip,
        )
        shardckpt.save(directory / str(step), state, options=options)
        expected[step] = facts(state)
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")


def write_axis(directory: Path) -> None:
    """Values by the position on an axis of size 2, from four processes: two at each position."""
    _write_from_hosts(directory, "save_axis", 4)


def write_local(directory: Path) -> None:
    """A state with values that belong to each process alone, and with a tensor of all processes."""
    _write_from_hosts(directory, "save_local", 2)


def _write_from_hosts(directory: Path, save: str, count: int) -> None:
    from processes import Processes

    shutil.rmtree(directory, ignore_errors=True)
    with Processes("golden_hosts") as processes:
        answers = processes.run(save, count, directory / "packed")
        if answers != ["saved"] * count:
            sys.exit(str(answers))
    (directory / "expected.json").write_text(
        json.dumps(facts(shardckpt.restore(directory / "packed"))) + "\n"
    )


def composite(name: str, data: Any = None) -> CompositeTensor:
    """A composite tensor of quantized rows and their scales, as a place that has its parts."""
    parts = {
        "data": elements(name, "int8", (6, 4)) if data is None else data,
        "scale": elements(f"{name} scale", "float32", (6, 1)),
    }
    context = {
        "block": {"$tuple": [1, 4]},
        "dtype": {"$torch.dtype": "float32"},
        "rounding": "Rounding.NEAREST",
        "none": None,
    }
    return CompositeTensor(
        "golden.Scaled",
        (6, 4),
        context,
        parts,
        lambda values: dict(zip(parts, values, strict=True)),
    )


def write_composite(directory: Path) -> None:
    """Composite tensors: quantized rows with their scales, and one inside of another.

    There is also a parameter of an 8-bit optimizer.
    """
    shutil.rmtree(directory, ignore_errors=True)
    made = {"w": composite("w"), "outer": composite("outer", composite("inner")), "step": 3}
    for layout, compression in LAYOUTS.items():
        options = shardckpt.SaveOptions(layout=layout, compression=compression)  # type: ignore[arg-type]
        shardckpt.save(directory / layout, made, options=options)
    (directory / "expected.json").write_text(
        json.dumps(facts(shardckpt.restore(directory / "packed"))) + "\n"
    )


def write_differences(directory: Path) -> None:
    """Three versions: all elements, and twice differences.

    There are gaps of every length, a chunk without a change, and a chunk that is stored whole.
    """
    shutil.rmtree(directory, ignore_errors=True)
    state = {
        "many": elements("many", "bfloat16", (300, 50)),
        "whole": elements("whole", "float32", (40, 3)),
        "same": elements("same", "int8", (9,)),
        "scalar": elements("scalar", "float64", ()),
        "empty": elements("empty", "float32", (0, 2)),
    }
    expected = {}
    with shardckpt.Publisher(directory, keep=None) as publisher:
        for step in range(3):
            many = state["many"].reshape(-1).view(np.uint16)
            many[[step, step + 1, 300 + step, 560, 820 + 2 * step, 14_999]] ^= np.uint16(step)
            state["whole"] = elements(f"whole {step}", "float32", (40, 3))
            publisher.publish(step, state)
            publisher.wait()
            expected[step] = facts(state)
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")


def main() -> None:
    """Write all checkpoints and the facts."""
    from processes import Processes

    golden = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    directory = golden / f"v{FORMAT_VERSION[0]}"
    make_small()
    write_bases(golden / f"v{BASES_VERSION[0]}" / "bases")
    write_axis(golden / f"v{AXIS_VERSION[0]}" / "axis")
    write_local(golden / f"v{LOCAL_VERSION[0]}" / "local")
    write_composite(golden / f"v{COMPOSITE_VERSION[0]}" / "composite")
    write_differences(golden / f"v{DIFFERENCE_VERSION[0]}" / "differences")
    one, three = directory / "one-host", directory / "three-hosts"
    shutil.rmtree(directory, ignore_errors=True)
    made = state()
    with Processes("golden_hosts") as processes:
        for layout, compression in LAYOUTS.items():
            options = shardckpt.SaveOptions(
                layout=layout, compression=compression, shardings=shardings(), metadata=METADATA
            )  # type: ignore[arg-type]
            shardckpt.save(one / layout, made, options=options)
            answers = processes.run("save", 3, three / layout, layout, compression)
            if answers != ["saved"] * 3:
                sys.exit(str(answers))
    tell(
        one,
        {**made, "rng": [made["rng"].value]},
        {
            name: (layout, made["sharded"][name.partition("/")[2]].shape)
            for name, layout in shardings().items()
        },
    )
    tell(three, job_state(None), job_layouts())


if __name__ == "__main__":
    main()
