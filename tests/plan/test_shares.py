"""Shares of boxes that several processes need: everything is read, once, and evenly."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt import Bandwidths, Mesh, PartitionSpec, Sharding
from shardckpt.errors import OptionError
from shardckpt.frameworks.base import whole
from shardckpt.layout.box import Box, BoxArray
from shardckpt.plan.chunks import chunk_shape
from shardckpt.plan.pieces import Piece, overlaps
from shardckpt.plan.shares import MOST_READERS, SharedBoxes, peers_sharing_reads, rounds


@st.composite
def pieces_of(draw):
    """A tensor in one piece or several, of any chunks."""
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
    cut = draw(st.integers(0, shape[0])) if shape else 0
    stretches = [(a, b) for a, b in ((0, cut), (cut, shape[0])) if a < b] if shape else [(0, 0)]
    pieces = []
    for i, (a, b) in enumerate(stretches):
        held = (b - a, *shape[1:]) if shape else ()
        chunks = tuple(draw(st.integers(1, n)) for n in held)
        pieces.append(Piece(f"w.{i}", (a, *(0,) * (len(shape) - 1)) if shape else (), held, chunks))
    return shape, pieces


@st.composite
def shared_boxes(draw):
    """Boxes without common elements: the halves of some box."""
    shape, pieces = draw(pieces_of())
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    boxes = [Box(start, stop)]
    if shape and stop[-1] - start[-1] > 1 and draw(st.booleans()):
        middle = (start[-1] + stop[-1]) // 2
        boxes = [Box(start, (*stop[:-1], middle)), Box((*start[:-1], middle), stop)]
    return SharedBoxes(pieces, BoxArray.of(boxes, len(shape)), draw(st.sampled_from([1, 2, 8])))


@given(st.lists(shared_boxes(), max_size=4), st.integers(1, 6), st.integers(1, 4000))
@settings(max_examples=150, deadline=None)
def test_every_element_is_read_by_exactly_one_process_and_every_chunk_too(tensors, readers, limit):
    counts = [[np.zeros(one.boxes[b].shape, int) for b in range(len(one.boxes))] for one in tensors]
    touched = {}
    for number, shares in enumerate(rounds(tensors, readers, limit)):
        assert len(shares) == readers
        for reader, share in enumerate(shares):
            for region in share:
                one, box = tensors[region.tensor], tensors[region.tensor].boxes[region.box]
                counts[region.tensor][region.box][
                    tuple(
                        slice(a - o, b - o)
                        for a, b, o in zip(
                            region.part.start, region.part.stop, box.start, strict=True
                        )
                    )
                ] += 1
                for piece in one.pieces:
                    for chunk in overlaps(
                        piece, BoxArray.of([region.part], len(piece.shape))
                    ).chunk.tolist():
                        touched.setdefault((region.tensor, piece.path, chunk), set()).add(
                            (number, reader)
                        )
    assert all((count == 1).all() for boxes in counts for count in boxes)
    assert all(len(readers) == 1 for readers in touched.values())


@given(st.lists(shared_boxes(), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 4000))
@settings(max_examples=50, deadline=None)
def test_a_round_holds_as_many_bytes_as_allowed_or_a_single_chunk(tensors, readers, limit):
    for shares in rounds(tensors, readers, limit):
        regions = [region for share in shares for region in share]
        chunks = [
            prod(piece.chunks) * tensors[r.tensor].itemsize
            for r in regions
            for piece in tensors[r.tensor].pieces
        ]
        assert sum(r.part.size * tensors[r.tensor].itemsize for r in regions) <= max(limit, *chunks)


def stored(shape, itemsize=2):
    return [Piece("w", (0,) * len(shape), shape, chunk_shape(shape, itemsize, (1,) * len(shape)))]


SHAPES = [(32003, 1024), (4096, 4096), (4096,), (1024, 11008), (7, 13), ()]
"""Of a model; odd ones and small ones too."""


@pytest.mark.parametrize("replicas", range(1, 33))
def test_1_to_32_replicas_read_every_chunk_of_a_model_once_and_evenly(replicas):
    tensors = [SharedBoxes(stored(shape), whole(shape), 2) for shape in SHAPES]
    read, shares = {}, np.zeros(replicas)
    for planned in rounds(tensors, replicas, 64 << 20):
        for reader, share in enumerate(planned):
            for region in share:
                piece = tensors[region.tensor].pieces[0]
                chunks = overlaps(
                    piece, BoxArray.of([region.part], len(piece.shape))
                ).chunk.tolist()
                for chunk in chunks:
                    read[region.tensor, chunk] = read.get((region.tensor, chunk), 0) + 1
                shares[reader] += len(chunks) * prod(piece.chunks) * 2
    assert len(read) == sum(tensor.pieces[0].num_chunks for tensor in tensors)
    assert set(read.values()) == {1}
    assert shares.max() <= shares.mean() * 1.1 + 4 * (2 << 20)


@pytest.mark.parametrize("replicas", [2, 4, 8, 32])
def test_a_sharded_model_is_read_once_however_many_replicas_of_its_shards_there_are(replicas):
    """Tensor parallelism over 4, replicated over data: the holders of each shard share it."""
    shape, itemsize = (4096, 4096), 2
    layout = Sharding(Mesh((replicas, 4), ("data", "model")), PartitionSpec(None, "model"))
    piece = Piece("w", (0, 0), shape, chunk_shape(shape, itemsize, layout.parts(2)))
    times = np.zeros(piece.num_chunks, int)
    for device in range(4):
        box = layout.device_boxes(shape, [device]).boxes
        for planned in rounds([SharedBoxes([piece], box, itemsize)], replicas, 1 << 20):
            for region in (region for share in planned for region in share):
                times[overlaps(piece, BoxArray.of([region.part], 2)).chunk] += 1
    assert (times == 1).all()


@pytest.mark.long
@given(st.integers(1, 500))
def test_many_replicas_share_in_groups_of_at_most_64_that_are_the_same_for_all_their_members(count):
    sharers = tuple(range(3, 3 + 2 * count, 2))
    groups = {process: peers_sharing_reads(sharers, process) for process in sharers}
    assert all(
        process in group and groups[other] == group
        for process, group in groups.items()
        for other in group
    )
    assert max(map(len, groups.values())) <= MOST_READERS
    assert len(set(groups.values())) == -(-count // MOST_READERS)


# --- Is it worth it? ------------------------------------------------------------------------------


def over_gloo(replicas, nbytes=16 << 30, **rates):
    return Bandwidths(**{"interconnect": 1.25e9} | rates).estimate(
        nbytes=nbytes, readers=replicas, processes=replicas, rounds=64
    )


def test_few_replicas_read_by_themselves_and_many_together():
    chosen = [over_gloo(replicas).together for replicas in range(1, 129)]
    assert not any(chosen[:8])
    assert all(chosen[63:])
    assert chosen == sorted(chosen)


def test_a_storage_that_bears_all_its_readers_needs_no_interconnect():
    assert not any(over_gloo(replicas, store=1e15).together for replicas in range(1, 129))


def test_a_fast_interconnect_pays_early():
    assert not over_gloo(1, interconnect=100e9).together
    assert over_gloo(4, interconnect=100e9).together


def test_little_is_not_worth_finding_each_other_for():
    assert not over_gloo(128, nbytes=10_000_000).together


@pytest.mark.parametrize(
    "rates",
    [
        {"store": 0},
        {"process": -1.0},
        {"interconnect": "fast"},
        {"gain": float("nan")},
        {"latency": True},
    ],
)
def test_what_is_no_rate_is_refused(rates):
    with pytest.raises(OptionError, match=next(iter(rates))):
        Bandwidths(**rates)
