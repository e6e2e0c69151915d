"""zarr-python reads a checkpoint through `CheckpointStore`: the same values, and never a chunk that
is not there."""

import asyncio
import copy
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore

import shardckpt
from shardckpt.errors import CorruptionError, MissingDataError, OptionError, ReplacedError
from shardckpt.layout.dtypes import DTYPES
from shardckpt.plan import chunks
from shardckpt.state.names import array_path

LAYOUTS = ["packed", "zarr"]


def odd_state():
    """Nested names, names that zarr gives a meaning, and shapes at the edge of what there is."""
    return {
        "model": {
            "layers": [
                {"w": np.arange(12, dtype=np.float32).reshape(3, 4)},
                {"w": -np.ones((5,), np.int16)},
            ]
        },
        "c": {"c": np.array(2.5), "0": {"c": np.array([7, 8])}},
        "zarr.json": np.array(True),
        "": np.zeros((0, 3), np.uint8),
        "é/ü": np.full((1, 1, 1), 3j),
        "several chunks": np.arange(600_000, dtype=np.float32).reshape(600, 1000),
    }


def saved(path, state, **options):
    shardckpt.save(path, state, options=shardckpt.SaveOptions(**options))
    return shardckpt.open(path)


def opened(checkpoint):
    return zarr.open_group(checkpoint.zarr_store(), mode="r")


def equal(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.array_equal(np.ascontiguousarray(a).view("u1"), np.ascontiguousarray(b).view("u1"))
    )


def everything(store, method, *args):
    async def collect():
        return sorted([key async for key in getattr(store, method)(*args)])

    return asyncio.run(collect())


def get(store, key, byte_range=None):
    content = asyncio.run(store.get(key, default_buffer_prototype(), byte_range))
    return None if content is None else content.to_bytes()


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_reads_the_same_through_zarr_python(
    tmp_path, layout, compression, random_array
):
    state = {
        name: random_array((5, 7), np.uint8).astype(np.int8).astype(np.float32).astype(d.numpy)
        for name, d in DTYPES.items()
    }
    state |= {
        f"{name} bits": random_array((5, 7), d.numpy)
        for name, d in DTYPES.items()
        if not d.name.startswith(("int1", "uint1", "uint", "float6"))
    }
    checkpoint = saved(tmp_path / "ckpt", state, layout=layout, compression=compression)
    group = opened(checkpoint)

    for name in checkpoint.names():
        values = checkpoint.read(name)
        assert equal(values, state[name])
        assert equal(
            group[array_path(name)][...], values.view(checkpoint.info(name).dtype.storage)
        ), name


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_become_nested_groups_at_their_slashes(tmp_path, layout, compression):
    checkpoint = saved(tmp_path / "ckpt", odd_state(), layout=layout, compression=compression)

    members = dict(opened(checkpoint).members(max_depth=None))

    assert {
        path: array for path, array in members.items() if isinstance(array, zarr.Array)
    }.keys() == {array_path(n) for n in checkpoint.names()}
    assert {path for path, group in members.items() if isinstance(group, zarr.Group)} == {
        "model",
        "model/layers",
        "model/layers/0",
        "model/layers/1",
        "c",
        "c/0",
    }
    for name in checkpoint.names():
        assert equal(members[array_path(name)][...], checkpoint.read(name)), name
    assert members["model/layers/0/w"].attrs["shardckpt"]["name"] == "model/layers/0/w"
    assert members[array_path("several chunks")].nchunks > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_in_pieces_appears_as_the_arrays_of_its_pieces(tmp_path, layout, monkeypatch):
    monkeypatch.setattr(chunks, "LARGEST_COMMON_CHUNK", 64)
    w = np.arange(7 * 97, dtype=np.float32).reshape(7, 97)
    sharding = shardckpt.Sharding(shardckpt.Mesh((2,), ("x",)), shardckpt.PartitionSpec(None, "x"))
    checkpoint = saved(tmp_path / "ckpt", {"w": w}, layout=layout, shardings={"w": sharding})

    pieces = dict(opened(checkpoint).arrays())

    assert len(pieces) == 2
    assert equal(np.concatenate([pieces[path][...] for path in sorted(pieces)], axis=1), w)
    assert [pieces[path].attrs["shardckpt"]["start"] for path in sorted(pieces)] == [
        [0, 0],
        [0, 49],
    ]


