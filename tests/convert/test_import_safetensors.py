"""Safetensors files become checkpoints bit for bit; what makes no sense is refused by name, and
nothing is committed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import shardckpt
from shardckpt import Mesh, PartitionSpec, errors
from shardckpt.convert.formats.safetensors import source as from_safetensors
from shardckpt.convert.formats.safetensors.header import _DTYPES
from shardckpt.io.url import parse
from shardckpt.layout.dtypes import by_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    State = Mapping[str, NDArray[Any]]

KNOWN = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "float16",
    "bfloat16",
    "int32",
    "uint32",
    "float32",
    "float64",
    "int64",
    "uint64",
]
"""dtypes that safetensors' writer of numpy arrays knows, and fp8 besides."""
NAMES = st.text(st.characters(codec="utf-8"), max_size=8).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def arrays(draw: st.DrawFn, names: st.SearchStrategy[str]) -> dict[str, NDArray[Any]]:
    """Any few arrays, of any bits."""
    drawn = {}
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        dtype = by_name(draw(st.sampled_from([*KNOWN, "float8_e4m3fn", "float8_e5m2"]))).numpy
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 40]), max_size=4))
        rng = np.random.default_rng(draw(st.integers(0, 9)))
        bits = (
            rng.integers(0, 2, shape, np.uint8)
            if dtype.kind == "b"
            else rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        )
        drawn[name] = bits.view(dtype).reshape(shape)
    return drawn


def equal(actual: State, expected: State) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        assert actual[name].tobytes() == array.tobytes(), name


def split(place: Path, *parts: State, index: Mapping[str, str] | None = None) -> Path:
    """Split files as Hugging Face's libraries write them."""
    place.mkdir(exist_ok=True)
    names = [f"model-{k + 1:05d}-of-{len(parts):05d}.safetensors" for k in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        save_file(dict(part), place / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    document = {"metadata": {"total_size": 0}, "weight_map": weight_map if index is None else index}
    (place / "model.safetensors.index.json").write_text(json.dumps(document))
    return place


def contents(place: Path) -> dict[Path, tuple[bytes, int]]:
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in place.rglob("*")
        if path.is_file()
    }


A = {"a": np.arange(12, dtype=np.float32).reshape(3, 4)}
B = {"b": np.ones((5,), ml_dtypes.bfloat16), "c": np.array(7, np.int64)}


@settings(max_examples=12)
@given(state=arrays(NAMES))
def test_any_names_and_arrays_come_back_bit_by_bit(state: State) -> None:
    with tempfile.TemporaryDirectory() as top:
        place = Path(top)
        save_file(dict(state), place / "any.safetensors")
        report = shardckpt.import_checkpoint(place / "any.safetensors", place / "out", workers=1)
        assert report.read_bytes == report.nbytes == sum(array.nbytes for array in state.values())
        equal(shardckpt.restore(place / "out"), state)
        assert shardckpt.open(place / "out").verify().ok


@pytest.mark.long
@settings(max_examples=12)
@given(
    state=arrays(st.sampled_from(["p", "q", "r", "s"])),
    axes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=2),
    layout=st.sampled_from(["packed", "zarr"]),
    task_bytes=st.sampled_from(["1KiB", "256MiB"]),
    data=st.data(),
)
def test_any_mesh_and_rules_make_what_a_reshard_makes(
    state: State, axes: list[int], layout: Any, task_bytes: str, data: st.DataObject
) -> None:
    rules = {}
    for name, array in state.items():
        where = data.draw(
            st.lists(
                st.sampled_from(["", *"xy"[: len(axes)]]), min_size=array.ndim, max_size=array.ndim
            ),
            label=name,
        )
        rules[name] = PartitionSpec(
            *(axis if axis and axis not in where[:d] else None for d, axis in enumerate(where))
        )
    options: dict[str, Any] = {
        "mesh": Mesh(tuple(axes), tuple("xy"[: len(axes)])),
        "rules": rules,
        "layout": layout,
        "workers": 1,
    }
    with tempfile.TemporaryDirectory() as top:
        place = Path(top)
        save_file(dict(state), place / "model.safetensors")
        shardckpt.save(place / "saved", state)
        shardckpt.import_checkpoint(place, place / "out", task_bytes=task_bytes, **options)
        shardckpt.reshard(place / "saved", place / "resharded", **options)
        made, expected = shardckpt.open(place / "out"), shardckpt.open(place / "resharded")
        equal(shardckpt.restore(place / "out"), state)
        assert {name: made.info(name) for name in state} == {
            name: expected.info(name) for name in state
        }
        assert made.verify().ok


