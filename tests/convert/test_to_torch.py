"""A state as one file of torch.save, against torch itself."""

from __future__ import annotations

import os
import zipfile
import zlib
from itertools import pairwise

import exported
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardckpt
from shardckpt import errors
from shardckpt.convert.formats.torch.crc32 import PartsCrc
from shardckpt.convert.options import StateOptions
from shardckpt.convert.whole_state import write_state
from shardckpt.io.url import parse
from shardckpt.reading.checkpoint import Checkpoint

MiB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return exported.save(tmp_path_factory.mktemp("torch") / "checkpoint")


def export(source, place, **options):
    return write_state(
        Checkpoint(source),
        parse(place),
        "torch",
        StateOptions(**{"memory_limit": 64 * MiB, **options}),
    )


@pytest.fixture(scope="module")
def file(checkpoint, tmp_path_factory):
    place = tmp_path_factory.mktemp("out") / "state.pt"
    export(checkpoint, place)
    return place


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_the_state_bit_by_bit_without_leave_to_run_code(file, mmap):
    loaded, expected = torch.load(file, weights_only=True, mmap=mmap), exported.state()
    for group in ("model", "dtypes"):
        assert list(loaded[group]) == list(expected[group])
        for name, array in expected[group].items():
            tensor = loaded[group][name]
            assert (str(tensor.dtype), tuple(tensor.shape)) == (
                f"torch.{array.dtype.name}",
                array.shape,
            ), name
            assert exported.raw(tensor) == array.tobytes(), name
    assert (
        loaded["optimizer"]["state"][1]["m"].numpy().tobytes()
        == expected["optimizer"]["state"][1]["m"].tobytes()
    )
    assert [loaded["optimizer"]["state"][i]["step"] for i in (0, 1)] == [7, 8]
    assert loaded["list"][1] == {"nested": [True, None, -1.5]}
    assert (loaded["none"], loaded["nothing"]) == (None, {})


def test_tied_tensors_are_one_memory_and_one_record(checkpoint, file):
    loaded = torch.load(file, weights_only=True)
    assert loaded["model"]["w"].data_ptr() == loaded["model"]["tied"].data_ptr()
    tensors = len(shardckpt.open(checkpoint).record.structure.tensors)
    assert len([name for name in zipfile.ZipFile(file).namelist() if "/data/" in name]) == tensors


def test_other_readers_of_zip_files_find_nothing_wrong(file):
    assert zipfile.ZipFile(file).testzip() is None


def test_what_torch_saves_itself_is_the_same_but_for_its_own_name(file, tmp_path):
    with (tmp_path / "state.pt").open("wb") as theirs:
        torch.save(torch.load(file, weights_only=True), theirs)
    theirs, ours = zipfile.ZipFile(tmp_path / "state.pt"), zipfile.ZipFile(file)
    assert theirs.namelist() == ours.namelist()
    for one, other in zip(theirs.infolist(), ours.infolist(), strict=True):
        # Keys that are one str object are written once.
        if not one.filename.endswith(("serialization_id", "data.pkl")):
            assert (one.CRC, one.file_size) == (other.CRC, other.file_size), one.filename


def test_numbers_of_numpy_are_python_s_and_what_cannot_be_read_without_leave_is_left_out_by_name(
    tmp_path,
):
    state = {
        "n": np.float32(0.5),
        "i": np.int8(-3),
        "empty": b"",
        "bytes": b"\xff",
        "huge": 1 << 3000,
        "size": torch.Size([2]),
        "z": 1j,
    }
    exported.save(
        tmp_path / "c", state | {"dtype": torch.float8_e5m2, "when": np.datetime64("2024-01-01")}
    )
    written = export(tmp_path / "c", tmp_path / "s.pt")
    loaded = torch.load(tmp_path / "s.pt", weights_only=True)
    assert loaded == {
        "n": 0.5,
        "i": -3,
        "bytes": b"\xff",
        "size": torch.Size([2]),
        "z": 1j,
        "dtype": torch.float8_e5m2,
    }
    assert (type(loaded["n"]), type(loaded["i"]), type(loaded["size"])) == (float, int, torch.Size)
    assert [note.split(":")[0] for note in written.notes] == [
        f"'{name}' is left out" for name in ("empty", "huge", "when")
    ]


