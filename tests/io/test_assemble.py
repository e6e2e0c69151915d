"""From what several hosts have written to one commit record: put together whole, or refused with a name in the message."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest

import shardckpt
from shardckpt import dtypes, errors
from shardckpt.contents import Contents
from shardckpt.errors import CommitError, FormatError
from shardckpt.io.assemble import assemble, finished_hosts, wait_for_hosts
from shardckpt.io.commit import Prior, publish
from shardckpt.io.host import HostWriter
from shardckpt.io.store import Store
from shardckpt.io.table import decode_table, encode_table
from shardckpt.names import array_path, piece_path
from shardckpt.record import HostRecord, open_envelope, seal
from shardckpt.reshard.plan import Piece, chunk_boxes
from shardckpt.structure import Structure, TensorRecord

LAYOUTS = ["packed", "zarr"]
ATTEMPT = "20300101T000000-00000000-1"
W = np.arange(60 * 40, dtype=np.float32).reshape(60, 40)
B = np.arange(12, dtype=np.int16)
STORAGES = ["file", "gs"]


def tensor(name, array, chunks=None, pieces=None, partial=False):
    """The record of an array that is stored in chunks of that shape, or in pieces of so many rows."""
    start = (0,) * array.ndim
    chunks = chunks or tuple(max(1, n) for n in array.shape)
    if pieces is None:
        stored = (Piece(array_path(name), start, array.shape, chunks),)
    else:
        rows = [((a, *start[1:]), (b - a, *array.shape[1:])) for a, b in pieces]
        stored = tuple(Piece(piece_path(name, array.shape, begin), begin, shape, chunks) for begin, shape in rows)
    return TensorRecord(name, array.shape, dtypes.of_numpy(array.dtype), None, stored, partial)


LARGE = tensor("w", W, (20, 20))
"""Six chunks."""


def contents(*tensors, small=None, metadata=None, **leaves):
    records = {t.name: t for t in tensors}
    return Contents(Structure({**dict.fromkeys(records, "$tensor"), **leaves}, records), small or {}, metadata or {})


def write_host(place, host, said, written, *, hosts=3, prior=None, layout="packed", compression=None, values=None):
    """One host's share: `written` has arrays and positions of chunks by tensor; of tensors in pieces, for each of its pieces."""
    writer = HostWriter(place, ATTEMPT, host, layout=layout, compression=compression, memory_limit=1 << 24)
    for name, (array, positions) in written.items():
        record = said.structure.tensors[name]
        for piece in record.pieces:
            for position in positions:
                (box,) = [chunk_boxes(piece, np.array([position]))[0]]
                writer.put(piece, position, array[box.slices])
    return writer.finish(said, hosts=hosts, prior=prior, values=values)


@pytest.fixture
def place(tmp_path):
    return Store.open(tmp_path / "c").sub(ATTEMPT)


def committed(place):
    """Assemble and publish; the open checkpoint, which is whole."""
    root = Store.open(place.location.parent) if hasattr(place.location, "parent") else None
    assert root is not None
    return opened(root, assemble(place))


def opened(root, record):
    assert publish(root, record, Prior(None, root.read_versioned("checkpoint.json")[1], None))
    checkpoint = shardckpt.open(str(root.location))
    assert checkpoint.verify().damage == []
    return checkpoint


def refused(place, match):
    with pytest.raises(CommitError, match=match) as raised:
        assemble(place)
    assert str(raised.value).endswith((".", "alone.", "own."))
    return str(raised.value)
