"""Checkpoints through fsspec, and what reads through fsspec."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import fsspec
import numpy as np
import pytest
import zarr
from convert_states import random, saved, sharded
from counting import counted, steps
from emulators import environment
from safetensors.numpy import load
from web_server import web_server

import shardckpt
from shardckpt.errors import DtypeError, OptionError, ReplacedError
from shardckpt.runs import pinning


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fs")
    state = {"model": {"w": random((96, 60)), "b": random((60,), "int32", 1)}}
    saved(
        folder / "runs/100",
        state,
        {"model/w": sharded("a", "b")},
        metadata={"config.json": {"model_type": "x"}},
    )
    shardckpt.export_safetensors(folder / "runs/100", folder / "out.safetensors")
    return folder


def test_files_have_the_exports_bytes(place):
    expected = (place / "out.safetensors").read_bytes()
    with fsspec.open(f"shardckpt://{place}/runs/100/model.safetensors") as file:
        assert file.read() == expected
    with fsspec.open(f"shardckpt://model.safetensors::file://{place}/runs/100") as file:
        file.seek(-5, 2)
        assert file.read() == expected[-5:]
    fs, path = fsspec.url_to_fs(f"shardckpt://{place}/runs/100/model.safetensors")
    assert fs.size(path) == len(expected)
    assert fs.cat_ranges([path, path], [0, -7], [9, -2]) == [expected[:9], expected[-7:-2]]
    assert fs.cat(f"{place}/runs/100/config.json") == b'{\n  "model_type": "x"\n}\n'
    assert load(fs.cat(path))["model.b"].tobytes() == random((60,), "int32", 1).tobytes()


def test_options_are_those_of_the_view(place):
    fs = fsspec.filesystem("shardckpt", dtype="bfloat16", include=["model/w"])
    whole = fsspec.filesystem("shardckpt").size(f"{place}/runs/100/model.safetensors")
    assert fs.size(f"{place}/runs/100/model.safetensors") < whole / 2
    assert (
        shardckpt.safe_open(place / "runs/100", "np", dtype="bfloat16")
        .get_slice("model.w")
        .get_dtype()
        == "BF16"
    )


def test_directories_are_listed(place):
    fs = fsspec.filesystem("shardckpt")
    root = f"{place}/runs/100"
    assert fs.ls(root, detail=False) == [
        f"{root}/model.safetensors",
        f"{root}/config.json",
        f"{root}/zarr",
    ]
    assert fs.isdir(root)
    assert fs.isfile(f"{root}/zarr/model/w/zarr.json")
    assert sorted(fs.find(root)) == sorted(
        [f"{root}/model.safetensors", f"{root}/config.json", *(f for f in fs.find(f"{root}/zarr"))]
    )
    assert not fs.exists(f"{root}/nothing")
    assert not fs.exists(f"{place}/nothing/model.safetensors")
    with pytest.raises(NotImplementedError, match="read-only"):
        fs.open(f"{root}/new", "wb")


@pytest.mark.parametrize(
    "form", ["shardckpt://{place}/runs/100/zarr", "shardckpt://zarr::file://{place}/runs/100"]
)
def test_zarr_opens_the_arrays(place, form):
    group = zarr.open_group(form.format(place=place), mode="r")
    assert np.array_equal(group["model/w"][10:20], random((96, 60))[10:20], equal_nan=True)
    assert sorted(group["model"].array_keys()) == ["b", "w"]


def test_a_checkpoint_that_was_replaced_is_seen(tmp_path):
    fs, path = fsspec.url_to_fs(f"shardckpt://{tmp_path}/c/model.safetensors")
    for size in (5, 9):
        shardckpt.save(
            tmp_path / "c", {"w": np.arange(size)}, options=shardckpt.SaveOptions(overwrite=True)
        )
        expected = {"w": list(range(size))}
        assert {name: one.tolist() for name, one in load(fs.cat(path)).items()} == expected
        with fs.open(path) as file:
            assert len(file.read()) == fs.size(path)
        assert fs.ls(f"{tmp_path}/c")[0]["size"] == fs.size(path)


def test_a_key_of_a_replaced_checkpoint_says_so_until_a_look_finds_the_new_one(tmp_path):
    fs = fsspec.filesystem("shardckpt", skip_instance_cache=True)
    place = tmp_path / "zarr/c"  # where files, too, are below a directory of that name
    for last in (1, 2, 3):
        options = shardckpt.SaveOptions(overwrite=True)
        shardckpt.save(place, {"w": np.arange(last, last + 5)}, options=options)
        if last == 2:
            with pytest.raises(ReplacedError, match="was replaced while it was being read"):
                fs.cat_file(f"{place}/zarr/w/c/0")
        assert load(fs.cat_file(f"{place}/model.safetensors"))["w"][0] == last
        assert np.frombuffer(fs.cat_file(f"{place}/zarr/w/c/0", 0, 8), np.int64) == [last]


def test_the_arrays_of_a_checkpoint_that_safetensors_cannot_hold_are_shown(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.arange(5), "odd": np.ones(2, np.complex128)})
    group = zarr.open_group(f"shardckpt://{tmp_path}/c/zarr", mode="r")
    assert group["odd"][...].tolist() == [1, 1]
    fs = fsspec.filesystem("shardckpt")
    for read in (fs.cat_file, fs.info, fs.open):
        with pytest.raises(DtypeError, match=r"safetensors has no complex128.*exclude="):
            read(f"{tmp_path}/c/model.safetensors")
    root = f"{tmp_path}/c"
    assert fs.ls(root, detail=False) == [f"{root}/zarr"]
    assert f"{root}/zarr/odd/zarr.json" in fs.find(root)
    chosen = fsspec.filesystem("shardckpt", exclude=["odd"])
    assert load(chosen.cat_file(f"{tmp_path}/c/model.safetensors"))["w"].tolist() == [*range(5)]


def test_a_mapping_that_was_wrong_may_be_corrected(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.arange(5)})
    mapping, path = tmp_path / "m.toml", f"{tmp_path}/c/model.safetensors"
    fs = fsspec.filesystem("shardckpt", mapping=str(mapping))
    mapping.write_text('[[map]]\nfrom = "wrong"\nto = "a"\n')
    with pytest.raises(OptionError, match="matches no tensor"):
        fs.cat_file(path)
    mapping.write_text('[[map]]\nfrom = "w"\nto = "a"\n')
    assert load(fs.cat_file(path))["a"].tolist() == [*range(5)]


def test_a_look_at_an_open_checkpoint_reads_no_record(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.arange(5)})
    record = tmp_path / "c" / "checkpoint.json"
    fs, path = fsspec.url_to_fs(f"shardckpt://{tmp_path}/c/model.safetensors")

    def look():
        assert fs.exists(path)
        assert fs.info(path) == fs.ls(path)[0]
        with fs.open(path):
            pass

    assert counted(look).read < record.stat().st_size
    pinning.pin(tmp_path / "c")  # which writes the record anew
    tag = fs.info(path)["ETag"]
    assert counted(look).read < record.stat().st_size
    assert fs.info(path)["ETag"] == tag


def test_many_checkpoints_stay_open_and_few_keep_blocks(tmp_path):
    fs = fsspec.filesystem("shardckpt", skip_instance_cache=True)
    nbytes = 4 << 20
    for number in range(9):
        small = {f"small{i}": i for i in range(300)}
        w = np.full(nbytes, number, np.uint8)
        shardckpt.save(tmp_path / f"{number}", {"w": w, **small})

    def read_parts():
        for _ in range(2):
            for number in range(9):
                for start in (1 << 20, 2 << 20):
                    data = fs.cat_file(f"{tmp_path}/{number}/model.safetensors", start, start + 99)
                    assert data == bytes([number]) * 99

    first = steps(read_parts)
    assert steps(read_parts) < first / 5
    tracemalloc.start()
    try:
        for _ in range(2):
            read_parts()
        assert tracemalloc.get_traced_memory()[0] < 6 * nbytes
    finally:
        tracemalloc.stop()


def test_of_very_many_checkpoints_most_are_closed(tmp_path):
    fs = fsspec.filesystem("shardckpt", skip_instance_cache=True)
    for number in range(36):
        shardckpt.save(tmp_path / f"{number}", {"w": np.full(3, number)})
    for _ in range(2):
        for number in range(36):
            data = fs.cat(f"{tmp_path}/{number}/model.safetensors")
            assert load(data)["w"].tolist() == [number] * 3
    assert len(fs._opened) < 36


def test_threads_that_open_one_place_open_it_once(tmp_path):
    shardckpt.save(tmp_path / "c", {f"w{i}": np.arange(3) for i in range(500)})
    fs = fsspec.filesystem("shardckpt", skip_instance_cache=True)
    with ThreadPoolExecutor(8) as pool:
        views = [*pool.map(lambda _: fs._find(f"{tmp_path}/c", look=True)[0], range(8))]
    assert len({id(view) for view in views}) == 1


def test_other_storages_are_chained(place, gcs_server):
    url = gcs_server.url("fs")
    with environment(gcs_server.env()):
        shardckpt.save(url, {"w": np.arange(5)})
        with fsspec.open(f"shardckpt://model.safetensors::{url}") as file:
            assert load(file.read())["w"].tolist() == list(range(5))
    with (
        web_server(place) as server,
        fsspec.open(f"shardckpt://model.safetensors::{server.url}/{quote('runs/100')}") as file,
    ):
        assert file.read() == (place / "out.safetensors").read_bytes()
