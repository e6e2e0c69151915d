"""Random moves of the C extension between memory and a file, and comparisons of chunks, compared
with numpy.

python moves.py <extension> <first seed> <number>     with that build of the extension, which may
have sanitizers
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from math import prod

import crc32c
import numpy as np

__all__ = ["FOREVER", "check_changes", "check_in", "check_out", "stored"]

FOREVER = 1e6
MOVED, WRONG_CHECKSUM, END_OF_FILE = 0, 1, 2


def stored(block, chunk):
    """The chunks of a block in grid order, each as it is stored."""
    chunks = []
    for index in product(
        *(range(-(-n // side)) for n, side in zip(block.shape, chunk, strict=True))
    ):
        part = block[
            tuple(slice(i * side, (i + 1) * side) for i, side in zip(index, chunk, strict=True))
        ]
        padded = np.zeros(chunk, block.dtype)
        padded[tuple(slice(n) for n in part.shape)] = part
        chunks.append(padded.tobytes() + crc32c.crc32c(padded.tobytes()).to_bytes(4, "little"))
    return chunks


def laid_anyhow(chance, shape, dtype):
    """An array of that shape whose elements lie anyhow: in another order, backwards, with gaps, and
    not aligned."""
    order = chance.sample(range(len(shape)), len(shape))
    steps = [chance.choice([1, 1, 1, 2]) for _ in shape]
    larger = [(shape[d] + chance.choice([0, 0, 1])) * steps[d] for d in order]
    shift = chance.choice([0, 0, 1])
    raw = np.random.default_rng(chance.randrange(1 << 32)).integers(
        0, 256, prod(larger) * dtype.itemsize + shift, np.uint8
    )
    array = (
        raw[shift:]
        .view(dtype)
        .reshape(larger)
        .transpose([order.index(d) for d in range(len(shape))])
    )
    array = array[tuple(slice(0, n * step, step) for n, step in zip(shape, steps, strict=True))]
    return array[(*(slice(None, None, chance.choice([1, 1, 1, -1])) for _ in shape), ...)]


def shapes(chance):
    """A shape, a chunk's shape, and a type of elements."""
    ndim = chance.choice([0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 7, 8])
    most = {0: 1, 1: 300, 2: 30, 3: 9}.get(ndim, 3)
    chunk = tuple(chance.randint(1, most) for _ in range(ndim))
    if chance.random() < 0.1 and ndim in (1, 2):  # chunks that are read straight to their place
        chunk = (*(1 for _ in chunk[1:]), chance.randint(5000, 90_000))
    shape = tuple(chance.randint(1, 3) * side - chance.randrange(side) for side in chunk)
    return shape, chunk, np.dtype(chance.choice(["u1", "u2", "u4", "u8", "c16"]))


def scratch_of(chance, itemsize):
    return np.empty(
        chance.choice([itemsize + 4, itemsize + 4 + chance.randrange(200), 1 << 12, 1 << 20]),
        np.uint8,
    )


def check_out(moving, seed):
    """Write some chunks of some blocks at an offset, in one call or in several."""
    chance = random.Random(seed)
    shape, chunk, dtype = shapes(chance)
    blocks = tuple(laid_anyhow(chance, shape, dtype) for _ in range(chance.randint(1, 3)))
    if chance.random() < 0.1:
        blocks = tuple(np.broadcast_to(block[(slice(1),) * block.ndim], shape) for block in blocks)
    expected = [each for block in blocks for each in stored(block, chunk)]
    first = chance.randrange(len(expected))
    last = chance.randint(first + 1, len(expected))
    offset, seconds, size = chance.randrange(100), chance.choice([0, FOREVER]), len(expected[0])
    scratch, crcs = scratch_of(chance, dtype.itemsize), np.zeros(last - first, np.uint32)
    with tempfile.TemporaryFile() as file:
        at = first
        while at < last:
            to = offset + (at - first) * size
            how, done, _ = moving.write_chunks(
                file.fileno(), to, 0, blocks, chunk, at, last, crcs[at - first :], scratch, seconds
            )
            assert how == MOVED
            assert done == (1 if seconds == 0 else last - at)
            at += done
        assert os.pread(file.fileno(), 1 << 30, offset) == b"".join(expected[first:last])
    memory, at, written = (
        np.zeros((last - first) * size + chance.randrange(9), np.uint8),
        first,
        crcs.copy(),
    )
    while at < last:
        begin = (at - first) * size
        how, done, _ = moving.write_chunks(
            -1, 0, 0, blocks, chunk, at, last, crcs[at - first :], memory[begin:], seconds
        )
        assert how == MOVED
        at += done
    assert memory[: (last - first) * size].tobytes() == b"".join(expected[first:last])
    assert crcs.tobytes() == written.tobytes()
    assert [crc.tobytes() for crc in crcs] == [each[-4:] for each in expected[first:last]]


