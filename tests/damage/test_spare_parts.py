"""Parts that are there twice may be lost once: the table of all or the hosts' own. Each host's
files are its own loss."""

import shutil
from pathlib import Path

import pytest
from flip_bits import file_kinds, same
from noticed import LAYOUTS, damage_of
from one_of_several import OneOfSeveral

import shardckpt
from shardckpt import PerProcess, ShardckptError, errors


def spoil(path):
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def put_directory(path):
    """Put a directory in place of a file."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "spoilt", [Path.unlink, spoil, put_directory], ids=["missing", "damaged", "a directory"]
)
def test_without_the_table_of_all_the_others_do_and_everything_is_still_verified(
    checkpoint_of, layout, spoilt
):
    checkpoint, truth = checkpoint_of(layout, 3)
    kinds = file_kinds(checkpoint, layout)
    (table,) = kinds["chunk table"]
    spoilt(table)
    report = shardckpt.open(checkpoint).verify()
    assert [damage.file for damage in report.damage] == [str(table.relative_to(checkpoint))]
    assert report.chunks == shardckpt.open(checkpoint).record.totals["chunks"]
    assert same(truth, shardckpt.restore(checkpoint))
    # But one of them more, and nothing is guessed.
    for other in (
        kinds["a host's chunk table"][2],
        kinds["small tensors' table"][0],
        kinds["host record"][1],
    ):
        aside = other.rename(other.with_suffix(".aside"))
        if spoilt is not Path.unlink:
            shutil.copy(aside, other)
            spoilt(other)
        with pytest.raises(ShardckptError, match=str(other.relative_to(checkpoint / table.parent))):
            shardckpt.restore(checkpoint)
        if other.is_dir():
            other.rmdir()
        aside.replace(other)
    assert same(truth, shardckpt.restore(checkpoint))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_all_hosts_records_and_tables_their_tensors_are_there(checkpoint_of, layout):
    checkpoint, truth = checkpoint_of(layout, 3)
    kinds = file_kinds(checkpoint, layout)
    lost = {
        path
        for kind in (
            "host record",
            "a host's chunk table",
            "small tensors' table",
            "contents",
            "values",
        )
        for path in kinds[kind]
    }
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
        coordinator = OneOfSeveral(process, 3)
        return shardckpt.restore(
            checkpoint, {"own": PerProcess(None)}, only="own", coordinator=coordinator
        )["own"].value

    assert same([mine(0), mine(2)], [truth["own"][0], truth["own"][2]])
    with pytest.raises(errors.FormatError, match=r"hosts/00001/values\.json"):
        mine(1)


def test_damage_to_what_several_hosts_share_is_reported_once(checkpoint_of):
    """And hides nothing else."""
    checkpoint, _ = checkpoint_of("packed", 3)
    kinds = file_kinds(checkpoint, "packed")
    lost = [
        *kinds["contents"],
        kinds["a host's chunk table"][1],
        kinds["values"][2],
        kinds["chunk table"][0],
    ]
    for path in lost:
        spoil(path)
    files = [d.file for d in shardckpt.open(checkpoint).verify().damage if d.tensor is None]
    assert sorted(files) == sorted(str(path.relative_to(checkpoint)) for path in lost)
