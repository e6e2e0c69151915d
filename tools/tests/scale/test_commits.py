"""Cost of a commit, counted: requests to the storage, and steps of Python; `tools/scale/commits.py`
measures the time."""

from __future__ import annotations

from collections import Counter

import pytest
from counting import steps

import shardckpt
from shardckpt.io import files
from shardckpt.io.store import Store
from shardckpt.io.stores import disk
from tools.scale.commits import (
    CHUNKS_PER_TENSOR,
    commit,
    contents_of,
    floor,
    forget_commit,
    measure,
    write_attempt,
)

pytestmark = pytest.mark.slow


def written(top, hosts, chunks, layout="packed"):
    """Write an attempt by so many hosts, of so many chunks each; the checkpoint's place and the
    attempt's."""
    root = Store.open(top)
    return root, write_attempt(root, contents_of(hosts, chunks), hosts, layout)


def requests(top, hosts, chunks, layout):
    """Number of the committer's requests to the storage, by kind."""
    root, place = written(top, hosts, chunks, layout)
    asked = Counter()

    def counted(name, function):
        def wrapped(*arguments, **options):
            asked[name] += 1
            return function(*arguments, **options)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((files, "read"), (files, "replace"), (disk, "below")):
            patch.setattr(module, name, counted(name, getattr(module, name)))
        commit(root, place, hosts)
    assert shardckpt.open(str(root)).verify().damage == []
    return asked


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_committer_reads_two_small_files_of_each_host_however_many_chunks_there_are(
    tmp_path, monkeypatch, layout
):
    tensors = 10
    few = requests(tmp_path / "few", 2, tensors * CHUNKS_PER_TENSOR, layout)
    more_hosts = requests(tmp_path / "hosts", 6, tensors * CHUNKS_PER_TENSOR, layout)
    monkeypatch.setattr("tools.scale.commits.CHUNKS_PER_TENSOR", 5 * CHUNKS_PER_TENSOR)
    more_chunks = requests(tmp_path / "chunks", 2, 5 * tensors * CHUNKS_PER_TENSOR, layout)
    assert more_chunks == few
    assert more_hosts - few == Counter(read=2 * (6 - 2))


def calls(top, hosts, chunks):
    """Number of calls of Python functions in a commit."""
    root, place = written(top, hosts, chunks)
    commit(root, place, hosts)  # what is made once and kept
    forget_commit(place.local_path(""))
    return steps(lambda: commit(root, place, hosts))


def test_what_python_does_depends_on_tensors_and_hosts_but_not_on_their_product_or_on_chunks(
    tmp_path, monkeypatch
):
    tensors, hosts = 50, 4
    once = calls(tmp_path / "once", hosts, tensors * CHUNKS_PER_TENSOR)
    more_hosts = calls(tmp_path / "hosts", 3 * hosts, tensors * CHUNKS_PER_TENSOR)
    monkeypatch.setattr("tools.scale.commits.CHUNKS_PER_TENSOR", 10 * CHUNKS_PER_TENSOR)
    more_chunks = calls(tmp_path / "chunks", hosts, 10 * tensors * CHUNKS_PER_TENSOR)
    assert abs(more_chunks - once) < 0.05 * once
    # Of each host: its files, and a look-up of each of its tensors' names.
    assert (more_hosts - once) / (2 * hosts) < 2 * tensors + 800


def test_the_tool_tells_where_the_time_goes(tmp_path):
    root, place = written(tmp_path, 3, 40)
    seconds = measure(root, place, 3)
    assert set(seconds) == {
        "listing",
        "records",
        "tables",
        "coverage",
        "documents",
        "index",
        "table",
        "publish",
        "rest",
    }
    assert floor(place.local_path("")) > 0
    assert shardckpt.open(str(root)).verify().damage == []
