"""Ways to change a record or a chunk table so that it is still one, and wrong."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
from chunk_tables import decode_table, encode_table
from forgery import MIB
from hypothesis import note

NASTY = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        7,
        2**31,
        2**32,
        2**40,
        2**61,
        2**62,
        2**62 + 1,
        2**63 - 1,
        2**64,
        10**40,
        0.5,
        -0.0,
        1e300,
        math.nan,
        math.inf,
    ),
    *(
        "",
        ".",
        "..",
        "../outside/secret",
        "/",
        "a/../../outside/secret",
        "a//b",
        "a\\b",
        "\0",
        "\ud800",
        "é",
        "x" * 5000,
        "zarr",
        "hosts",
        "records",
    ),
    *(
        "float32",
        "float64",
        "bfloat16",
        "object",
        "float128",
        "V8",
        "bool",
        "int4",
        "packed",
        "zstd",
        "blosc",
        "$tensor",
        "$",
        "$$",
        "w",
        "0",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [0],
        [1],
        [-1],
        [1] * 33,
        [2**40],
        [2**31, 2**31],
        [2**62],
        [2**20, 2**20, 2**20],
        [0, 2**61],
        [1, 1],
        [[1]] * 300,
        ["a"] * 50,
    ),
    *(
        {"$tensor": 1},
        {"$tied": "w"},
        {"$per_process": None},
        {"$per_process": 0},
        {"$tuple": []},
        {"$dict": [[1, "$tensor"]]},
        {"$leaf": ["os.system", "true"]},
        {"$bytes": "@@"},
    ),
    *(
        {"$numpy": ["object", "00"]},
        {"$numpy": ["float32", "00"]},
        {"$int": "f" * 5000},
        {"$float": "7ff0"},
        {"$complex": [1, 2]},
        {"$str": "zz"},
    ),
    *({"$torch.dtype": "load"}, {"$torch.device": "cuda:9999"}, {"$torch.Size": [-1, 2**70]}),
    *(
        "{replicated}",
        "{manual}",
        "{devices=[2,2]<=[4]}",
        "{devices=[1048576]<=[1048576]}",
        "{devices=[4]0,0,0,0}",
        "{maximal device=3}",
    ),
    *(
        {"shape": [1 << 20], "axes": ["x"], "devices": None},
        {"shape": [4], "axes": ["x"], "devices": [0, 1, 2, 3]},
    ),
    *(
        {"op_sharding": "{replicated}", "devices": 1 << 20},
        {"mesh": 0, "spec": [["x"], "x"]},
        {"start": [0, 0], "shape": [40, 60], "chunks": [1, 1]},
    ),
]


def paths_in(document, path=()):
    """The path of every node of a JSON document."""
    yield path
    if isinstance(document, dict | list):
        for key, child in document.items() if isinstance(document, dict) else enumerate(document):
            yield from paths_in(child, (*path, key))


def parent_of(document, path):
    for key in path[:-1]:
        document = document[key]
    return document


def deep(levels, kind):
    node = "$tensor"
    for _ in range(levels):
        node = [node] if kind == "list" else {"k": node}
    return node


def mutated(random, document):
    """A JSON document with one to three things changed."""
    for _ in range(random.randint(1, 3)):
        document = json.loads(json.dumps(document))  # no part of it is in two places
        # Short paths are few and interesting: choose how deep first.
        by_depth = {}
        for path in paths_in(document):
            by_depth.setdefault(len(path), []).append(path)
        path = random.choice(by_depth[random.choice(sorted(by_depth))])
        if not path:
            continue
        parent, key = parent_of(document, path), path[-1]
        value = parent[key]
        change = random.choice(
            [
                "replace",
                "replace",
                "replace",
                "number",
                "delete",
                "move",
                "repeat",
                "rename",
                "deepen",
            ]
        )
        note(f"{change} {'/'.join(map(str, path))[:200]}")
        if change == "replace":
            parent[key] = random.choice(NASTY)
        elif change == "number" and type(value) is int:
            parent[key] = value + random.choice([-1, 1, 2, 100, -value, value, 2**62])
        elif change == "delete":
            del parent[key]
        elif change == "move":
            other = random.choice(random.choice(list(by_depth.values())))
            parent[key] = json.loads(
                json.dumps(parent_of(document, other)[other[-1]] if other else 0)
            )
        elif change == "repeat" and isinstance(parent, list):
            most = 4 * MIB // len(json.dumps(value))  # memory is bounded by the record's own size
            parent.extend([value] * random.choice([1, min(1000, most)]))
        elif change == "rename" and isinstance(parent, dict):
            parent[random.choice([n for n in NASTY if isinstance(n, str)])] = parent.pop(key)
        elif change == "deepen":
            parent[key] = deep(random.choice([1, 199, 201, 300]), random.choice(["list", "dict"]))
        note(f"  now {str(parent.get(key) if isinstance(parent, dict) else parent)[:200]}")
    return document


def mutated_table(random, table):
    """A chunk table with a few of its numbers, its header or its bytes changed."""
    kind = random.choice(["columns", "columns", "header", "bytes"])
    begin = 12 + int.from_bytes(table[8:12], "little")
    if kind == "header":
        header = json.dumps(mutated(random, json.loads(table[12:begin]))).encode()
        return table[:8] + struct.pack("<I", len(header)) + header + table[begin:]
    if kind == "bytes":
        changed = bytearray(table)
        for _ in range(random.randint(1, 4)):
            changed[random.randrange(len(table))] = random.randrange(256)
        return bytes(changed[: random.choice([len(table), len(table) - 1, 13, 12, 8, 0])])
    files, arrays = decode_table(table, "")
    changed = {}
    for path, rows in arrays.items():
        columns = {
            name: getattr(rows, name).copy()
            for name in ("chunk", "file", "offset", "length", "crc")
        }
        for name, column in columns.items():
            if random.random() < 0.2:
                most = np.iinfo(column.dtype).max
                at, value = (
                    random.randrange(len(column)),
                    random.choice([0, 1, 3, 4, 100, most // 2, most - 1, most]),
                )
                note(f"{path} {name}[{at}] = {value}")
                column[at] = value
        changed[path] = type(rows)(**columns)
    return encode_table(files, changed)
