"""The memory limit holds for tensors of any size, and what cannot fit is refused in advance."""

import json
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from paths import CHILDREN

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, errors
from shardckpt.format.zarr_arrays import largest_chunk
from shardckpt.reading.reader import LOCAL_RUN
from shardckpt.reshard.options import ReshardOptions
from shardckpt.reshard.plan import plan_reshard
from shardckpt.reshard.rules import Rules
from shardckpt.streaming.memory import PROCESS_BYTES, READERS, Sizes, share

CHILD = CHILDREN / "reshard_memory.py"
MiB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """One tensor of 384 MiB that consists of rows of 7ths."""
    place = tmp_path_factory.mktemp("memory") / "a"
    w = np.arange(96 * MiB, dtype=np.uint32).reshape(12288, 8192)
    shardckpt.save(
        place,
        {"w": w},
        options=SaveOptions(shardings={"w": Sharding(Mesh((7,), ("x",)), PartitionSpec("x"))}),
    )
    return place


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"compression": "zstd", "layout": "zarr"}], ids=["plain", "compressed objects"]
)
def test_a_tensor_much_larger_than_the_limit_is_resharded_within_it(source, tmp_path, options):
    options = {
        "src": str(source),
        "dst": str(tmp_path / "b"),
        "mesh": "x=5",
        "rules": ["w=(None,x)"],
        "memory_limit": 64 * MiB,
        **options,
    }
    finished = subprocess.run(
        [sys.executable, CHILD, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    took = json.loads(finished.stdout)
    assert took["bytes"] == 384 * MiB
    assert took["peak"] <= 64 * MiB + PROCESS_BYTES
    assert took["read"] <= 1.05 * took["bytes"]


def test_a_limit_that_does_not_suffice_is_refused_before_anything_is_written_with_both_numbers(
    tmp_path,
):
    shardckpt.save(tmp_path / "a", {"w": np.zeros((4096, 1024), np.float32)})
    with pytest.raises(
        errors.BudgetError,
        match=r"memory_limit=8 MiB is too little for 1 worker: .* each needs .* "
        r"raise it to \d+ MiB",
    ):
        shardckpt.reshard(
            tmp_path / "a",
            tmp_path / "b",
            mesh=Mesh((2,), ("x",)),
            rules=["w=(x)"],
            memory_limit="8MiB",
        )
    with pytest.raises(errors.BudgetError, match="too little for 16 workers"):
        shardckpt.reshard(tmp_path / "a", tmp_path / "b", memory_limit="64MiB", workers=16)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("limit", [256 * MiB, 512 * MiB, 4096 * MiB])
def test_no_share_of_memory_exceeds_the_limit(limit, local, compressed):
    sizes = Sizes(2 * MiB, 16 * MiB, local, not local, compressed, compressed)
    memory = share(limit, None, 100, 256 * MiB, sizes, "a")
    assert limit * 0.9 <= memory.peak <= limit
    assert memory.room >= sizes.target_chunk
    assert memory.reading >= sizes.reading
    assert memory.writing >= sizes.writing


@pytest.mark.parametrize("compression", ["zstd", None])
@pytest.mark.parametrize("rows", [8, 512])
def test_what_a_reader_of_a_local_disk_reads_at_once_and_unpacks_is_what_it_has(
    tmp_path, compression, rows
):
    options = SaveOptions(
        shardings={"w": Sharding(Mesh((2,), ("x",)), PartitionSpec("x"))}, compression=compression
    )
    shardckpt.save(tmp_path / "a", {"w": np.zeros((rows, 4096), np.float32)}, options=options)
    checkpoint = shardckpt.open(tmp_path / "a")
    chunk = largest_chunk(checkpoint.record.structure.tensors.values())
    sizes = Sizes(chunk, 0, True, True, compression is not None, False)
    checkpoint.limit_reading(threads=READERS, memory=sizes.reading)
    unpacked = chunk if compression else 0
    assert READERS * (max(checkpoint.reader.limits.nbytes, chunk) + unpacked) <= sizes.reading


def test_a_thread_unpacks_a_chunk_when_the_one_before_it_is_gone(tmp_path):
    w = np.zeros((4096, 2048), np.float32)
    shardckpt.save(tmp_path / "a", {"w": w}, options=SaveOptions(compression="zstd"))
    checkpoint, like = shardckpt.open(tmp_path / "a"), {"w": np.ones_like(w)}
    checkpoint.limit_reading(threads=1, memory=MiB)
    chunk = largest_chunk(checkpoint.record.structure.tensors.values())
    assert chunk >= MiB // 2
    shardckpt.restore(checkpoint, like)  # has all modules then
    tracemalloc.start()
    try:
        shardckpt.restore(checkpoint, like)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not like["w"].any()
    assert peak <= LOCAL_RUN[0] + 1.8 * chunk


def test_a_base_may_be_compressed_where_what_lies_beside_it_is_not(tmp_path):
    state = {"a": np.zeros((1024, 1024), np.float32), "b": np.zeros(4, np.float32)}
    shardckpt.save(tmp_path / "0", state, options=SaveOptions(compression="zstd"))
    shardckpt.save(tmp_path / "1", state, options=SaveOptions(base=tmp_path / "0", skip=("a",)))
    options = ReshardOptions(mesh=Mesh((2,), ("x",)), memory_limit="64MiB", workers=1)
    of_base, beside = (
        plan_reshard(shardckpt.open(tmp_path / step), options).memory.reading for step in "01"
    )
    assert beside == of_base > READERS * LOCAL_RUN[0]


def test_readers_of_many_bases_have_the_threads_and_the_buffers_of_one(tmp_path):
    state = {f"w{i}": np.full((256, 4096), i, np.float32) for i in range(6)}
    for i in range(6):
        base = (
            {"base": tmp_path / str(i - 1), "skip": tuple(f"w{j}" for j in range(i))} if i else {}
        )
        shardckpt.save(tmp_path / str(i), state, options=SaveOptions(compression="zstd", **base))
    checkpoint = shardckpt.open(tmp_path / "5")
    checkpoint.limit_reading(threads=READERS, memory=MiB)
    before = set(threading.enumerate())
    tracemalloc.start()
    try:
        for _ in range(3):
            for name, tensor in state.items():
                assert np.array_equal(checkpoint.read(name), tensor)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(checkpoint.record.structure.bases) == 5
    new = [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("shardckpt-")
    ]
    assert len(new) <= READERS
    assert held <= (READERS + 1) * LOCAL_RUN[0] + 2 * MiB


def test_a_worker_has_half_a_gibibyte_of_the_job_or_there_are_fewer():
    sizes = Sizes(2 * MiB, 2 * MiB, True, True, False, False)
    assert share(4096 * MiB, None, 8, 64 * MiB, sizes, "a").workers == 1
    assert share(4096 * MiB, 3, 8, 64 * MiB, sizes, "a").workers == 3, (
        "unless somebody says how many"
    )


def test_a_job_of_less_than_a_task_has_several_all_the_same_whatever_memory_and_workers_it_has(
    tmp_path,
):
    shardckpt.save(
        tmp_path / "a",
        {"w": np.zeros((2048, 20480), np.float32)},
        options=SaveOptions(compression="zstd"),
    )
    checkpoint, mesh = shardckpt.open(tmp_path / "a"), Mesh((4,), ("x",))
    plans = [
        plan_reshard(
            checkpoint,
            ReshardOptions(
                mesh=mesh, rules=Rules.parse("w=(None,x)"), memory_limit=limit, workers=workers
            ),
        )
        for limit, workers in (("512MiB", None), ("128MiB", 1), ("1GiB", 4))
    ]
    assert all(plan.tasks == plans[0].tasks for plan in plans)
    assert [task.nbytes for task in plans[0].tasks] == pytest.approx(
        [64 * MiB, 64 * MiB, 32 * MiB], rel=0.1
    )


def test_no_step_needs_more_room_than_there_is(source):
    opened = shardckpt.open(source)
    rules = Rules.parse("w=(None,x)", mesh=Mesh((5,), ("x",)))
    plan = plan_reshard(opened, ReshardOptions(rules=rules, memory_limit="48MiB", workers=1))
    steps = [step for task in plan.tasks for share in task.shares for step in plan.steps(share)]
    assert len(steps) > 10
    assert max(step.box.size * 4 for step in steps) <= plan.memory.room < 48 * MiB
    assert plan.memory.peak <= 48 * MiB