def check_in(moving, seed):
    """Read bands of chunks with up to two places each; sometimes a byte is wrong, or the file ends
    too early."""
    chance = random.Random(seed)
    data, crcs, bands, expected = bytearray(chance.randrange(50)), [], [], []
    ends, scratch_bytes = [], 0
    for _ in range(chance.randint(0, 4)):
        _, chunk, dtype = shapes(chance)
        count = chance.randint(1, 4)
        along = chance.randrange(len(chunk)) if chunk else 0
        count = count if chunk else 1
        elements = [laid_anyhow(chance, chunk, dtype) for _ in range(count)]
        data += bytes(chance.choice([0, 0, 7]))
        places = []
        for _ in range(chance.choice([0, 1, 1, 2])):
            whole = chance.random() < 0.5
            start = tuple(0 if whole else chance.randrange(side) for side in chunk)
            part = tuple(
                side if whole else chance.randint(1, side - at)
                for side, at in zip(chunk, start, strict=True)
            )
            shape = tuple(n * count if d == along else n for d, n in enumerate(part))
            memory = (
                np.zeros(shape, dtype)
                if chance.random() < 0.5
                else laid_anyhow(chance, shape, dtype)
            )
            places.append((memory, start, along))
            cells = [
                each[(*(slice(at, at + n) for at, n in zip(start, part, strict=True)), ...)]
                for each in elements
            ]
            expected.append((memory, np.concatenate(cells, along) if chunk else cells[0]))
        bands.append((len(data), count, dtype.itemsize, chunk, tuple(places)))
        for each in elements:
            (one,) = stored(each, chunk)
            data += one
            crcs.append(int.from_bytes(one[-4:], "little"))
            ends.append(len(data))
        scratch_bytes = max(scratch_bytes, dtype.itemsize)
    scratch, wrong = scratch_of(chance, max(1, scratch_bytes)), None
    fault = chance.choice([None, None, "byte", "end"]) if ends else None
    if fault is not None:
        wrong = chance.randrange(len(ends))
        at = ends[wrong] - chance.randint(1, 5)
        if fault == "byte":
            data[at] ^= 1 << chance.randrange(8)
        else:
            del data[at:]
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        how, done, seconds = MOVED, 0, chance.choice([0, FOREVER])
        while done < len(crcs) and how == MOVED:
            how, done, _ = moving.read_chunks(
                file.fileno(), tuple(bands), done, np.array(crcs, np.uint32), scratch, seconds
            )
    if fault is not None:
        assert (how, done) == (WRONG_CHECKSUM if fault == "byte" else END_OF_FILE, wrong)
        return
    assert (how, done) == (MOVED, len(crcs))
    for memory, content in expected:
        assert memory.tobytes() == content.tobytes()


def check_changes(moving, seed):
    """Compare some chunks with earlier ones, of which some elements differ, in as many calls as the
    room demands."""
    chance = random.Random(seed)
    rng = np.random.default_rng(seed)
    size = chance.choice([1, 2, 4, 8])
    olds, news, bodies = [], [], []
    for _ in range(chance.randint(0, 4)):
        number, last, gaps, longs, folded = f"<u{size}", -1, [], [], []
        shape = chance.choice(
            [
                (chance.choice([0, 1, chance.randrange(300), chance.randrange(20_000)]),),
                (chance.randrange(40), chance.randrange(300)),
                tuple(chance.randint(1, 4) for _ in range(chance.choice([0, 3, 8]))),
            ]
        )
        box = laid_anyhow(chance, shape, np.dtype(number))
        if chance.random() < 0.1 and box.size:
            box = np.broadcast_to(box[(slice(1),) * box.ndim], shape)
        count, new = box.size, np.frombuffer(box.tobytes(), np.uint8)
        old = np.empty(count * size + 1, np.uint8)[chance.choice([0, 1]) :][: count * size]
        old[:] = new
        rows = rng.random(count) < chance.choice([0, 0.001, 0.02, 0.5, 1])
        old.reshape(count, size)[rows, chance.randrange(size)] ^= rng.integers(
            1, 256, int(rows.sum()), np.uint8
        )
        for i in np.flatnonzero(rows).tolist():
            gap, last = i - last - 1, i
            gaps.append(min(gap, 255))
            longs += [gap - 255] if gap >= 255 else []
            growth = (int(new.view(number)[i]) - int(old.view(number)[i]) + (1 << 8 * size - 1)) % (
                1 << 8 * size
            ) - (1 << 8 * size - 1)
            folded.append(2 * growth if growth >= 0 else -2 * growth - 1)
        planes = np.array(folded, number).view(np.uint8).reshape(-1, size).T
        bodies.append(
            (
                bytes(gaps) + np.array(longs, "<u4").tobytes() + planes.tobytes(),
                len(gaps),
                len(longs),
                crc32c.crc32c(new.tobytes()),
            )
        )
        olds.append(old)
        news.append(box)
    least = max(
        (old.size // size * (1 + size) + 4 * (old.size // size // 256 + 1) for old in olds),
        default=0,
    )
    room, results = (
        np.empty(least + chance.choice([0, 0, least]), np.uint8),
        np.zeros((len(olds), 3), np.int64),
    )
    done = 0
    while done < len(olds):
        ready = done + moving.find_changes(
            tuple(olds[done:]), tuple(news[done:]), size, results[done:], room
        )
        assert ready > done
        assert room.tobytes().startswith(b"".join(body for body, *_ in bodies[done:ready]))
        done = ready
    assert results.tolist() == [[*numbers] for _, *numbers in bodies]
    assert [old.tobytes() for old in olds] == [new.tobytes() for new in news]


def _load(path):
    spec = spec_from_file_location(
        "shardckpt.io._moving", path, loader=ExtensionFileLoader("shardckpt.io._moving", path)
    )
    assert spec is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    moving = _load(sys.argv[1])
    for seed in range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])):
        print(f"seed {seed}", flush=True) if seed % 100 == 0 else None
        check_out(moving, seed)
        check_in(moving, seed)
        check_changes(moving, seed)
