"""Layouts over a mesh for what a program keeps, and the page about it."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from models import AverageLoss, Statistics, exported
from paths import DOCS

import shardckpt
from shardckpt import Mesh, PartitionSpec
from shardckpt.errors import NamesMismatchError, OptionError, ShardingError
from shardckpt.reshard.batch_dims import batch_dims, batch_shardings

PAGE = DOCS / "batch-dims.md"
MESH = Mesh((4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def statistics():
    return batch_dims(exported(Statistics(), (torch.randn(8, 4),)))


def test_partial_state_is_refused_with_what_reduces_it_until_it_is_said_to_be_replicated(
    statistics, tmp_path
):
    with pytest.raises(ShardingError, match=r"total.*Partial\(sum\).*op sum"):
        batch_shardings(statistics, mesh=MESH)
    layouts = batch_shardings(statistics, mesh=MESH, replicated=["*"])
    assert layouts["total"].spec == PartitionSpec(None)
    state = {
        name: np.zeros(layout.spec.parts and 4)
        for name, layout in layouts.items()
        if len(layout.spec)
    }
    shardckpt.save(
        tmp_path / "c",
        state,
        options=shardckpt.SaveOptions(shardings={name: layouts[name] for name in state}),
    )


@pytest.mark.parametrize("pattern", ["t*l", "total"])
def test_one_pattern_of_what_is_replicated_is_no_sequence_of_letters(statistics, pattern):
    with pytest.raises(ShardingError, match=r"^'average'"):
        batch_shardings(statistics, mesh=MESH, replicated=pattern)


def test_a_pattern_that_selects_none_of_the_state_is_refused(statistics):
    with pytest.raises(NamesMismatchError, match=r"replicated=\['\*\.total'\] selects none"):
        batch_shardings(statistics, mesh=MESH, replicated=["*", "*.total"])


class Namesake(torch.nn.Module):
    """A buffer has the name of an argument."""

    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.zeros(8, 4))
        self.register_buffer("g", torch.zeros(8, 4))

    def forward(self, h):
        self.g += self.h
        self.h.copy_(h)
        return h * 2


class ChangesBoth(Namesake):
    def forward(self, h):
        self.h.copy_(h)
        h.mul_(2)
        return h.sum(1)


class Ordinary(torch.nn.Module):
    """Has tensors that are not in its state dict: a buffer and two constants."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(8, 4))
        self.register_buffer("total", torch.zeros(4), persistent=False)
        self.scale = torch.ones(4)

    def forward(self, x):
        self.total += x.sum(0)
        self.cache.copy_(x)
        return self.project(x) * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.total


def test_the_layouts_fit_the_state_dict(tmp_path):
    model = Ordinary()
    program = torch.export.export(model, (torch.randn(8, 4),))
    layouts = batch_shardings(program, {"x": 0}, mesh=MESH, prefix="model/")
    options = shardckpt.SaveOptions(shardings=layouts)
    shardckpt.save(tmp_path / "c", {"model": model.state_dict()}, options=options)
    assert shardckpt.open(tmp_path / "c").info("model/cache").layout == layouts["model/cache"]


def test_a_buffer_may_have_the_name_of_an_argument():
    program = torch.export.export(Namesake(), (torch.randn(8, 4),))
    layouts = batch_shardings(program, {"h": 0}, mesh=MESH)
    assert {name: layout.spec for name, layout in layouts.items()} == dict.fromkeys(
        ("h", "g"), PartitionSpec("data", None)
    )
    inferred = batch_dims(program, {"h": 0})
    assert inferred.explain("h").splitlines()[-1] == "h is Shard(0)"


def test_a_buffer_and_a_changed_argument_of_one_name_are_refused():
    program = torch.export.export(ChangesBoth(), (torch.randn(8, 4),))
    with pytest.raises(ShardingError, match="a state and a changed input are both named 'h'"):
        batch_shardings(program, {"h": 0}, mesh=MESH)


@pytest.mark.long
def test_what_cannot_be_is_said(statistics):
    program = exported(AverageLoss(), (torch.randn(8, 4), torch.randn(8, 3)))
    with pytest.raises(ShardingError, match="no axis 'batch'"):
        batch_shardings(program, mesh=MESH, axis="batch")
    with pytest.raises(OptionError, match="no input 'z'; it has 'x', 'y'"):
        batch_dims(program, {"z": 0})
    with pytest.raises(OptionError, match="no dimension 2"):
        batch_dims(program, {"x": 2})
    with pytest.raises(OptionError, match="all batch dimensions need one size"):
        batch_dims(program, {"x": 0, "y": 1})
    with pytest.raises(OptionError, match="not a graph"):
        batch_dims(torch.nn.Linear(1, 1))
    with pytest.raises(NamesMismatchError, match="no tensor 'z'"):
        statistics.explain("z")


@pytest.mark.long
def test_the_code_of_the_page_runs():
    code = "\n".join(
        re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = re.findall(r"  # (.*)$", code, re.MULTILINE)
    assert [line for line in outputs if line not in done.stdout] == []


def test_nothing_imports_torch():
    code = (
        "import sys, shardckpt.reshard.batch_dims; assert 'torch' not in sys.modules and 'sympy' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
