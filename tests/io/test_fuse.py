"""Real mounts with further habits; `make fuse` also runs other tests on a mount."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from fuse_mount import mounted

import shardckpt
from shardckpt.convert.files.notes import Notes
from shardckpt.errors import NotFoundError, StorageError
from shardckpt.io import ocdbt
from shardckpt.io.store import Store
from shardckpt.runs.collecting import collect, delete

pytestmark = pytest.mark.fuse
STATE = {"w": np.arange(200_000.0)}


def saved_twice(place):
    for step in (1, 2):
        shardckpt.save(
            place, {**STATE, "step": step}, options=shardckpt.SaveOptions(overwrite=step == 2)
        )
    assert shardckpt.restore(place)["step"] == 2


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_saves_and_exports_succeed_where_each_look_gives_an_open_file_another_inode_number(
    tmp_path, layout
):
    with mounted(tmp_path, "renumbered") as mount:
        with shardckpt.CheckpointManager(
            mount / "run", every=1, keep=1, options=shardckpt.SaveOptions(layout=layout)
        ) as manager:
            for step in range(3):
                manager.save(step, STATE)
        assert shardckpt.CheckpointManager(mount / "run").all_steps() == [2]
        for to in ("safetensors", "dcp", "torch"):
            for overwrite in (False, True):
                shardckpt.export(mount / "run" / "2", mount / to, to=to, overwrite=overwrite)
        assert {path.name for path in mount.iterdir()} == {"run", "safetensors", "dcp", "torch"}
        assert not [*mount.rglob("*.__lock")]


def test_saves_and_exports_succeed_where_directories_cannot_be_synced(tmp_path, caplog):
    with mounted(tmp_path, "unsynced") as mount:
        saved_twice(mount / "c")
        for to in ("safetensors", "dcp", "torch"):
            shardckpt.export(mount / "c", mount / to, to=to)
    assert (
        sum("cannot make directories durable" in record.message for record in caplog.records) == 1
    )


def test_a_save_where_nothing_can_be_renamed_is_refused_with_the_way_out(tmp_path):
    with (
        mounted(tmp_path, "unrenamed") as mount,
        pytest.raises(StorageError, match=r"Function not implemented.*use the bucket's own url"),
    ):
        shardckpt.save(mount / "c", STATE)


def test_a_checkpoint_that_somebody_reads_is_deleted_and_what_is_hidden_goes_when_it_is_closed(
    tmp_path,
):
    with mounted(tmp_path) as mount:
        saved_twice(mount / "c")
        (data,) = [path for path in mount.rglob("hosts/**/d/*") if path.stat().st_size > 1 << 20]
        with data.open("rb"):
            delete(str(mount / "c"), grace=0)
            left = sorted(path.name[:12] for path in mount.rglob("*") if path.is_file())
            assert left == [".fuse_hidden", "checkpoint.j"]  # a tombstone
            with pytest.raises(NotFoundError):
                shardckpt.restore(mount / "c")
        assert [one.outcome for one in collect(str(mount / "c"), grace=0)] == ["removed"]
        assert not [path for path in mount.rglob("*") if path.is_file()]


@pytest.mark.parametrize("habit", ["unkept", "renumbered"])
def test_of_many_processes_exactly_one_creates(tmp_path, habit):
    program = (
        "import json, sys; from shardckpt.io.store import Store; s = Store.open(sys.argv[1]); "
        "s.exists('x'); sys.stdin.read(1)\n"
        "print(json.dumps([s.create(f'record {i}', sys.argv[2].encode()) for i in range(50)]))"
    )
    with mounted(tmp_path, habit) as mount:
        command = [sys.executable, "-c", program, str(mount)]
        children = [
            subprocess.Popen(
                [*command, str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for i in range(3)
        ]
        for child in children:
            child.stdin.write("x")
            child.stdin.flush()
        created = [json.loads(child.communicate()[0]) for child in children]
        assert [sum(won) for won in zip(*created, strict=True)] == [1] * 50


def test_a_lock_that_is_removed_between_being_found_and_opened_is_made_anew(tmp_path):
    with mounted(tmp_path, "outrun") as mount:
        (mount / "key.__lock").touch()
        store = Store.open(mount)
        assert store.create("key", b"1")
        (mount / "key.__lock").touch()
        store.write("key", b"2")
        (mount / "notes").touch()
        Notes(mount / "notes").close()
        assert sorted(path.name for path in mount.iterdir()) == ["key", "notes"]


def test_an_index_of_many_keys_is_written_where_no_file_keeps_its_inode_number(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ocdbt, "LEAF_KEYS", 3)
    with mounted(tmp_path, "renumbered") as mount:
        shardckpt.save(mount / "c", {f"w{i}": np.arange(i) for i in range(10)})
        assert shardckpt.open(mount / "c").verify().ok


def test_a_mount_ends_with_the_process_that_made_it(tmp_path):
    program = (
        "import pathlib, sys, time; from fuse_mount import mounted\n"
        "with mounted(pathlib.Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert (tmp_path / "mount").is_mount()
        child.send_signal(signal.SIGKILL)
        child.stdout.read()  # until the mount's own process has ended
    assert not (tmp_path / "mount").is_mount()
