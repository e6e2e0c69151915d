"""torch_xla processes that each own some of 8 devices write one checkpoint: every chunk once, by
one that has it."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from chunk_tables import decode_table
from faults import TORTURE

import shardckpt
from shardckpt.format.table import ArrayChunks
from shardckpt.plan.pieces import chunk_boxes

pytestmark = [pytest.mark.xla, pytest.mark.timeout(400)]

OWNED = {4: [[5], [0, 3, 6], [1, 2], [4, 7]], 8: [[3], [1], [4], [0], [5], [7], [2], [6]]}
"""By processes: the devices of each, as `tests/children/e2e_torch_xla.py` has them."""
DEVICES = [5, 1, 4, 0, 7, 3, 6, 2]
CASES = {
    "everywhere": ((1024, 768), {"mesh": [8], "devices": DEVICES, "spec": [None, None]}),
    "twice": ((1030, 512), {"mesh": [4, 2], "devices": DEVICES, "spec": ["x", None]}),
    "four times": ((512, 515), {"mesh": [4, 2], "devices": DEVICES, "spec": [None, "y"]}),
    "once": ((1000, 601), {"mesh": [2, 4], "devices": DEVICES, "spec": ["y", "x"]}),
    "over two axes": (
        (1001, 300),
        {"mesh": [2, 2, 2], "devices": DEVICES, "spec": [["z", "x"], None]},
    ),
}
"""Name → shape and layout."""


@pytest.fixture(scope="module", params=OWNED if TORTURE else [4])
def checkpoint(request, run_job, tmp_path_factory):
    """A saved checkpoint: its place, the number of processes that saved it, and the part of each
    tensor on each device."""
    url = tmp_path_factory.mktemp("owned") / "c"
    answers = run_job("torch_xla", "save_numbered", request.param, url, CASES)
    assert all(answer == answers[0] for answer in answers)
    return url, request.param, answers[0]


def written(url, processes):
    """By process: array → its chunks."""
    tables = [next(url.glob(f"*/hosts/{process:05}/table")) for process in range(processes)]
    return [decode_table(table.read_bytes(), str(table))[1] for table in tables]


def holders(piece, name, places, owned):
    """(processes, chunks) Which process owns a device that has all of which chunk."""
    boxes = chunk_boxes(piece, np.arange(piece.num_chunks))

    def has(device):
        box = np.array(places[name][device])
        return (boxes.start >= box[:, 0]).all(axis=1) & (boxes.stop <= box[:, 1]).all(axis=1)

    return np.array([np.any([has(device) for device in mine], axis=0) for mine in owned])


def test_it_restores_in_one_process_bit_by_bit(checkpoint):
    url, *_ = checkpoint
    restored = shardckpt.restore(url)
    for name, (shape, _) in CASES.items():
        np.testing.assert_array_equal(
            restored[name], np.arange(prod(shape), dtype=np.float32).reshape(shape)
        )
    assert shardckpt.open(url).verify().ok


def test_every_chunk_has_one_writer_which_owns_a_device_that_has_all_of_it(checkpoint):
    url, processes, places = checkpoint
    opened, tables = shardckpt.open(url), written(url, processes)
    for name in CASES:
        for piece in opened.tensor(name).pieces:
            wrote = np.zeros((processes, piece.num_chunks), int)
            for process, arrays in enumerate(tables):
                if piece.path in arrays:
                    wrote[process, arrays[piece.path].chunk.astype(int)] += 1
            assert (wrote.sum(axis=0) == 1).all(), name
            assert (wrote <= holders(piece, name, places, OWNED[processes])).all(), name


def test_those_who_have_the_same_share_it_out_evenly_to_a_chunk(checkpoint):
    url, processes, places = checkpoint
    opened, tables = shardckpt.open(url), written(url, processes)
    bytes_of: dict[frozenset[int], Counter[int]] = {}
    largest = 0
    for name in CASES:
        for piece in opened.tensor(name).pieces:
            has = holders(piece, name, places, OWNED[processes])
            for process, arrays in enumerate(tables):
                rows = arrays.get(piece.path, ArrayChunks.none())
                for chunk, length in zip(rows.chunk.tolist(), rows.length.tolist(), strict=True):
                    bytes_of.setdefault(
                        frozenset(np.flatnonzero(has[:, chunk]).tolist()), Counter()
                    )[process] += length
                    largest = max(largest, length)
    assert any(len(group) == processes for group in bytes_of)
    assert any(1 < len(group) < processes for group in bytes_of)
    for group, written_by in bytes_of.items():
        assert (
            max(written_by.values()) - min(written_by[process] for process in group) <= largest
        ), group
