"""Fixtures of the tests of hostile checkpoints: forgeries of a checkpoint by one host, and of one
by three."""

from __future__ import annotations

import shutil

import flip_bits
import pytest
from forgery import Forgery, Watch
from placeholders import put_placeholder
from processes import Processes


@pytest.fixture
def forgery(tmp_path):
    """One of its own for each test, by one host."""
    return Forgery.of_one_host(tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def _three_hosts(tmp_path_factory):
    """Layout → a checkpoint that three processes have saved."""
    root = tmp_path_factory.mktemp("three")
    with Processes("damage_hosts") as processes:
        for layout, compression in (("packed", None), ("zarr", "zstd")):
            put_placeholder(root / layout)  # so that `Forgery.unpublish` needs to change no record
            flip_bits.save(root / layout, 0, layout, compression, processes=processes)
    return root


@pytest.fixture
def of_three_hosts(_three_hosts, tmp_path):
    """Gives a forgery in a layout, by three hosts, of its own for each test."""

    def made(layout="packed"):
        shutil.copytree(_three_hosts / layout, tmp_path / f"{layout}3")
        return Forgery(tmp_path / f"{layout}3")

    return made


@pytest.fixture(scope="module")
def forgeries(_three_hosts, tmp_path_factory):
    """Layout and number of hosts → a forgery, to be written and used over and over; and the watch
    over what lies outside of each."""
    made = {}
    for layout in ("packed", "zarr"):
        root = tmp_path_factory.mktemp(layout)
        made[layout, 1] = Forgery.of_one_host(
            root / "one", layout, None if layout == "packed" else "zstd"
        )
        shutil.copytree(_three_hosts / layout, root / "three")
        made[layout, 3] = Forgery(root / "three")
    with Watch([forgery.url.parent / "outside" for forgery in made.values()]) as watch:
        yield made, watch