def test_the_plain_layout_also_opens_by_its_path_alone(tmp_path):
    checkpoint = saved(
        tmp_path / "ckpt", {**odd_state(), "b": np.ones(3, ml_dtypes.bfloat16)}, layout="zarr"
    )

    group = zarr.open_group(tmp_path / "ckpt" / checkpoint.record.attempt / "zarr", mode="r")

    for name in checkpoint.names():
        assert equal(group[array_path(name)][...], checkpoint.read(name)), name


# --- damage ---------------------------------------------------------------------------------------


def data_files(checkpoint):
    attempt = Path(str(checkpoint.location)) / checkpoint.record.attempt
    if checkpoint.record.layout == "zarr":
        return sorted(p for p in attempt.glob("zarr/**/c/**/*") if p.is_file())
    return sorted(attempt / file for file in checkpoint.reader._own.table.whole().files)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_chunk_is_an_error_and_never_a_fill_value(tmp_path, layout):
    checkpoint = saved(tmp_path / "ckpt", {"w": np.zeros((4, 4), np.float32)}, layout=layout)
    array = opened(checkpoint)["w"]
    for file in data_files(checkpoint):
        file.unlink()

    with pytest.raises(MissingDataError, match=r"w\[0:4, 0:4\]"):
        array[...]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_is_an_error(tmp_path, layout):
    checkpoint = saved(tmp_path / "ckpt", {"w": np.zeros((4, 4), np.float32)}, layout=layout)
    (file,) = data_files(checkpoint)
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    file.write_bytes(data)

    with pytest.raises(CorruptionError, match=r"w\[0:4, 0:4\]"):
        opened(checkpoint)["w"][0, 0]


def test_chunks_in_each_others_place_are_an_error_although_their_own_checksums_agree(tmp_path):
    checkpoint = saved(tmp_path / "ckpt", {"a": np.zeros(4), "b": np.ones(4)}, layout="zarr")
    a, b = data_files(checkpoint)
    a_bytes, b_bytes = a.read_bytes(), b.read_bytes()
    a.write_bytes(b_bytes)
    b.write_bytes(a_bytes)

    with pytest.raises(CorruptionError, match="a"):
        opened(checkpoint)["a"][...]


def test_what_the_stored_documents_say_does_not_matter(tmp_path):
    checkpoint = saved(tmp_path / "ckpt", odd_state(), layout="zarr")
    for document in (tmp_path / "ckpt" / checkpoint.record.attempt).glob("zarr/**/zarr.json"):
        document.write_text("{}")

    group = opened(checkpoint)

    assert all(
        equal(group[array_path(name)][...], checkpoint.read(name)) for name in checkpoint.names()
    )


# --- the store's interface; zarr's own LocalStore on the plain layout is the oracle ---------------


@pytest.fixture
def both(tmp_path):
    """Our store and zarr's, on one checkpoint."""
    checkpoint = saved(tmp_path / "ckpt", odd_state(), layout="zarr")
    return checkpoint.zarr_store(), LocalStore(
        tmp_path / "ckpt" / checkpoint.record.attempt / "zarr", read_only=True
    )


def test_listing_gives_the_keys_that_a_local_store_lists(both):
    ours, theirs = both
    keys = everything(theirs, "list")

    assert everything(ours, "list") == keys
    for prefix in {
        "",
        "model/",
        "model/layers/0/w/",
        "c/c/",
        "c/",
        "nothing/",
        *(f"{key.rpartition('/')[0]}/" for key in keys),
    } - {"/"}:
        assert everything(ours, "list_prefix", prefix) == [
            key for key in keys if key.startswith(prefix)
        ], prefix


def test_listing_a_directory_gives_the_names_that_a_local_store_lists(both):
    ours, theirs = both
    keys = everything(theirs, "list")
    directories = {key.rsplit("/", n)[0] for key in keys for n in range(1, key.count("/") + 1)}

    for directory in {"", "nothing", "model/nothing", *directories}:
        assert everything(ours, "list_dir", directory) == everything(
            theirs, "list_dir", directory
        ), directory
        assert everything(ours, "list_dir", f"{directory}/") == everything(
            theirs, "list_dir", directory
        ), directory


def test_every_chunk_has_the_bytes_and_the_size_that_a_local_store_gives(both):
    ours, theirs = both

    for key in everything(theirs, "list"):
        if not key.endswith("zarr.json"):
            assert get(ours, key) == get(theirs, key), key
            assert asyncio.run(ours.getsize(key)) == asyncio.run(theirs.getsize(key)), key
        assert asyncio.run(ours.exists(key))


