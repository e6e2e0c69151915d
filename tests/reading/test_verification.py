"""Verification that is stopped and resumed: every chunk is checked exactly once, in groups of
bounded size."""

import contextlib
import dataclasses
import shutil
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_store import LatentStore
from one_of_several import on_threads

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, errors
from shardckpt.io.store import Store
from shardckpt.plan.pieces import chunk_boxes
from shardckpt.reading.verification import verify

TENSORS = {
    "large": np.arange(256 * 64, dtype=np.float32).reshape(256, 64),
    "uneven": np.arange(35, dtype=np.int16).reshape(7, 5),
    "scalar": np.array(7.5),
    "empty": np.zeros((0, 3), np.int8),
    "bytes": np.arange(200, dtype=np.uint8),
}
SHARDING = Sharding(Mesh((4, 4), ("x", "y")), PartitionSpec("x", "y"))
KINDS = [("packed", None), ("packed", "zstd"), ("zarr", None)]


class Stopped(errors.ShardckptError):
    """Raised by the caller of `verify`, who may raise errors of this package, too."""


def save(root, layout, compression):
    """A checkpoint called 1 with tensors of its own, and of two bases between them."""
    options = SaveOptions(
        layout=layout,
        compression=compression,
        shardings={"*/large": SHARDING, "*/uneven": SHARDING},
    )
    state = {kind: {name: value + 1 for name, value in TENSORS.items()} for kind in ("a", "b", "c")}
    shardckpt.save(root / "x", state, options=options)
    shardckpt.save(
        root / "y", state, options=dataclasses.replace(options, base=root / "x"), skip="b/*"
    )
    # Tensors that y has in x are in x for 1 as well; the others of a and b are in y.
    shardckpt.save(
        root / "1",
        state,
        options=dataclasses.replace(options, base=root / "y"),
        skip=["a/*", "b/*"],
    )
    return root / "1"


def data_files(root):
    """The files that hold chunks; a scalar's chunk is called c in layout "zarr"."""
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    return [p for p in files if p.name == "c" or (p.name.isdecimal() and {"d", "c"} & set(p.parts))]


def check(checkpoint, **options):
    return verify(Store.open(checkpoint.location), checkpoint.record, **options)


def chunks_of(checkpoint):
    """Tensor and box of every chunk, sorted."""
    pieces = [
        (t, piece) for t in checkpoint.record.structure.tensors.values() for piece in t.pieces
    ]
    boxes = [(t.name, chunk_boxes(piece, np.arange(piece.num_chunks))) for t, piece in pieces]
    return sorted(
        (name, str(boxes_of_piece[i]))
        for name, boxes_of_piece in boxes
        for i in range(len(boxes_of_piece))
    )


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def damaged(request, tmp_path_factory):
    """A checkpoint that has no good chunk, and neither have its bases."""
    root = tmp_path_factory.mktemp("damaged")
    checkpoint = shardckpt.open(save(root, *request.param))
    report = checkpoint.verify()
    assert (report.ok, report.chunks) == (True, len(chunks_of(checkpoint)))
    assert {base.url for base in checkpoint.record.structure.bases} == {"../x", "../y"}
    for file in data_files(root):
        file.write_bytes((np.frombuffer(file.read_bytes(), np.uint8) ^ 0xFF).tobytes())
    return checkpoint


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 12)), max_size=6),
    st.integers(1, 1 << 20),
)
def test_every_chunk_is_checked_exactly_once_wherever_a_verification_stops(damaged, stops, last):
    """All chunks are damaged, so that a check of each shows; damage is reported before the call of
    `progress` after it."""
    damage, after, shown = [], 0, []

    def progress(done, total, bytes_read, calls=1000):
        shown.append((done, total, bytes_read, len(damage)))
        if len(shown) > calls:
            raise Stopped

    for group_bytes, calls in stops:
        shown.clear()
        with contextlib.suppress(Stopped):
            check(
                damaged,
                progress=partial(progress, calls=calls),
                after=after,
                group_bytes=group_bytes,
                on_damage=damage.append,
            )
        after = shown[-1][0]
        assert len(damage) == after
    shown.clear()
    report = check(
        damaged, progress=progress, after=after, group_bytes=last, on_damage=damage.append
    )
    assert sorted((d.tensor, str(d.box)) for d in damage) == chunks_of(damaged)
    assert report.damage == damage[len(damage) - report.chunks :]
    assert [done for done, *_ in shown] == [so_far for *_, so_far in shown]
    assert shown[-1][0] == shown[-1][1] == len(damage)
    assert [read for *_, read, _ in shown] == sorted(read for *_, read, _ in shown)


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("group_bytes", [1, 5000])
def test_a_group_has_no_more_bytes_than_it_may_unless_one_chunk_has(tmp_path, layout, group_bytes):
    checkpoint = shardckpt.open(save(tmp_path, layout, None))
    shown = []
    assert check(checkpoint, progress=lambda *now: shown.append(now), group_bytes=group_bytes).ok
    largest = max(
        int(np.prod(p.chunks)) * t.dtype.itemsize + 4
        for t in checkpoint.record.structure.tensors.values()
        for p in t.pieces
    )
    steps = [(b[0] - a[0], b[2] - a[2]) for a, b in pairwise(shown)]
    assert all(nbytes <= max(largest, group_bytes + 4 * chunks) for chunks, nbytes in steps)
    assert sum(nbytes for _, nbytes in steps) == checkpoint.verify().bytes_read
    if group_bytes == 1:
        assert {chunks for chunks, _ in steps} == {1}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_a_flipped_bit_in_any_file_is_found_wherever_a_verification_is_resumed(tmp_path, kind):
    checkpoint = shardckpt.open(save(tmp_path / "good", *kind))
    total = check(checkpoint).chunks
    rng = np.random.default_rng(0)
    for file in sorted(
        p for p in checkpoint.location.local_path.rglob("*") if p.is_file() and p.stat().st_size
    ):
        data = file.read_bytes()
        at = int(rng.integers(len(data)))
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.integers(8))]) + data[at + 1 :])
        damage, positions = [], [0]
        for stop in rng.integers(0, total, 2).tolist():
            with contextlib.suppress(Stopped):
                check(
                    checkpoint,
                    progress=partial(stop_at, stop, positions),
                    after=positions[-1],
                    group_bytes=3000,
                    on_damage=damage.append,
                )
        check(checkpoint, after=positions[-1], on_damage=damage.append)
        assert damage, file
        file.write_bytes(data)


