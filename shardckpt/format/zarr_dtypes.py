"""zarr-python classes for data types that zarr-python does not have, such as bfloat16 and float8.

zarr-python 3 looks up the class of an array's `data_type` in a registry. This module has one class
for each type that ml_dtypes and TensorStore share, and registers them without an explicit import of
shardckpt:

1. The entry points `zarr.data_type` name every class here. zarr-python loads them when it first
   looks up a type.
2. zarr-python 3.1 collects those entry points and never loads them. It does load buffer classes,
   whenever it first reads or writes. So an entry point `zarr.buffer` names `Buffer` here: zarr's
   own class, registered once more under its own name. Its only purpose is that this module is
   imported.

If another package (a later zarr-python, another extension) has registered a type of the same name
before, that one stays. Both mean the same bytes: names, bits and fill values come from the
zarr-extensions repository, as TensorStore writes them.

Arrays are read and written as ml_dtypes' own arrays. NaN payloads and negative zeros survive, in
elements and in fill values alike. Types of fewer than eight bits have a byte per element, of which
only the low bits count.

To write such arrays with zarr-python 3.1, import this module first (creating an array reads
nothing, so step 2 would come too late), and set `config={"write_empty_chunks": True}`: zarr-python
does not store a chunk that equals the fill value, and treats -0.0 as equal to 0.0.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import ml_dtypes
import numpy as np
from zarr.buffer.cpu import Buffer
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

try:
    from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined,unused-ignore]  # zarr 3.4
except ImportError:
    from zarr.dtype import DataTypeValidationError

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat
    from zarr.core.dtype.common import DTypeJSON

__all__ = ["CLASSES", "Buffer"]

NumpyDType = np.dtype[Any]


@dataclass(frozen=True, kw_only=True)
class _MlDType(ZDType[NumpyDType, np.generic], HasItemSize):
    """A data type of zarr v3 whose numpy dtype comes from ml_dtypes."""

    native: ClassVar[NumpyDType]
    """The numpy dtype, in the machine's byte order."""

    @classmethod
    def from_native_dtype(cls, dtype: NumpyDType) -> Self:
        """The data type of a numpy dtype.

        DataTypeValidationError if the dtype belongs to another type.
        """
        if dtype != cls.native:
            cls._refuse(dtype)
        return cls()

    def to_native_dtype(self) -> NumpyDType:
        """The numpy dtype."""
        return self.native

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        """Refuse, because zarr v2 has no names for these types."""
        cls._refuse(data)

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        """Read `data_type` of a zarr.json: the name, or an object with the name.

        The object also has an empty configuration.
        """
        name = cls._zarr_v3_name
        if data not in (name, {"name": name, "configuration": {}}):
            cls._refuse(data)
        return cls()

    @classmethod
    def _refuse(cls, document: object) -> NoReturn:
        raise DataTypeValidationError(
            f"{document!r} is not the data type {cls._zarr_v3_name} of zarr v3."
        )

    def to_json(self, zarr_format: ZarrFormat) -> Any:
        """`data_type` in a zarr.json."""
        if zarr_format != 3:
            raise ValueError(
                f"{self._zarr_v3_name} is a data type of zarr v3; zarr v{zarr_format} has none of "
                "that name."
            )
        return self._zarr_v3_name

    @property
    def item_size(self) -> int:
        """Bytes per element."""
        return self.native.itemsize

    def default_scalar(self) -> np.generic:
        """Default fill value of zarr: all bits zero, as in TensorStore."""
        return self._of_bits(0)

    def cast_scalar(self, data: Any) -> np.generic:
        """Convert a number to an element; an element keeps its bits.

        Raises:
            TypeError: not a number, or out of the range of an integer type.
        """
        if isinstance(data, np.generic) and data.dtype == self.native:
            return data
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} cannot be a fill value of data type {self._zarr_v3_name}.")
        return self._of_number(data)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> np.generic:
        """The element for the `fill_value` of a zarr.json; TypeError if it is invalid."""
        del zarr_format  # these types exist only in v3
        return self.cast_scalar(data)

    def _of_bits(self, bits: int) -> np.generic:
        return np.array([bits], f"u{self.item_size}").view(self.native)[0]  # type: ignore[no-any-return]

    def _bits(self, element: np.generic) -> int:
        return int(np.asarray(element, self.native).view(f"u{self.item_size}"))

    def _of_number(self, data: Any) -> np.generic:
        return np.array([data]).astype(self.native)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class _Float(_MlDType):
    """A floating point type.

    Its fill values are numbers, "NaN", "Infinity", "-Infinity", or bits as "0x7fc1".
    """

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> JSON:
        """`fill_value` in a zarr.json, by TensorStore's rule: bits if no other form is exact."""
        del zarr_format
        element = self.cast_scalar(data)
        value = float(element)
        text: JSON = {np.inf: "Infinity", -np.inf: "-Infinity"}.get(
            value, "NaN" if np.isnan(value) else value
        )
        exact = self._bits(self.from_json_scalar(text, zarr_format=3)) == self._bits(element)
        return text if exact else self._hex(element)

    def _hex(self, element: np.generic) -> str:
        return f"0x{self._bits(element):0{2 * self.item_size}x}"

    def _check_scalar(self, data: object) -> bool:
        if isinstance(data, str):
            return data in _SPECIAL or self._bits_of_text(data) is not None
        # Neither complex numbers nor bools are valid. ml_dtypes' scalars have __float__ and are not
        # numbers.Real.
        if isinstance(data, (bool, complex, np.complexfloating, np.ndarray)) or not hasattr(
            data, "__float__"
        ):
            return False
        try:
            float(data)
        except OverflowError:  # an integer of too many digits
            return False
        return True

    def _of_number(self, data: Any) -> np.generic:
        if isinstance(data, str) and data not in _SPECIAL:
            bits = self._bits_of_text(data)
            assert bits is not None, "checked before"
            return self._of_bits(bits)
        return super()._of_number(float(data))

    def _bits_of_text(self, text: str) -> int | None:
        """The bits in a hexadecimal text; None if it is invalid or too wide."""
        try:
            bits = int(text, 16) if text.startswith("0x") else -1
        except ValueError:
            return None
        return bits if 0 <= bits < 1 << 8 * self.item_size else None


