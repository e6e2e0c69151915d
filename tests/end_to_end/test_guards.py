"""Limits of each operation's cost, by counts: bytes, system calls, memory, copied elements, and
Python steps per chunk.

Times depend on the machine; these do not. A bound on bytes, calls of the kernel or memory is what
was counted when it was written, and up to a sixth more. A bound on steps is twice what was counted:
it is there for what takes another order of steps, not for one function more. If you make an
operation cheaper, lower its bounds.
"""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from counting import counted, steps, turns
from safetensors.numpy import save_file

import shardckpt
from shardckpt import Box, Mesh, PartitionSpec, SaveOptions, Sharding, frameworks
from shardckpt.io import extension
from shardckpt.io.cores import cores
from shardckpt.state.flatten import flatten

KiB, MiB = 1 << 10, 1 << 20
SIDE, MATRICES, CHUNK = 1024, 16, 128
NBYTES = MATRICES * (SIDE * SIDE * 4 + SIDE * 4)
CHUNKS = MATRICES * ((SIDE // CHUNK) ** 2 + 1)
READING = max(2, min(8, cores())) * 8 * MiB + 4 * MiB
"""One run for each thread that reads, and what is made of chunk tables."""
ROWS = Sharding(Mesh((8,), ("x",)), PartitionSpec("x"))
PORTIONS = NBYTES // MiB + 2 if extension.moving else 0
"""Calls of the kernel by the extension, which moves a MiB with each, without the interpreter and
without its lock."""
OPTIONS = SaveOptions(shardings={"matrix*": ROWS})
MOST_INDEX_FILES = 8
"""Two, unless TensorStore flushes the nodes of one of its two transactions in several files, as it
does in one save of a hundred or so, more often on a busy machine."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A state of 64 MiB in chunks of 64 KiB, and where it is saved."""
    directory = tmp_path_factory.mktemp("guards")
    rng = np.random.default_rng(0)
    state = {f"matrix{i}": rng.random((SIDE, SIDE), np.float32) for i in range(MATRICES)}
    state |= {f"norm{i}": rng.random(SIDE, np.float32) for i in range(MATRICES)}
    shardckpt.save(directory / "kept", state, options=OPTIONS)
    (piece,) = shardckpt.open(directory / "kept").record.structure.tensors["matrix0"].pieces
    assert piece.chunks == (CHUNK, CHUNK)
    return SimpleNamespace(
        state=state,
        kept=directory / "kept",
        out=directory / "out",
        file=directory / "model.safetensors",
    )


@pytest.mark.parametrize(
    ("save", "threads", "at_once"),
    [
        pytest.param(shardckpt.save, min(4, cores()), 4 * MiB, id="save"),
        pytest.param(
            lambda *where, **how: shardckpt.save_async(*where, **how).wait(),
            1,
            2 * MiB,
            id="save_async",
        ),
    ],
)
def test_a_save_writes_its_bytes_once_in_a_few_large_calls(place, save, threads, at_once):
    took = counted(
        lambda: save(place.out, place.state, options=OPTIONS),
        lambda: shutil.rmtree(place.out, ignore_errors=True),
    )

    assert NBYTES <= took.written <= 1.002 * NBYTES
    assert took.read <= 80 * KiB, "a save reads what it has written of indexes, and no data"
    assert took.writes <= 50 + 2 * MOST_INDEX_FILES + PORTIONS
    assert took.reads <= 30
    assert took.peak <= threads * at_once + 1 * MiB, (
        "elements go from the state, or from the buffer that is kept, to where they are laid "
        "out, to the file"
    )
    assert took.steps <= 26 * CHUNKS
    files = [
        path.relative_to(place.out).parts[1:] for path in place.out.rglob("*") if path.is_file()
    ]
    index = [file for file in files if file[:1] == ("d",)]
    assert len(index) <= MOST_INDEX_FILES
    assert len(files) - len(index) <= 6 + 3 * threads, "a lane for each thread"


@pytest.mark.parametrize(
    "save",
    [shardckpt.save, lambda *where: shardckpt.save_async(*where).wait()],
    ids=["save", "save_async"],
)
def test_a_small_tensor_costs_a_save_few_steps(tmp_path, save):
    def saving(tensors):
        state = {f"block{i}": np.ones((64, 64), np.float32) for i in range(tensors)}
        save(tmp_path / f"warm{tensors}", state)
        return steps(lambda: save(tmp_path / f"counted{tensors}", state))

    assert saving(300) - saving(100) <= 350 * 200, (
        "of which 17 are for reading the record as every reader will, before it is published"
    )


@pytest.mark.parametrize(
    "make",
    [np.ones, torch.ones, lambda shape: torch.nn.Parameter(torch.ones(shape))],
    ids=["numpy", "torch", "parameter"],
)
def test_a_tensor_of_a_common_class_costs_the_walk_of_a_state_few_steps(make):
    def walking(tensors):
        state = {f"block{i}": make((8, 8)) for i in range(tensors)}
        return steps(
            lambda: flatten(
                state,
                frameworks.is_tensor,
                frameworks.identity,
                frameworks.meaning,
                composite=frameworks.composite,
            )
        )

    walking(1)  # finds the adapter of the class
    # Where torch_xla is imported, a tensor may be one of its own.
    most = 30 if "torch_xla" not in sys.modules else 50
    assert walking(300) - walking(100) <= most * 200, (
        "its class says which adapter it has, so that no adapter is asked"
    )


def test_a_restore_in_place_reads_its_bytes_once_in_large_reads_and_copies_none_twice(place):
    targets = {name: np.ones_like(array) for name, array in place.state.items()}

    took = counted(lambda: shardckpt.restore(place.kept, targets))

    assert all(np.array_equal(targets[name], array) for name, array in place.state.items())
    assert NBYTES <= took.read <= 1.002 * NBYTES
    assert took.written == 0
    assert took.reads <= 17 + PORTIONS
    assert took.copied <= NBYTES
    assert took.peak <= READING
    assert took.steps <= 22 * CHUNKS


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """The same state twice, of 64 and of 320 MiB, and where it is saved."""
    cases = []
    for number in (1, 5):
        state = {f"m{i}": np.full((4096, 4096), i, np.float32) for i in range(number)}
        place = tmp_path_factory.mktemp("turns")
        shardckpt.save(place / "kept", state)
        cases.append(SimpleNamespace(state=state, kept=place / "kept", out=place / "out"))
    return cases


MOVING = {"write_chunks": 1, "read_chunks": 3} | dict.fromkeys(
    ("crc32c", "lay_out_all", "Band.scatter", "preadv", "begin_write_back", "_copy"), 1
)
"""Calls whose number grows with the bytes, and times that each gives the lock up; a file is opened
and closed for each that reads. Those for a lane and its files depend on the number of threads."""


@pytest.mark.long
@pytest.mark.skipif(
    not extension.moving,
    reason="Python gives the lock up several times per chunk: 740 to 2,240 times per GB",
)
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda at: shardckpt.save(at.out, at.state), id="save"),
        pytest.param(lambda at: shardckpt.save_async(at.out, at.state).wait(), id="save_async"),
        pytest.param(lambda at: shardckpt.restore(at.kept, at.state), id="restore"),
        pytest.param(lambda at: shardckpt.open(at.kept).verify(), id="verify"),
    ],
)
def test_a_quarter_of_a_gigabyte_more_gives_the_interpreter_lock_up_a_few_times_more(
    sizes, monkeypatch, operation
):
    # Else a busy disk decides how many calls there are.
    monkeypatch.setattr(extension, "LONGEST_S", 1e6)
    totals = []
    for at in sizes:
        shutil.rmtree(at.out, ignore_errors=True)
        counts = turns(lambda at=at: operation(at))
        totals.append(sum(counts.get(name, 0) * times for name, times in MOVING.items()))
    small, large = totals
    assert 0 <= large - small <= 27, "100 per GB"


