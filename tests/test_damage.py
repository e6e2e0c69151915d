"""Nothing wrong is ever returned silently: whatever is damaged is refused or harmless, and `verify` says where."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import shardckpt
from shardckpt import Box, PerProcess, SaveOptions, ShardckptError, errors
from shardckpt.world import World

sys.path[:0] = [str(Path(__file__).parents[1] / "tools"), str(Path(__file__).parent)]

import flip_bits
from flip_bits import SEVERAL_HOSTS, file_kinds, make_state, same, save_in_small_files, state_of_host
from processes import Processes

LAYOUTS = ["packed", "zarr"]
CHUNKS = {"packed": "data file", "zarr": "chunk"}
INDEXES = {"merged index: manifest", "merged index: nodes", "lane: manifest", "lane: node", "zarr.json"}
"""What only other tools read."""
SPARE = {"chunk table", "a host's chunk table", "small tensors' table", "contents"}
"""What a reader can do without: the table of all by itself, or the hosts' and that of small tensors."""
KINDS = [
    (layout, hosts, kind)
    for layout in LAYOUTS
    for hosts in (1, 3)
    for kind in flip_bits.KINDS[layout]
    if hosts > 1 or kind not in SEVERAL_HOSTS
]


@pytest.fixture(scope="module")
def hosts():
    """Three of them, to save together."""
    with Processes("damage_hosts") as processes:
        yield processes


@pytest.fixture(scope="module")
def saved(hosts, tmp_path_factory):
    """Layout and number of hosts → a checkpoint, not to be touched, and what is in it."""
    root = tmp_path_factory.mktemp("saved")
    found = {}
    for layout in LAYOUTS:
        for number in (1, 3):
            path = root / f"{layout}{number}"
            found[layout, number] = path, flip_bits.save(path, 0, layout, processes=hosts if number > 1 else None)
    return found


@pytest.fixture(scope="module")
def stale(hosts, tmp_path_factory):
    """The same of another state, which differs in its elements alone: the same names and sizes."""
    root = tmp_path_factory.mktemp("stale")
    for layout in LAYOUTS:
        for number in (1, 3):
            flip_bits.save(root / f"{layout}{number}", 1, layout, processes=hosts if number > 1 else None)
    return root


@pytest.fixture
def checkpoint_of(saved, tmp_path):
    """Gives a copy to damage of the checkpoint in a layout, and what was saved."""

    def copy(layout, number=1):
        path, truth = saved[layout, number]
        shutil.copytree(path, tmp_path / layout)
        return tmp_path / layout, truth

    return copy


def damage_of(checkpoint):
    """Files that verify names as damaged, relative to the checkpoint."""
    return {damage.file for damage in shardckpt.open(checkpoint).verify().damage}


def assert_noticed(checkpoint, path, kind, truth):
    """After damage to a file of that kind: our readers refuse, unless they do not need it; verify names it anyway."""
    if kind in INDEXES | SPARE:
        assert same(truth, shardckpt.restore(checkpoint))
    else:
        with pytest.raises(ShardckptError):
            shardckpt.restore(checkpoint)
    if kind == "commit record":
        with pytest.raises(ShardckptError):
            shardckpt.open(checkpoint)
    else:
        file = str(path.relative_to(checkpoint))
        if kind in {"merged index: nodes", "lane: node"}:  # said of the index as a whole
            file = re.sub(r"d/\w+$", "manifest.ocdbt", file)
        assert file in damage_of(checkpoint)


# --- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "compression", "number"), [("packed", None, 1), ("packed", None, 3), ("zarr", "zstd", 3)])
def test_no_flipped_bit_goes_unnoticed(hosts, tmp_path, layout, compression, number):
    tally = flip_bits.run(layout, compression, 75, 1, tmp_path, hosts if number > 1 else None)
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


@pytest.mark.parametrize(("layout", "number", "kind"), KINDS)
def test_a_missing_file_of_any_kind_is_noticed(checkpoint_of, layout, number, kind):
    checkpoint, truth = checkpoint_of(layout, number)
    path = file_kinds(checkpoint, layout)[kind][-1]
    path.unlink()
    assert_noticed(checkpoint, path, kind, truth)


