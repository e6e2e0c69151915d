"""Nothing wrong is ever returned silently: whatever is damaged is refused or harmless, and `verify` says where."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import shardckpt
from shardckpt import Box, SaveOptions, ShardckptError, errors

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import flip_bits
from flip_bits import file_kinds, make_state, options, same, save_in_small_files

LAYOUTS = ["packed", "zarr"]
CHUNKS = {"packed": "data file", "zarr": "chunk"}
INDEXES = {"merged index: manifest", "merged index: nodes", "lane: manifest", "lane: node", "zarr.json"}
"""What only other tools read."""
KINDS = [(layout, kind) for layout in LAYOUTS for kind in flip_bits.KINDS[layout]]


@pytest.fixture(scope="module")
def truth():
    return make_state(0)


@pytest.fixture(scope="module")
def saved(truth, tmp_path_factory):
    """Layout → a checkpoint of the truth, not to be touched."""
    root = tmp_path_factory.mktemp("saved")
    for layout in LAYOUTS:
        save_in_small_files(root / layout, truth, options(layout))
    return {layout: root / layout for layout in LAYOUTS}


@pytest.fixture
def checkpoint_of(saved, tmp_path):
    """Gives a copy to damage of the checkpoint in a layout."""

    def copy(layout):
        shutil.copytree(saved[layout], tmp_path / layout)
        return tmp_path / layout

    return copy


def damage_of(checkpoint):
    """Files that verify names as damaged, relative to the checkpoint."""
    return {damage.file for damage in shardckpt.open(checkpoint).verify().damage}


def assert_noticed(checkpoint, kind, truth):
    """After damage to a file of that kind: our readers refuse, unless they do not need it; verify reports it anyway."""
    if kind in INDEXES:
        assert same(truth, shardckpt.restore(checkpoint))
    else:
        with pytest.raises(ShardckptError):
            shardckpt.restore(checkpoint)
    if kind == "commit record":
        with pytest.raises(ShardckptError):
            shardckpt.open(checkpoint)
    else:
        assert damage_of(checkpoint)


# --- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "compression"), [("packed", None), ("zarr", "zstd")])
def test_no_flipped_bit_goes_unnoticed(tmp_path, layout, compression):
    tally = flip_bits.run(layout, compression, 75, 1, tmp_path)
    assert tally.failures == []
    assert tally.unreported == []
    assert {counts.total() > 0 for counts in tally.verdicts.values()} == {True}


def test_no_bit_of_the_envelope_goes_unnoticed(tmp_path):
    """The bytes before the record, which its digest does not cover."""
    shardckpt.save(tmp_path / "c", {"a": 1})
    record = tmp_path / "c" / "checkpoint.json"
    data = record.read_bytes()
    head = data.index(b'"record"')
    for bit in (*range(8 * head + 64), *range(8 * len(data) - 16, 8 * len(data))):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        record.write_bytes(flipped)
        try:
            assert not shardckpt.open(tmp_path / "c").verify().ok
        except errors.FormatError:
            continue
    record.write_bytes(data)
    assert shardckpt.open(tmp_path / "c").verify().ok


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "kind"), KINDS)
def test_a_missing_file_of_any_kind_is_noticed(checkpoint_of, truth, layout, kind):
    checkpoint = checkpoint_of(layout)
    file_kinds(checkpoint, layout)[kind][-1].unlink()
    assert_noticed(checkpoint, kind, truth)


@pytest.mark.parametrize(("layout", "kind"), KINDS)
def test_a_truncated_file_of_any_kind_is_noticed(checkpoint_of, truth, layout, kind):
    checkpoint = checkpoint_of(layout)
    path = file_kinds(checkpoint, layout)[kind][0]
    size = path.stat().st_size
    for left in (size - 2, size // 2, 0):  # the last byte of a record is a newline that nobody needs
        os.truncate(path, left)
        assert_noticed(checkpoint, kind, truth)


@pytest.mark.parametrize(("layout", "kind"), [k for k in KINDS if k[1] not in {"lane: node", "merged index: nodes"}])
def test_bytes_after_the_end_of_a_file_are_noticed(checkpoint_of, truth, layout, kind):
    """But behind an index's node, to which the index points with its length; nobody reads what follows."""
    checkpoint = checkpoint_of(layout)
    with file_kinds(checkpoint, layout)[kind][0].open("ab") as file:
        file.write(b"x")
    if kind == CHUNKS[layout]:  # our readers go by the table, and lack nothing
        assert same(truth, shardckpt.restore(checkpoint))
        assert damage_of(checkpoint)
    else:
        assert_noticed(checkpoint, kind, truth)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swapped_files_of_equal_size_are_noticed(checkpoint_of, layout):
    """Each passes its own checksums: only the table knows which belongs where."""
    checkpoint = checkpoint_of(layout)
    by_size = {}
    for path in file_kinds(checkpoint, layout)[CHUNKS[layout]]:
        by_size.setdefault((path.stat().st_size, path.parent), []).append(path)
    one, other = next(paths[:2] for paths in by_size.values() if len(paths) > 1)
    a, b = one.read_bytes(), other.read_bytes()
    assert a != b
    one.write_bytes(b)
    other.write_bytes(a)
    with pytest.raises(errors.CorruptionError, match="checksum"):
        shardckpt.restore(checkpoint)
    assert {str(one.relative_to(checkpoint)), str(other.relative_to(checkpoint))} <= damage_of(checkpoint)