def test_restore_and_verify_of_many_small_tensors_work_out_once_what_is_alike_of_them(tmp_path):
    state = {f"block.{i}.weight": np.full((64, 64), i, np.float32) for i in range(400)}
    shardckpt.save(tmp_path, state)
    targets = {name: np.zeros_like(array) for name, array in state.items()}

    assert steps(lambda: shardckpt.restore(tmp_path, targets)) <= 290 * len(state)
    assert steps(lambda: shardckpt.open(tmp_path).verify()) <= 270 * len(state)
    assert all(np.array_equal(targets[name], array) for name, array in state.items())


@pytest.mark.parametrize(
    ("box", "steps"),
    [
        pytest.param(Box((0, 0), (SIDE, SIDE // 8)), 172, id="an eighth of the columns"),
        pytest.param(Box((SIDE // 2, 0), (SIDE, SIDE // 4)), 164, id="a shard of another mesh"),
    ],
)
def test_a_part_is_read_and_nothing_else(place, box, steps):
    needed = MATRICES * box.size * 4

    def read():
        checkpoint = shardckpt.open(place.kept)
        return [checkpoint.read(f"matrix{i}", box) for i in range(MATRICES)]

    took = counted(read)

    assert all(
        np.array_equal(part, place.state[f"matrix{i}"][box.slices]) for i, part in enumerate(read())
    )
    assert needed <= took.read <= 1.01 * needed
    assert took.written == 0
    assert took.reads <= needed // (CHUNK * CHUNK * 4) + 20, "one call per chunk at most"
    assert took.peak <= needed + READING
    assert took.steps <= steps * needed // (CHUNK * CHUNK * 4)


def test_verifying_reads_every_stored_byte_once(place):
    took = counted(lambda: shardckpt.open(place.kept).verify())

    assert NBYTES <= took.read <= 1.004 * NBYTES
    assert took.written == 0
    assert took.reads <= 70 + PORTIONS
    assert took.copied == 0
    assert took.peak <= READING
    assert took.steps <= 198 * CHUNKS


def test_an_export_writes_its_bytes_once_and_reads_them_and_what_it_wrote_once(place):
    took = counted(
        lambda: shardckpt.export_safetensors(place.kept, place.file),
        lambda: place.file.unlink(missing_ok=True),
    )

    assert NBYTES <= took.written <= 1.001 * NBYTES
    assert NBYTES <= took.read <= 2.002 * NBYTES, (
        "to compare the file with the checksums of what should be in it takes a look at it"
    )
    assert took.reads + took.writes <= 100 + NBYTES // (256 * KiB), (
        "what was written is read in blocks of 256 KiB"
    )
    assert took.copied <= NBYTES
    assert took.writes <= 12, "a batch of 16 MiB is one call"
    assert took.peak <= 80 * MiB, "four batches, and a run for each thread that reads"
    assert took.steps <= 42 * CHUNKS


@pytest.mark.long
def test_an_import_writes_its_bytes_once_and_reads_them_and_what_it_wrote_once_in_large_calls(
    place, tmp_path
):
    layers = 2000
    state = {f"layer{i}": np.full((32, 32), i, np.float32) for i in range(layers)}
    save_file(state, tmp_path / "model.safetensors")
    nbytes = sum(array.nbytes for array in state.values())

    took = counted(
        lambda: shardckpt.import_checkpoint(tmp_path / "model.safetensors", place.out),
        lambda: shutil.rmtree(place.out, ignore_errors=True),
    )

    assert nbytes <= took.written <= 1.1 * nbytes, (
        "and what describes each tensor, to other readers too"
    )
    assert 2 * nbytes <= took.read <= 2.1 * nbytes
    assert took.reads + took.writes <= 56
    assert took.copied <= nbytes // 100, "elements are read to where they are written from"
    assert took.steps <= 1120 * layers