def test_a_large_tensor_is_stored_as_a_save_would_store_it(tmp_path: Path) -> None:
    state = {"w": np.random.default_rng(0).random((1003, 1500), np.float32)}
    save_file(state, tmp_path / "model.safetensors")
    report = shardckpt.import_checkpoint(
        tmp_path, tmp_path / "imported", workers=1, task_bytes="1MiB"
    )
    shardckpt.save(tmp_path / "saved", state)
    made, saved = (shardckpt.open(tmp_path / name) for name in ("imported", "saved"))
    assert made.tensor("w").pieces == saved.tensor("w").pieces
    assert report.read_bytes == state["w"].nbytes, "each byte is read once"
    equal(shardckpt.restore(tmp_path / "imported"), state)


def test_split_files_are_one_state_in_the_order_of_the_index_and_keep_what_is_said_besides(
    tmp_path: Path,
) -> None:
    source = split(tmp_path / "hf", B, A)
    (source / "config.json").write_text('{"model_type": "llama", "id2label": {"0": "a"}}')
    (source / "generation_config.json").write_text('{"eos": NaN}')
    (source / "README.md").write_text("{}")
    before = contents(source)
    report = shardckpt.import_checkpoint(source, tmp_path / "out", workers=1)
    made = shardckpt.open(tmp_path / "out")
    equal(shardckpt.restore(tmp_path / "out"), {**B, **A})
    assert made.names() == ["b", "c", "a"]
    assert made.metadata == {
        "safetensors": {"format": "pt"},
        "config.json": {"model_type": "llama", "id2label": {"0": "a"}},
    }
    assert report.format == "safetensors"
    assert report.notes[1:] == (
        (
            "3 tensors in model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, by "
            "model.safetensors.index.json"
        ),
        "kept as metadata: config.json",
        "left behind: README.md, generation_config.json",
    )
    assert contents(source) == before


