"""Whether there is room for a save."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

import shardckpt
from shardckpt.errors import StorageError
from shardckpt.io.datafile import check_space, free_bytes
from shardckpt.io.store import Store


def test_a_place_that_is_not_there_yet_has_the_space_of_the_disk_that_it_will_be_on(tmp_path):
    free = free_bytes(Store.open(tmp_path / "run" / "100"))
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, abs=1 << 30)
    assert not (tmp_path / "run").exists()


def test_a_save_that_fits_is_not_refused(tmp_path):
    check_space(Store.open(tmp_path), 1)


def test_a_save_that_does_not_fit_is_refused_with_the_place_both_sizes_and_what_to_do(tmp_path):
    with pytest.raises(StorageError) as caught:
        check_space(Store.open(tmp_path / "run"), 1 << 60)
    assert re.fullmatch(
        rf"{tmp_path}/run: this save takes 1,048,576 TiB and the disk has [\d.]+ [KMGT]iB free, "
        r"[\d.,]+ TiB too little; make room .*",
        str(caught.value),
    )


@pytest.mark.parametrize("url", ["memory://somewhere", "/proc/sys"])
def test_where_the_storage_does_not_say_nothing_is_refused(url):
    store = Store.open(url)
    assert free_bytes(store) is None
    check_space(store, 1 << 60)


def test_a_file_in_the_way_is_for_the_save_to_complain_of(tmp_path):
    (tmp_path / "file").touch()
    assert free_bytes(Store.open(tmp_path / "file" / "100")) is None


def test_a_save_of_more_than_the_disk_has_writes_nothing(tmp_path):
    """As large as the disk is, and one element in memory."""
    free = free_bytes(Store.open(tmp_path))
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2 * free,), (0,))
    with pytest.raises(StorageError, match="this save takes"):
        shardckpt.save(tmp_path / "c", {"w": huge})
    assert not (tmp_path / "c" / "checkpoint.json").exists()
    handle = shardckpt.save_async(tmp_path / "c", {"small": np.ones(3)})
    assert handle.wait() is not None