@pytest.mark.parametrize(("layout", "number", "kind"), KINDS)
def test_a_truncated_file_of_any_kind_is_noticed(checkpoint_of, layout, number, kind):
    checkpoint, truth = checkpoint_of(layout, number)
    path = file_kinds(checkpoint, layout)[kind][0]
    size = path.stat().st_size
    for left in (size - 2, size // 2, 0):  # the last byte of a record is a newline that nobody needs
        os.truncate(path, left)
        assert_noticed(checkpoint, path, kind, truth)


@pytest.mark.parametrize(("layout", "number", "kind"), [k for k in KINDS if k[2] not in {"lane: node", "merged index: nodes"}])
def test_bytes_after_the_end_of_a_file_are_noticed(checkpoint_of, layout, number, kind):
    """But behind an index's node, to which the index points with its length; nobody reads what follows."""
    checkpoint, truth = checkpoint_of(layout, number)
    path = file_kinds(checkpoint, layout)[kind][0]
    with path.open("ab") as file:
        file.write(b"x")
    if kind in {CHUNKS[layout], "small tensors"}:  # our readers go by the table, and lack nothing
        assert same(truth, shardckpt.restore(checkpoint))
        assert str(path.relative_to(checkpoint)) in damage_of(checkpoint)
    else:
        assert_noticed(checkpoint, path, kind, truth)


SINGLE = {"chunk table", "small tensors", "small tensors' table", "commit record", "merged index: manifest"}
"""Kinds of which there is one file."""


@pytest.mark.parametrize(("layout", "kind"), [(layout, kind) for layout, number, kind in KINDS if number == 3 and kind not in SINGLE])
def test_files_of_two_hosts_that_changed_places_are_noticed(checkpoint_of, layout, kind):
    checkpoint, truth = checkpoint_of(layout, 3)
    files = file_kinds(checkpoint, layout)[kind]
    one, other = files[0], files[-1]
    a, b = one.read_bytes(), other.read_bytes()
    if kind == "lane: manifest" and a == b:  # they say where the lane's own node is, and how many chunks it has
        return
    assert a != b
    one.write_bytes(b)
    other.write_bytes(a)
    for path in (one, other):
        assert_noticed(checkpoint, path, kind, truth)


@pytest.mark.parametrize(("layout", "number", "kind"), [k for k in KINDS if k[2] not in {"commit record", "zarr.json"}])
def test_a_file_of_another_attempt_is_noticed(checkpoint_of, stale, layout, number, kind):
    checkpoint, truth = checkpoint_of(layout, number)
    place = file_kinds(checkpoint, layout)[kind][0]
    other = file_kinds(stale / f"{layout}{number}", layout)[kind][0].read_bytes()
    if place.read_bytes() == other or (kind.startswith("lane") and place.stat().st_size == len(other)):
        # What holds places and no elements says the same in all attempts of one layout, but for the order of its files.
        place.write_bytes(other)
        assert same(truth, shardckpt.restore(checkpoint))
        return
    place.write_bytes(other)
    assert_noticed(checkpoint, place, kind, truth)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_host_of_another_attempt_is_noticed(checkpoint_of, stale, layout):
    """Its record, its table, its values and its chunks, which all vouch for each other."""
    checkpoint, _ = checkpoint_of(layout, 3)
    attempt = checkpoint / shardckpt.open(checkpoint).record.attempt
    other = stale / f"{layout}3" / shardckpt.open(stale / f"{layout}3").record.attempt
    record = attempt / "records" / "00001.json"
    for path in [record, *(p for p in (attempt / "hosts" / "00001").rglob("*") if p.is_file())]:
        path.write_bytes((other / path.relative_to(attempt)).read_bytes())
    assert str(record.relative_to(checkpoint)) in damage_of(checkpoint)
    with pytest.raises(errors.FormatError, match=r"records/00001\.json"):
        shardckpt.restore(checkpoint)
    if layout == "packed":
        with pytest.raises(errors.CorruptionError, match="checksum"):
            shardckpt.restore(checkpoint, only=lambda name: name != "own")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swapped_files_of_equal_size_are_noticed(checkpoint_of, layout):
    """Each passes its own checksums: only the table knows which belongs where."""
    checkpoint, _ = checkpoint_of(layout)
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


# --- spare parts ----------------------------------------------------------------------------------------------------


def spoil(path):
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spoilt", [Path.unlink, spoil], ids=["missing", "damaged"])
def test_without_the_table_of_all_the_others_do_and_everything_is_still_verified(checkpoint_of, layout, spoilt):
    checkpoint, truth = checkpoint_of(layout, 3)
    kinds = file_kinds(checkpoint, layout)
    (table,) = kinds["chunk table"]
    spoilt(table)
    report = shardckpt.open(checkpoint).verify()
    assert [damage.file for damage in report.damage] == [str(table.relative_to(checkpoint))]
    assert report.chunks == shardckpt.open(checkpoint).record.totals["chunks"]
    assert same(truth, shardckpt.restore(checkpoint))
    # But one of them more, and nothing is guessed.
    for other in (kinds["a host's chunk table"][2], kinds["small tensors' table"][0], kinds["host record"][1]):
        before = other.read_bytes()
        spoilt(other)
        with pytest.raises(ShardckptError, match=str(other.relative_to(checkpoint / table.parent))):
            shardckpt.restore(checkpoint)
        other.write_bytes(before)
    assert same(truth, shardckpt.restore(checkpoint))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_all_hosts_records_and_tables_their_tensors_are_there(checkpoint_of, layout):
    checkpoint, truth = checkpoint_of(layout, 3)
    kinds = file_kinds(checkpoint, layout)
    lost = {path for kind in ("host record", "a host's chunk table", "small tensors' table", "contents", "values") for path in kinds[kind]}
    for path in lost:
        spoil(path)
    tensors = shardckpt.restore(checkpoint, only=lambda name: name != "own")
    assert same({name: part for name, part in truth.items() if name != "own"}, tensors)
    with pytest.raises(errors.FormatError, match=r"records/00000\.json"):
        shardckpt.restore(checkpoint, only="own")
    named = damage_of(checkpoint)
    assert {str(path.relative_to(checkpoint)) for path in kinds["host record"]} <= named


def test_the_values_of_one_process_are_lost_to_no_other(checkpoint_of):
    checkpoint, truth = checkpoint_of("packed", 3)
    spoil(file_kinds(checkpoint, "packed")["values"][1])

    def mine(process):
        coordinator = SimpleNamespace(world=World(process, 3))
        return shardckpt.restore(checkpoint, {"own": PerProcess(None)}, only="own", coordinator=coordinator)["own"].value

    assert same([mine(0), mine(2)], [truth["own"][0], truth["own"][2]])
    with pytest.raises(errors.FormatError, match=r"hosts/00001/values\.json"):
        mine(1)


def test_damage_to_what_several_hosts_share_is_reported_once(checkpoint_of):
    """And hides nothing else."""
    checkpoint, _ = checkpoint_of("packed", 3)
    kinds = file_kinds(checkpoint, "packed")
    lost = [*kinds["contents"], kinds["a host's chunk table"][1], kinds["values"][2], kinds["chunk table"][0]]
    for path in lost:
        spoil(path)
    files = [d.file for d in shardckpt.open(checkpoint).verify().damage if d.tensor is None]
    assert sorted(files) == sorted(str(path.relative_to(checkpoint)) for path in lost)


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


def test_a_damaged_chunk_of_a_tied_tensor_is_lost_to_all_its_names(checkpoint_of):
    checkpoint, truth = checkpoint_of("packed")
    place = truth["tied"]["first"].tobytes()[:40]
    (file,) = [p for p in file_kinds(checkpoint, "packed")["data file"] if place in p.read_bytes()]
    file.write_bytes(file.read_bytes().replace(place, bytes(40)))
    assert [d.tensor for d in shardckpt.open(checkpoint).verify().damage] == ["tied/first"]
    for name in ("tied/first", "tied/second"):
        with pytest.raises(errors.CorruptionError, match="tied/first"):
            shardckpt.restore(checkpoint, only=name)


def test_verify_reports_all_damage_and_not_just_the_first(checkpoint_of):
    checkpoint, _ = checkpoint_of("packed", 3)
    files = [path for kind in ("data file", "small tensors") for path in file_kinds(checkpoint, "packed")[kind]]
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    opened = shardckpt.open(checkpoint)
    report = opened.verify()
    assert {d.file for d in report.damage} == {str(f.relative_to(checkpoint)) for f in files}
    assert len(report.damage) == report.chunks == opened.record.totals["chunks"]


def test_in_place_restore_of_damaged_data_raises_before_it_returns(checkpoint_of):
    checkpoint, _ = checkpoint_of("packed", 3)
    file = file_kinds(checkpoint, "packed")["data file"][1]
    file.write_bytes(bytes(file.stat().st_size))
    like = {**make_state(0, 3), "own": PerProcess(None, choose=len)}
    with pytest.raises(errors.CorruptionError):
        shardckpt.restore(checkpoint, like)


# --- other readers --------------------------------------------------------------------------------------------------


def test_an_index_that_points_elsewhere_is_reported(checkpoint_of):
    """The merged index of another checkpoint whose chunks lie elsewhere: whole, with good checksums, and wrong here."""
    checkpoint, truth = checkpoint_of("packed")
    attempt = shardckpt.open(checkpoint).record.attempt
    shardckpt.save(checkpoint.parent / "other", {**state_of_host(0, 0, 1), "aaa": np.arange(5)}, options=flip_bits.options("packed"))
    other = checkpoint.parent / "other" / shardckpt.open(checkpoint.parent / "other").record.attempt
    shutil.rmtree(checkpoint / attempt / "d")
    shutil.copytree(other / "d", checkpoint / attempt / "d")
    shutil.copy(other / "manifest.ocdbt", checkpoint / attempt / "manifest.ocdbt")
    assert same(truth, shardckpt.restore(checkpoint))
    assert damage_of(checkpoint) == {f"{attempt}/manifest.ocdbt"}


def test_a_small_tensor_that_the_index_has_otherwise_is_reported(checkpoint_of, stale):
    """The merged index of a checkpoint that is the same but for its elements, which lies elsewhere in the same places."""
    checkpoint, truth = checkpoint_of("packed", 3)
    attempt = shardckpt.open(checkpoint).record.attempt
    other = stale / "packed3" / shardckpt.open(stale / "packed3").record.attempt
    shutil.rmtree(checkpoint / attempt / "d")
    shutil.copytree(other / "d", checkpoint / attempt / "d")
    shutil.copy(other / "manifest.ocdbt", checkpoint / attempt / "manifest.ocdbt")
    assert same(truth, shardckpt.restore(checkpoint))
    reasons = [damage.reason for damage in shardckpt.open(checkpoint).verify().damage]
    assert "dtypes/float64/c/0/0 in the index is missing or not what was written" in reasons
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
