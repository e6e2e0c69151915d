"""The C extension: what it moves is what numpy would move, it moves nothing that was not checked,
and its errors are Python's."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from below_python import CALLS, lead_through_os
from failing import failing, state
from hypothesis import given, settings
from hypothesis import strategies as st
from moves import FOREVER, check_changes, check_in, check_out, stored
from paths import ROOT, TESTS, TOOLS

import shardckpt
from shardckpt.errors import CorruptionError, StorageError
from shardckpt.io import extension
from tools.build_extension import build

moving = extension.moving
with_extension = pytest.mark.skipif(moving is None, reason="the extension is off, or was not built")
SOURCE = ROOT / "shardckpt" / "io"
seeds = st.integers(0, 1 << 32)


@with_extension
@given(seeds)
@settings(max_examples=300, deadline=None)
def test_chunks_are_written_as_numpy_lays_them_out(seed):
    check_out(moving, seed)


@with_extension
@given(seeds)
@settings(max_examples=300, deadline=None)
def test_chunks_are_read_to_where_numpy_would_copy_them_and_the_first_wrong_one_is_named(seed):
    check_in(moving, seed)


@pytest.mark.long
@with_extension
@given(seeds)
@settings(max_examples=300, deadline=None)
def test_what_differs_from_an_earlier_chunk_is_found_as_numpy_finds_it(seed):
    check_changes(moving, seed)


def run_moves(built, count, **environment):
    command = [sys.executable, TESTS / "support" / "moves.py", str(built), "0", str(count)]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )


@with_extension
def test_the_checksum_by_table_is_the_same():
    assert run_moves(moving.__file__, 100, SHARDCKPT_CRC_TABLE="1").returncode == 0


@pytest.mark.long
@with_extension
def test_processors_without_sse_find_the_same_changes(tmp_path):
    built = build(ROOT, tmp_path, ("-DWITHOUT_SSE",))
    assert run_moves(built, 100).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@with_extension
def test_sanitizers_find_nothing(tmp_path):
    subprocess.run(
        [sys.executable, TOOLS / "build_extension.py", "--sanitize", tmp_path], check=True
    )
    compiler = os.environ.get("CC", "cc")
    library = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("this compiler has no AddressSanitizer")
    options = {"ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=8", "PYTHONMALLOC": "malloc"}
    done = run_moves(tmp_path / "_moving.abi3.so", 150, LD_PRELOAD=library, **options)
    assert done.returncode == 0, done.stderr[-3000:]


def blocks(*shapes, dtype="u4"):
    return tuple(np.ones(shape, dtype) for shape in shapes)


CRCS, SCRATCH, TOO_MANY = np.zeros(1, "u4"), np.zeros(4096, "u1"), (1,) * 9
WRONG_WRITES = {
    "no such chunk": (0, 0, blocks(4), (4,), 1, 2, CRCS, SCRATCH),
    "before the file": (-1, 0, blocks(4), (4,), 0, 1, CRCS, SCRATCH),
    "beyond all files": (2**63 - 10, 0, blocks(4), (4,), 0, 1, CRCS, SCRATCH),
    "no blocks": (0, 0, (), (), 0, 1, CRCS, SCRATCH),
    "an empty block": (0, 0, blocks(0), (4,), 0, 1, CRCS, SCRATCH),
    "blocks that differ": (0, 0, blocks(4, 5), (4,), 0, 1, CRCS, SCRATCH),
    "an empty chunk": (0, 0, blocks(4), (0,), 0, 1, CRCS, SCRATCH),
    "a chunk of more dimensions": (0, 0, blocks(4), (4, 1), 0, 1, CRCS, SCRATCH),
    "a chunk that no number counts": (0, 0, blocks((1, 1)), (2**40, 2**40), 0, 1, CRCS, SCRATCH),
    "too many dimensions": (0, 0, blocks(TOO_MANY), TOO_MANY, 0, 1, CRCS, SCRATCH),
    "too few checksums": (0, 0, blocks(8), (4,), 0, 2, CRCS, SCRATCH),
    "too little scratch": (0, 0, blocks(4), (4,), 0, 1, CRCS, SCRATCH[:3]),
    "a scratch that is written": (0, 0, (SCRATCH[8:12],), (4,), 0, 1, CRCS, SCRATCH),
    "checksums in the scratch": (0, 0, blocks(4), (4,), 0, 1, SCRATCH[:4].view("u4"), SCRATCH),
    "write-back that began where nothing was": (0, 1, blocks(4), (4,), 0, 1, CRCS, SCRATCH),
}


@with_extension
@pytest.mark.parametrize("case", WRONG_WRITES)
def test_a_write_that_cannot_be_right_is_refused_before_a_byte_moves(tmp_path, case):
    with (tmp_path / "file").open("wb") as file, pytest.raises(ValueError):
        moving.write_chunks(file.fileno(), *WRONG_WRITES[case], FOREVER)
    assert (tmp_path / "file").stat().st_size == 0


@with_extension
def test_chunks_that_the_memory_has_no_room_for_are_refused():
    crcs, (block,) = np.zeros(2, "u4"), blocks(8)
    memory = np.zeros(2 * (4 * block.itemsize + 4), "u1")
    assert moving.write_chunks(-1, 0, 0, (block,), (4,), 0, 2, crcs, memory, FOREVER) == (0, 2, 0)
    with pytest.raises(ValueError, match="too little memory"):
        moving.write_chunks(-1, 0, 0, (block,), (4,), 0, 2, crcs, memory[:-1], FOREVER)


CHUNK, ROOM = np.zeros(64, "u1"), np.zeros(1000, "u1")
PAIRS = CHUNK.copy().view("u2")
WRONG_COMPARISONS = {
    "another number of chunks": ((CHUNK,), (), 2, np.zeros(3, "i8"), ROOM),
    "another number of results": ((CHUNK,), (PAIRS,), 2, np.zeros(6, "i8"), ROOM),
    "a chunk of another length": ((CHUNK,), (PAIRS[:16],), 2, np.zeros(3, "i8"), ROOM),
    "elements of three bytes": ((CHUNK[:63],), (CHUNK[:63].copy(),), 3, np.zeros(3, "i8"), ROOM),
    "elements of another size": ((CHUNK,), (CHUNK.copy(),), 2, np.zeros(3, "i8"), ROOM),
    "too many dimensions": (
        (CHUNK[:2],),
        (PAIRS[:1].reshape(TOO_MANY),),
        2,
        np.zeros(3, "i8"),
        ROOM,
    ),
    "too little room": ((CHUNK,), (PAIRS,), 2, np.zeros(3, "i8"), ROOM[:99]),
    "the same chunk twice": ((CHUNK,), (CHUNK.view("u2"),), 2, np.zeros(3, "i8"), ROOM),
    "the same chunk in reverse order": (
        (CHUNK,),
        (CHUNK.view("u2")[::-1],),
        2,
        np.zeros(3, "i8"),
        ROOM,
    ),
    "room in a chunk": ((ROOM[:64],), (PAIRS,), 2, np.zeros(3, "i8"), ROOM),
    "results in the room": ((CHUNK,), (PAIRS,), 2, ROOM[:24].view("i8"), ROOM),
}


@with_extension
@pytest.mark.parametrize("case", WRONG_COMPARISONS)
def test_a_comparison_that_cannot_be_right_is_refused(case):
    with pytest.raises(ValueError):
        moving.find_changes(*WRONG_COMPARISONS[case])


@with_extension
def test_a_chunk_without_elements_overlaps_nothing_whatever_its_strides():
    memory = np.zeros(2000, "u2")
    empty = np.lib.stride_tricks.as_strided(memory, (0, 900), (1800, 2))
    room, results = memory[:400].view("u1"), memory[400:412].view("i8")
    assert moving.find_changes((memory[500:500].view("u1"),), (empty,), 2, results, room) == 1
    assert results.tolist() == [0, 0, 0]


@with_extension
def test_a_chunk_that_cannot_be_written_does_not_become_the_new_one():
    constant = CHUNK.copy()
    constant.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        moving.find_changes((constant,), (PAIRS,), 2, np.zeros(3, "i8"), ROOM)


def band(offset=0, count=1, itemsize=4, chunk=(4,), places=()):
    return offset, count, itemsize, chunk, places


CONSTANT = np.ones(4, "u4")
CONSTANT.flags.writeable = False
WRONG_READS = {
    "before the file": (band(offset=-1),),
    "beyond all files": (band(offset=2**63 - 10),),
    "no chunks": (band(count=0),),
    "more chunks than checksums": (band(count=2),),
    "chunks that no number counts": (band(count=2**62, chunk=(2**10,)),),
    "elements of no bytes": (band(itemsize=0),),
    "elements larger than the scratch": (band(itemsize=5000),),
    "an empty chunk": (band(chunk=(0,)),),
    "too many dimensions": (band(chunk=TOO_MANY),),
    "a place that reaches beyond": (band(places=((np.zeros(4, "u4"), (1,), 0),)),),
    "a place of more dimensions": (band(places=((np.zeros((4, 1), "u4"), (0, 0), 0),)),),
    "a place of other elements": (band(places=((np.zeros(4, "u2"), (0,), 0),)),),
    "a place in the scratch": (band(places=((SCRATCH[:16].view("u4"), (0,), 0),)),),
    "an empty place": (band(places=((np.zeros(0, "u4"), (0,), 0),)),),
    "a place before its chunk": (band(places=((np.zeros(4, "u4"), (-1,), 0),)),),
    "a place for another number of chunks": (
        band(count=2, places=((np.zeros(7, "u4"), (0,), 0),)),
    ),
    "chunks that follow along nothing": (band(count=2, places=((np.zeros(8, "u4"), (0,), 1),)),),
    "no tuple": ([0, 1, 4, (4,), ()],),
}


@with_extension
@pytest.mark.parametrize("case", WRONG_READS)
def test_a_read_that_cannot_be_right_is_refused_before_a_byte_moves(tmp_path, case):
    (tmp_path / "file").write_bytes(bytes(100))
    places = [memory for one in WRONG_READS[case] for memory, _, _ in one[4]]
    before = [place.copy() for place in places]
    with (tmp_path / "file").open("rb") as file, pytest.raises(ValueError):
        moving.read_chunks(file.fileno(), WRONG_READS[case], 0, CRCS, SCRATCH, FOREVER)
    assert all((a == b).all() for a, b in zip(before, places, strict=True))


@with_extension
def test_memory_that_may_not_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(stored(np.zeros(4, "u4"), (4,))[0])
    with (tmp_path / "file").open("rb") as file, pytest.raises((ValueError, BufferError)):
        moving.read_chunks(
            file.fileno(), (band(places=((CONSTANT, (0,), 0),)),), 0, CRCS, SCRATCH, FOREVER
        )
    assert (CONSTANT == 1).all()


@pytest.fixture
def through_os():
    end = lead_through_os()
    yield
    end()


@with_extension
@pytest.mark.usefixtures("through_os")
@pytest.mark.parametrize("seed", range(30))
def test_short_transfers_and_signals_are_gone_on_from(monkeypatch, seed):
    pwrite, preadv, calls = os.pwrite, os.preadv, iter(range(10**9))

    def interrupted(function):
        def called(fd, data, offset):
            if next(calls) % 3 == 0:
                raise InterruptedError(errno.EINTR, "a signal")
            return function(fd, data, offset)

        return called

    monkeypatch.setattr(
        os,
        "pwrite",
        interrupted(lambda fd, data, offset: pwrite(fd, data[: max(1, len(data) // 2)], offset)),
    )
    monkeypatch.setattr(
        os,
        "preadv",
        interrupted(
            lambda fd, into, offset: preadv(fd, [into[0][: max(1, len(into[0]) // 3)]], offset)
        ),
    )
    check_out(extension.moving, seed)
    check_in(extension.moving, seed)


@with_extension
@pytest.mark.usefixtures("through_os")
def test_ctrl_c_ends_a_call_that_the_kernel_interrupts(tmp_path, monkeypatch):
    import signal

    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)
        raise InterruptedError(errno.EINTR, "a signal")

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shardckpt.save(tmp_path / "c", state(1))


@with_extension
@pytest.mark.usefixtures("through_os")
def test_a_disk_that_is_full_is_named_with_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"hosts/00000.*disk is full"):
        shardckpt.save(tmp_path / "c", state(1))


@pytest.mark.usefixtures("through_os")
def test_a_file_that_cannot_be_read_is_named_with_the_tensor(tmp_path, monkeypatch):
    shardckpt.save(tmp_path / "c", state(1))

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match=r"^w.*cannot read .*hosts/00000.*Input/output error"):
        shardckpt.restore(tmp_path / "c")


@pytest.mark.parametrize("fault", ["byte", "end"])
def test_both_engines_say_the_same_of_damage(tmp_path, monkeypatch, fault):
    shardckpt.save(tmp_path / "c", {"w": np.arange(600_000.0)}, options=shardckpt.SaveOptions())
    (data,) = (
        path for path in (tmp_path / "c").rglob("d/00000") if path.stat().st_size > 4_000_000
    )
    content = bytearray(data.read_bytes())
    if fault == "byte":
        content[3_000_000] ^= 1
    data.write_bytes(content[:3_500_000] if fault == "end" else content)
    messages = []
    for engine in (moving, None):
        monkeypatch.setattr(extension, "moving", engine)
        with pytest.raises(CorruptionError) as error:
            shardckpt.restore(tmp_path / "c")
        messages.append(
            (
                str(error.value),
                [
                    (str(damage.box), damage.reason)
                    for damage in shardckpt.open(tmp_path / "c").verify().damage
                ],
            )
        )
    assert messages[0] == messages[1]


def test_no_operation_is_out_of_reach_of_the_proofs_that_let_it_fail(tmp_path, monkeypatch):
    """As many as Python makes, at least; and every byte of the data files passes one."""
    counts = {}
    for name, engine in (("C", moving), ("Python", None)):
        monkeypatch.setattr(extension, "moving", engine)
        place = tmp_path / name
        with failing(place, 10**9) as fault:
            shardckpt.save(place, state(1))
            shardckpt.restore(place)
        counts[name] = fault.operations
    assert counts["C"] >= counts["Python"] > 50


@with_extension
@pytest.mark.usefixtures("through_os")
def test_every_byte_that_the_extension_moves_passes_through_the_table_of_its_calls(
    tmp_path, monkeypatch
):
    moved = dict.fromkeys(CALLS, 0)

    def counted(name, function):
        def called(*arguments):
            nbytes = function(*arguments)
            moved[name] += nbytes
            return nbytes

        return called

    for name in CALLS:
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    array = np.random.default_rng(0).random((1000, 700))
    shardckpt.save(tmp_path / "c", {"w": array})
    nbytes = shardckpt.open(tmp_path / "c").record.totals["stored_bytes"]
    assert (shardckpt.restore(tmp_path / "c")["w"] == array).all()
    assert moved == {"pwrite": nbytes, "preadv": nbytes}


HARMLESS = {
    "calloc",
    "free",
    "memcmp",
    "memcpy",
    "memmove",
    "memset",
    "__errno_location",
    "clock_gettime",
    "getauxval",
    "getenv",
}
HINTS = {"sync_file_range"}
"""They are in the table, too, and tell nothing of what is written."""
"""Functions beside the table that the extension may call: none moves data out of the process, or
into it."""


@with_extension
def test_the_extension_imports_no_other_call_of_the_kernel_and_makes_none_beside_the_table():
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", moving.__file__],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    symbols = {line.split()[-1].partition("@")[0] for line in listed.splitlines()}
    linkers = {
        "__cxa_finalize",
        "__gmon_start__",
        "__stack_chk_fail",
        "__memcpy_chk",
        "__memset_chk",
        "__memmove_chk",
    }
    others = {
        s
        for s in symbols
        if not s.startswith(("Py", "_Py", "_ITM_")) and s not in linkers | HARMLESS
    }
    assert {symbol.removesuffix("64") for symbol in others} == {*CALLS, *HINTS}
    relocations = subprocess.run(
        ["readelf", "-rW", moving.__file__], capture_output=True, text=True, check=True
    ).stdout
    kinds = [
        line.split()[2]
        for line in relocations.splitlines()
        if re.search(rf" ({'|'.join(others)})@", line)
    ]
    assert len(kinds) == len(others), "each is in the table, and called by nothing else"
    assert not any("JUMP" in kind or "GLOB" in kind for kind in kinds)


def test_the_core_knows_nothing_of_python_and_all_files_are_small():
    core, comparing, binding = (
        (SOURCE / name).read_text() for name in ("moving.c", "changes.c", "moving_binding.c")
    )
    for source in (core, comparing):
        assert "Python.h" not in source.partition("*/")[2]
        assert "Py" not in re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    assert f"MOST_DIMS = {extension.MOST_DIMS}," in core
    assert core.count("\n") + comparing.count("\n") + binding.count("\n") <= 1163
