"""The chunks that each host reads: computed by hand, by device and by element, they are the
same."""

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.layout.box import BoxArray
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.world import DeviceOwners
from shardckpt.plan.pieces import Piece, chunk_boxes
from shardckpt.plan.readers import chunks_read, host_boxes
from shardckpt.reshard.forecast.hosts import Bins, Hosts


@st.composite
def layouts(draw):
    """A layout over a few devices of any ids, in GSPMD's way or DTensor's; None: plain."""
    mesh_shape = draw(st.sampled_from([(1,), (4,), (2, 3), (3, 2), (2, 2, 2)]))
    names = ("a", "b", "c")[: len(mesh_shape)]
    ids = draw(st.permutations(range(int(np.prod(mesh_shape)))))
    mesh = Mesh(mesh_shape, names, [7 * i + 3 for i in ids])
    kind = draw(st.sampled_from(["sharding", "placements", "plain"]))
    if kind == "plain":
        return None
    if kind == "placements":
        return Placements.of(mesh, [draw(st.sampled_from(["S(0)", "S(1)", "R"])) for _ in names])
    cuts = [[], []]
    for name in names:
        where = draw(st.integers(-1, 1))
        if where >= 0:
            cuts[where].append(name)
    return Sharding(mesh, PartitionSpec(*(tuple(cut) or None for cut in cuts)))


def pieces_of(shape, border, chunks):
    """One array, or two that meet at a border of the first dimension."""
    spans = [(0, shape[0])] if not 0 < border < shape[0] else [(0, border), (border, shape[0])]
    return [Piece(f"w{a}", (a, 0), (b - a, shape[1]), chunks) for a, b in spans]


@given(
    layout=layouts(),
    shape=st.tuples(st.integers(0, 13), st.integers(1, 11)),
    border=st.integers(0, 13),
    chunks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    devices_per_host=st.integers(1, 4),
)
@settings(max_examples=200)
def test_a_host_reads_every_chunk_that_holds_an_element_of_its_devices_and_no_other(
    layout, shape, border, chunks, devices_per_host
):
    hosts = Hosts.of([(layout, 2)], devices_per_host=devices_per_host)
    pieces = pieces_of(shape, border, chunks)
    number = np.full(shape, -1)
    first = 0
    for piece in pieces:
        boxes = chunk_boxes(piece, np.arange(piece.num_chunks))
        for k in range(piece.num_chunks):
            number[boxes[k].slices] = first + k
        first += piece.num_chunks

    held = host_boxes(layout, shape, hosts.owners, hosts.number)
    read = chunks_read(pieces, held)

    for host in range(hosts.number):
        needed = np.zeros(shape, bool)
        for device in hosts.owners.device_ids[hosts.owners.processes == host].tolist():
            for box in boxes_of(layout, shape, device):
                needed[box.slices] = True
        group = held.group[host]
        assert (group >= 0) == needed.any()
        assert set(read.chunk[read.group == group].tolist() if group >= 0 else []) == set(
            number[needed].tolist()
        )
        if group >= 0:
            assert len(read.chunk[read.group == group]) == len(np.unique(number[needed]))


def boxes_of(layout, shape, device):
    if layout is None:
        whole = BoxArray(np.zeros((1, 2), np.int64), np.array([shape]))
        return [whole[0]]
    if isinstance(layout, Placements):
        boxes = layout.rank_boxes(shape, device)
        return [boxes[i] for i in range(len(boxes))]
    return [layout.device_boxes(shape, [device]).boxes[0]]


def test_many_pieces_that_every_box_touches_are_compared_in_batches():
    n = 400
    pieces = [Piece(f"w{i}", (8 * i, 0), (8, n), (4, n)) for i in range(n)]
    layout = Sharding(Mesh((n,), ("x",)), PartitionSpec(None, "x"))
    owners = DeviceOwners(np.arange(n), np.arange(n))
    held = host_boxes(layout, (8 * n, n), owners, n)
    tracemalloc.start()
    try:
        read = chunks_read(pieces, held)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read.group.tolist() == np.repeat(np.arange(n), 2 * n).tolist()
    assert read.chunk.tolist() == np.tile(np.arange(2 * n), n).tolist()
    assert peak < 8 * read.chunk.nbytes + (24 << 20)


@given(st.integers(1, 5000))
def test_bins_hold_every_host_once_and_in_order(hosts):
    bins = Bins(hosts)
    ranges = bins.ranges()
    assert len(ranges) == bins.number <= 64
    assert [host for first, stop in ranges for host in range(first, stop)] == list(range(hosts))
    assert bins.of(np.arange(hosts)).tolist() == [
        i for i, (first, stop) in enumerate(ranges) for _ in range(first, stop)
    ]
    assert max(b - a for a, b in ranges) - min(b - a for a, b in ranges) <= 1
