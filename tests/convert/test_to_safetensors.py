"""An exported file is, byte for byte, the one that safetensors itself would write of the whole
state."""

from __future__ import annotations

import json
import uuid

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from convert_states import layouts, random, saved, sharded
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt import errors
from shardckpt.convert.formats.safetensors import layout as safetensors_layout
from shardckpt.convert.formats.safetensors.layout import DTYPES, lay_out
from shardckpt.layout.dtypes import DTYPES as ALL
from shardckpt.layout.dtypes import by_name
from shardckpt.plan import grids
from shardckpt.reading.naming.outputs import OutputTensor


def as_torch(array):
    """The same bits as a torch tensor."""
    if array.dtype.name in ("bool", "complex64"):
        return torch.from_numpy(array.copy())
    bits = torch.from_numpy(
        array.reshape(-1).view(f"u{array.itemsize}").reshape(array.shape).copy()
    )
    return bits.view(getattr(torch, array.dtype.name))


def reference(path, tensors, **metadata):
    """Bytes of the file that safetensors itself writes."""
    safetensors.torch.save_file(
        {name: as_torch(t) for name, t in tensors.items()},
        path,
        metadata={"format": "pt", **metadata},
    )
    return path.read_bytes()


@given(data=st.data())
@settings(max_examples=30)
def test_a_file_is_the_one_that_safetensors_writes_whatever_dtypes_shapes_and_layouts(
    tmp_path_factory, data
):
    place = tmp_path_factory.mktemp("export")
    names = data.draw(
        st.lists(
            st.sampled_from(["a", "b.c", "é", "layers.0.w", "Z", '"', "0"]),
            min_size=1,
            max_size=5,
            unique=True,
        )
    )
    state, shardings = {}, {}
    for i, name in enumerate(names):
        shape = data.draw(st.lists(st.integers(0, 20), max_size=3).map(tuple))
        state[name] = random(shape, data.draw(st.sampled_from(sorted(DTYPES))), i)
        shardings[name] = data.draw(layouts(len(shape)))
    compression = data.draw(st.sampled_from([None, "zstd"]))
    url = f"memory://{uuid.uuid4()}"
    saved(url, state, shardings, compression=compression)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "BLOCK_BYTES", data.draw(st.sampled_from([64, 1 << 10, 4 << 20])))
        report = shardckpt.export_safetensors(url, place / "a.safetensors")
    assert (place / "a.safetensors").read_bytes() == reference(place / "b.safetensors", state)
    assert report.nbytes == sum(t.nbytes for t in state.values())
    assert sorted(path.name for path in place.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_every_dtype_that_safetensors_has_for_torch_is_exported_in_its_order(tmp_path):
    state = {f"t{i}": random((3, 8), name, i) for i, name in enumerate(sorted(DTYPES))}
    saved(tmp_path / "c", {"model": state, "scalar": random((), "float64"), "none": random((0, 4))})
    report = shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors", metadata={"made": "here"})
    named = {f"model.{name}": t for name, t in state.items()} | {
        "scalar": random((), "float64"),
        "none": random((0, 4)),
    }
    written = (tmp_path / "a.safetensors").read_bytes()
    expected = reference(tmp_path / "b.safetensors", named, made="here")
    length = int.from_bytes(expected[:8], "little") + 8
    assert written[length:] == expected[length:]
    # The metadata comes in any order.
    assert json.loads(written[8:length]) == json.loads(expected[8:length])
    assert report.tensors == len(DTYPES) + 2


def test_in_a_directory_the_file_is_called_as_transformers_looks_for_it(tmp_path):
    saved(tmp_path / "c", {"w": random((3,))})
    report = shardckpt.export(tmp_path / "c", tmp_path / "hf" / "model")
    assert report.files == ("model.safetensors",)
    assert (tmp_path / "hf" / "model" / "model.safetensors").read_bytes() == reference(
        tmp_path / "b", {"w": random((3,))}
    )


def test_readers_find_tensors_and_slices_of_them(tmp_path):
    w = random((300, 700), "bfloat16")
    saved(tmp_path / "c", {"w": w, "step": 5}, {"w": sharded("a", "b")})
    report = shardckpt.export_safetensors(tmp_path / "c", tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert list(file.keys()) == ["w"]
        part = file.get_slice("w")[17:200, 3:600]
    assert torch.equal(part.view(torch.uint16), as_torch(w)[17:200, 3:600].view(torch.uint16))
    assert report.notes == ("'step': no tensor, and not written.",)


@pytest.mark.parametrize(
    "spec", [("a", "b"), ("", "ab"), ("ab", "")], ids=["both", "columns", "rows"]
)
def test_each_stored_byte_is_read_once_and_each_byte_of_the_file_written_once(tmp_path, spec):
    w = random((4001, 3000))
    checkpoint = saved(tmp_path / "c", {"w": w, "v": w[:5]}, {"w": sharded(*spec)})
    report = shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors", memory_limit="32MiB")
    stored = sum(int(rows.length.sum()) for rows in checkpoint.reader.whole_table().arrays.values())
    assert report.read_bytes == stored
    assert report.written_bytes == (tmp_path / "a.safetensors").stat().st_size
    assert (tmp_path / "a.safetensors").read_bytes() == reference(
        tmp_path / "b.safetensors", {"w": w, "v": w[:5]}
    )


def test_tall_columns_of_a_matrix_larger_than_the_memory_are_written_in_blocks(tmp_path):
    w = random((1 << 19, 16))
    checkpoint = saved(tmp_path / "c", {"w": w.T}, {"w": sharded("", "ab")})
    report = shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors", memory_limit="32MiB")
    assert checkpoint.info("w").shape == (16, 1 << 19)
    assert report.read_bytes < 1.01 * w.nbytes
    assert (tmp_path / "a.safetensors").read_bytes() == reference(
        tmp_path / "b.safetensors", {"w": w.T}
    )


def test_floats_are_converted_by_the_nearest_even_and_others_stay(tmp_path):
    w = np.random.default_rng(0).standard_normal((500, 300)).astype(np.float32)
    i = np.arange(7)
    saved(tmp_path / "c", {"w": w, "i": i}, {"w": sharded("a", "b")})
    report = shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors", dtype="bfloat16")
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert torch.equal(tensors["w"], torch.from_numpy(w).to(torch.bfloat16))
    assert torch.equal(tensors["i"], torch.from_numpy(i))
    assert report.nbytes == 2 * w.size + i.nbytes
    shardckpt.export(
        tmp_path / "c",
        tmp_path / "a.safetensors",
        dtype={"i": "float64", "w": "float16"},
        overwrite=True,
    )
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert torch.equal(tensors["w"], torch.from_numpy(w).to(torch.float16))
    assert tensors["i"].dtype == torch.float64


def test_of_the_names_that_are_wanted_all_are_exported_and_tied_ones_once(tmp_path):
    w = random((4, 4))
    saved(
        tmp_path / "c",
        {
            "model": {"embed": w, "head": w, "bias": w[0]},
            "optimizer": {0: {"exp_avg": w + 1}},
            "step": 3,
        },
    )
    report = shardckpt.export(
        tmp_path / "c", tmp_path / "a.safetensors", include="model/**", exclude=["**/bias"]
    )
    assert list(safetensors.torch.load_file(tmp_path / "a.safetensors")) == ["model.embed"]
    assert report.notes == (
        "'model.head' is the same tensor as 'model.embed', and is not written again.",
    )
    report = shardckpt.export(tmp_path / "c", tmp_path / "b.safetensors", exclude="**/embed")
    assert sorted(safetensors.torch.load_file(tmp_path / "b.safetensors")) == [
        "model.bias",
        "model.head",
        "optimizer.0.exp_avg",
    ]
    assert report.notes == ("'step': no tensor, and not written.",)


def test_what_safetensors_cannot_hold_is_refused_by_name_before_anything_is_written(tmp_path):
    saved(
        tmp_path / "c",
        {
            "w": random((4, 4), "complex128"),
            "a": {"b": np.zeros(2)},
            "a.b": np.ones(2),
            "q": random((4,), "int4"),
        },
    )
    to = tmp_path / "out" / "a.safetensors"
    with pytest.raises(
        errors.DtypeError,
        match=r"'w': safetensors has no complex128; convert it, for example with dtype={'w': "
        r"'complex64'}",
    ):
        shardckpt.export(tmp_path / "c", to, include="w")
    with pytest.raises(
        errors.DtypeError,
        match=r"'q': safetensors has no int4; convert it, for example with dtype={'q': 'float32'}",
    ):
        shardckpt.export(tmp_path / "c", to, include="q")
    with pytest.raises(
        errors.NamesMismatchError, match=r"'a/b' and 'a\.b' would both be called 'a\.b'; rename one"
    ):
        shardckpt.export(tmp_path / "c", to, include=["a/b", "a.b"])
    with pytest.raises(errors.NamesMismatchError, match="selects none of its 4 tensors"):
        shardckpt.export(tmp_path / "c", to, include="nothing")
    with pytest.raises(
        errors.DtypeMismatchError,
        match="'w' has dtype complex128, which cannot be converted to float32",
    ):
        shardckpt.export(tmp_path / "c", to, include="w", dtype={"w": "float32"})
    with pytest.raises(errors.OptionError, match=r"unknown dtype 'floaty'"):
        shardckpt.export(tmp_path / "c", to, include="a/b", dtype="floaty")
    with pytest.raises(errors.OptionError, match=r"'x\*' matches no tensor"):
        shardckpt.export(tmp_path / "c", to, include="a/b", dtype={"x*": "float32"})
    with pytest.raises(errors.OptionError, match="safetensors metadata maps texts to texts"):
        shardckpt.export(tmp_path / "c", to, include="a/b", metadata={"epoch": 3})
    with pytest.raises(
        errors.OptionError,
        match="memory://out: safetensors files are written to a local disk, gs:// or s3://",
    ):
        shardckpt.export(tmp_path / "c", "memory://out", include="a/b")
    with pytest.raises(
        errors.OptionError,
        match=r"to='gguf': give 'safetensors', 'peft', 'torch', 'dcp', 'orbax', 'canonical-delta'",
    ):
        shardckpt.export(tmp_path / "c", to, to="gguf")
    with pytest.raises(
        errors.BudgetError,
        match=r"memory_limit=1 MiB is too little to read chunks of 20 B; raise it to \d+ MiB",
    ):
        shardckpt.export(tmp_path / "c", to, include="a/b", memory_limit="1MiB")
    with pytest.raises(errors.NotFoundError, match="no checkpoint there"):
        shardckpt.export(tmp_path / "none", to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_the_header_is_refused_where_no_reader_would_take_it_and_its_own_name_is_no_tensors(
    monkeypatch,
):
    f32 = by_name("float32")
    with pytest.raises(
        errors.NamesMismatchError, match="'__metadata__': a safetensors file cannot hold that name"
    ):
        lay_out([OutputTensor("__metadata__", (0,), f32, ())])
    with pytest.raises(
        errors.NamesMismatchError,
        match="'w': a safetensors file cannot hold two tensors of that name",
    ):
        lay_out([OutputTensor("w", (0,), f32, ()), OutputTensor("w", (0, 1), f32, ())])
    with pytest.raises(
        errors.NamesMismatchError, match=r"'w.udc80': a name in a safetensors file is Unicode"
    ):
        lay_out([OutputTensor("w\udc80", (0,), f32, ())])
    monkeypatch.setattr(safetensors_layout, "LARGEST_HEADER", 1000)
    with pytest.raises(
        errors.OptionError,
        match=r"header for 1 tensors would have 1088 bytes, and readers of safetensors take 1000",
    ):
        lay_out([OutputTensor("w" * 1000, (0,), f32, ())])


def test_the_list_of_dtypes_is_that_of_the_installed_safetensors():
    """Those of eight bits and more that it has for torch, and no others."""
    theirs = {str(dtype).removeprefix("torch.") for dtype in safetensors.torch._TYPES.values()}
    assert {name for name in theirs if name in ALL and ALL[name].itemsize * 8 >= 8} - {
        "float4_e2m1fn_x2"
    } == set(DTYPES) & theirs


def test_only_selected_small_leaves_are_noted(tmp_path):
    saved(tmp_path / "c", {"model": {"w": random((4,)), "scale": 2}, "optimizer": {"lr": 0.1}})
    report = shardckpt.export(tmp_path / "c", tmp_path / "a.safetensors", include="model/**")
    assert report.notes == ("'model/scale': no tensor, and not written.",)
