"""Location of damage: tensor, index range and file. Everything else can be had."""

import numpy as np
import pytest
from flip_bits import file_kinds, make_state, same
from noticed import CHUNKS, LAYOUTS

import shardckpt
from shardckpt import Box, PerProcess, SaveOptions, errors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_chunk_is_located_and_the_rest_restored(tmp_path, layout):
    """Of a tensor of 4 × 4 chunks one is overwritten; everything outside it can be had."""
    value = np.arange(256 * 256, dtype=np.float32).reshape(256, 256)
    mesh = shardckpt.Mesh((4, 4), ("x", "y"))
    sharding = shardckpt.Sharding(mesh, shardckpt.PartitionSpec("x", "y"))
    state = {"before": np.arange(9), "w": value, "after": np.arange(7.0), "leaf": "text"}
    shardckpt.save(
        tmp_path / "c", state, options=SaveOptions(layout=layout, shardings={"w": sharding})
    )
    checkpoint = shardckpt.open(tmp_path / "c")
    place = value[64:65, 128:160].tobytes()  # the beginning of a row of the chunk at (1, 2)
    (file,) = [
        p for p in file_kinds(tmp_path / "c", layout)[CHUNKS[layout]] if place in p.read_bytes()
    ]
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
    for box in (
        Box((0, 0), (64, 256)),
        Box((64, 0), (256, 128)),
        Box((128, 128), (256, 256)),
        Box((64, 192), (128, 256)),
    ):
        np.testing.assert_array_equal(checkpoint.read("w", box), value[box.slices])
    with pytest.raises(errors.CorruptionError):
        checkpoint.read("w", damage.box)


@pytest.mark.long
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
    files = [
        path
        for kind in ("data file", "small tensors")
        for path in file_kinds(checkpoint, "packed")[kind]
    ]
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
