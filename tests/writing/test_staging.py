"""Sizes of copies, and the way of copies from the saving thread to the writing one."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest
import torch
from chunk_oracle import chunks_inside
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt import errors, frameworks
from shardckpt.io.buffers import BufferPool
from shardckpt.io.store import Store
from shardckpt.layout.box import Box
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.world import World
from shardckpt.options import SaveOptions
from shardckpt.plan.blocks import Block, parts_of, smaller
from shardckpt.plan.pieces import Piece
from shardckpt.writing.host import HostWriter
from shardckpt.writing.save_plan import PlanCache, plan_save
from shardckpt.writing.staging import Stage, StageSizes
from shardckpt.writing.state_share import BlockElements, read, share_of

MiB = 1 << 20


# --- what is copied at once


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@given(
    shape=shapes,
    process=st.integers(0, 2),
    most=st.integers(1, 2000),
    cuts=st.sampled_from([(), ("x",), (None, "x"), (("x", "y"),), ("y", "x")]),
)
@settings(max_examples=200, deadline=None)
def test_blocks_hold_each_chunk_of_a_process_once_and_in_order_however_small_they_are(
    shape, process, most, cuts
):
    sharding = Sharding(Mesh((4, 2), ("x", "y")), PartitionSpec(*cuts[: len(shape)]))
    sources = frameworks.sources({"w": np.zeros(shape, np.int16)})
    plan = plan_save(sources, SaveOptions(shardings={"w": sharding}), World(process, 3))
    blocks = plan.blocks.get("w", [])
    parts = [part for block in blocks for part in smaller(block, most)]
    positions, of_parts = (
        [
            (one.piece.path, position)
            for one in pieces
            for position in chunks_inside(one.piece, one.box)[0].tolist()
        ]
        for pieces in (blocks, parts)
    )
    assert positions == sorted(set(positions))
    assert of_parts == positions
    assert sum(block.nbytes for block in parts) == plan.nbytes
    largest = max((np.prod(block.piece.chunks) * 2 for block in blocks), default=0)
    assert all(
        part.nbytes <= max(most, largest) for block in blocks for part in smaller(block, most)
    )


def test_a_block_is_written_in_parts_that_take_so_much_with_their_padding():
    edge = Block(0, (64, 0), Piece("w", (0, 0), (65, 512), (64, 64)), Box((64, 0), (65, 512)), 4)
    parts = [*parts_of(edge, 2 * 64 * 64 * 4)]
    assert [box for box, _ in parts] == [Box((64, n), (65, n + 128)) for n in range(0, 512, 128)]
    assert [np.zeros((1, 512))[index].shape for _, index in parts] == [(1, 128)] * 4


def test_a_shard_that_a_process_writes_alone_is_copied_at_once():
    plan = plan_save(
        frameworks.sources({"w": np.zeros((2048, 1024), np.float32)}), SaveOptions(), World()
    )
    assert plan.tensors["w"].num_chunks > 1
    assert [block.box for block in plan.blocks["w"]] == [Box.full((2048, 1024))]


# --- plans of earlier saves


@st.composite
def states(draw):
    names = draw(st.lists(st.sampled_from("abcd"), unique=True))
    return {
        name: np.zeros(
            draw(st.sampled_from([(), (4,), (300, 200)])), draw(st.sampled_from(["f4", "i2"]))
        )
        for name in names
    }


@given(
    st.lists(
        st.tuples(
            states(), st.integers(0, 1), st.sampled_from(["replicated", "local"]), st.booleans()
        ),
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_a_remembered_plan_is_the_plan_that_would_be_made(saves):
    plans = PlanCache()
    for state, process, host_tensors, sharded in saves:
        sharding = Sharding(Mesh((2,), ("x",)), PartitionSpec("x"))
        shardings = {name: sharding for name, tensor in state.items() if sharded and tensor.ndim}
        arguments = (
            frameworks.sources(state),
            SaveOptions(host_tensors=host_tensors, shardings=shardings),
            World(process, 2),
        )
        assert plans.plan(*arguments) == plan_save(*arguments)


def test_the_same_state_is_planned_once_whatever_its_values_are():
    plans, options, world = PlanCache(), SaveOptions(), World()
    first = plans.plan(frameworks.sources({"w": np.zeros((300, 200))}), options, world)
    assert plans.plan(frameworks.sources({"w": np.ones((300, 200))}), options, world) is first
    assert plans.plan(frameworks.sources({"w": np.ones((300, 201))}), options, world) is not first


def test_the_records_of_arrays_of_a_training_state_are_made_once_for_all_saves():
    def structure(array):
        state = shardckpt.train_state(params={"w": array, "t": torch.zeros(3)})
        share = share_of(state, SaveOptions(), World(), waits=False)
        return share.contents.structure

    first, again = structure(np.zeros(7)), structure(np.ones(7))
    assert first.tensors["params/w"].array == "numpy"
    assert first.tensors["params/t"].array == ""
    assert again.tensors is first.tensors
    other = structure(torch.zeros(7, dtype=torch.float64))
    assert {tensor.array for tensor in other.tensors.values()} == {""}
    assert structure(np.zeros(7)).tensors == first.tensors


def test_a_batch_is_fetched_by_the_thread_that_asks_for_it_and_used_by_any(monkeypatch):
    """Streams, devices and guards of a framework are those of the thread that saves."""
    sources, fetched, fetch = frameworks.sources({"w": np.arange(12.0)}), [], frameworks.fetch
    monkeypatch.setattr(
        frameworks,
        "fetch",
        lambda *asked: fetched.append(threading.current_thread()) or fetch(*asked),
    )
    for batch in read(plan_save(sources, SaveOptions(), World()), sources, 0):
        assert fetched == [threading.current_thread()]
        with ThreadPoolExecutor(1) as other:
            ((_, elements, *_),) = other.submit(list, batch).result()
        assert elements.tolist() == [*range(12)]
    assert len(fetched) == 1


# --- from one thread to the other


def portions(stage, at_a_time=MiB, written=lambda _: None):
    """The portions for a writer of one thread."""
    place = Store.open(f"memory://{uuid.uuid4().hex}")
    writer = HostWriter(place, "a", 0, layout="packed", compression=None, memory_limit=MiB)
    return stage.portions(writer, at_a_time, written)


class Saved:
    """One pass of a state through a stage, with a thread that takes everything off."""

    def __init__(self, pool, state, *, die_after=None, fetching=0):
        self.arrays = {name: np.empty_like(array) for name, array in state.items()}
        self.addresses = set()
        self.errors = []
        self.stage = Stage(pool, self.start)
        self.die_after = die_after
        self.thread = threading.Thread(target=self.take_off)
        sources = frameworks.sources(state)
        plan = plan_save(sources, SaveOptions(), World())
        try:
            most = self.stage.fit(
                [(block, False) for block in chain(*plan.blocks.values())],
                StageSizes(fetching=fetching),
            )
            for batch in read(plan, sources, 0, most=most):
                self.stage.put(batch)
            self.stage.close()
        except BaseException as e:
            self.stage.give_up(e)
            raise
        finally:
            if self.stage.started:
                self.thread.join(60)
        assert not self.thread.is_alive()

    def start(self):
        self.thread.start()

    def take_off(self):
        try:
            for i, portion in enumerate(portions(self.stage)):
                if i == self.die_after:
                    raise errors.StorageError("the disk is full")
                for piece, box, elements in portion.blocks:
                    self.addresses.add(elements.ctypes.data)
                    self.arrays[piece.path][box.slices] = elements
                portion.written()
        except errors.ShardckptError as e:
            self.stage.fail(e)
        finally:
            self.stage.end()


def state_of(mebibytes):
    return {
        name: np.random.default_rng(i).random((mebibytes, 128, 1024)) for i, name in enumerate("ab")
    }


def test_what_fits_is_copied_into_one_buffer_and_written_afterwards():
    pool, state = BufferPool(16 * MiB), state_of(2)
    saved = Saved(pool, state)
    assert not saved.stage.streamed
    assert all((saved.arrays[name] == state[name]).all() for name in state)
    assert len(pool.kept) == 1
    assert pool.high_water == 4 * MiB


def test_what_does_not_fit_streams_through_the_buffers():
    pool, state = BufferPool(2 * MiB), state_of(4)
    saved = Saved(pool, state)
    assert saved.stage.streamed
    assert all((saved.arrays[name] == state[name]).all() for name in state)
    assert pool.high_water <= pool.limit


@pytest.mark.parametrize("mebibytes", [1, 8])
def test_later_saves_use_the_same_buffers(mebibytes):
    pool = BufferPool(4 * MiB)
    first = Saved(pool, state_of(mebibytes))
    kept, most = pool.kept, pool.high_water
    for _ in range(3):
        later = Saved(pool, state_of(mebibytes))
        assert later.addresses <= first.addresses
        assert pool.kept == kept
        assert pool.high_water == most


def test_the_copying_thread_wakes_up_when_the_writing_thread_fails():
    pool = BufferPool(2 * MiB)
    with pytest.raises(errors.StorageError, match="the disk is full"):
        Saved(pool, state_of(8), die_after=3)
    with pool.take(pool.limit):  # all was given back
        pass


def one_block():
    return plan_save(frameworks.sources({"w": np.zeros(1000)}), SaveOptions(), World()).blocks["w"][
        0
    ]


def test_a_stage_that_gives_up_returns_its_memory():
    pool, block = BufferPool(16 * MiB), one_block()
    stage = Stage(pool, lambda: None)
    stage.fit([(block, False)], StageSizes(fetching=MiB, writing=MiB))
    stage.put([BlockElements(block, np.zeros(1000), False)])
    stage.give_up(KeyboardInterrupt())
    assert not pool.kept, "a thread may still be copying into it"
    assert pool.take_at_once(pool.limit) is not None
    with pytest.raises(KeyboardInterrupt):
        next(portions(stage))


def test_what_is_in_memory_of_its_own_is_counted_and_not_copied():
    pool, block, array = BufferPool(16 * MiB), one_block(), np.random.default_rng(0).random(1000)
    stage = Stage(pool, lambda: None)
    stage.fit([(block, True)], StageSizes(fetching=MiB))
    stage.put([BlockElements(block, array, True)])
    stage.close()
    assert MiB + array.nbytes <= pool.high_water < MiB + array.nbytes + 1000
    assert pool.take_at_once(pool.limit - array.nbytes + 1) is None
    ((_, _, elements),) = (block for portion in portions(stage) for block in portion.blocks)
    assert np.shares_memory(elements, array)
    stage.end()
    assert pool.take_at_once(pool.limit) is not None


def test_the_buffer_is_not_given_back_while_the_other_side_may_touch_it():
    pool, block = BufferPool(16 * MiB), one_block()
    stage = Stage(pool, lambda: None)
    stage.fit([(block, False)], StageSizes())
    stage.put([BlockElements(block, np.ones(1000), False)])
    stage.close()
    blocks = portions(stage)
    ((_, _, elements),) = next(blocks).blocks
    stage.fail(errors.StorageError("gone"))
    with pool.take(MiB) as lease:
        lease.array((MiB,), np.uint8)[...] = 0
    assert (elements == 1).all()
    blocks.close()
    stage.end()
    assert pool.take_at_once(pool.limit) is not None


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([0, 0, 3, 20]), st.booleans()),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=15, deadline=None)
def test_stages_that_share_a_pool_all_come_to_their_end_within_its_limit(saves):
    """Some fit, some stream, some die; what frameworks take may be more than the limit, and then
    goes alone."""
    pool = BufferPool(12 * MiB)
    peaks = []

    def save(case):
        mebibytes, fetching, dies = case
        state = {"a": np.full((mebibytes, 256, 1024), mebibytes, np.float32)}
        try:
            saved = Saved(pool, state, fetching=fetching * MiB, die_after=0 if dies else None)
            assert (saved.arrays["a"] == mebibytes).all() or dies
        except errors.StorageError:
            assert dies
        peaks.append(fetching)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(save, saves))
    assert len(peaks) == len(saves)
    assert pool.high_water <= pool.limit or 20 in peaks
    assert pool.take_at_once(pool.limit) is not None
