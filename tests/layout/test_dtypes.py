"""Every dtype that can be stored, against TensorStore's zarr3 driver itself."""

import json

import ml_dtypes
import numpy as np
import pytest

from shardckpt.errors import DtypeError
from shardckpt.layout import dtypes
from shardckpt.layout.dtypes import DTYPES, DType

CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
SUB_BYTE_INTS = {
    "int1": (-1, 1),
    "uint1": (0, 2),
    "int2": (-2, 2),
    "uint2": (0, 4),
    "int4": (-8, 8),
    "uint4": (0, 16),
}
SUB_BYTE_FLOATS = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}


def every_value(dtype: DType) -> np.ndarray:
    """All values of the small types, and random bits of the others: NaNs of every payload among
    them."""
    if dtype.name in SUB_BYTE_INTS:
        return np.arange(*SUB_BYTE_INTS[dtype.name]).astype(dtype.numpy)
    if dtype.name == "bool":
        return np.array([False, True])
    if dtype.name in SUB_BYTE_FLOATS:
        return np.arange(2 ** SUB_BYTE_FLOATS[dtype.name], dtype=np.uint8).view(dtype.numpy)
    if dtype.itemsize == 1:
        return np.arange(256, dtype=np.uint8).view(dtype.numpy)
    if dtype.itemsize == 2:
        return np.arange(65536, dtype=np.uint16).view(dtype.numpy)
    return (
        np.random.default_rng(0).integers(0, 256, 4096 * dtype.itemsize, np.uint8).view(dtype.numpy)
    )


@pytest.fixture
def tensorstore():
    import tensorstore

    return tensorstore


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_bit_comes_back_from_a_zarr_array(tensorstore, dtype):
    values = every_value(dtype)
    spec = {
        "driver": "zarr3",
        "kvstore": "memory://",
        "metadata": {"data_type": dtype.zarr, "codecs": CODECS, "shape": [len(values)]},
    }
    stored = tensorstore.open(spec, create=True, dtype=dtype.storage).result()
    stored.write(values.view(dtype.storage)).result()
    back = stored.read().result()
    assert back.dtype == dtype.storage
    assert back.view(dtype.numpy).tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_zarr_name_is_the_one_that_tensorstore_writes(tensorstore, dtype):
    stored = tensorstore.open(
        {"driver": "zarr3", "kvstore": "memory://"}, create=True, dtype=dtype.storage, shape=[2]
    ).result()
    metadata = json.loads(stored.kvstore.read("zarr.json").result().value)
    assert metadata["data_type"] == dtype.zarr
    assert stored.dtype.numpy_dtype == dtype.storage


def test_bits_are_stored_only_for_what_tensorstore_lacks(tensorstore):
    def known(dtype):
        try:
            tensorstore.dtype(dtype.numpy)
        except ValueError:
            return False
        return True

    assert [d.name for d in DTYPES.values() if d.as_bits] == [
        d.name for d in DTYPES.values() if not known(d)
    ]


def test_every_number_type_of_ml_dtypes_can_be_stored():
    offered = {
        name
        for name in ml_dtypes.__all__
        if isinstance(getattr(ml_dtypes, name), type) and name not in {"finfo", "iinfo"}
    }
    assert offered <= set(DTYPES)


@pytest.mark.parametrize("name", DTYPES)
def test_a_name_and_its_numpy_dtype_mean_the_same(name):
    dtype = dtypes.by_name(name)
    assert dtype.numpy.name == str(dtype) == name
    assert dtypes.of_numpy(dtype.numpy) is dtype
    assert dtypes.of_numpy(np.zeros(3, dtype.numpy)[1:].dtype) is dtype
    assert dtype.itemsize == np.zeros((), dtype.numpy).nbytes


def test_names_are_those_of_torch():
    import torch

    names = {name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)}
    assert names >= {
        "bool",
        "uint8",
        "int64",
        "float16",
        "float32",
        "bfloat16",
        "complex32",
        "complex64",
        "float8_e4m3fn",
        "float8_e8m0fnu",
    }
    for name in names:
        assert dtypes.by_name(name).itemsize == getattr(torch, name).itemsize


def test_a_big_endian_array_has_the_same_dtype():
    assert dtypes.of_numpy(np.dtype(">f4")) is dtypes.by_name("float32")
    assert dtypes.of_numpy(np.dtype(">c16")) is dtypes.by_name("complex128")


def test_two_integer_types_of_one_width_are_one_dtype():
    assert (
        dtypes.of_numpy(np.dtype("longlong"))
        is dtypes.of_numpy(np.dtype("long"))
        is dtypes.by_name("int64")
    )


REFUSED = [
    "O",
    "U5",
    "S5",
    "M8[ns]",
    "m8[s]",
    "V2",
    "g",
    "G",
    [("a", "f4")],
    np.dtype(("f4", (2,))),
    np.dtypes.StringDType(),
]


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_a_dtype_that_cannot_be_stored_is_refused_by_name(dtype):
    dtype = np.dtype(dtype)
    with pytest.raises(DtypeError) as caught:
        dtypes.of_numpy(dtype)
    assert str(dtype) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "object",
        "str",
        "datetime64",
        "float128",
        "complex256",
        "longdouble",
        "float",
        "torch.float32",
        "",
        None,
        3,
    ],
)
def test_an_unknown_name_is_refused(name):
    with pytest.raises(DtypeError, match="cannot be stored"):
        dtypes.by_name(name)


def test_a_type_that_only_a_newer_ml_dtypes_has_says_so(monkeypatch):
    monkeypatch.setattr(dtypes, "DTYPES", {})
    with pytest.raises(DtypeError, match=r"ml_dtypes.*newer"):
        dtypes.by_name.__wrapped__("uint1")


def test_a_storage_of_another_width_is_refused():
    with pytest.raises(DtypeError, match="same width"):
        DType("complex32", np.dtype("u4"), np.dtype("u1"), "uint8")