def test_the_size_of_a_compressed_chunk_is_that_of_its_bytes(tmp_path):
    store = saved(tmp_path / "ckpt", {"w": np.zeros(1000)}, compression="zstd").zarr_store()

    assert asyncio.run(store.getsize("w/c/0")) == len(get(store, "w/c/0")) < 1000


@pytest.mark.parametrize(
    "key",
    [
        *(
            "nothing",
            "nothing/zarr.json",
            "model",
            "model/c/0",
            "model/layers/0/w",
            "model/layers/0/w/c",
            "model/layers/0/w/c/0",
        ),
        *(
            "model/layers/0/w/c/0/1",
            "model/layers/0/w/c/0/0/0",
            "model/layers/0/w/c/00/0",
            "model/layers/0/w/c/-1/0",
            "model/layers/0/w/.zarray",
        ),
        *(
            "model/layers/0/w/c/²/0",
            "=-/c/0/0",
            "c/c/c/0",
            "",
            "/",
            f"model/layers/0/w/c/0/{'9' * 5000}",
        ),
    ],
)
def test_a_key_that_names_nothing_has_no_bytes(both, key):
    ours, _ = both

    assert get(ours, key) is None
    assert not asyncio.run(ours.exists(key))


@pytest.mark.parametrize("key", ["model/layers/0/w/c/0/0", "zarr.json", "c/c/c"])
@pytest.mark.parametrize(
    "byte_range",
    [
        RangeByteRequest(1, 5),
        RangeByteRequest(3, 10**9),
        OffsetByteRequest(4),
        SuffixByteRequest(4),
        SuffixByteRequest(10**9),
        None,
    ],
)
def test_a_byte_range_is_that_part_of_the_whole(tmp_path, both, key, byte_range):
    ours, _ = both
    whole = get(ours, key)
    parts = {
        RangeByteRequest: lambda r: whole[r.start : r.end],
        OffsetByteRequest: lambda r: whole[r.offset :],
    }
    expected = parts.get(type(byte_range), lambda r: whole if r is None else whole[-r.suffix :])(
        byte_range
    )

    assert get(ours, key, byte_range) == expected
    several = asyncio.run(
        ours.get_partial_values(default_buffer_prototype(), [(key, byte_range), ("nothing", None)])
    )
    assert several[1] is None
    assert several[0].to_bytes() == expected


def test_what_is_no_byte_range_is_refused(both):
    with pytest.raises(OptionError, match="byte range"):
        get(both[0], "zarr.json", (0, 2))


# --- read-only ------------------------------------------------------------------------------------


def test_writing_is_refused(both):
    store, _ = both
    value = default_buffer_prototype().buffer.from_bytes(b"x")
    group = zarr.open_group(store, mode="r")

    for write in (
        lambda: store.set("x", value),
        lambda: store.delete("zarr.json"),
        lambda: store.set_if_not_exists("x", value),
    ):
        with pytest.raises(OptionError, match="read-only"):
            asyncio.run(write())
    with pytest.raises(ValueError, match="read-only"):
        group["model/layers/0/w"][0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        zarr.open_group(store, mode="r+")
    with pytest.raises(OptionError, match="read-only"):
        store.with_read_only(read_only=False)
    assert store.with_read_only(read_only=True) == store
    assert (
        store.read_only,
        store.supports_writes,
        store.supports_deletes,
        store.supports_listing,
    ) == (True, False, False, True)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))]
)
def test_a_store_can_be_copied_and_pickled(both, duplicate):
    store, other = both

    twin = duplicate(store)

    assert twin == store
    assert store != other
    assert equal(
        zarr.open_group(twin, mode="r")["several=20chunks"][...], odd_state()["several chunks"]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_that_is_replaced_under_a_store_says_so(tmp_path, layout):
    store = saved(tmp_path / "c", {"w": np.ones(2)}, layout=layout).zarr_store()
    twin = pickle.loads(pickle.dumps(store))
    saved(tmp_path / "c", {"w": np.ones(2)}, layout=layout, overwrite=True)
    for one in (store, twin):
        with pytest.raises(ReplacedError, match="was replaced while it was being read"):
            zarr.open_group(one, mode="r")["w"][...]


def test_two_checkpoints_have_unequal_stores(tmp_path):
    assert (
        saved(tmp_path / "a", {"w": np.ones(2)}).zarr_store()
        != saved(tmp_path / "b", {"w": np.ones(2)}).zarr_store()
    )