def test_a_part_of_it_in_another_dtype(checkpoint, tmp_path):
    export(
        checkpoint,
        tmp_path / "s.pt",
        include="model/*",
        exclude=["model/rows"],
        dtype={"model/uneven": "bfloat16"},
    )
    loaded, expected = torch.load(tmp_path / "s.pt", weights_only=True), exported.state()["model"]
    assert list(loaded) == ["model"]
    assert list(loaded["model"]) == [name for name in expected if name != "rows"]
    assert torch.equal(
        loaded["model"]["uneven"].nan_to_num(),
        torch.from_numpy(expected["uneven"]).to(torch.bfloat16).nan_to_num(),
    )
    with pytest.raises(errors.NamesMismatchError, match="selects none of its names"):
        export(checkpoint, tmp_path / "none.pt", include="nothing like it")
    with pytest.raises(errors.NamesMismatchError, match=r"exclude=.modle/.*selects none of its"):
        export(checkpoint, tmp_path / "none.pt", exclude="modle/**")
    with pytest.raises(
        errors.NamesMismatchError, match=r"include=\['modle/\*\*'\] selects none of its names"
    ):
        export(checkpoint, tmp_path / "none.pt", include=["model/**", "modle/**"])


def test_a_dtype_that_torch_lacks_is_refused_by_name_and_nothing_is_left(tmp_path):
    exported.save(tmp_path / "c", {"a": {"w": exported.bits((3,), "int4", 0)}})
    with pytest.raises(errors.DtypeError, match=r"'a/w': torch has no dtype int4"):
        export(tmp_path / "c", tmp_path / "s.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_an_export_that_fails_leaves_nothing_and_what_was_there_stays(checkpoint, tmp_path):
    place = tmp_path / "s.pt"
    place.write_bytes(b"mine")
    with pytest.raises(errors.AlreadyExistsError, match=r"s\.pt is there already"):
        export(checkpoint, place)

    def stop(done, _total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, place, overwrite=True, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["s.pt"]
    assert place.read_bytes() == b"mine"
    export(checkpoint, place, overwrite=True)
    assert "model" in torch.load(place, weights_only=True)


def test_what_a_killed_export_left_goes_with_the_next_one_and_a_live_one_s_stays(
    checkpoint, tmp_path
):
    place, killed = tmp_path / "s.pt", tmp_path / ".s.pt.01234567.partial"
    killed.write_bytes(b"left")
    sizes = []

    def count(done, total):
        if done == total:
            sizes.append(len(list(tmp_path.glob(".s.pt.*.partial"))))

    def other(done, total):
        if done == total and not sizes:
            sizes.append(0)
            export(checkpoint, place, progress=count)

    with pytest.raises(errors.AlreadyExistsError):
        export(checkpoint, place, progress=other)  # another one, meanwhile, was faster
    assert sizes == [0, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["s.pt"]


def test_it_is_written_to_a_local_disk_only_and_only_where_there_is_room(
    checkpoint, tmp_path, monkeypatch
):
    with pytest.raises(errors.OptionError, match="written to a local disk only"):
        export(checkpoint, "memory://somewhere/s.pt")
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((*status[:4], 1, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    with pytest.raises(
        errors.StorageError, match=r"needs [\d.]+ [KMGT]iB .* the disk has [\d.]+ [KMGT]iB free"
    ):
        export(checkpoint, tmp_path / "s.pt")
    assert not list(tmp_path.iterdir())


@given(st.data(), st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_the_crc_of_parts_in_any_order_is_that_of_the_whole(draw, data, cuts):
    cuts = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    crc = PartsCrc()
    for begin, end in draw.draw(st.permutations([*pairwise(cuts)])):
        crc.add(begin, end - begin, zlib.crc32(data[begin:end]))
    assert (crc.value, crc.nbytes, crc.parts) == (zlib.crc32(data), len(data), {})


def test_of_a_row_of_blocks_one_part_is_held_for_each_row():
    data, crc, most = bytes(range(240)), PartsCrc(), 0
    for row in range(0, 240, 80):  # two rows of 40 bytes, in blocks of 10 bytes each
        for block in range(0, 40, 10):
            for at in (row + block, row + 40 + block):
                crc.add(at, 10, zlib.crc32(data[at : at + 10]))
                most = max(most, len(crc.parts))
    assert (crc.value, crc.nbytes, most) == (zlib.crc32(data), 240, 1)
