"""If no chunk changes, the new checkpoint reuses the source's files."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from placeholders import put_placeholder
from processes import Processes

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, errors
from shardckpt.format.table import Table
from shardckpt.io.store import Store
from shardckpt.reshard import reuse
from shardckpt.reshard.job import Job, OpenJob
from shardckpt.reshard.options import ReshardOptions
from shardckpt.reshard.reuse import reuse_lanes

ROWS = Sharding(Mesh((4,), ("x",)), PartitionSpec("x"))


def state():
    rng = np.random.default_rng(0)
    return {
        "w": rng.random((300, 400)),
        "v": rng.random((1000,), np.float32),
        "none": np.zeros((0, 2)),
        "lr": 0.5,
    }


def chunk_files(attempt):
    """Files that hold chunks, in either layout."""
    return [
        *attempt.glob("hosts/*/*/d/0*"),
        *(path for path in attempt.glob("zarr/*/c/**/*") if path.is_file()),
    ]


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_files_are_linked_and_each_checkpoint_may_go_without_the_other(
    tmp_path, layout, compression
):
    saved = state()
    shardckpt.save(
        tmp_path / "a",
        saved,
        options=SaveOptions(layout=layout, compression=compression, shardings={"[wv]": ROWS}),
    )
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (tmp_path / "a").rglob("*")
        if path.is_file()
    }

    report = shardckpt.reshard(tmp_path / "a", tmp_path / "b", mesh=Mesh((4,), ("x",)))

    assert report.stored_bytes == 0
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    files = chunk_files(tmp_path / "b" / report.attempt)
    assert (
        len(files)
        == len(chunk_files(tmp_path / "a" / shardckpt.open(tmp_path / "a").record.attempt))
        > 0
    )
    assert all(path.stat().st_nlink == 2 for path in files)
    shutil.rmtree(tmp_path / "a")
    made = shardckpt.open(tmp_path / "b")
    assert made.verify().ok
    got = shardckpt.restore(tmp_path / "b")
    for name, value in saved.items():
        assert np.asarray(got[name]).tobytes() == np.asarray(value).tobytes()


def test_damage_of_the_source_is_told_before_anything_is_committed(tmp_path):
    shardckpt.save(tmp_path / "a", state())
    (data,) = (tmp_path / "a").glob("*/hosts/00000/0/d/00000")
    content = bytearray(data.read_bytes())
    content[50_000] ^= 1
    data.write_bytes(content)
    with pytest.raises(errors.CorruptionError, match=f"w.* is damaged: {data}, bytes"):
        shardckpt.reshard(tmp_path / "a", tmp_path / "b")
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(tmp_path / "b")
    assert shardckpt.reshard(tmp_path / "a", tmp_path / "b", verify=False).committed


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_file_that_the_source_lacks_is_named_and_nothing_is_committed(tmp_path, layout, verify):
    shardckpt.save(tmp_path / "a", state(), options=SaveOptions(layout=layout))
    lost = chunk_files(next((tmp_path / "a").glob("2*")))[0]
    lost.unlink()
    with pytest.raises(
        errors.MissingDataError, match=f"^{lost} is missing; put it back from a backup"
    ):
        shardckpt.reshard(tmp_path / "a", tmp_path / "b", verify=verify)
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(tmp_path / "b")


@pytest.mark.long
def test_a_save_of_many_hosts_is_taken_over_host_by_host_and_goes_on_where_it_was(tmp_path):
    with Processes("many_hosts") as job:
        job.run("save_without_committing", 4, tmp_path / "a")
    shardckpt.commit(tmp_path / "a")
    source = shardckpt.open(tmp_path / "a")
    opened = OpenJob(Job(str(tmp_path / "a"), str(tmp_path / "b"), ReshardOptions(), alone=True))
    assert len(opened.contents.small) == 2
    assert opened.checkpoint.stats.reads == 1, "all small tensors together"
    put_placeholder(tmp_path / "b")
    first = shardckpt.reshard(tmp_path / "a", tmp_path / "b")
    assert (first.tasks, first.done_before) == (4, 0)
    put_placeholder(tmp_path / "b")
    (tmp_path / "b" / first.attempt / "records" / "00002.json").unlink()

    again = shardckpt.reshard(tmp_path / "a", tmp_path / "b")

    assert (again.attempt, again.done_before) == (first.attempt, 3)
    made = shardckpt.open(tmp_path / "b")
    assert made.verify().ok
    assert made.record.processes == source.record.processes == 4
    assert len(list((tmp_path / "b" / again.attempt / "hosts").glob("0*"))) == 4
    for name in source.names():
        assert made.read(name).tobytes() == source.read(name).tobytes()
    for process in range(4):
        assert made.process_values(process) == source.process_values(process)


def test_values_of_processes_outlive_a_reshard_that_has_other_tasks_than_they_were(tmp_path):
    with Processes("many_hosts") as job:
        job.run("save_per_process", 4, tmp_path / "a")
    source = shardckpt.open(tmp_path / "a")
    report = shardckpt.reshard(tmp_path / "a", tmp_path / "b", layout="zarr", workers=1)
    assert report.tasks == 4, "as many as had values, though there is nothing else for them to do"
    made = shardckpt.open(tmp_path / "b")
    assert made.verify().ok
    assert made.record.processes == 4
    for name in source.names():
        assert made.read(name).tobytes() == source.read(name).tobytes()
    for process in range(4):
        assert made.process_values(process) == source.process_values(process)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_nothing_that_a_symbolic_link_leads_to_becomes_a_part_of_the_target(tmp_path, what):
    shardckpt.save(tmp_path / "a", state())
    (lane,) = (tmp_path / "a").glob("*/hosts/*/0")
    if what == "directory":
        lane.rename(tmp_path / "elsewhere")
        lane.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "secret").write_text("of this user alone")
    (lane / "d" / "linked").symlink_to(tmp_path / "secret")
    shardckpt.reshard(tmp_path / "a", tmp_path / "b")
    assert not list((tmp_path / "b").rglob("linked"))
    assert shardckpt.open(tmp_path / "b").verify().ok


def test_a_chunk_table_that_names_a_file_outside_of_its_databases_is_refused(tmp_path):
    table = Table.of(["small"], {})
    with pytest.raises(errors.FormatError, match="'small'"):
        reuse_lanes(
            Store.open(tmp_path),
            Store.open(tmp_path / "b"),
            ["hosts/00000/0"],
            table,
            "hosts/00000-0",
        )


def test_a_file_is_copied_where_the_kernel_cannot_copy_between_two_file_systems(tmp_path):
    data = np.random.default_rng(0).bytes(3_000_000)
    # Of another kind than the disk, if there is one.
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as other:
        other.write(data)
        other.flush()
        reuse._copy(Path(other.name), tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
