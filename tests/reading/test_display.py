"""Checkpoints as Python and notebooks show them."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding
from shardckpt.errors import OptionError
from shardckpt.reshard.options import ReshardOptions
from shardckpt.reshard.plan import plan_reshard

EVIL = "<script>alert(1)</script>\x1b[2J"
ROWS = Sharding(Mesh((4,), ("data",)), PartitionSpec("data"))


class Tags(HTMLParser):
    """Counts elements, and checks that they are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.count, self.text = [], {}, ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def checkpoint(tmp_path):
    layers = {f"layers.{i}.w": np.full((8, 4), i, np.float32) for i in range(5)}
    state = {"model": layers, "list": [np.ones(2), np.zeros(2)], "lr": [0.1, 0.2], EVIL: 3}
    shardckpt.save(tmp_path / "1", state, options=SaveOptions(shardings={"model/**": ROWS}))
    return shardckpt.open(tmp_path / "1")


def test_repr_is_a_line_and_str_a_tree(checkpoint):
    assert repr(checkpoint) == f"<shardckpt.Checkpoint {checkpoint.location} with 7 tensors, 672 B>"
    lines = str(checkpoint).splitlines()
    assert lines[0] == str(checkpoint.location)
    assert any(
        line.split()[:3] == ["├─", "model", "5"] or "layers.{0…4}.w" in line for line in lines
    )
    assert "\x1b" not in str(checkpoint)


def test_a_notebook_gets_a_tree_that_opens_and_closes(checkpoint):
    tags = Tags(checkpoint._repr_html_())
    assert tags.count["details"] >= 1
    assert "script" not in tags.count
    assert "layers.{0…4}.w" in tags.text
    assert "<script>alert(1)" in tags.text


def test_a_notebook_gets_a_drawing_of_a_tensors_layout(checkpoint):
    tags = Tags(checkpoint["model/layers.1.w"]._repr_html_())
    assert tags.count["svg"] == 1
    assert tags.count["rect"] == 4
    assert "data=4" in tags.text


def test_a_large_tree_is_cut_off_with_the_number_of_the_rest(tmp_path):
    shardckpt.save(tmp_path / "1", {f"{'ab'[i % 2]}{i * i}x": np.ones(1) for i in range(3000)})
    checkpoint = shardckpt.open(tmp_path / "1")
    assert str(checkpoint).splitlines()[-1] == "… and 2,940 more; `shardckpt info` lists all"
    tags = Tags(checkpoint._repr_html_())
    assert tags.count["li"] == 2001
    assert "… and 1,000 more" in tags.text


def test_names_are_counted_found_and_iterated(checkpoint):
    assert len(checkpoint) == 7
    assert list(checkpoint) == checkpoint.names()
    assert "model/layers.0.w" in checkpoint
    assert "model" in checkpoint
    assert "lr/0" in checkpoint
    assert "nosuch" not in checkpoint
    assert 3 not in checkpoint
    assert bool(checkpoint)


def test_a_container_is_plain_containers_of_lazy_arrays_and_values(checkpoint):
    model = checkpoint["model"]
    assert list(model) == [f"layers.{i}.w" for i in range(5)]
    assert (model["layers.3.w"][2:4] == 3).all()
    first, second = checkpoint["list"]
    assert (first.shape, second[0]) == ((2,), 0)
    assert checkpoint["lr"] == [0.1, 0.2]
    assert checkpoint["lr/1"] == 0.2
    with pytest.raises(shardckpt.ShardckptError, match="no tensor"):
        checkpoint["modle"]


def test_values_of_each_process_are_left_out_of_a_container(tmp_path):
    shardckpt.save(tmp_path / "1", {"a": {"rng": shardckpt.PerProcess(7), "w": np.ones(2)}})
    assert list(shardckpt.open(tmp_path / "1")["a"]) == ["w"]


def test_other_formats_are_opened_and_compared_in_python(checkpoint, tmp_path):
    save_file(
        {f"layers.{i}.w": np.full((8, 4), i, np.float32) for i in range(5)},
        tmp_path / "a.safetensors",
    )
    save_file(
        {f"layers.{i}.w": np.full((8, 4), i % 4, np.float32) for i in range(5)},
        tmp_path / "b.safetensors",
    )
    foreign = shardckpt.open(tmp_path / "a.safetensors")
    assert isinstance(foreign, shardckpt.Checkpoint)
    assert "(safetensors)" in repr(foreign)
    assert (foreign["layers.2.w"][...] == 2).all()
    assert shardckpt.diff(foreign, tmp_path / "a.safetensors").equal()
    comparison = shardckpt.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert not comparison.equal()
    assert str(comparison).splitlines() == [
        "different: 5 tensors, 640 B compared bit by bit",
        "  layers.4.w: 32 of 32 elements differ, by up to 4",
    ]
    assert "layers.4.w" in Tags(comparison._repr_html_()).text
    for refused in (foreign.zarr_store, lambda: foreign.stock_spec("layers.0.w")):
        with pytest.raises(shardckpt.ShardckptError, match="import it first"):
            refused()


def test_a_manager_and_a_plan_say_what_they_do(checkpoint, tmp_path):
    with shardckpt.CheckpointManager(tmp_path / "run", every=5, keep=3) as manager:
        assert repr(manager).startswith(
            f"<shardckpt.CheckpointManager {tmp_path}/run: saves EverySteps("
        )
        assert "3" in repr(manager)
    plan = plan_reshard(checkpoint, ReshardOptions(mesh=Mesh((2,), ("x",)), rules=["**=()"]))
    assert repr(plan).startswith("<ReshardPlan of 7 tensors, 672 B: 1 task, ")


@pytest.mark.parametrize("name", [slice(0, 1), [1], 1, None, {}])
def test_what_is_no_name_is_an_error_that_says_so(tmp_path, name):
    shardckpt.save(tmp_path / "c", {"w": np.arange(3)})
    checkpoint = shardckpt.open(tmp_path / "c")
    with pytest.raises(
        OptionError, match="is not a name of a tensor; give one of its names, as a str"
    ):
        _ = checkpoint[name]
    assert name not in checkpoint
