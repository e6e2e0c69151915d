"""An export that was killed, at whatever instant, has published nothing by halves, and the same
call continues where it stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import crc32c
import numpy as np
import pytest
from convert_states import random, saved, sharded
from paths import CHILDREN

import shardckpt
from shardckpt import errors
from shardckpt.convert.files import local_files
from shardckpt.convert.files.notes import Notes
from shardckpt.plan import grids
from shardckpt.streaming import stream as streaming

CHILD = CHILDREN / "export_killed.py"
KiB = 1 << 10


@pytest.fixture
def small(monkeypatch):
    """Blocks of 8 KiB, batches of 32 and notes of 64, so that a small export has all that a large
    one has."""
    monkeypatch.setattr(grids, "BLOCK_BYTES", 8 * KiB)
    monkeypatch.setattr(streaming, "_BATCH", 32 * KiB)
    monkeypatch.setattr(local_files, "_NOTE_BYTES", 64 * KiB)


def source(place):
    """Some 400 KiB in eight tensors."""
    return saved(
        place,
        {"model": {f"w{i}": random((60 + i, 200), seed=i) for i in range(8)}},
        {"model/w1": sharded("a", "b")},
    )


def left(directory):
    """Hidden names in a directory, which an interrupted export has left there."""
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


class StopError(Exception):
    """The test stops the export."""


def stopped(src, dst, after, **options):
    """Export until so many bytes are written, then be interrupted as by Ctrl-C."""

    def progress(done, total):
        if after <= done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardckpt.export(src, dst, progress=progress, **options)


def killed(place, every, *before):
    """Each death: operation, whether the file was there, bytes found, written and read by the next
    call."""
    command = [sys.executable, CHILD, place, str(every), *before]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def check_deaths(place, deaths, unpublished):
    """Nothing by halves, and not much written twice."""
    shardckpt.export(place / "checkpoint", place / "whole.safetensors")
    whole = (place / "whole.safetensors").read_bytes()
    results = [path.read_bytes() for path in place.glob("*.result")]
    assert len(results) == len(deaths)
    assert all(result == whole for result in results)
    there = [state for _, state, *_ in deaths]
    assert there == sorted(there, key=lambda state: state is True), "once it is there it stays"
    assert set(there) <= {unpublished, True}
    header = int.from_bytes(whole[:8], "little") + 8
    for _, _, resumed, written, _ in deaths:
        assert resumed < 0 or resumed + written == len(whole) or written == header
    bytes_found = [resumed for _, _, resumed, *_ in deaths if resumed >= 0]
    # Of a note every 64 KiB and batches of 32 at least the last but one was durable.
    assert max(bytes_found) >= len(whole) - 3 * 64 * KiB
    assert len(set(bytes_found)) >= 2


def test_a_kill_at_any_of_many_instants_publishes_nothing_by_halves_and_the_same_call_goes_on(
    tmp_path,
):
    source(tmp_path / "checkpoint")
    check_deaths(tmp_path, killed(tmp_path, 9), unpublished=False)


def test_a_kill_while_a_file_is_replaced_leaves_the_old_one_or_the_new_one(tmp_path):
    source(tmp_path / "checkpoint")
    check_deaths(tmp_path, killed(tmp_path, 11, "old"), unpublished=b"old".hex())


@pytest.mark.slow
@pytest.mark.parametrize("before", [(), ("old",)], ids=["new", "replaced"])
def test_a_kill_before_every_single_operation(tmp_path, before):
    source(tmp_path / "checkpoint")
    deaths = killed(tmp_path, 1, *before)
    check_deaths(tmp_path, deaths, unpublished=b"old".hex() if before else False)
    assert {"pwritev", "the second half of a pwritev", "fdatasync", "link", "unlink", "rmdir"} <= {
        operation for operation, *_ in deaths
    }


def test_a_process_killed_from_outside_is_gone_on_with_by_another(tmp_path):
    saved(tmp_path / "c", {f"w{i}": random((1024, 1024), seed=i) for i in range(12)})
    code = (
        "import sys, shardckpt\n"
        "from shardckpt.convert.files import local_files\n"
        "from shardckpt.streaming import stream\n"
        "local_files._NOTE_BYTES = stream._BATCH = 4 << 20\n"
        "shardckpt.export(sys.argv[1], sys.argv[2], progress=lambda done, total: print(done, "
        "flush=True))"
    )
    to = tmp_path / "out" / "a.safetensors"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "c", to], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        while int(child.stdout.readline()) < 20 << 20:
            pass
        notes = to.parent / f".{to.name}.partial" / "notes"
        deadline = time.monotonic() + 60
        while notes.exists() and notes.stat().st_size <= 32 and time.monotonic() < deadline:
            pass
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    if to.exists():  # it was faster than the signal
        to.unlink()
    report = shardckpt.export(tmp_path / "c", to)
    assert shardckpt.export(tmp_path / "c", tmp_path / "b.safetensors").nbytes == report.nbytes
    assert to.read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert left(to.parent) == []


def test_an_interrupted_export_goes_on_with_what_is_noted_and_reads_only_the_rest(tmp_path, small):
    source(tmp_path / "c")
    stopped(tmp_path / "c", tmp_path / "a.safetensors", 300 * KiB)
    assert left(tmp_path) == [".a.safetensors.partial"]
    assert not (tmp_path / "a.safetensors").exists()
    report = shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors")
    assert report.resumed_bytes >= 150 * KiB
    assert report.read_bytes <= report.nbytes - report.resumed_bytes + 64 * KiB
    shardckpt.export(tmp_path / "c", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert left(tmp_path) == []


@pytest.mark.parametrize("change", ["source", "dtype", "header"])
def test_another_export_to_the_same_name_starts_anew(tmp_path, small, change):
    source(tmp_path / "c")
    stopped(tmp_path / "c", tmp_path / "a.safetensors", 300 * KiB)
    options = {}
    if change == "source":
        state = {"model": {f"w{i}": random((60 + i, 200), seed=100 + i) for i in range(8)}}
        shardckpt.save(tmp_path / "c", state, options=shardckpt.SaveOptions(overwrite=True))
    else:
        options = {"dtype": "bfloat16"} if change == "dtype" else {"metadata": {"a": "b"}}
    report = shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors", **options)
    assert report.resumed_bytes == 0
    shardckpt.export(tmp_path / "c", tmp_path / "b.safetensors", **options)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert left(tmp_path) == []


def test_notes_that_are_torn_count_as_far_as_they_are_whole(tmp_path, small):
    source(tmp_path / "c")
    stopped(tmp_path / "c", tmp_path / "a.safetensors", 340 * KiB)
    notes = tmp_path / ".a.safetensors.partial" / "notes"
    whole = notes.read_bytes()
    shardckpt.export(tmp_path / "c", tmp_path / "b.safetensors")
    expected = (tmp_path / "b.safetensors").read_bytes()
    partial = {path.name: path.read_bytes() for path in notes.parent.iterdir()}
    for damaged in (
        whole[:-1],
        whole[:40],
        whole[:20],
        b"",
        whole + bytes(64),
        whole[:60] + bytes(len(whole) - 60),
        whole + b"\xff" * 9,
    ):
        notes.parent.mkdir(exist_ok=True)
        for name, content in partial.items():
            (notes.parent / name).write_bytes(content)
        notes.write_bytes(damaged)
        shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors")
        assert (tmp_path / "a.safetensors").read_bytes() == expected
        (tmp_path / "a.safetensors").unlink()


def test_what_an_earlier_call_wrote_and_the_disk_has_lost_is_found_out(tmp_path, small):
    source(tmp_path / "c")
    stopped(tmp_path / "c", tmp_path / "a.safetensors", 340 * KiB)
    with (tmp_path / ".a.safetensors.partial" / "0").open("r+b") as file:
        file.seek(5000)
        file.write(b"lost")
    with pytest.raises(
        errors.CorruptionError,
        match=r"'model\.w\d' does not read back as it was written to .*; nothing was published",
    ):
        shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_a_file_system_that_gives_less_than_is_asked_for_is_asked_again(
    tmp_path, small, monkeypatch
):
    source(tmp_path / "c")
    preadv = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, buffers, at: preadv(fd, [buffers[0][: max(1, len(buffers[0]) // 3)]], at),
    )
    shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors")
    monkeypatch.undo()
    shardckpt.export(tmp_path / "c", tmp_path / "b.safetensors", verify=False)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_two_exports_to_one_name_do_not_mix(tmp_path, small):
    source(tmp_path / "c")
    ends = []

    def progress(done, total):
        if done == total:
            with pytest.raises(
                errors.StorageError,
                match="another export is writing there; wait for it, or choose another name",
            ):
                shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors")
            ends.append(done)

    shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors", progress=progress)
    assert len(ends) == 1


def test_a_file_that_is_there_stays_unless_it_is_to_be_replaced(tmp_path, small):
    source(tmp_path / "c")
    to = tmp_path / "a.safetensors"
    to.write_bytes(b"mine")
    with pytest.raises(
        errors.AlreadyExistsError,
        match=r"is there already; choose another place, or replace it with overwrite=True",
    ):
        shardckpt.export(tmp_path / "c", to)
    assert to.read_bytes() == b"mine"
    to.unlink()

    def somebody(done, total):
        if done == total:
            to.write_bytes(b"theirs")

    with pytest.raises(errors.AlreadyExistsError, match="there already"):
        shardckpt.export(tmp_path / "c", to, progress=somebody)
    assert to.read_bytes() == b"theirs"
    assert left(tmp_path) == []
    shardckpt.export(tmp_path / "c", to, overwrite=True)
    assert to.stat().st_size > 400_000
    to.unlink()
    to.mkdir()
    with pytest.raises(errors.AlreadyExistsError, match="is a directory"):
        shardckpt.export(tmp_path / "c", to, overwrite=True)


def test_an_interrupted_export_is_kept_though_somebody_else_has_put_a_file_there(tmp_path, small):
    source(tmp_path / "c")
    to = tmp_path / "a.safetensors"
    stopped(tmp_path / "c", to, 300 * KiB)
    to.write_bytes(b"theirs")
    with pytest.raises(errors.AlreadyExistsError):
        shardckpt.export(tmp_path / "c", to)
    assert shardckpt.export(tmp_path / "c", to, overwrite=True).resumed_bytes >= 150 * KiB


def test_a_refused_export_leaves_the_progress_of_another_one(tmp_path, small):
    source(tmp_path / "c")
    to = tmp_path / "a.safetensors"
    to.write_bytes(b"old")
    stopped(tmp_path / "c", to, 300 * KiB, overwrite=True)
    with pytest.raises(errors.AlreadyExistsError):
        shardckpt.export(tmp_path / "c", to, dtype="bfloat16")
    assert shardckpt.export(tmp_path / "c", to, overwrite=True).resumed_bytes >= 150 * KiB


def test_an_export_that_is_interrupted_as_it_begins_leaves_no_blocks_of_another_one(
    tmp_path, small, monkeypatch
):
    """Else the next call took its empty drafts for what the other one had written."""
    source(tmp_path / "c")
    source(tmp_path / "other")
    to, begin = tmp_path / "a.safetensors", Notes.begin

    def interrupted(notes, identity, names):
        if notes.has_blocks():
            raise KeyboardInterrupt
        begin(notes, identity, names)

    stopped(tmp_path / "c", to, 300 * KiB)
    with monkeypatch.context() as patch:
        patch.setattr(Notes, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shardckpt.export(tmp_path / "other", to)
    shardckpt.export(tmp_path / "c", to, verify=False)
    shardckpt.export(tmp_path / "c", tmp_path / "b.safetensors")
    assert to.read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_the_log_of_an_earlier_release_is_no_list_of_files(tmp_path, small):
    source(tmp_path / "c")
    partial = tmp_path / "out" / ".model.safetensors.partial"
    partial.mkdir(parents=True)
    note = np.array([1, 0xFFFFFFFF], "<u4").tobytes()
    checked = note + crc32c.crc32c(note).to_bytes(4, "little")
    (partial / "notes").write_bytes(bytes(32) + checked)
    shardckpt.export(tmp_path / "c", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("size", [None, "200KiB"])
def test_what_an_earlier_release_left_of_an_export_of_several_files_is_removed(
    tmp_path, small, size
):
    source(tmp_path / "c")
    partial = tmp_path / "out" / ".model.safetensors.index.json.partial"
    partial.mkdir(parents=True)
    (partial / "0").write_bytes(b"draft")
    lock = Notes(partial / "notes")
    with pytest.raises(errors.StorageError, match=r"index\.json\.partial"):
        shardckpt.export(tmp_path / "c", tmp_path / "out", max_shard_size=size)
    assert (partial / "0").exists()
    lock.close()
    shardckpt.export(tmp_path / "c", tmp_path / "out", max_shard_size=size)
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name[0] == "."]


def test_a_file_that_was_named_and_removed_before_all_was_tidied_up_is_made_again(
    tmp_path, small, monkeypatch
):
    source(tmp_path / "c")
    to = tmp_path / "a.safetensors"

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(local_files, "_remove", interrupt)
        with pytest.raises(KeyboardInterrupt):
            shardckpt.export(tmp_path / "c", to)
    whole = to.read_bytes()
    to.unlink()
    assert shardckpt.export(tmp_path / "c", to).read_bytes == 0
    assert to.read_bytes() == whole
    assert left(tmp_path) == []


def test_a_damaged_chunk_stops_the_export_and_leaves_nothing(tmp_path, small):
    checkpoint = source(tmp_path / "c")
    files = checkpoint.reader.whole_table().files
    data = tmp_path / "c" / checkpoint.record.attempt / files[0]
    content = bytearray(data.read_bytes())
    content[-3000] ^= 4
    data.write_bytes(content)
    with pytest.raises(
        errors.CorruptionError,
        match=r"is damaged: .*with a backup, or leave the tensor out with exclude=",
    ):
        shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "name"), [("safetensors", "a.safetensors"), ("torch", "a.pt"), ("dcp", "a")]
)
def test_files_that_may_not_grow_so_large_are_refused_with_what_to_do(tmp_path, to, name):
    source(tmp_path / "c")
    code = (
        "import gc, resource, sys, shardckpt; resource.setrlimit(resource.RLIMIT_FSIZE, "
        "(100_000, 100_000))\n"
        "try: shardckpt.export(sys.argv[1], sys.argv[2], to=sys.argv[3])\n"
        "except shardckpt.ShardckptError as e: print(type(e).__name__, e)\n"
        "gc.collect()  # torch's writer is destroyed, and writes once more"
    )
    command = [sys.executable, "-c", code, tmp_path / "c", tmp_path / name, to]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert re.match("StorageError cannot (create|write)", finished.stdout)
    assert "ulimit -f" in finished.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


@pytest.mark.long
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_an_interrupt_while_torch_ends_its_archive_does_not_end_the_process(tmp_path, to):
    source(tmp_path / "c")
    code = (
        "import gc, signal, sys, shardckpt, torch\n"
        "writer = torch.serialization._open_zipfile_writer_buffer\n"
        "end = writer.__exit__\n"
        "def interrupted(*all): signal.raise_signal(signal.SIGINT); end(*all)\n"
        "writer.__exit__ = interrupted\n"
        "try: shardckpt.export(sys.argv[1], sys.argv[2], to=sys.argv[3])\n"
        "except KeyboardInterrupt: print('interrupted')\n"
        "gc.collect()  # torch's writer is destroyed, and writes once more"
    )
    command = [sys.executable, "-c", code, tmp_path / "c", tmp_path / "a", to]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert (finished.returncode, finished.stdout) == (0, "interrupted\n"), finished.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_only_what_can_be_done_better_by_the_same_call_is_kept(tmp_path, small):
    source(tmp_path / "c")

    def progress(done, total):
        if done > 300 * KiB:
            raise StopError

    with pytest.raises(StopError):
        shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors", progress=progress)
    assert left(tmp_path) == []
