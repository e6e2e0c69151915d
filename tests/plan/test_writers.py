"""Every chunk has exactly one writer, and the holders of a box share its bytes; nobody asks
anybody."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import OptionError, ShardingError
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.world import DeviceOwners, World
from shardckpt.plan.writers import Part, box_holders, deal


@st.composite
def jobs(draw):
    """Parts of several tensors, held by random groups of processes."""
    processes = draw(st.integers(1, 9))
    groups = draw(
        st.lists(
            st.lists(st.integers(0, processes - 1), min_size=1, unique=True).map(
                lambda g: tuple(sorted(g))
            ),
            min_size=1,
            max_size=4,
        )
    )
    parts = []
    for i in range(draw(st.integers(1, 12))):
        size = draw(st.sampled_from([0, 1, 7, 64 << 10, 1 << 20, 3 << 20]))
        parts.append(
            Part(
                f"w{i % 5}",
                f"w{i % 5}=p{i}",
                (i,),
                draw(st.sampled_from(groups)),
                draw(st.integers(0, 40)),
                size,
            )
        )
    return processes, parts


@given(jobs(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_every_chunk_is_written_exactly_once_whatever_else_a_process_knows(job, random):
    processes, parts = job
    written = [np.zeros(part.chunks, int) for part in parts]
    for process in range(processes):
        mine = [i for i, part in enumerate(parts) if process in part.holders]
        random.shuffle(mine)  # processes know their tensors in orders of their own
        for i, share in zip(mine, deal([parts[i] for i in mine], process), strict=True):
            written[i][share] += 1
    assert all((counts == 1).all() for counts in written)


@given(jobs())
@settings(max_examples=200, deadline=None)
def test_holders_of_a_tape_write_as_much_as_each_other_up_to_two_chunks(job):
    _, parts = job
    for holders in {part.holders for part in parts}:
        tape = [part for part in parts if part.holders == holders]
        shares = []
        for process in holders:
            dealt = deal(tape, process)
            shares.append(
                sum(len(share) * part.chunk_bytes for part, share in zip(tape, dealt, strict=True))
            )
        fair = sum(part.chunks * part.chunk_bytes for part in tape) / len(holders)
        assert max(abs(share - fair) for share in shares) <= max(part.chunk_bytes for part in tape)


def test_a_process_that_holds_nothing_writes_nothing():
    assert deal([Part("w", "w", (0,), (1, 2), 10, 100)], 0) == [range(0)]


AXES = ("a", "b", "c")


@st.composite
def layouts(draw):
    shape = draw(st.sampled_from([(2,), (4, 2), (2, 3), (2, 2, 2), (6, 2), (1, 4)]))
    ids = draw(st.permutations(range(prod(shape))))
    offset = draw(st.sampled_from([0, 2048]))
    mesh = Mesh(shape, AXES[: len(shape)], [i + offset * (i % 2) for i in ids])
    axes = draw(st.permutations(AXES[: len(shape)]))
    first = draw(st.integers(0, len(axes)))
    second = draw(st.integers(first, len(axes)))
    spec = PartitionSpec(*(tuple(part) or None for part in (axes[:first], axes[first:second])))
    return Sharding(mesh, spec), draw(st.integers(1, 3))


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_holders_are_the_processes_whose_devices_have_the_same_box(case):
    layout, processes = case
    shape = tuple(2 * parts for parts in layout.parts(2))
    boxes = layout.device_boxes(shape)
    owners = DeviceOwners.of({int(d): i % processes for i, d in enumerate(boxes.device_ids)})
    held = box_holders(layout, 2, boxes.device_ids, owners)
    for i, device in enumerate(boxes.device_ids):
        same = [int(d) for j, d in enumerate(boxes.device_ids) if boxes.boxes[j] == boxes.boxes[i]]
        assert held[i] == tuple(sorted({int(owners.of_devices(d)) for d in same})), device


def test_a_layout_without_axes_has_holders_too():
    owners = DeviceOwners.of({0: 0, 1: 0, 2: 1, 3: 1})
    assert box_holders(OpSharding.replicated(4), 2, [3], owners) == [(0, 1)]
    assert box_holders(
        OpSharding.parse("{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"), 2, [0, 1], owners
    ) == [(0, 1), (0, 1)]


def test_a_device_that_is_nobodys_is_an_error_that_names_it():
    sharding = Sharding(Mesh((2,), ("x",), [5, 9]), PartitionSpec("x"))
    with pytest.raises(ShardingError, match="device 9 belongs to no process"):
        box_holders(sharding, 1, [5], DeviceOwners.of({5: 0}))


def test_a_device_outside_of_the_layout_has_no_holders_but_an_error():
    sharding = Sharding(Mesh((2,), ("x",), [5, 9]), PartitionSpec("x"))
    for stranger in (0, 7, 11):
        with pytest.raises(ShardingError, match=f"device {stranger} holds nothing"):
            box_holders(sharding, 1, [5, stranger], DeviceOwners.of({5: 0, 9: 1}))


@pytest.mark.parametrize("numbers", [(2, 2), (-1, 2), (0, 0), ("0", "1"), (0.0, 1), (None, 2)])
def test_a_world_counts_its_processes_from_zero(numbers):
    with pytest.raises(OptionError, match="numbered from 0"):
        World(*numbers)
