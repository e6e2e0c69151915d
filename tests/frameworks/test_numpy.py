"""numpy arrays as leaves: fetched and filled without a copy."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardckpt import frameworks
from shardckpt.errors import DtypeError, LeafError, OptionError
from shardckpt.frameworks.base import Target, dtype_of
from shardckpt.frameworks.numpy import overlaps_itself
from shardckpt.layout.dtypes import DTYPES, by_name
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.layout.sharding import Sharding

F32 = by_name("float32")


def fetched(array):
    source = frameworks.source("w", array)
    (arrays,) = frameworks.fetch([source])
    assert len(arrays) == len(source.boxes)
    return source, arrays


def seen_in_many_ways(array):
    yield array
    yield np.asfortranarray(array)
    yield array.T
    yield array[::-1, 1::2]
    yield array[:, :1]
    yield array[..., None]


def test_an_array_is_fetched_as_itself_whatever_its_strides():
    for array in seen_in_many_ways(np.arange(24.0).reshape(4, 6)):
        source, (elements,) = fetched(array)
        assert np.shares_memory(elements, array)
        np.testing.assert_array_equal(elements, array)
        assert source.boxes[0].shape == source.shape == array.shape
        assert (source.layout, source.staged_bytes) == (None, 0)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_arrays_of_every_dtype_are_fetched_with_it(name):
    array = np.ones((2, 3), DTYPES[name].numpy)
    source, (elements,) = fetched(array)
    assert (source.dtype.name, elements.dtype) == (name, array.dtype)


def test_a_scalar_array_is_one_box_of_no_dimensions():
    source, (elements,) = fetched(np.array(7.5, np.float32))
    assert (source.shape, source.boxes[0].shape, elements[()]) == ((), (), 7.5)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 5)])
def test_an_array_without_elements_has_no_boxes(shape):
    source, arrays = fetched(np.zeros(shape))
    assert (source.shape, arrays) == (shape, [])
    array = np.zeros(shape)
    assert frameworks.target("w", array, shape, F32).place([]) is array


def test_an_array_of_the_other_byte_order_is_fetched_and_filled_in_ours():
    array = np.arange(6, dtype=">i4")
    source, (elements,) = fetched(array)
    assert (source.dtype.name, elements.dtype.isnative, elements.tolist()) == (
        "int32",
        True,
        [0, 1, 2, 3, 4, 5],
    )
    assert source.staged_bytes == array.nbytes
    sink = frameworks.target("w", array, (6,), F32)
    sink.destinations[0][...] = np.arange(6, 12, dtype=np.int32)
    assert sink.place(sink.destinations) is array
    assert array.tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"]),
        np.array([object()]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "i4")]),
    ],
    ids=lambda a: str(a.dtype),
)
def test_elements_that_cannot_be_stored_are_refused_by_name(array):
    assert frameworks.is_tensor(array)
    with pytest.raises(DtypeError, match=r"'layer/w': dtype .* cannot be stored"):
        frameworks.source("layer/w", array)


def test_a_masked_array_is_refused_because_its_mask_would_be_lost():
    with pytest.raises(LeafError, match="'w': only the elements of a MaskedArray would be stored"):
        frameworks.source("w", np.ma.masked_array([1, 2], [True, False]))


def test_a_memory_map_is_an_array(tmp_path):
    np.arange(4.0).tofile(tmp_path / "data")
    mapped = np.memmap(tmp_path / "data", np.float64, "r+")
    assert fetched(mapped)[1][0].tolist() == [0, 1, 2, 3]
    sink = frameworks.target("w", mapped, (4,), F32)
    sink.destinations[0][...] = 5
    assert sink.place(sink.destinations) is mapped
    assert np.fromfile(tmp_path / "data").tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1),
        np.bool_(1),
        3,
        2.5,
        None,
        "text",
        [np.zeros(1)],
        ml_dtypes.bfloat16(1),
        np.float32,
    ],
)
def test_scalars_and_containers_are_no_tensors(value):
    assert not frameworks.is_tensor(value)
    assert frameworks.identity(value) is None


def test_an_array_is_filled_where_it_is_whatever_its_strides():
    for array in seen_in_many_ways(np.zeros((4, 6))):
        sink = frameworks.target("w", array, array.shape, F32)
        (destination,) = sink.destinations
        assert np.shares_memory(destination, array)
        destination[...] = np.arange(array.size).reshape(array.shape)
        assert sink.place(sink.destinations) is array
        np.testing.assert_array_equal(array, np.arange(array.size).reshape(array.shape))
        assert (sink.shape, sink.dtype.name, sink.placing_bytes) == (array.shape, "float64", 0)


def test_a_lent_buffer_is_copied_in():
    array = np.zeros((2, 3))
    assert frameworks.target("w", array, (2, 3), F32).place([np.ones((2, 3))]) is array
    assert array.all()


def test_an_array_that_cannot_be_written_is_refused_by_name():
    array = np.zeros(3)
    array.setflags(write=False)
    with pytest.raises(LeafError, match="'w': this numpy array is read-only"):
        frameworks.target("w", array, (3,), F32)


def test_an_array_whose_elements_share_memory_is_refused_by_name():
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(8), (3, 4), (8, 8))
    with pytest.raises(LeafError, match="'w': elements of this numpy array share memory"):
        frameworks.target("w", overlapping, (3, 4), F32)


@given(st.data())
def test_overlap_is_never_overlooked(data):
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=4))
    strides = tuple(8 * data.draw(st.integers(0, 12)) for _ in shape)
    array = np.lib.stride_tricks.as_strided(np.arange(200.0), shape, strides)
    if len(set(array.ravel().tolist())) < array.size:
        assert overlaps_itself(array)


@given(st.data())
def test_views_that_slice_and_transpose_do_not_overlap(data):
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=5))
    array = np.zeros(shape)
    array = array.transpose(data.draw(st.permutations(range(len(shape)))))
    array = array[data.draw(hnp.basic_indices(array.shape))]
    assert not overlaps_itself(np.asarray(array))


def test_identity_is_where_the_elements_are_and_how_they_are_seen():
    array = np.zeros((4, 4))
    same = [array, array[:], array.view(), np.asarray(array)]
    other = [
        array[1:],
        array.T,
        array.reshape(2, 8),
        array.view(np.int64),
        array.copy(),
        np.zeros((4, 4)),
    ]
    assert len({frameworks.identity(a) for a in same}) == 1
    assert len({frameworks.identity(a) for a in [array, *other]}) == 1 + len(other)
    assert frameworks.identity(np.zeros((0, 3))) is None


def test_a_target_without_sharding_is_a_new_array_of_the_stored_shape_and_dtype():
    sink = frameworks.target("w", Target(), (2, 3), by_name("bfloat16"))
    sink.destinations[0][...] = 2
    array = sink.place(sink.destinations)
    assert isinstance(array, np.ndarray)
    assert (array.shape, array.dtype, array.astype(float).tolist()) == (
        (2, 3),
        ml_dtypes.bfloat16,
        [[2] * 3] * 2,
    )


def test_a_target_says_shape_and_dtype_instead_of_the_stored_ones():
    sink = frameworks.target("w", Target(shape=[4], dtype="float16"), (2, 3), F32)
    assert (sink.shape, sink.dtype.name) == ((4,), "float16")


@pytest.mark.parametrize("shape", [(2.7, 3), (2, "3"), "23", (-1,), 4])
def test_a_target_of_sizes_that_are_not_whole_numbers_is_refused(shape):
    with pytest.raises(OptionError, match=r"Target\(shape=.*give a tuple of sizes"):
        Target(shape=shape)
    assert Target(shape=(np.int64(2), 3)).shape == (2, 3)


def test_a_target_of_a_shape_that_no_array_has_is_refused_by_name():
    with pytest.raises(LeafError, match="'w': no array of the shape"):
        frameworks.target("w", Target(shape=(1 << 62,)), (2, 3), F32)


@pytest.mark.parametrize(
    "dtype",
    ["float8_e5m2", ml_dtypes.float8_e5m2, np.dtype(ml_dtypes.float8_e5m2), by_name("float8_e5m2")],
)
def test_a_dtype_can_be_said_in_every_framework_s_way(dtype):
    assert dtype_of(dtype) == by_name("float8_e5m2")
    assert Target(dtype=dtype) == Target(dtype="float8_e5m2")


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"shape": (2, -1)}, "shape"), ({"shape": 3}, "shape"), ({"dtype": 3}, "not a dtype")],
)
def test_a_target_that_cannot_be_is_refused(fields, words):
    with pytest.raises(OptionError, match=words):
        Target(**fields)


def test_a_target_has_nothing_to_save():
    assert frameworks.is_tensor(Target())
    assert frameworks.identity(Target()) is None
    with pytest.raises(LeafError, match="'w': a Target says where to restore a tensor to"):
        frameworks.source("w", Target())


def test_a_sharding_that_no_imported_framework_knows_is_refused_by_name(monkeypatch):
    for framework in ("jax", "torch_xla"):  # which an earlier test may have imported
        monkeypatch.delitem(sys.modules, framework, raising=False)
    with pytest.raises(LeafError, match="'w': no imported framework can restore to"):
        frameworks.target("w", Target(object()), (2,), F32)
    with pytest.raises(LeafError, match="'w': no imported framework can restore to"):
        frameworks.target("w", Target(Sharding(Mesh((8,), ("x",)), PartitionSpec("x"))), (8,), F32)


def test_sources_keep_the_order_of_the_leaves():
    leaves = {name: np.full(2, i) for i, name in enumerate("zax")}
    sources = frameworks.sources(leaves)
    assert list(sources) == ["z", "a", "x"]
    assert [arrays[0][0] for arrays in frameworks.fetch(list(sources.values())[::-1])] == [2, 1, 0]


def test_what_is_no_tensor_is_refused_by_name():
    with pytest.raises(LeafError, match="'w': a list cannot be saved as a tensor"):
        frameworks.source("w", [1])


TWO_THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
import numpy as np
from shardckpt import frameworks

begun, over = threading.Event(), threading.Event()

class Slow(PathFinder):
    @classmethod
    def find_spec(cls, name, *args):
        spec = super().find_spec(name, *args) if name == "shardckpt.frameworks.numpy" else None
        if spec is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (begun.set(), over.wait(0.3), run(module))
        return spec

sys.meta_path.insert(0, Slow)
with ThreadPoolExecutor(2) as threads:
    first = threads.submit(frameworks.is_tensor, np.zeros(2))
    begun.wait(60)
    second = threads.submit(frameworks.is_tensor, np.zeros(2))
    second.add_done_callback(lambda _: over.set())
    assert first.result() and second.result()
"""


def test_a_thread_does_not_find_an_adapter_that_another_one_has_half_imported():
    subprocess.run([sys.executable, "-c", TWO_THREADS], check=True, timeout=250)


def test_the_adapters_that_compute_pending_leaves_are_listed():
    folder = Path(frameworks.__file__).parent
    settling = {path.stem for path in folder.glob("*.py") if "\ndef settle(" in path.read_text()}
    settling.remove("__init__")
    assert {frameworks._ADAPTERS[name] for name in settling} == {*frameworks._SETTLED}
