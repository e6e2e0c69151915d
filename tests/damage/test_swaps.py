"""A whole file in the wrong place, which passes every checksum of its own: of another host, another
tensor, another attempt."""

from itertools import combinations
from random import Random

import numpy as np
import pytest
from flip_bits import file_kinds, indexes_of, same, save_in_small_files
from noticed import CHUNKS, INDEXES, KINDS, LAYOUTS, SPARE, assert_noticed, damage_of

import shardckpt
from shardckpt import SaveOptions, ShardckptError, errors

pytestmark = pytest.mark.slow


def names(path, checkpoint):
    """Names that verify may give a file."""
    return indexes_of(str(path.relative_to(checkpoint)))


def contents_of(*paths):
    return [path.read_bytes() for path in paths]


def exchange(one, other):
    """Two files change places."""
    a, b = contents_of(one, other)
    one.write_bytes(b)
    other.write_bytes(a)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_files_of_equal_size_that_changed_places_are_reported(checkpoint_of, layout):
    """Each passes its own checksums: only who refers to them knows which belongs where."""
    checkpoint, truth = checkpoint_of(layout, 3)
    kind_of = {
        path: kind for kind, paths in file_kinds(checkpoint, layout).items() for path in paths
    }
    pairs = [
        pair
        for pair in combinations(kind_of, 2)
        if len({path.stat().st_size for path in pair}) == 1 and len({*contents_of(*pair)}) == 2
    ]
    assert {frozenset(map(kind_of.get, pair)) for pair in pairs} >= {
        frozenset({kind}) for kind in (CHUNKS[layout], "values", "host record")
    }
    for one, other in Random(0).sample(pairs, min(60, len(pairs))):
        exchange(one, other)
        report = {damage.file for damage in shardckpt.open(checkpoint).verify().damage}
        for path in (one, other):
            assert names(path, checkpoint) & report, f"{one} and {other}"
        assert report <= names(one, checkpoint) | names(other, checkpoint)
        if kind_of[one] not in INDEXES | SPARE:
            with pytest.raises(ShardckptError):
                shardckpt.restore(checkpoint)
        exchange(one, other)
    assert same(truth, shardckpt.restore(checkpoint))


SINGLE = {
    "chunk table",
    "small tensors",
    "small tensors' table",
    "commit record",
    "merged index: manifest",
    "merged index: nodes",
}
"""Kinds of which there is one file, where the index is small."""
COMMITTED = {"checksums of replicas"}
"""Kinds that only the committer reads."""


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (layout, kind)
        for layout, number, kind in KINDS
        if number == 3 and kind not in SINGLE | COMMITTED
    ],
)
def test_files_of_two_hosts_that_changed_places_are_reported(checkpoint_of, layout, kind):
    """Files of equal and of different sizes."""
    checkpoint, _ = checkpoint_of(layout, 3)
    files = file_kinds(checkpoint, layout)[kind]
    exchange(files[0], files[-1])
    report = damage_of(checkpoint)
    assert names(files[0], checkpoint) & report
    assert names(files[-1], checkpoint) & report


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stale_file_of_equal_size_is_noticed(checkpoint_of, stale, layout, number):
    """From another attempt at the same state with other elements, file by file."""
    checkpoint, truth = checkpoint_of(layout, number)
    attempt, other = (
        path / shardckpt.open(path).record.attempt for path in (checkpoint, stale[layout, number])
    )
    tried = set()
    for kind, paths in file_kinds(checkpoint, layout).items():
        for path in paths[:: max(1, len(paths) // 20)]:
            old = (
                other / path.relative_to(attempt)
                if kind != "commit record"
                else other.parent / path.name
            )
            if (
                not old.exists()
                or old.stat().st_size != path.stat().st_size
                or old.read_bytes() == path.read_bytes()
            ):
                continue  # named by its digest, say; or it holds places and no elements
            tried.add(kind)
            before = path.read_bytes()
            path.write_bytes(old.read_bytes())
            if kind in {"lane: manifest", "merged index: manifest"}:
                # It says of the index's one node what the right one says, which has the same name;
                # only its identity is another.
                assert same(truth, shardckpt.restore(checkpoint))
            elif kind == "commit record":
                # It names what is not there.
                with pytest.raises(errors.CorruptionError, match=other.name):
                    shardckpt.restore(checkpoint)
                assert not shardckpt.open(checkpoint).verify().ok
            else:
                assert_noticed(checkpoint, path, kind, truth)
            path.write_bytes(before)
    assert tried >= {
        CHUNKS[layout],
        "chunk table",
        "a host's chunk table",
        "host record",
        "values",
        "commit record",
    }
    assert same(truth, shardckpt.restore(checkpoint))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_host_of_another_attempt_is_noticed(checkpoint_of, stale, layout):
    """Its record, its table, its values and its chunks, which all vouch for each other."""
    checkpoint, _ = checkpoint_of(layout, 3)
    attempt = checkpoint / shardckpt.open(checkpoint).record.attempt
    other = stale[layout, 3] / shardckpt.open(stale[layout, 3]).record.attempt
    record = attempt / "records" / "00001.json"
    for path in [record, *(p for p in (attempt / "hosts" / "00001").rglob("*") if p.is_file())]:
        path.write_bytes((other / path.relative_to(attempt)).read_bytes())
    assert str(record.relative_to(checkpoint)) in damage_of(checkpoint)
    with pytest.raises(errors.FormatError, match=r"records/00001\.json"):
        shardckpt.restore(checkpoint)
    if layout == "packed":
        with pytest.raises(errors.CorruptionError, match="checksum"):
            shardckpt.restore(checkpoint, only=lambda name: name != "own")


def test_chunks_of_equal_size_that_changed_places_are_noticed(tmp_path):
    state = {name: np.full((100,), i, np.float32) for i, name in enumerate("abcdefgh")}
    save_in_small_files(tmp_path / "c", state, SaveOptions())
    (file,) = file_kinds(tmp_path / "c", "packed")["data file"]
    data = file.read_bytes()
    file.write_bytes(data[404:808] + data[:404] + data[808:])
    damaged = [d.tensor for d in shardckpt.open(tmp_path / "c").verify().damage if d.tensor]
    assert damaged == ["a", "b"]
