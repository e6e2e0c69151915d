"""Write the golden checkpoints of the present format: tests/golden/v<major>/{packed,zarr}, and what is in them.

    python tools/make_golden.py [directory]

They are made once, when a version of the format is released, and read by the tests for ever after: run this again for
a new version, never to make a failing test pass. The elements are SHAKE-128 of the tensor's name, so that nothing
here depends on a random generator that may change.
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

import shardckpt
from shardckpt.dtypes import DTYPES
from shardckpt.record import FORMAT_VERSION
from shardckpt.reshard import chunks

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
sys.path.insert(0, str(GOLDEN))

from golden_facts import Interval, facts, layout_facts  # noqa: E402  (it lies beside the checkpoints)

YOUNG = {"int1", "uint1", "complex32", "bcomplex32"}
"""Dtypes that the oldest supported ml_dtypes lacks: a record that names them could not be read with it."""
LOW_BITS = {"bool": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
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
LARGEST_BYTES = 200 << 10
"""Of one checkpoint: it stays in the repository for ever."""


def elements(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A tensor with bits of every kind."""
    native = DTYPES[dtype].numpy
    raw = np.frombuffer(hashlib.shake_128(name.encode()).digest(math.prod(shape) * native.itemsize), np.uint8)
    if dtype in LOW_BITS:
        raw = raw & ((1 << LOW_BITS[dtype]) - 1)
    return raw.copy().view(native).reshape(shape)


def state() -> dict[str, Any]:
    """Every dtype, every kind of leaf and container, odd names, tied tensors, shapes at the edge of what there is."""
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
            "pieces": elements("pieces", "uint8", (3, 97)),
        },
        "tied": {"first": shared, "second": shared},
        "keys": {key: elements(repr(key), "uint8", (2,)) for key in ODD_KEYS},
        "containers": {"tuple": ([1], (), {}), "list": [elements("in a list", "int8", (2,)), [[]]], "empty": {}},
        "leaves": leaves(),
    }


def leaves() -> dict[str, Any]:
    """Every kind of small leaf, and the awkward ones of each kind."""
    import torch

    nan = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    shardckpt.register_leaf(Interval, name="golden.Interval", encode=lambda i: [i.low, i.high], decode=lambda pair: Interval(*pair))
    return {
        "none and bools": [None, True, False],
        "int": [0, -1, 2**53 - 1, 2**53, -(2**53), 2**200],
        "float": [0.0, -0.0, 0.1, 1e300, 5e-324, 2.0**60, math.inf, -math.inf, nan],
        "complex": [1 + 2j, complex(-0.0, nan), complex(math.inf, 0)],
        "str": ["", "text", "$", "$tensor", "$$", 'é\0\n"', "\ud800", "😀"],
        "bytes": [b"", bytes(range(256))],
        "numpy": [np.float32(0.1), np.bool_(True), np.int64(-5), np.complex64(1j), np.str_("é"), np.bytes_(b"\0x")],
        "ml_dtypes": [ml_dtypes.bfloat16(1.5), ml_dtypes.float8_e4m3fn(0.5), ml_dtypes.int4(-3)],
        "times": [np.datetime64("2024-02-29T12:00", "s"), np.timedelta64(-7, "D"), np.datetime64("NaT")],
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
        "registered": Interval([1, -1], 2.5),
    }


def shardings() -> dict[str, Any]:
    """A `Sharding` with names, uneven, with a replicated axis, with permuted devices; and OpShardings without names."""
    mesh = shardckpt.Mesh((2, 4), ("data", "model"))
    return {
        "sharded/even": shardckpt.Sharding(mesh, shardckpt.PartitionSpec("data", "model")),
        "sharded/uneven": shardckpt.Sharding(mesh, shardckpt.PartitionSpec("model", None)),
        "sharded/replicated": shardckpt.OpSharding.parse("{replicated}"),
        "sharded/permuted": shardckpt.OpSharding.parse("{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
        "sharded/pieces": shardckpt.Sharding(shardckpt.Mesh((3,), ("x",), [2, 0, 1]), shardckpt.PartitionSpec(None, ("x",))),
    }


def main() -> None:
    """Write both checkpoints and the facts."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN / f"v{FORMAT_VERSION[0]}"
    # A tensor is cut into pieces where chunks would be larger than this; no golden tensor could be large enough.
    chunks.LARGEST_COMMON_CHUNK = 256
    made = state()
    for layout, compression in (("packed", None), ("zarr", "zstd")):
        place = directory / layout
        shutil.rmtree(place, ignore_errors=True)
        options = shardckpt.SaveOptions(
            layout=layout,  # type: ignore[arg-type]
            compression=compression,  # type: ignore[arg-type]
            shardings=shardings(),
            metadata=METADATA,
        )
        shardckpt.save(place, made, options=options)
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        print(f"{place}: {size} bytes, {len(shardckpt.open(place).names())} tensors")
        if size > LARGEST_BYTES:
            sys.exit(f"{place} has {size} bytes, at most {LARGEST_BYTES} are to stay in the repository; make its tensors smaller.")
    expected = {
        "metadata": METADATA,
        "state": facts(made),
        "layouts": {name: layout_facts(layout, made["sharded"][name.partition("/")[2]].shape) for name, layout in shardings().items()},
    }
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
