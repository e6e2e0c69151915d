"""zarr-python and TensorStore read each other's arrays of the types that zarr-python does not know
by itself."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from zarr.dtype import Int8, data_type_registry

from shardckpt.format.zarr_dtypes import CLASSES
from shardckpt.layout.dtypes import DTYPES

NAMES = sorted(CLASSES)
FLOATS = [name for name in NAMES if name.startswith(("float", "bfloat"))]
STORE_ALL = {"write_empty_chunks": True}
"""Else zarr-python drops a chunk of negative zeros: it compares with the fill value, not its
bits."""
SUB_BYTE = {"int2": 2, "int4": 4, "float4_e2m1fn": 4}


def bits(array):
    """An array's or scalar's bits; of types of fewer than eight only those that count."""
    array = np.asarray(array)
    whole = array.view(f"u{array.itemsize}")
    return (
        whole & ((1 << SUB_BYTE[array.dtype.name]) - 1) if array.dtype.name in SUB_BYTE else whole
    )


def every_value(name):
    """All bit patterns of a type, NaN payloads, infinities and negative zeros among them."""
    native = CLASSES[name].native
    count = 1 << SUB_BYTE.get(name, 8 * native.itemsize)
    return np.arange(count, dtype=f"u{native.itemsize}").view(native).reshape(2, -1)


def tensorstore_array(path, name, *, fill=None, endian="little", shape=(4,)):
    codec = (
        {"name": "bytes", "configuration": {"endian": endian}}
        if CLASSES[name].native.itemsize > 1
        else {"name": "bytes"}
    )
    metadata = {"data_type": name, "shape": list(shape), "codecs": [codec, {"name": "crc32c"}]}
    if fill is not None:
        metadata["fill_value"] = fill
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": metadata,
    }
    return ts.open(spec, create=True).result()


def open_in_tensorstore(path):
    return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}).result()


def test_every_type_that_shardckpt_stores_and_zarr_python_lacks_has_a_class():
    known = {name for name, dtype in DTYPES.items() if dtype.storage.name == name}
    built_in = {d.name for d in map(np.dtype, "?bhilBHILefdFD")}
    assert known - built_in == set(CLASSES)


@pytest.mark.parametrize("name", NAMES)
def test_zarr_python_reads_every_value_that_tensorstore_writes(tmp_path, name):
    values = every_value(name)
    tensorstore_array(tmp_path / "a", name, shape=values.shape).write(values).result()

    array = zarr.open_array(tmp_path / "a", mode="r")

    assert array.dtype == values.dtype
    assert np.array_equal(bits(array[...]), bits(values))


@pytest.mark.parametrize("given", ["numpy dtype", "name"])
@pytest.mark.parametrize("name", NAMES)
def test_tensorstore_reads_every_value_that_zarr_python_writes(tmp_path, name, given):
    values = every_value(name)
    dtype = values.dtype if given == "numpy dtype" else name
    array = zarr.create_array(
        tmp_path / "a",
        shape=values.shape,
        chunks=(1, values.shape[1] // 2),
        dtype=dtype,
        config=STORE_ALL,
    )
    array[...] = values

    array = open_in_tensorstore(tmp_path / "a")

    assert array.dtype.name == name
    assert np.array_equal(bits(array.read().result()), bits(values))


@pytest.mark.parametrize(
    "fill", [0, 1, -1, 1.5, -0.0, "NaN", "Infinity", "-Infinity", "0x01", "0x7f", "0xff", 1e30]
)
@pytest.mark.parametrize("name", sorted({*FLOATS} - {"float8_e8m0fnu"}))
def test_a_fill_value_means_what_tensorstore_takes_it_for(tmp_path, name, fill):
    meant = tensorstore_array(tmp_path / "a", name, fill=fill).read().result()

    as_given = CLASSES[name]().from_json_scalar(fill, zarr_format=3)
    # TensorStore has rewritten it by its own rule; both forms must be understood.
    rewritten = zarr.open_array(tmp_path / "a", mode="r")

    assert bits(as_given) == bits(meant)[0]
    assert np.array_equal(bits(rewritten[...]), bits(meant))


@pytest.mark.parametrize(
    ("fill", "expected"), [(1, 127), (0.5, 126), (2.0**127, 254), (0, 0), ("0x07", 7), ("NaN", 255)]
)
def test_a_fill_value_of_float8_e8m0fnu_means_what_the_specification_says(fill, expected):
    # Exponent bias 127. TensorStore 0.1.86 takes numbers for bias 63 here, so it is not an oracle,
    # and we write bits.
    element = CLASSES["float8_e8m0fnu"]().from_json_scalar(fill, zarr_format=3)

    assert bits(element) == expected
    assert CLASSES["float8_e8m0fnu"]().to_json_scalar(element, zarr_format=3) == (
        "NaN" if expected == 255 else f"0x{expected:02x}"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_value_can_be_a_fill_value_in_both_libraries(tmp_path, name):
    # All of 8 bits or fewer; of bfloat16 zeros, ones, infinities, NaNs with payloads, subnormals.
    values = every_value(name).reshape(-1)
    if len(values) > 256:
        values = np.array(
            [0, 1, 0x3F80, 0x7F80, 0x7FC0, 0x7FC1, 0x7FFF, 0x8000, 0xBF80, 0xFF80, 0xFF81, 0xFFC0],
            np.uint16,
        ).view(values.dtype)
    for i, value in enumerate(values):
        if i % 16 == 0 or len(values) <= 16:
            written = zarr.create_array(tmp_path / str(i), shape=(2,), dtype=name, fill_value=value)
            assert bits(written.fill_value) == bits(value)
            assert bits(open_in_tensorstore(tmp_path / str(i)).read().result())[0] == bits(value)
        text = CLASSES[name]().to_json_scalar(value, zarr_format=3)
        again = CLASSES[name]().from_json_scalar(
            json.loads(json.dumps(text, allow_nan=False)), zarr_format=3
        )
        assert bits(again) == bits(value)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_fill_value_both_libraries_fill_with_zero_bits(tmp_path, name):
    tensorstore_array(tmp_path / "theirs", name)
    zarr.create_array(tmp_path / "ours", shape=(4,), dtype=name)

    assert not bits(zarr.open_array(tmp_path / "theirs", mode="r")[...]).any()
    assert not bits(open_in_tensorstore(tmp_path / "ours").read().result()).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fill", [True, "1.0", "0x", "0x12345", "-0x1", "nan", None, [1], 1j])
def test_what_is_no_fill_value_is_refused(name, fill):
    with pytest.raises(TypeError, match=name):
        CLASSES[name]().from_json_scalar(fill, zarr_format=3)


@pytest.mark.parametrize(
    ("name", "fill"),
    [
        ("int4", 8),
        ("int4", -9),
        ("int2", 2),
        ("int2", 0.5),
        ("int4", "0x1"),
        ("int4", float("nan")),
        ("int4", float("inf")),
        ("bfloat16", 10**400),
    ],
)
def test_a_number_out_of_range_is_no_fill_value(name, fill):
    with pytest.raises(TypeError, match=name):
        CLASSES[name]().from_json_scalar(fill, zarr_format=3)


def test_the_type_may_be_named_by_an_object_as_the_specification_allows(tmp_path):
    values = np.array([1, 2], ml_dtypes.bfloat16)
    tensorstore_array(tmp_path / "a", "bfloat16", shape=(2,)).write(values).result()
    document = json.loads((tmp_path / "a/zarr.json").read_text())
    (tmp_path / "a/zarr.json").write_text(
        json.dumps({**document, "data_type": {"name": "bfloat16", "configuration": {}}})
    )

    assert np.array_equal(zarr.open_array(tmp_path / "a", mode="r")[...], values)


def test_bfloat16_in_the_other_byte_order_is_refused_and_not_misread(tmp_path):
    other = {"little": "big", "big": "little"}[sys.byteorder]
    tensorstore_array(tmp_path / "a", "bfloat16", endian=other).write(
        np.ones(4, ml_dtypes.bfloat16)
    ).result()

    array = zarr.open_array(tmp_path / "a", mode="r")

    with pytest.raises(ValueError, match=f"{other}-endian"):
        array[...]


def test_plain_zarr_opens_a_group_of_such_arrays_without_shardckpt_and_without_a_warning(
    tmp_path,
):
    for name in NAMES:
        values = every_value(name)
        tensorstore_array(tmp_path / name, name, shape=values.shape).write(values).result()
    (tmp_path / "zarr.json").write_text(
        json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}})
    )
    program = """
import sys, zarr
assert not any(name.startswith("shardckpt") for name in sys.modules)
group = zarr.open_group(sys.argv[1], mode="r")
print(*sorted(f"{name}:{array[...].dtype}" for name, array in group.arrays()))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stderr == ""
    assert done.stdout.split() == [f"{name}:{name}" for name in NAMES]


def our_entry_points():
    return [e for e in entry_points(group="zarr.data_type") if e.value.startswith("shardckpt.")]


def test_there_is_an_entry_point_for_every_class():
    assert {e.name: e.load() for e in our_entry_points()} == CLASSES


def test_a_class_that_somebody_else_registered_before_stays(monkeypatch):
    class Foreign(Int8):
        _zarr_v3_name = "int4"

    monkeypatch.setitem(data_type_registry.contents, "int4", Foreign)

    loaded = {e.name: e.load() for e in our_entry_points()}

    assert loaded == {**CLASSES, "int4": Foreign}
    # This is what zarr then does with them.
    for cls in loaded.values():
        data_type_registry.register(cls._zarr_v3_name, cls)
    assert isinstance(data_type_registry.match_json("int4", zarr_format=3), Foreign)
    assert isinstance(data_type_registry.match_json("int2", zarr_format=3), CLASSES["int2"])
