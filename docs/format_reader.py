"""A complete reader of checkpoints, as docs/format.md describes them.

Its command is `python docs/format_reader.py CHECKPOINT TENSOR`.

It needs numpy, ml_dtypes, crc32c and, for compressed checkpoints and differences, numcodecs. It
does not need shardckpt.
"""

import hashlib
import itertools
import json
import math
import re
import struct
import sys
from pathlib import Path
from urllib.parse import unquote

import crc32c
import ml_dtypes
import numpy as np


def record(data):
    """The record in a file, after its digest was compared."""
    head, body = re.fullmatch(
        rb'(\{"format":"shardckpt","version":\[[1-6],\d+\],"sha256":"[0-9a-f]{64}","record":)(.*)\}\n?',
        data,
        re.DOTALL,
    ).groups()
    assert hashlib.sha256(body).hexdigest() == json.loads(head + b"0}")["sha256"], "damaged record"
    return json.loads(body)


def referred(attempt, reference):
    """The bytes of the file that a reference names, after size and digest were compared."""
    data = (attempt / reference["key"]).read_bytes()
    digest = hashlib.sha256(data[: reference.get("header")]).hexdigest()
    assert (len(data), digest) == (reference["size"], reference["sha256"]), reference["key"]
    return data


def tables(attempt, commit):
    """Places of all chunks, from the merged table or, if it is lost, from the other tables.

    The other tables are the tables of hosts and small tensors.
    """
    try:
        return [places(referred(attempt, commit["table"]))]
    except (KeyError, OSError, AssertionError):
        hosts = [record(referred(attempt, host))["table"] for host in commit["hosts"]]
        small = [commit["small_table"]] if "small_table" in commit else []
        return [places(referred(attempt, table)) for table in hosts + small]


def name_of(array_path):
    """The tensor's name and, for a piece, the index of its first element."""
    path, _, piece = array_path.partition("=p")
    parts = ["" if part == "=-" else part for part in path.replace("=/", "").split("/")]
    name = re.sub(b"=(..)", lambda m: bytes.fromhex(m[1].decode()), "/".join(parts).encode())
    return name.decode("utf-8", "surrogatepass"), int(piece) if piece else None


def places(table):
    """(name, first element of the piece, position in the grid) → place of the chunk.

    A place is (data file or None, array's path, offset, length, crc32c).
    """
    assert table[:8] == b"SHCKTAB2"
    at = 12 + int.from_bytes(table[8:12], "little")
    header = json.loads(table[12:at])
    begin = len(table) - 28 * sum(count for _, count in header["arrays"])
    for block in range(begin, len(table), 28 * header["block"]):
        digest = hashlib.sha256(table[block : block + 28 * header["block"]]).digest()
        assert digest[:16] == table[at : at + 16], "damaged chunk table"
        at += 16
    found, rows = {}, struct.iter_unpack("<QIQII", table[begin:])
    for path, count in header["arrays"]:
        for chunk, file, *rest in itertools.islice(rows, count):
            found[*name_of(path), chunk] = (
                None if file == 0xFFFFFFFF else header["files"][file],
                path,
                *rest,
            )
    return found


def changed(stored, base, itemsize):
    """The elements of a chunk, stored whole or as a difference from the same chunk of the base."""
    if not stored or stored[0] == 0:
        return stored[1:] or base
    from numcodecs.zstd import Zstd

    crc, n, m = struct.unpack("<III", stored[1:13])
    data = np.frombuffer(Zstd().decode(stored[13:]), np.uint8)
    gaps, rest = data[:n].astype(int), data[n : n + 4 * m].copy().view("<u4")
    gaps[gaps == 255] += rest
    number = f"<u{min(itemsize, 8)}"
    growth = data[n + 4 * m :].reshape(itemsize, n).T.copy().view(number)
    elements = np.frombuffer(base, number).reshape(-1, growth.shape[1]).copy()
    elements[np.cumsum(gaps + 1) - 1] += (growth >> 1) ^ -(growth & 1)
    assert crc32c.crc32c(elements.tobytes()) == crc, "a difference from other elements"
    return elements.tobytes()


def read_base(checkpoint, base, name):
    """A tensor of a base, after its identity was compared."""
    place = Path(checkpoint).parent / unquote(
        base["url"].removeprefix("file://").removeprefix("../")
    )
    commit = record((place / "checkpoint.json").read_bytes())
    if "contents" in base:
        same = commit["fingerprint"]["sha256"] == base["contents"]
    else:  # an attempt that was folded has the same elements
        same = commit["attempt"].split("-folded-")[0] == base["attempt"].split("-folded-")[0]
    assert same, "another checkpoint is there"
    return read(place, name)


def read(checkpoint, name):
    """One tensor as a numpy array."""
    commit = record((Path(checkpoint) / "checkpoint.json").read_bytes())
    attempt, tensor = Path(checkpoint) / commit["attempt"], commit["tensors"][name]
    if "base" in tensor:
        return read_base(checkpoint, commit["bases"][tensor["base"]], tensor.get("base_name", name))
    before = read_base(checkpoint, commit["bases"][0], name) if tensor.get("difference") else None
    place = {}
    for table in tables(attempt, commit):
        place |= table
    shape, dtype = tensor["shape"], np.dtype(getattr(ml_dtypes, tensor["dtype"], tensor["dtype"]))
    whole = {"start": [0] * len(shape), "shape": shape, "chunks": tensor.get("chunks")}
    result = np.empty(shape, dtype)
    for piece in tensor.get("pieces", [whole]):
        first_element = (
            None
            if piece is whole
            else sum(i * math.prod(shape[d + 1 :]) for d, i in enumerate(piece["start"]))
        )
        chunks = piece["chunks"]
        for position, index in enumerate(
            np.ndindex(*(-(-n // c) for n, c in zip(piece["shape"], chunks, strict=True)))
        ):
            file, path, offset, length, crc = place[name, first_element, position]
            directory = re.sub(r"\.__lock(?=/|$)", "=2E__lock", path)
            file = file or "/".join(["zarr", directory, "c", *map(str, index)])
            stored = (attempt / file).read_bytes()[offset : offset + length]
            elements = stored[:-4]
            assert crc32c.crc32c(elements) == crc == int.from_bytes(stored[-4:], "little"), (
                f"damaged chunk in {file}"
            )
            if commit["compression"] == "zstd":
                from numcodecs.zstd import Zstd

                elements = Zstd().decode(elements)
            first = [i * c for i, c in zip(index, chunks, strict=True)]
            inside = [min(c, n - a) for a, c, n in zip(first, chunks, piece["shape"], strict=True)]
            target = tuple(
                slice(s + a, s + a + n)
                for s, a, n in zip(piece["start"], first, inside, strict=True)
            )
            if commit["compression"] == "difference":
                base = np.zeros(chunks, dtype)
                if before is not None:
                    base[tuple(map(slice, inside))] = before[target]
                elements = changed(elements, base.tobytes(), dtype.itemsize)
            result[target] = np.frombuffer(elements, dtype).reshape(chunks)[
                tuple(map(slice, inside))
            ]
    return result


if __name__ == "__main__":
    print(read(*sys.argv[1:]))
