"""A kind of storage that somebody adds holds checkpoints from the first save to the last deletion:
nothing asks for the kinds we know.

The kind `latent` takes a moment for each request, has no paths, and TensorStore has no driver for
it (`latent_store`). Azure is such a kind, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import numpy as np
import pytest
from emulators import environment
from paths import TESTS
from safetensors.numpy import load_file
from serving import serving
from training_runs import state as trained
from typer.testing import CliRunner

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, errors
from shardckpt.cli.app import app
from shardckpt.commit import index
from shardckpt.frameworks.coordination.base import SingleProcess
from shardckpt.io import ocdbt
from shardckpt.io.store import Store
from shardckpt.runs.collecting import collect, delete
from shardckpt.writing.attempt import Attempt

ROWS = Sharding(Mesh((4,), ("x",)), PartitionSpec("x"))
STATE = {
    "w": np.arange(2048 * 80, dtype=np.float32).reshape(2048, 80),
    "b": np.arange(37, dtype=np.int16),
    "step": 7,
}


@pytest.fixture(params=["latent", "az"])
def place(request):
    """The url of a place where nothing is yet."""
    if request.param == "latent":
        yield request.getfixturevalue("latent")
    else:
        server = request.getfixturevalue("azure_server")
        with environment(server.env()):
            yield server.url(uuid.uuid4().hex)


def save(url, **options):
    return shardckpt.save(url, STATE, options=SaveOptions(shardings={"w": ROWS}, **options))


def assert_holds(url):
    assert shardckpt.open(url).verify().ok
    restored = shardckpt.restore(url)
    assert restored["step"] == 7
    for name in ("w", "b"):
        np.testing.assert_array_equal(restored[name], STATE[name])


@pytest.mark.long
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_checkpoint_is_saved_restored_replaced_and_deleted(place, layout, compression):
    save(place, layout=layout, compression=compression)
    assert_holds(place)
    with pytest.raises(errors.AlreadyExistsError):
        save(place)
    shardckpt.save_async(place, STATE, options=SaveOptions(overwrite=True, layout=layout)).wait()
    assert_holds(place)
    assert delete(place) == []
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(place)
    assert Store.open(place).list() == []


def test_a_state_on_one_mesh_is_restored_onto_another():
    child = [sys.executable, str(TESTS / "children" / "added_storage_jax.py")]
    done = subprocess.run(
        child,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["4"]), done.stderr


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_checkpoint_is_resharded_there_from_there_and_to_there(place, tmp_path, layout):
    save(f"{place}/a")
    columns = {"mesh": Mesh((2, 2), ("y", "z")), "layout": layout}
    report = shardckpt.reshard(f"{place}/a", f"{place}/b", **columns)
    assert report.committed
    assert_holds(f"{place}/b")
    shardckpt.reshard(f"{place}/b", tmp_path / "c", mesh=Mesh((8,), ("x",)))
    assert_holds(tmp_path / "c")
    shardckpt.reshard(tmp_path / "c", f"{place}/d")
    assert_holds(f"{place}/d")


def test_a_cluster_is_refused_because_it_cannot_reach_the_place(latent, tmp_path):
    save(f"{latent}/a")
    with pytest.raises(errors.OptionError, match="a cluster cannot reach a latent:// url"):
        shardckpt.reshard(f"{latent}/a", tmp_path / "b", engine="ray://host:1")


def test_a_run_keeps_the_steps_of_its_rule(place):
    with shardckpt.CheckpointManager(
        place, every=1, keep=2, coordinator=SingleProcess()
    ) as manager:
        for step in range(1, 4):
            manager.save(step, trained(step))
        manager.wait()
        manager.pin(2)
        for step in range(4, 7):
            manager.save(step, trained(step))
        manager.wait()
    again = shardckpt.CheckpointManager(place)
    assert again.all_steps() == [2, 5, 6]
    assert again.restore().step == 6
    assert sorted(Store.open(place).list_children()) == ["2/", "5/", "6/", "job.json"]


def test_an_attempt_that_was_given_up_is_collected_after_its_time_of_grace(place):
    attempt = Attempt.at(place, SingleProcess(), SaveOptions())
    attempt.place.write("hosts/00000/0/d/00000", b"data of a save that was killed")
    (kept,) = collect(place, grace=3600)
    assert kept.outcome == "kept"
    (gone,) = collect(place, grace=0)
    assert gone.outcome == "removed"
    assert not any(name.startswith("hosts/") for name in Store.open(place).list())


def test_a_checkpoint_is_exported_to_safetensors_on_a_disk(place, tmp_path):
    save(f"{place}/1")
    shardckpt.export(f"{place}/1", tmp_path / "model.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["w"], STATE["w"])
    with pytest.raises(
        errors.OptionError, match="safetensors files are written to a local disk, gs:// or s3://"
    ):
        shardckpt.export(f"{place}/1", f"{place}/model.safetensors")


def test_safetensors_files_that_lie_there_are_imported(place, tmp_path):
    save(place)
    shardckpt.export(place, tmp_path / "model.safetensors")
    Store.open(place).write(
        "files/model.safetensors", (tmp_path / "model.safetensors").read_bytes()
    )
    shardckpt.import_checkpoint(f"{place}/files", f"{place}/imported")
    np.testing.assert_array_equal(shardckpt.restore(f"{place}/imported")["w"], STATE["w"])


def test_the_service_shows_runs_that_lie_there(place):
    for step in (10, 20):
        save(f"{place}/{step}")
    with serving(("lab", place)) as service:
        service.wait_until(lambda: len(service.get("/v1/checkpoints")["checkpoints"]) == 2)
        assert [one["run"] for one in service.get("/v1/runs")["runs"]] == ["lab"]
        tensor = service.get("/v1/checkpoints/lab/10/tensors/w")
        assert (tensor["shape"], tensor["tensorstore"]) == ([2048, 80], None)
        assert (
            service.ask("/v1/checkpoints/lab/10/tensors/w?format=raw").body == STATE["w"].tobytes()
        )


def test_commands_read_what_lies_there(place):
    save(f"{place}/1")
    for command in (
        ["ls", place],
        ["info", f"{place}/1"],
        ["info", f"{place}/1", "w"],
        ["verify", f"{place}/1"],
    ):
        shown = CliRunner().invoke(app, command)
        assert shown.exit_code == 0, shown.output
        assert "tensorstore.open" not in shown.output


def test_an_index_of_several_leaves_is_written_where_tensorstore_has_no_driver(place):
    many = {f"w{i}": np.int32(i) * np.ones(1, np.int32) for i in range(ocdbt.LEAF_KEYS)}
    shardckpt.save(place, many)
    opened = shardckpt.open(place)
    assert opened.verify().ok
    assert (
        len([*index.index_values(Store.open(place).sub(opened.record.attempt))])
        > 2 * ocdbt.LEAF_KEYS
    )
    with pytest.raises(
        errors.StorageError, match=f"TensorStore has no driver for {place.partition(':')[0]}://"
    ):
        opened.stock_spec("w0")
