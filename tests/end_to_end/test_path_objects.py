"""A path object of a url is the url wherever a place is given: nothing is written to a directory
named after a scheme."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest

import shardckpt
from shardckpt import errors
from shardckpt.reshard.forecast import rates
from shardckpt.runs.catalog import catalog
from shardckpt.runs.collecting import collect, delete
from shardckpt.runs.pinning import pin, tag, unpin, untag
from shardckpt.training.integrations.dcp import StorageReader, StorageWriter
from shardckpt.views.model_view import ModelView

STATE = {"w": np.arange(1 << 15, dtype=np.float32), "v": np.ones(1 << 15, np.float32)}


class PathLike:
    """As `etils.epath.Path("gs://…")`: `os.fspath` gives the url."""

    def __init__(self, url):
        self.url = url

    def __fspath__(self):
        return self.url

    def __truediv__(self, name):
        return PathLike(f"{self.url}/{name}")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A url in memory; the working directory must stay empty."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    yield PathLike(f"memory://{uuid.uuid4().hex}")
    assert list(Path.cwd().iterdir()) == []


def test_every_call_takes_a_path_object_of_a_url(root, tmp_path):
    options = shardckpt.SaveOptions
    shardckpt.save(root / "1", STATE)
    shardckpt.save_async(root / "2", STATE, options=options(base=root / "1", skip="v")).wait()
    assert shardckpt.open((root / "2").url).bases
    assert set(shardckpt.restore(root / "2")) == {"w", "v"}
    assert shardckpt.open(root / "1").names() == ["w", "v"]
    assert [str(entry.location) for entry in catalog(root)] == [(root / "1").url, (root / "2").url]
    pin(root / "1")
    assert unpin(root / "1")
    tag(root / "1", "best")
    assert untag(root / "1", "best")
    assert shardckpt.commit(root) == []
    assert collect(root) == []
    shardckpt.reshard(root / "1", root / "3", mesh=shardckpt.Mesh((2,), ("x",)), rules="*=(x)")
    shardckpt.reshard(root / "1", root / "4", like=root / "3")
    assert shardckpt.open((root / "4").url).info("w").layout is not None
    assert ModelView(root / "4").sizes
    assert shardckpt.safetensors_view(root / "4").read(8)
    with shardckpt.safe_open(root / "4", framework="np") as opened:
        assert set(opened.keys()) == {"w", "v"}
    shardckpt.export(root / "4", tmp_path / "m.safetensors")
    shardckpt.import_checkpoint(tmp_path / "m.safetensors", root / "5", like=root / "4")
    assert set(shardckpt.restore((root / "5").url)) == {"w", "v"}
    rates.measure_write(root / "probe")
    delete(root / "5")
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(root / "5")


def test_a_manager_takes_a_path_object_of_a_url(root):
    with shardckpt.CheckpointManager(root / "run", options=shardckpt.SaveOptions()) as manager:
        manager.save(1, STATE)
        manager.wait()
    with shardckpt.CheckpointManager((root / "run").url) as manager:
        assert manager.restore(STATE).step == 1


def test_a_manager_s_base_may_be_a_path_object_of_a_url(root):
    shardckpt.save(root / "base", STATE)
    with shardckpt.CheckpointManager(
        root / "run", options=shardckpt.SaveOptions(base=root / "base", skip="v")
    ) as manager:
        manager.save(1, STATE)
    assert shardckpt.open((root / "run" / "1").url).bases


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_readers_and_writers_of_dcp_take_a_path_object_of_a_url(root):
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(3)}, storage_writer=StorageWriter(root / "dcp"))
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=StorageReader(root / "dcp"))
    assert state["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "orbax"])
def test_an_export_that_needs_a_disk_refuses_a_path_object_of_another_storage(root, to):
    shardckpt.save(root / "1", STATE)
    with pytest.raises(errors.OptionError, match=r"memory://.*written to a local disk"):
        shardckpt.export(root / "1", root / "out", to=to)


CALLS = {
    "save": lambda place: shardckpt.save(place, STATE),
    "save_async": lambda place: shardckpt.save_async(place, STATE),
    "base": lambda place: shardckpt.save(
        "x", STATE, options=shardckpt.SaveOptions(base=place, skip="v")
    ),
    "open": shardckpt.open,
    "restore": shardckpt.restore,
    "manager": shardckpt.CheckpointManager,
    "catalog": catalog,
    "commit": shardckpt.commit,
    "collect": collect,
    "delete": delete,
    "pin": pin,
    "view": ModelView,
    "safe_open": lambda place: shardckpt.safe_open(place, framework="np"),
    "import": lambda place: shardckpt.import_checkpoint(place, "x"),
    "reshard": lambda place: shardckpt.reshard(place, "x"),
    "measure_write": rates.measure_write,
    "writer of DCP": StorageWriter,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_refuses_a_url_whose_slashes_pathlib_has_joined(root, call):
    with pytest.raises(
        errors.UrlError, match="a gs url starts with gs://, and pathlib joins its slashes"
    ):
        call(Path("gs://bucket/run"))