def test_chunks_of_equal_size_that_changed_places_are_noticed(tmp_path):
    state = {name: np.full((100,), i, np.float32) for i, name in enumerate("abcdefgh")}
    save_in_small_files(tmp_path / "c", state, SaveOptions())
    (file,) = file_kinds(tmp_path / "c", "packed")["data file"]
    data = file.read_bytes()
    file.write_bytes(data[404:808] + data[:404] + data[808:])
    damaged = [d.tensor for d in shardckpt.open(tmp_path / "c").verify().damage if d.tensor]
    assert damaged == ["a", "b"]


@pytest.mark.parametrize(("layout", "kind"), [k for k in KINDS if k[1] not in {"commit record", "zarr.json"}])
def test_a_file_of_another_attempt_is_noticed(checkpoint_of, truth, tmp_path, layout, kind):
    """Of the same state, but for its elements: the same names and sizes."""
    checkpoint = checkpoint_of(layout)
    save_in_small_files(tmp_path / "other", make_state(1), options(layout))
    kinds, others = file_kinds(checkpoint, layout), file_kinds(tmp_path / "other", layout)
    place, stale = kinds[kind][0], others[kind][0]
    place.write_bytes(stale.read_bytes())
    if kind.startswith("lane") and place.stat().st_size == stale.stat().st_size:
        # An index holds places and no elements: that of another attempt with the same layout says the same.
        assert same(truth, shardckpt.restore(checkpoint))
        return
    assert_noticed(checkpoint, kind, truth)


# --- where the damage is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_chunk_is_located_and_the_rest_restored(tmp_path, layout):
    """Of a tensor of 4 × 4 chunks one is overwritten; everything outside it can be had."""
    value = np.arange(256 * 256, dtype=np.float32).reshape(256, 256)
    mesh = shardckpt.Mesh((4, 4), ("x", "y"))
    sharding = shardckpt.Sharding(mesh, shardckpt.PartitionSpec("x", "y"))
    state = {"before": np.arange(9), "w": value, "after": np.arange(7.0), "leaf": "text"}
    shardckpt.save(tmp_path / "c", state, options=SaveOptions(layout=layout, shardings={"w": sharding}))
    checkpoint = shardckpt.open(tmp_path / "c")
    place = value[64:65, 128:160].tobytes()  # the beginning of a row of the chunk at (1, 2)
    (file,) = [p for p in file_kinds(tmp_path / "c", layout)[CHUNKS[layout]] if place in p.read_bytes()]
    file.write_bytes(file.read_bytes().replace(place, bytes(len(place))))

    (damage,) = checkpoint.verify().damage
    assert damage.tensor == "w"
    assert damage.box is not None
    assert Box((64, 128), (128, 192)).contains(damage.box)
    assert damage.file == str(file.relative_to(tmp_path / "c"))
    with pytest.raises(errors.CorruptionError) as raised:
        shardckpt.restore(tmp_path / "c")
    assert f"w{damage.box}" in str(raised.value)
    assert str(file) in str(raised.value)

    others = shardckpt.restore(tmp_path / "c", only=["before", "after", "leaf"])
    assert same({k: v for k, v in state.items() if k != "w"}, others)
    for box in (Box((0, 0), (64, 256)), Box((64, 0), (256, 128)), Box((128, 128), (256, 256)), Box((64, 192), (128, 256))):
        np.testing.assert_array_equal(checkpoint.read("w", box), value[box.slices])
    with pytest.raises(errors.CorruptionError):
        checkpoint.read("w", damage.box)


