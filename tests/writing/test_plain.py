"""Every chunk an object of its own."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import StorageError
from shardckpt.io.store import Store
from shardckpt.writing.plain import PlainWriter


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text("abc12", min_size=1, max_size=8), st.binary(min_size=1, max_size=40), max_size=30
    ),
    st.integers(0, 100),
)
def test_every_chunk_is_an_object_of_its_name(entries, in_flight_bytes):
    store = Store.open(f"memory://{uuid.uuid4().hex}")
    writer = PlainWriter(store, in_flight_bytes=in_flight_bytes)
    for key, data in entries.items():
        writer.append([f"{key}/c/0"], [data])
    extents = writer.finish()
    assert {key: store.read(key) for key in store.list()} == {
        f"zarr/{key}/c/0": data for key, data in entries.items()
    }
    assert extents.length.tolist() == [len(data) for data in entries.values()]
    assert extents.files == ()
    assert not extents.offset.any()


def test_buffers_may_be_used_again_at_once(store):
    buffer = np.zeros(100, np.uint8)
    writer = PlainWriter(store, in_flight_bytes=250)
    for i in range(20):
        buffer[:] = i
        writer.append([f"w/c/{i}"], [buffer])
    writer.finish()
    assert [store.read(f"zarr/w/c/{i}") for i in range(20)] == [bytes([i]) * 100 for i in range(20)]


def test_a_file_that_another_writer_has_written_is_written_again_but_none_of_a_name_like_it(
    tmp_path,
):
    store = Store.open(tmp_path)
    PlainWriter(store).append(["w/c/0"], [b"first"])
    with pytest.raises(StorageError, match="File exists"):
        PlainWriter(store).append(["w/c/0"], [b"second"])
    writer = PlainWriter(store, drafts="hosts/0/drafts")
    writer.append(["w/c/0"], [b"second"])
    writer.finish()
    assert store.read("zarr/w/c/0") == b"second"
    # As where a file system ignores case, "W" leads to what "w" has written.
    (tmp_path / "zarr" / "W").symlink_to("w")
    listed = type(store).list_children
    writer = PlainWriter(store, drafts="hosts/0/drafts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(store),
            "list_children",
            lambda store, prefix="": [name for name in listed(store, prefix) if name[0] != "W"],
        )
        with pytest.raises(StorageError, match="File exists"):
            writer.append(["W/c/0"], [b"third"])
    assert store.read("zarr/w/c/0") == b"second"