_SPECIAL = ("NaN", "Infinity", "-Infinity")
"""Numbers that JSON cannot represent; Python's float() reads all three."""


@dataclass(frozen=True, kw_only=True)
class _Integer(_MlDType):
    """A narrow integer type. Its fill values are whole numbers in its range."""

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> JSON:
        """`fill_value` in a zarr.json."""
        del zarr_format
        return int(self.cast_scalar(data))

    def _check_scalar(self, data: object) -> bool:
        if isinstance(
            data, (bool, str, bytes, complex, np.complexfloating, np.ndarray)
        ) or not hasattr(data, "__int__"):
            return False
        info = ml_dtypes.iinfo(self.native)
        try:
            return bool(int(data) == data and info.min <= int(data) <= info.max)
        except (OverflowError, ValueError):  # infinite, or not a number
            return False

    def _of_number(self, data: Any) -> np.generic:
        return super()._of_number(int(data))


# --- the types ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Float, HasEndianness):
    """bfloat16, the only type here with a byte order."""

    native = np.dtype(ml_dtypes.bfloat16)
    _zarr_v3_name = "bfloat16"

    def to_native_dtype(self) -> NumpyDType:
        """The numpy dtype.

        ValueError for data in the other byte order, for which ml_dtypes has no dtype.
        """
        if self.endianness != sys.byteorder:
            raise ValueError(
                f"bfloat16 data that is stored {self.endianness}-endian cannot be read on this "
                "machine: ml_dtypes has no such dtype. Read it with TensorStore."
            )
        return super().to_native_dtype()


@dataclass(frozen=True, kw_only=True)
class Float8E3M4(_Float):
    """float8_e3m4."""

    native = np.dtype(ml_dtypes.float8_e3m4)
    _zarr_v3_name = "float8_e3m4"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3B11FNUZ(_Float):
    """float8_e4m3b11fnuz."""

    native = np.dtype(ml_dtypes.float8_e4m3b11fnuz)
    _zarr_v3_name = "float8_e4m3b11fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_Float):
    """float8_e4m3fn."""

    native = np.dtype(ml_dtypes.float8_e4m3fn)
    _zarr_v3_name = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(_Float):
    """float8_e4m3fnuz."""

    native = np.dtype(ml_dtypes.float8_e4m3fnuz)
    _zarr_v3_name = "float8_e4m3fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_Float):
    """float8_e5m2."""

    native = np.dtype(ml_dtypes.float8_e5m2)
    _zarr_v3_name = "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(_Float):
    """float8_e5m2fnuz."""

    native = np.dtype(ml_dtypes.float8_e5m2fnuz)
    _zarr_v3_name = "float8_e5m2fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E8M0FNU(_Float):
    """float8_e8m0fnu: powers of two from 2^-127 to 2^127, and NaN; no sign and no zero.

    Fill values are written as bits, because numbers are not safe: TensorStore (0.1.86) reads and
    writes them with half the exponent bias of its elements. Its default fill value, zero, has all
    bits zero, and a zero means the same here.
    """

    native = np.dtype(ml_dtypes.float8_e8m0fnu)
    _zarr_v3_name = "float8_e8m0fnu"

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> JSON:
        """`fill_value` in a zarr.json: "NaN", or bits."""
        del zarr_format
        element = self.cast_scalar(data)
        return "NaN" if np.isnan(element) else self._hex(element)

    def _of_number(self, data: Any) -> np.generic:
        return self._of_bits(0) if data == 0 else super()._of_number(data)


@dataclass(frozen=True, kw_only=True)
class Float4E2M1FN(_Float):
    """float4_e2m1fn."""

    native = np.dtype(ml_dtypes.float4_e2m1fn)
    _zarr_v3_name = "float4_e2m1fn"


@dataclass(frozen=True, kw_only=True)
class Int2(_Integer):
    """int2."""

    native = np.dtype(ml_dtypes.int2)
    _zarr_v3_name = "int2"


@dataclass(frozen=True, kw_only=True)
class Int4(_Integer):
    """int4."""

    native = np.dtype(ml_dtypes.int4)
    _zarr_v3_name = "int4"


CLASSES: dict[str, type[_MlDType]] = {
    cls._zarr_v3_name: cls
    for cls in (
        *(
            BFloat16,
            Float8E3M4,
            Float8E4M3B11FNUZ,
            Float8E4M3FN,
            Float8E4M3FNUZ,
            Float8E5M2,
            Float8E5M2FNUZ,
            Float8E8M0FNU,
        ),
        *(Float4E2M1FN, Int2, Int4),
    )
}
"""All classes by the name of their data type."""


# --- the registry ---------------------------------------------------------------------------------


def __getattr__(name: str) -> type[ZDType[Any, Any]]:
    """The class to register for the data type `name`, loaded by an entry point `zarr.data_type`."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return data_type_registry.contents.get(name, CLASSES[name])


for _name in CLASSES:
    data_type_registry.register(_name, __getattr__(_name))
