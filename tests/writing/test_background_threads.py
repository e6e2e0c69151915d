"""Threads that write in a background save: how many there are, and what they share."""

import resource
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import NotFoundError, OptionError, StorageError
from shardckpt.writing.background import Saver
from shardckpt.writing.encoder import Encoder

MiB = 1 << 20


def state(mebibytes):
    return {"w": np.random.default_rng(mebibytes).integers(0, 1 << 63, (mebibytes, 128, 1024))}


@pytest.fixture
def writers(monkeypatch):
    """The threads that have written, and the portions in which they did."""
    seen, append = [], Encoder.append
    monkeypatch.setattr(
        Encoder,
        "append",
        lambda self, *of, **how: (
            seen.append((self, threading.get_ident())) or append(self, *of, **how)
        ),
    )
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("cores", "asked", "most"),
    [(1, None, 1), (2, None, 1), (8, None, 4), (8, 2, 2), (2, 6, 6), (64, None, 8)],
)
def test_a_background_save_writes_with_half_of_the_cores_or_as_many_as_asked(
    tmp_path, monkeypatch, writers, cores, asked, most
):
    """256 MiB are enough for eight threads."""
    monkeypatch.setenv("SHARDCKPT_THREADS", str(cores))
    large = state(256)
    shardckpt.save_async(
        tmp_path / "c", large, options=SaveOptions(background_threads=asked)
    ).wait()
    encoders = {encoder for encoder, _ in writers}
    assert len(encoders) <= most
    assert most == 1 or len({thread for _, thread in writers}) > 1
    record = shardckpt.open(tmp_path / "c").record
    assert len(record.hosts) == 1
    lanes = {
        path.name
        for path in (tmp_path / "c" / record.attempt / "hosts" / "00000").iterdir()
        if path.is_dir()
    }
    assert lanes == {"0"}, "one database names the files of all threads"
    assert (shardckpt.restore(tmp_path / "c")["w"] == large["w"]).all()


@pytest.mark.parametrize("asked", [0, -1, 1.5, True, "4"])
def test_a_number_of_threads_that_is_none_is_refused_by_name(asked):
    with pytest.raises(OptionError, match="background_threads"):
        SaveOptions(background_threads=asked)


@pytest.mark.long
@given(
    sizes=st.lists(st.integers(0, 5 * MiB), min_size=1, max_size=12),
    limit=st.sampled_from([16 * MiB, 24 * MiB, 128 * MiB]),
    threads=st.integers(1, 5),
    compression=st.sampled_from([None, "zstd"]),
)
@settings(max_examples=25, deadline=None)
def test_what_several_threads_write_is_what_was_saved_and_memory_stays_in_its_limit(
    tmp_path_factory, sizes, limit, threads, compression
):
    """Some states fit, others stream through a few parts."""
    place, calls = tmp_path_factory.mktemp("saved") / "c", []
    arrays = {
        f"t{i}": np.random.default_rng(i).integers(0, 255, size, np.uint8)
        for i, size in enumerate(sizes)
    }
    arrays["big"] = np.random.default_rng(99).integers(0, 255, (40, MiB), np.uint8)
    options = SaveOptions(background_threads=threads, compression=compression, memory_limit=limit)
    saver = Saver(memory_limit=limit)
    report = saver.begin(
        place, arrays, options, progress=lambda done, total: calls.append((done, total))
    ).wait()
    restored = shardckpt.restore(place)
    assert all((restored[name] == arrays[name]).all() for name in arrays)
    assert saver.pool.high_water <= limit
    assert report.streamed == (limit < 128 * MiB)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls}), (
        "progress goes forward"
    )
    assert calls[-1] == (report.nbytes, report.nbytes)
    assert shardckpt.open(place).verify().ok


@pytest.mark.parametrize("limit", [16 * MiB, 512 * MiB])
def test_an_error_of_any_thread_fails_the_save_and_its_memory_is_given_back(
    tmp_path, monkeypatch, limit
):
    append, calls = Encoder.append, []

    def failing(self, *of, **how):
        calls.append(self)
        if len(calls) == 5:
            raise StorageError("the disk is full")
        append(self, *of, **how)

    monkeypatch.setattr(Encoder, "append", failing)
    saver, options = (
        Saver(memory_limit=limit),
        SaveOptions(background_threads=3, memory_limit=limit),
    )
    with pytest.raises(StorageError, match="the disk is full"):  # at once where it streams
        saver.begin(tmp_path / "c", state(200), options).wait()
    assert saver.pool.take_at_once(limit) is not None
    with pytest.raises(NotFoundError):
        shardckpt.open(tmp_path / "c")
    monkeypatch.undo()
    shardckpt.save(tmp_path / "c", state(1), options=SaveOptions(overwrite=True))


@pytest.mark.timeout(60)
def test_a_full_disk_ends_a_save_whose_other_thread_waits_for_the_only_part_of_the_buffer(tmp_path):
    """The framework's copies of this leaf alone take more than the limit."""
    large = {"w": np.arange(24 * MiB, dtype=">f4")}
    saver = Saver(memory_limit=32 * MiB)
    options = SaveOptions(background_threads=2, memory_limit=32 * MiB)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MiB, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            saver.begin(tmp_path / "c", large, options).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert saver.pool.take_at_once(32 * MiB) is not None
    saver.begin(tmp_path / "c", large, options).wait()
    assert (shardckpt.restore(tmp_path / "c")["w"] == large["w"]).all()


def test_a_save_beside_others_of_the_same_saver_writes_its_own_bytes(tmp_path):
    saver, options = Saver(memory_limit=256 * MiB), SaveOptions(background_threads=3)
    states = [state(64 + i) for i in range(3)]
    handles = [saver.begin(tmp_path / str(i), each, options) for i, each in enumerate(states)]
    for i, handle in enumerate(handles):
        handle.wait()
        assert (shardckpt.restore(tmp_path / str(i))["w"] == states[i]["w"]).all()
