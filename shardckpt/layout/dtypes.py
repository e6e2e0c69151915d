"""The element types that can be stored, and their storage types.

A dtype has one name, the field's own (numpy, ml_dtypes, torch and JAX agree on it), and two forms:

1. `numpy`: the logical type of the arrays that callers see, from numpy or from ml_dtypes.
2. `storage`: the type of the stored zarr array. It is the same wherever TensorStore's zarr3 driver
   knows the type. Otherwise it is the unsigned integer of the same width that holds the bits, and
   the record keeps the logical name: `array.view(dtype.storage)` on the way in,
   `array.view(dtype.numpy)` on the way out.

Types of fewer than eight bits take one byte per element, in memory and stored alike, as ml_dtypes
has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from shardckpt.errors import DtypeError
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_NUMPY_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
"""Types of numpy itself."""

_ML_NAMES = (
    *(
        "bfloat16",
        "float8_e3m4",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
    ),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4"),
)
"""Types of ml_dtypes that TensorStore stores under the same name."""

_BITS_NAMES = (
    *("float8_e4m3", "float6_e2m3fn", "float6_e3m2fn", "int1", "uint1", "uint2", "uint4"),
    *("complex32", "bcomplex32"),
)
"""Types of ml_dtypes that TensorStore lacks; the newest of them exist only in ml_dtypes 0.6 and
later."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type that can be stored.

    >>> by_name("uint4").storage
    dtype('uint8')
    """

    name: str
    """The field's name, e.g. `bfloat16`, `float8_e4m3fn`, `bool`."""
    numpy: np.dtype[Any]
    """Logical dtype, of numpy or ml_dtypes, in the machine's byte order."""
    storage: np.dtype[Any]
    """Dtype of the stored array: `numpy`, or an unsigned integer of the same width that holds its
    bits."""
    zarr: str
    """The `data_type` of the stored array in zarr v3."""
    itemsize: int = field(init=False, repr=False, compare=False)
    """Bytes per element, in memory and stored."""

    def __post_init__(self) -> None:
        """Refuse a storage type that could not hold the bits."""
        object.__setattr__(self, "itemsize", self.numpy.itemsize)
        if self.numpy.itemsize != self.storage.itemsize:
            raise DtypeError(
                f"DType {self.name}: {self.numpy.itemsize} bytes an element cannot be stored as "
                f"{self.storage}; give a storage type of the same width."
            )

    @property
    def as_bits(self) -> bool:
        """Whether the array stores the bits as an unsigned integer.

        This is done where TensorStore lacks the type.
        """
        return self.numpy != self.storage

    @property
    def is_complex(self) -> bool:
        """Whether the elements are complex numbers; ml_dtypes has a kind of its own for these."""
        return self.numpy.kind in "cW"

    def __str__(self) -> str:
        """The name, for messages."""
        return self.name


def _table() -> dict[str, DType]:
    table = {name: DType(name, np.dtype(name), np.dtype(name), name) for name in _NUMPY_NAMES}
    for name in (*_ML_NAMES, *_BITS_NAMES):
        if hasattr(ml_dtypes, name):
            logical = np.dtype(getattr(ml_dtypes, name))
            storage = np.dtype(f"uint{8 * logical.itemsize}") if name in _BITS_NAMES else logical
            table[name] = DType(name, logical, storage, storage.name)
    return table


DTYPES: Mapping[str, DType] = MappingProxyType(_table())
"""Every dtype that can be stored, by name."""


@cache
def by_name(name: str) -> DType:
    """The dtype called `name`.

    Raises:
        DtypeError: no dtype of that name can be stored.
    """
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        if name in _ML_NAMES or name in _BITS_NAMES:
            raise DtypeError(
                f"dtype {name!r} is unknown to the installed ml_dtypes {ml_dtypes.__version__}; "
                "install a newer one."
            )
        raise DtypeError(f"dtype {shorten(name)} cannot be stored. {_ADVICE}")
    return dtype


@cache
def of_numpy(dtype: np.dtype[Any]) -> DType:
    """The dtype of a numpy array, whatever its byte order.

    >>> of_numpy(np.dtype(">f4")).name
    'float32'

    Raises:
        DtypeError: the type cannot be stored: strings, objects, dates, records, extended precision
            and others.
    """
    dtype = np.dtype(dtype)
    known = DTYPES.get(dtype.name)
    # A big-endian dtype keeps its name; a foreign dtype may have the name of a supported one, so
    # the type must agree as well.
    if known is None or dtype.newbyteorder("=") != known.numpy:
        raise DtypeError(f"dtype {str(dtype)!r} cannot be stored. {_ADVICE}")
    return known


@cache
def castable(stored: DType, target: DType) -> bool:
    """Whether elements can be converted as by `numpy.astype`, without losing imaginary parts."""
    if stored == target:
        return True
    if stored.is_complex and not target.is_complex:
        return False
    try:
        np.zeros(1, stored.numpy).astype(target.numpy)
    except TypeError:
        return False
    return True


def with_plain_bools(array: NDArray[Any]) -> NDArray[Any]:
    """An array of bools whose bytes are 0 and 1.

    Any other array, and one that has no other bytes, is returned itself.

    A view of bytes, or memory that nothing has written, may have other bytes, which frameworks
    count differently.
    """
    if array.dtype != np.bool_ or not array.size:
        return array
    raw = array.view(np.uint8)
    return array if raw.max() <= 1 else np.asarray(raw != 0)


def make_bools_plain(array: NDArray[Any]) -> None:
    """Rewrite an array of bools in place, so that its bytes are 0 and 1; other arrays stay."""
    if array.dtype == np.bool_ and (plain := with_plain_bools(array)) is not array:
        array[...] = plain


_ADVICE = (
    "Convert it to a numeric dtype first: bool, (u)int, float, bfloat16, float8 and complex of "
    "up to 128 bits are known."
)
