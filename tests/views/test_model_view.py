"""Virtual files have the bytes of exported ones, at any offset and in any order of reads."""

from __future__ import annotations

import io
import json
import random as rnd
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from convert_states import layouts, random, saved, sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open as stock_open
from safetensors.numpy import load

import shardckpt
from shardckpt.errors import CorruptionError, DtypeMismatchError, NotFoundError, OptionError
from shardckpt.streaming.elements import AHEAD_BYTES
from shardckpt.views.model_view import ModelView, safetensors_view

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "bool", "int64")


@st.composite
def states(draw):
    """A few tensors with layouts: also without elements, and without dimensions."""
    state, shardings = {}, {}
    for i in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 7, 24, 60]), max_size=3)))
        name = f"w{i}"
        state[name] = random(shape, draw(st.sampled_from(DTYPES)), seed=i)
        if shape:
            shardings[name] = draw(layouts(len(shape)))
    return state, shardings


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([{"**": "float16"}, {"w0": "float32", "*": "bfloat16"}]),
        "include": st.just(["w0", "w1"]),
        "rename": st.just("s/w(.)/layers.\\1.weight/"),
        "add_prefix": st.just("model."),
        "max_shard_size": st.integers(1, 4000),
        "metadata": st.dictionaries(st.text("ab"), st.text("cd"), max_size=2),
    },
)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(states(), OPTIONS, st.integers(0, 2**32), st.integers(0, 1 << 16))
def test_a_view_has_the_bytes_of_the_export(made, options, seed, cache_bytes):
    state, shardings = made
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = saved(f"{folder}/c", state, shardings)
        try:
            report = shardckpt.export_safetensors(f"{folder}/c", f"{folder}/out", **options)
        except shardckpt.ShardckptError as e:
            with pytest.raises(type(e)):
                ModelView(checkpoint, **options)
            return
        view = ModelView(checkpoint, cache_bytes=cache_bytes, **options)
        assert set(report.files) == set(view.sizes)
        draw = rnd.Random(seed)
        for name in report.files:
            expected = Path(folder, "out", name).read_bytes()
            file = view.open(name)
            assert len(file) == view.sizes[name] == len(expected)
            assert file.read() == expected
            for _ in range(20):
                offset, n = draw.randrange(len(expected) + 9), draw.randrange(len(expected) + 9)
                assert file.pread(offset, n) == expected[offset : offset + n]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of 24 MiB in chunks of two dimensions, and the bytes of its export."""
    folder = tmp_path_factory.mktemp("large")
    state = {f"w{i}": random((2048, 768), seed=i) for i in range(4)}
    shardings = {f"w{i}": sharded("b", "a") for i in range(4)}
    saved(folder / "c", state, shardings)
    shardckpt.export_safetensors(folder / "c", folder / "out.safetensors")
    return folder / "c", (folder / "out.safetensors").read_bytes()


@pytest.mark.parametrize("nbytes", [10_000, 1 << 20, 5 << 20])
def test_a_file_that_is_read_from_front_to_back_reads_each_stored_byte_once(large, nbytes):
    place, expected = large
    file = safetensors_view(place)
    assert b"".join(iter(lambda: file.read(nbytes), b"")) == expected
    stored = sum(t.nbytes for t in file.view.checkpoint.record.structure.tensors.values())
    assert file.view.checkpoint.stats.bytes_read <= 1.01 * stored


def test_an_eighth_of_the_rows_reads_hardly_more(large):
    place, expected = large
    file = safetensors_view(place)
    header = int.from_bytes(expected[:8], "little")
    entry = json.loads(expected[8 : 8 + header])["w2"]["data_offsets"]
    rows = (entry[1] - entry[0]) // 8
    assert (
        file.pread(8 + header + entry[0] + 3 * rows, rows)
        == expected[8 + header + entry[0] + 3 * rows :][:rows]
    )
    assert file.view.checkpoint.stats.bytes_read <= 1.1 * rows


def test_small_parts_at_random_places_are_read_by_rows_and_a_block_that_is_read_again_is_kept(
    large,
):
    place, expected = large
    view = ModelView(place)
    file = view.open()
    header, stats, cache = len(expected) - (24 << 20), view.checkpoint.stats, view._reader._cache
    block = view._reader._nbytes((0, 0))
    for i, place in enumerate((block + 3000, block + 99, 3 * block + 1, block + 77_000)):
        needed = stats.bytes_needed
        assert file.pread(header + place, 1000) == expected[header + place :][:1000]
        assert stats.bytes_needed - needed == (2 * 768 * 4, block, 768 * 4, 0)[i]
        assert list(cache) == ([(0, 1)] if i else [])


def test_the_header_reads_no_chunk(large):
    place, expected = large
    file = safetensors_view(place)
    header = 8 + int.from_bytes(expected[:8], "little")
    assert file.read(header) == expected[:header]
    assert file.view.checkpoint.stats.reads == 0


def test_many_threads_read_one_view(large):
    place, expected = large
    file = safetensors_view(place)
    draw = rnd.Random(0)
    ranges = [(draw.randrange(len(expected)), draw.randrange(1 << 20)) for _ in range(100)]
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda one: file.pread(*one), ranges))
    assert parts == [expected[a : a + n] for a, n in ranges]


def test_memory_is_the_cache_and_what_is_read_ahead(large):
    place, expected = large
    view = ModelView(place, cache_bytes=4 << 20)
    file = view.open()
    for _ in range(0, len(expected), 1 << 16):
        file.read(1 << 16)
        assert sum(block.nbytes for block in view._reader._cache.values()) <= 4 << 20
    assert AHEAD_BYTES > 4 << 20, "the cache is smaller than what would be read ahead"


def test_it_is_a_file_for_others(large):
    place, expected = large
    file = safetensors_view(place)
    assert (file.readable(), file.seekable(), file.writable(), file.tell()) == (
        True,
        True,
        False,
        0,
    )
    assert file.seek(-10, io.SEEK_END) == len(expected) - 10
    assert file.read(100) == expected[-10:]
    assert file.read(1) == b""
    assert file.seek(5) == file.tell() == 5
    assert io.BufferedReader(safetensors_view(place), 1 << 16).read(70_000) == expected[:70_000]
    loaded = load(safetensors_view(place).read())
    assert all(
        np.array_equal(loaded[f"w{i}"].view(np.uint8), random((2048, 768), seed=i).view(np.uint8))
        for i in range(4)
    )
    with pytest.raises(ValueError, match="before the beginning"):
        file.seek(-1)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_damage_is_an_error_that_names_tensor_and_file(tmp_path):
    saved(tmp_path / "c", {"w": random((64, 64))})
    (data,) = (tmp_path / "c").rglob("d/00000")
    raw = bytearray(data.read_bytes())
    raw[100] ^= 1
    data.write_bytes(raw)
    file = safetensors_view(tmp_path / "c")
    with pytest.raises(CorruptionError, match=r"w.*00000"):
        file.read()


def test_options_that_change_no_bytes_and_files_that_are_not_there_are_errors(large):
    place, _ = large
    with pytest.raises(OptionError, match="a view does not have the option overwrite="):
        ModelView(place, overwrite=True)
    with pytest.raises(OptionError, match="makes 4 files; name one with file="):
        safetensors_view(place, max_shard_size="1MiB")
    with pytest.raises(NotFoundError, match="no file 'x'"):
        safetensors_view(place, "x")


@pytest.mark.parametrize("framework", ["np", "pt", "jax"])
def test_safe_open_is_as_safetensors_has_it(tmp_path, framework):
    state = {"a": random((16, 9), "float32"), "b": {"c": np.arange(7, dtype=np.int32)}}
    saved(tmp_path / "c", state)
    shardckpt.export_safetensors(tmp_path / "c", tmp_path / "out.safetensors", metadata={"k": "v"})
    with (
        shardckpt.safe_open(tmp_path / "c", framework=framework, metadata={"k": "v"}) as ours,
        stock_open(
            tmp_path / "out.safetensors", framework={"jax": "flax"}.get(framework, framework)
        ) as stock,
    ):
        assert (sorted(ours.keys()), ours.metadata(), ours.offset_keys()) == (
            sorted(stock.keys()),
            stock.metadata(),
            stock.offset_keys(),
        )
        every, expected = ours.get_tensors(), stock.get_tensors()
        assert list(every) == list(expected)
        for name in sorted(ours.keys()):
            assert type(every[name]) is type(expected[name])
            assert np.asarray(every[name]).tobytes() == np.asarray(expected[name]).tobytes()
            assert type(ours.get_tensor(name)) is type(stock.get_tensor(name))
            assert (
                np.asarray(ours.get_tensor(name)).tobytes()
                == np.asarray(stock.get_tensor(name)).tobytes()
            )
            one, other = ours.get_slice(name), stock.get_slice(name)
            assert (one.get_shape(), one.get_dtype()) == (other.get_shape(), other.get_dtype())
            assert np.asarray(one[2:5]).tobytes() == np.asarray(other[2:5]).tobytes()
        with pytest.raises(
            shardckpt.errors.NamesMismatchError, match=r"no tensor 'aa' \(did you mean 'a'"
        ):
            ours.get_tensor("aa")


def test_all_tensors_are_read_together(tmp_path):
    state = {f"w{i}": np.full(3, i) for i in range(200)}
    state |= {"none": np.zeros((0, 2)), "one": np.array(5.0)}
    saved(tmp_path / "c", state)
    checkpoint = shardckpt.open(tmp_path / "c")
    tensors = shardckpt.safe_open(checkpoint, "np").get_tensors()
    assert checkpoint.stats.reads < 10
    for name, array in state.items():
        assert tensors[name].shape == array.shape
        assert np.array_equal(tensors[name], array)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"framework": ["pt"]}, "framework="),
        ({"framework": "pt", "device": "gpu 1"}, "device='gpu 1'"),
        ({"framework": "pt", "device": [1]}, "device="),
        ({"framework": "jax", "device": "cuda"}, r"device='cuda'.*jax\.devices"),
    ],
)
def test_safe_open_refuses_frameworks_and_devices_that_are_none(tmp_path, options, words):
    saved(tmp_path / "c", {"a": np.ones(2)})
    with pytest.raises(shardckpt.errors.OptionError, match=words):
        shardckpt.safe_open(tmp_path / "c", **options)


def test_safe_open_names_a_device_that_is_not_here(tmp_path):
    saved(tmp_path / "c", {"a": np.ones(2)})
    with (
        shardckpt.safe_open(tmp_path / "c", "pt", device="cuda:99") as f,
        pytest.raises(shardckpt.errors.LeafError, match="'a': no tensor can be made on cuda:99"),
    ):
        f.get_tensor("a")


@pytest.mark.parametrize("elements", [np.array([2**40 + 5]), np.array([1e300])])
def test_safe_open_refuses_elements_that_jax_would_make_shorter(tmp_path, elements):
    saved(tmp_path / "c", {"a": elements})
    with shardckpt.safe_open(tmp_path / "c", framework="jax") as f:
        with pytest.raises(
            DtypeMismatchError, match=r"'a' is .*64, and JAX makes it .*32 here; .*jax_enable_x64"
        ):
            f.get_tensor("a")
        with jax.enable_x64(True):
            assert np.asarray(f.get_tensor("a")).tobytes() == elements.tobytes()


def test_views_of_other_elements_have_another_identity(tmp_path):
    saved(tmp_path / "c", {"a": random((4, 4)), "b": random((4, 4), seed=1)})
    rules = {
        "transposed": 'from = "a"\nto = "a"\ntranspose = true',
        "rotary": 'from = "a"\nto = "a"\nrotary = {heads = 1, to = "pairs"}',
    }
    for name, rule in rules.items():
        (tmp_path / f"{name}.toml").write_text(f"[[map]]\n{rule}")
    options = [
        {},
        *({"mapping": tmp_path / f"{name}.toml"} for name in rules),
        {"rename": ["s/^a$/c/", "s/^b$/a/", "s/^c$/b/"]},
    ]
    views = [ModelView(tmp_path / "c", **one) for one in options]
    assert len({view.open().readall() for view in views}) == len(views)
    assert len({view.identity for view in views}) == len(views)
    assert [ModelView(tmp_path / "c", **one).identity for one in options] == [
        view.identity for view in views
    ]