def stop_at(stop, positions, done, _total, _bytes_read):
    """Note a position, and stop if it has been reached."""
    positions.append(done)
    if done >= stop:
        raise Stopped


def test_a_base_that_is_gone_is_damage_to_each_of_its_tensors_wherever_a_verification_begins(
    tmp_path,
):
    checkpoint = shardckpt.open(save(tmp_path, "packed", None))
    total = check(checkpoint).chunks
    shutil.rmtree(tmp_path / "x")
    positions = []
    check(checkpoint, progress=lambda done, _total, _read: positions.append(done), group_bytes=1)
    assert positions[-1] == total
    for after in positions:
        report = check(checkpoint, after=after)
        lost = [d.tensor for d in report.damage]
        assert lost == [f"b/{name}" for name in TENSORS if f"b/{name}" in lost]
        assert all(d.file == "../x" for d in report.damage)
        assert bool(lost) == (after < total)
    in_x = [
        t.name
        for t in checkpoint.record.structure.tensors.values()
        if t.base is not None and t.base.base.url == "../x"
    ]
    assert [d.tensor for d in check(checkpoint).damage] == in_x != []


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_checkpoint_that_is_deleted_or_replaced_meanwhile_is_not_damaged(
    tmp_path, layout, begun, what
):
    options = SaveOptions(layout=layout, overwrite=True)
    shardckpt.save(tmp_path / "c", TENSORS, options=options)
    checkpoint = shardckpt.open(tmp_path / "c")

    def remove(*_of_progress):
        if what == "deleted":
            shutil.rmtree(tmp_path / "c", ignore_errors=True)
        elif shardckpt.open(tmp_path / "c").record.attempt == checkpoint.record.attempt:
            shardckpt.save(tmp_path / "c", TENSORS, options=options)

    if not begun:
        remove()
    with pytest.raises(errors.ReplacedError, match=f"the checkpoint was {what} while"):
        checkpoint.verify(remove)


def test_a_checkpoint_whose_files_are_deleted_before_its_record_is_not_damaged(tmp_path):
    shardckpt.save(tmp_path / "c", TENSORS)
    checkpoint = shardckpt.open(tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / checkpoint.record.attempt)
    with pytest.raises(errors.ReplacedError, match="the checkpoint was deleted while"):
        check(checkpoint, on_damage=lambda _damage: shutil.rmtree(tmp_path / "c", True))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("names", ["records/*.json", "hosts/0*/table"])
def test_the_files_of_all_hosts_are_asked_for_at_once(latent, names):
    hosts = 3
    on_threads(hosts, lambda coordinator: shardckpt.save(latent, TENSORS, coordinator=coordinator))
    all_asked = Barrier(hosts, timeout=5)

    class Meeting(LatentStore):
        """The answer about a file of a host comes when those of all hosts are asked for."""

        def _read(self, key, start, stop, *, versioned):
            if fnmatch(key, names):
                all_asked.wait()
            return super()._read(key, start, stop, versioned=versioned)

    checkpoint = shardckpt.open(latent)
    assert len(checkpoint.record.hosts) == hosts
    assert verify(Meeting(checkpoint.location), checkpoint.record).ok


def test_a_position_that_no_verification_of_the_checkpoint_can_have_is_refused(tmp_path):
    shardckpt.save(tmp_path / "c", TENSORS)
    checkpoint = shardckpt.open(tmp_path / "c")
    for after in (-1, 1_000_000):
        with pytest.raises(errors.OptionError, match=f"after={after} is not a number from 0 to"):
            check(checkpoint, after=after)


def test_an_error_of_the_caller_stops_the_verification(damaged):
    def refuse(_damage):
        raise Stopped

    with pytest.raises(Stopped):
        check(damaged, on_damage=refuse)


class StoppedByStorage(errors.StorageError):
    """Raised by a storage of a class of its own."""


def test_an_error_of_the_storage_keeps_its_class_and_names_the_damage_before(damaged):
    def fail(_damage):
        raise StoppedByStorage("it does not answer.")

    # Other threads may have come to more meanwhile.
    with pytest.raises(StoppedByStorage, match=r"answer\. Before that, \d+ damaged parts? came to"):
        check(damaged, on_damage=fail)
