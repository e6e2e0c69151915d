"""The state of a foreign format as a checkpoint's structure."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import shardckpt
from shardckpt.convert.foreign import (
    ROWS_BYTES,
    ForeignPart,
    ForeignTensor,
    row_chunks,
    structure_and_tensors,
)
from shardckpt.errors import BudgetError, FormatError, ReplacedError
from shardckpt.io import foreign_arrays
from shardckpt.layout.dtypes import by_name
from shardckpt.state import alias_map

F32 = by_name("float32")


@given(shape=st.lists(st.integers(0, 3000), max_size=4), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_a_chunk_of_rows_is_one_run_of_bytes_of_bounded_size(
    shape: list[int], itemsize: int
) -> None:
    chunks = row_chunks(shape, itemsize)
    elements = 1
    for n in chunks:
        elements *= n
    assert len(chunks) == len(shape)
    assert elements * itemsize <= ROWS_BYTES
    longer = [d for d in range(len(shape)) if chunks[d] < shape[d]]
    assert all(chunks[d] == 1 for d in range(min(longer, default=0))), (
        "what is before the cut dimension is one index"
    )
    assert all(
        chunks[d] == max(1, shape[d]) for d in range(max(longer, default=-1) + 1, len(shape))
    ), "what is after it is whole"


def test_a_state_of_foreign_tensors_becomes_a_structure() -> None:
    whole = ForeignTensor((4, 6), F32, (ForeignPart((0, 0), (4, 6), (2, 6)),), identity=7)
    halves = ForeignTensor(
        (4, 6), F32, (ForeignPart((0, 0), (4, 3), (4, 3)), ForeignPart((0, 3), (4, 3), (1, 3)))
    )
    structure, _ = structure_and_tensors({"a": whole, "b": [halves, 5], "c": whole}, "file")
    assert [(t.name, t.shape, [p.path for p in t.pieces]) for t in structure.tensors.values()] == [
        ("a", (4, 6), ["a"]),
        ("b/0", (4, 6), ["b/0=p0", "b/0=p3"]),
    ]
    assert alias_map(structure.tree) == {"c": "a"}
    assert structure.from_json(structure.to_json(), "file") == structure


def test_parts_that_do_not_make_a_tensor_are_refused_by_name() -> None:
    half = ForeignTensor((4, 6), F32, (ForeignPart((0, 0), (4, 3), (4, 3)),))
    with pytest.raises(FormatError, match=r"the file: 'b/w': .*\(4, 6\).* 12 elements of 24"):
        structure_and_tensors({"b": {"w": half}}, "the file")


@pytest.mark.parametrize(
    ("version", "changed", "reason"),
    [
        (2, {"dtype": "<f16"}, '"dtype": Unsupported zarr dtype: "<f16"'),
        (2, {"dtype": "float32"}, '"dtype": Unsupported zarr dtype: "float32"'),
        (2, {"dtype": "|S4", "fill_value": None}, "'a' is an array of char"),
        (2, {"dtype": "|b1", "fill_value": 0}, '"fill_value": Expected boolean, but received: 0'),
        (2, {"filters": [{"id": "delta"}]}, '"filters": filters are not supported'),
        (2, {"compressor": {"id": "lz4"}}, '"lz4" is not registered'),
        (
            2,
            {"compressor": {"id": "zstd", "level": 0, "checksum": False}},
            '"compressor": Object includes extra members: "checksum"',
        ),
        (3, {"codecs": [{"name": "bytes"}, {"name": "bz2"}]}, '"bz2" is not registered'),
        (3, {"data_type": "string"}, '"data_type": string data type is not one of the supported'),
        (
            3,
            {"codecs": [{"name": "sharding_indexed", "configuration": {"codecs": ["other"]}}]},
            '"configuration": "chunk_shape": Expected array',
        ),
        (3, {"storage_transformers": [{"name": "x"}]}, "No storage transformers supported"),
        (3, {"chunk_grid": {"name": "rectilinear"}}, '"chunk_grid": '),
        (3, {"chunk_key_encoding": {"name": "other"}}, 'but received: "other"'),
    ],
)
def test_an_array_that_cannot_be_read_is_left_behind_with_a_note_and_its_group_is_read(
    tmp_path, version, changed, reason
):
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=version)
    for name in ("a", "b"):
        group.create_array(name, data=np.arange(8.0))
    file = tmp_path / "g" / "a" / (".zarray" if version == 2 else "zarr.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    report = shardckpt.import_checkpoint(tmp_path / "g", tmp_path / "c", workers=1)
    [note] = [note for note in report.notes if note.startswith("left behind: a, which is not read")]
    assert reason in note
    assert len(note) < 200
    assert [*shardckpt.restore(tmp_path / "c")] == ["b"]


@pytest.mark.parametrize("name", ["g", "g/a"])
@pytest.mark.parametrize("options", [{}, {"ties": "once"}])
def test_a_group_or_array_of_which_nothing_can_be_read_is_refused(tmp_path, name, options):
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=2)
    group.create_array("a", data=np.arange(8.0))
    file = tmp_path / "g" / "a" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"compressor": {"id": "lz4"}}))
    with pytest.raises(FormatError, match=r'no array .* can be read; left behind: a, .*"lz4"'):
        shardckpt.import_checkpoint(tmp_path / name, tmp_path / "c", workers=1, **options)


def test_verify_does_not_report_a_chunk_as_damaged_because_memory_is_short(tmp_path, monkeypatch):
    zarr.open_group(tmp_path, mode="w").create_array("a", data=np.arange(8.0))
    monkeypatch.setattr(foreign_arrays, "_LARGE", 0)
    monkeypatch.setattr(foreign_arrays, "free_memory", lambda: 1)
    with pytest.raises(BudgetError, match="memory are free"):
        shardckpt.open(tmp_path).verify()


def write_group(path, elements, version):
    """Write a zarr group in the place of one that may be there."""
    shutil.rmtree(path, ignore_errors=True)
    group = zarr.open_group(path, mode="w", zarr_format=version)
    group.create_array("in/a", data=elements)
    return group


@pytest.mark.parametrize("version", [2, 3])
def test_a_group_that_was_replaced_is_opened_with_its_new_dtype_and_shape(tmp_path, version):
    place = tmp_path / "group"
    states = [np.arange(4, dtype="f4"), np.arange(4, dtype="i4"), np.arange(9, dtype="i4")]
    for elements in states:
        write_group(place, elements, version)
        checkpoint = shardckpt.open(place)
        assert checkpoint.tensor("in/a").dtype.name == elements.dtype.name
        np.testing.assert_array_equal(checkpoint.read("in/a"), elements)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_a_group_that_is_replaced_while_it_is_open_is_an_error(
    store, tmp_path, version, consolidated
):
    def write(dtype):
        group = write_group(tmp_path / "group", np.arange(4, dtype=dtype), version)
        if consolidated:
            zarr.consolidate_metadata(group.store)
        for path in (tmp_path / "group").rglob("*"):
            if path.is_file():
                store.write(str(path.relative_to(tmp_path)), path.read_bytes())

    write("f4")
    place = str(store.location.join("group"))
    checkpoint = shardckpt.open(place)
    np.testing.assert_array_equal(checkpoint.read("in/a"), np.arange(4, dtype="f4"))
    write("i4")
    with pytest.raises(ReplacedError, match=r"in/a/.* was changed, replaced or deleted"):
        checkpoint.read("in/a")
    (damage,) = checkpoint.verify().damage
    assert "was changed, replaced or deleted" in damage.reason
    assert shardckpt.open(place).verify().damage == []