def test_the_state_goes_where_it_is_wanted_and_rules_mean_it_there(tmp_path: Path) -> None:
    save_file({**A, **B}, tmp_path / "model.safetensors")
    options: dict[str, Any] = {
        "mesh": Mesh((2,), ("x",)),
        "rules": ["train/model/a=(None,x)"],
        "only": ["train/model/a", "**/c"],
    }
    shardckpt.import_checkpoint(
        tmp_path, tmp_path / "out", into="train/model", dtype="bfloat16", workers=1, **options
    )
    got = shardckpt.restore(tmp_path / "out")
    equal(got["train"]["model"], {"a": A["a"].astype(ml_dtypes.bfloat16), "c": B["c"]})
    for into in ("", "a//b", "/a", 7):
        with pytest.raises(errors.OptionError, match="give keys joined by slashes"):
            shardckpt.import_checkpoint(tmp_path, tmp_path / "other", into=into)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (
            {"a": 1, "b": 2},
            "'c' is in model-00002-of-00002.safetensors, but the index does not know it",
        ),
        (
            {"a": 2, "b": 2, "c": 2},
            "'a' should be in model-00002-of-00002.safetensors, which does not have it",
        ),
        (
            {"a": 1, "b": 1, "c": 2},
            (
                "'b' is in model-00002-of-00002.safetensors, but the index says it is in "
                "model-00001-of-00002"
            ),
        ),
        (
            {"a": 1, "b": 2, "c": 2, "d": 2},
            "'d' should be in model-00002-of-00002.safetensors, which does not have it",
        ),
        ({}, "no weight_map"),
    ],
)
def test_an_index_that_contradicts_its_files_is_refused_by_name(
    tmp_path: Path, index: dict[str, int], why: str
) -> None:
    source = split(
        tmp_path / "hf",
        A,
        B,
        index={name: f"model-{k:05d}-of-00002.safetensors" for name, k in index.items()},
    )
    with pytest.raises(errors.FormatError, match=why):
        shardckpt.import_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_two_files_have_and_a_file_that_is_gone_are_named(tmp_path: Path) -> None:
    source = split(tmp_path / "hf", {**A, "d": A["a"]}, {**A, **B})
    with pytest.raises(
        errors.FormatError,
        match=r"'a' is in model-00001-of-00002.safetensors, "
        r"but the index says it is in model-00002",
    ):
        shardckpt.import_checkpoint(source, tmp_path / "out")
    source = split(tmp_path / "hf", A, B)
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        errors.MissingDataError, match=r"model-00002-of-00002.safetensors is missing"
    ):
        shardckpt.import_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize(
    "document",
    [
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": "x.bin"}}',
        '{"weight_map": []}',
        "[",
        "{}",
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, document: str) -> None:
    (tmp_path / "x.safetensors.index.json").write_text(document)
    with pytest.raises(errors.FormatError, match=r"x\.safetensors\.index\.json"):
        shardckpt.import_checkpoint(tmp_path, tmp_path / "out")


def test_of_several_models_in_a_directory_one_has_to_be_meant(tmp_path: Path) -> None:
    save_file(A, tmp_path / "one.safetensors")
    save_file(B, tmp_path / "other.safetensors")
    with pytest.raises(
        errors.OptionError,
        match=r"several models \(one.safetensors, other.safetensors\); give the path of one",
    ):
        shardckpt.import_checkpoint(tmp_path, tmp_path / "out")
    shardckpt.import_checkpoint(tmp_path / "other.safetensors", tmp_path / "out", workers=1)
    equal(shardckpt.restore(tmp_path / "out"), B)
    save_file(A, tmp_path / "model.safetensors")
    report = shardckpt.import_checkpoint(tmp_path, tmp_path / "out2", workers=1)
    equal(shardckpt.restore(tmp_path / "out2"), A)
    assert "left behind: one.safetensors, other.safetensors" in report.notes


def test_a_file_of_any_length_but_its_own_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({**A, **B}, file)
    whole = file.read_bytes()
    for wrong in (*(whole[:n] for n in range(0, len(whole), 7)), whole + b"\0"):
        file.write_bytes(wrong)
        with pytest.raises(errors.FormatError, match=r"model\.safetensors"):
            from_safetensors.open_foreign(parse(file))
    with pytest.raises(errors.FormatError, match="damaged or cut off"):
        shardckpt.import_checkpoint(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_is_an_error_while_it_is_read_and_another_job_afterwards(
    tmp_path: Path,
) -> None:
    file = tmp_path / "model.safetensors"
    state = {f"t{k}": np.full((256, 256), k, np.float32) for k in range(8)}
    save_file(state, file)
    options: dict[str, Any] = {"task_bytes": "256KiB", "workers": 1}

    def rewrite(done: int, _total: int) -> None:
        if done:
            save_file({name: array + 1 for name, array in state.items()}, file)

    with pytest.raises(
        errors.ReplacedError,
        match=r"model\.safetensors was changed, replaced or deleted while it was being read",
    ):
        shardckpt.import_checkpoint(file, tmp_path / "out", progress=rewrite, **options)
    with pytest.raises(errors.UncommittedError):
        shardckpt.open(tmp_path / "out")
    report = shardckpt.import_checkpoint(file, tmp_path / "out", **options)
    assert report.done_before == 0, "nothing of the former source is used"
    equal(shardckpt.restore(tmp_path / "out"), {name: array + 1 for name, array in state.items()})
    again = shardckpt.import_checkpoint(file, tmp_path / "out", **options)
    assert (again.attempt, again.stored_bytes) == (report.attempt, 0)


def test_a_model_is_restored_from_what_its_state_dict_was_saved_as(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_model

    model, fresh = (
        torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4)).to(torch.bfloat16)
        for _ in range(2)
    )
    save_model(model, str(tmp_path / "model.safetensors"))
    shardckpt.import_checkpoint(
        tmp_path,
        tmp_path / "out",
        into="model",
        mesh=Mesh((2,), ("x",)),
        rules=["**/0.weight=(x)"],
        workers=1,
    )
    shardckpt.restore(tmp_path / "out", like={"model": fresh.state_dict()})
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_nothing_is_written_into_what_is_read(tmp_path: Path) -> None:
    save_file(A, tmp_path / "model.safetensors")
    (tmp_path / "link").symlink_to(tmp_path)
    for target in (tmp_path, tmp_path / "link"):
        with pytest.raises(errors.OptionError, match="written into the source"):
            shardckpt.import_checkpoint(tmp_path, target)


def test_nothing_is_written_into_the_snapshot_that_is_read_for_a_model(tmp_path: Path) -> None:
    model, snapshot = tmp_path / "m", tmp_path / "m" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    save_file(A, snapshot / "model.safetensors")
    for target in (model, snapshot, snapshot / "new"):
        with pytest.raises(errors.OptionError, match="written into the source"):
            shardckpt.import_checkpoint(model, target, workers=1)
    assert [path.name for path in snapshot.iterdir()] == ["model.safetensors"]


def test_every_name_of_a_dtype_stands_for_one_of_ours() -> None:
    assert len({by_name(name).name for name in _DTYPES.values()}) == len(_DTYPES)


def test_numbers_that_json_has_not_are_left_behind_with_their_file_and_named(
    tmp_path: Path,
) -> None:
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"rope_theta": 1e999}')
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    report = shardckpt.import_checkpoint(tmp_path, tmp_path / "out", workers=1)
    assert any(note.startswith("left behind: config.json, ") for note in report.notes)
    assert "kept as metadata: generation_config.json" in report.notes
    assert shardckpt.open(tmp_path / "out").metadata == {"generation_config.json": {"top_k": 5}}
