"""Fixtures of the tests of damage: checkpoints of one host and of three, to be damaged and looked
at."""

from __future__ import annotations

import shutil

import flip_bits
import pytest
from processes import Processes


@pytest.fixture(scope="session")
def hosts():
    """Three of them, in processes of their own, to save together."""
    with Processes("damage_hosts") as processes:
        yield processes


def _saved(root, seed, hosts):
    """Layout and number of hosts → a checkpoint, and what is in it."""
    checkpoints = {}
    for layout in flip_bits.KINDS:
        for number in (1, 3):
            path = root / f"{layout}{number}"
            checkpoints[layout, number] = (
                path,
                flip_bits.save(path, seed, layout, processes=hosts if number > 1 else None),
            )
    return checkpoints


@pytest.fixture(scope="session")
def saved(hosts, tmp_path_factory):
    """Checkpoints that nobody is to touch."""
    return _saved(tmp_path_factory.mktemp("saved"), 0, hosts)


@pytest.fixture(scope="session")
def stale(hosts, tmp_path_factory):
    """The same of another state, which differs in its elements alone: the same names and sizes."""
    return {
        key: path for key, (path, _) in _saved(tmp_path_factory.mktemp("stale"), 1, hosts).items()
    }


@pytest.fixture
def checkpoint_of(saved, tmp_path):
    """Gives a copy to damage of the checkpoint in a layout, and what was saved."""

    def copy(layout, number=1):
        path, truth = saved[layout, number]
        shutil.copytree(path, tmp_path / layout)
        return tmp_path / layout, truth

    return copy