def test_a_damaged_chunk_of_a_tied_tensor_is_lost_to_all_its_names(checkpoint_of, truth):
    checkpoint = checkpoint_of("packed")
    place = truth["tied"]["first"].tobytes()[:40]
    (file,) = [p for p in file_kinds(checkpoint, "packed")["data file"] if place in p.read_bytes()]
    file.write_bytes(file.read_bytes().replace(place, bytes(40)))
    assert [d.tensor for d in shardckpt.open(checkpoint).verify().damage] == ["tied/first"]
    for name in ("tied/first", "tied/second"):
        with pytest.raises(errors.CorruptionError, match="tied/first"):
            shardckpt.restore(checkpoint, only=name)


def test_verify_reports_all_damage_and_not_just_the_first(checkpoint_of):
    checkpoint = checkpoint_of("packed")
    files = file_kinds(checkpoint, "packed")["data file"]
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    opened = shardckpt.open(checkpoint)
    report = opened.verify()
    assert {d.file for d in report.damage} == {str(f.relative_to(checkpoint)) for f in files}
    assert len(report.damage) == report.chunks == opened.record.totals["chunks"]


def test_in_place_restore_of_damaged_data_raises_before_it_returns(checkpoint_of, truth):
    checkpoint = checkpoint_of("packed")
    file = file_kinds(checkpoint, "packed")["data file"][1]
    file.write_bytes(bytes(file.stat().st_size))
    like = make_state(0)
    with pytest.raises(errors.CorruptionError):
        shardckpt.restore(checkpoint, like)


# --- other readers --------------------------------------------------------------------------------------------------


def test_an_index_that_points_elsewhere_is_reported(checkpoint_of, truth):
    """The merged index of another checkpoint whose chunks lie elsewhere: whole, with good checksums, and wrong here."""
    checkpoint = checkpoint_of("packed")
    attempt = shardckpt.open(checkpoint).record.attempt
    shardckpt.save(checkpoint.parent / "other", {**make_state(0), "aaa": np.arange(5)}, options=options("packed"))
    other = checkpoint.parent / "other" / shardckpt.open(checkpoint.parent / "other").record.attempt
    shutil.rmtree(checkpoint / attempt / "d")
    shutil.copytree(other / "d", checkpoint / attempt / "d")
    shutil.copy(other / "manifest.ocdbt", checkpoint / attempt / "manifest.ocdbt")
    assert same(truth, shardckpt.restore(checkpoint))
    assert damage_of(checkpoint) == {f"{attempt}/manifest.ocdbt"}


def test_documents_too_large_for_a_node_of_the_index_are_compared_too(tmp_path):
    """Long names of axes make a zarr.json of more than a mebibyte, which OCDBT keeps outside its nodes, without a checksum."""
    names = tuple("x" * 20_000 + str(i) for i in range(30))
    sharding = shardckpt.Sharding(shardckpt.Mesh((1,) * 30, names), shardckpt.PartitionSpec(names))
    shardckpt.save(tmp_path / "c", {"w": np.arange(12).reshape(3, 4)}, options=SaveOptions(shardings={"w": sharding}))
    assert shardckpt.open(tmp_path / "c").verify().damage == []
    (document,) = [p for p in (tmp_path / "c").glob("*/d/*") if p.stat().st_size > 1 << 20]
    document.write_bytes(document.read_bytes().replace(b"x17", b"x18"))
    assert [Path(file).name for file in damage_of(tmp_path / "c")] == ["manifest.ocdbt"]


@pytest.mark.parametrize("change", [{"shape": [7]}, {"data_type": "uint64"}, {"fill_value": 1}, {"codecs": []}])
def test_a_zarr_document_that_says_something_else_is_reported(tmp_path, change):
    shardckpt.save(tmp_path / "c", {"w": np.arange(6)}, options=SaveOptions(layout="zarr"))
    (document,) = (tmp_path / "c").glob("*/zarr/w/zarr.json")
    document.write_text(json.dumps({**json.loads(document.read_text()), **change}))
    assert damage_of(tmp_path / "c") == {str(document.relative_to(tmp_path / "c"))}
    np.testing.assert_array_equal(shardckpt.restore(tmp_path / "c")["w"], np.arange(6))
