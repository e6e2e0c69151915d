"""The objects in torch's pickles.

`torch.save` writes a state as a pickle in which each tensor is a call of
`torch._utils._rebuild_tensor_v2` (or a similar function) on a storage, an offset, a shape and
strides, and each storage is a reference to a run of bytes elsewhere in the file. `TABLE` turns them
into the classes of this module, without torch and without reading the storages. The calls are those
that torch's own `weights_only` unpickler accepts (torch/_weights_only_unpickler.py, 2.9), except
those for anything but plain tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardckpt.convert.formats.torch.unpickling import Build
from shardckpt.format.documents import MOST_DIMENSIONS
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bfloat16", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *(
        "float4_e2m1fn_x2",
        "qint8",
        "qint32",
        "quint8",
        "quint4x2",
        "quint2x4",
        "bits8",
        "bits16",
        "bits1x8",
        "bits2x4",
        "bits4x2",
    ),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)
"""Dtype names of torch. Dtypes in the last two lines cannot be stored; they are listed so that
messages can name them."""
_STORAGES = {
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "BFloat16": "bfloat16",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "QInt8": "qint8",
    "QInt32": "qint32",
    "QUInt8": "quint8",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}
"""The kind of a typed storage → its dtype."""


_MOST_REPEATED = 1 << 30
"""Elements that a tensor may have from few in the file, as an expanded mask does."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """A `torch.dtype`."""

    name: str
    """Name as torch prints it, without `torch.`."""

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True, slots=True)
class StorageKind:
    """A class of storages."""

    dtype: Dtype | None
    """Dtype of the elements; None: bytes of any dtype."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of elements in the file."""

    key: str
    """Its name in the file."""
    dtype: Dtype | None
    """Dtype of the elements; None: the storage is counted in bytes, and the tensor has the
    dtype."""
    count: int
    """Number of elements."""


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor: elements of a storage at regular distances."""

    storage: Storage
    dtype: Dtype
    offset: int
    """Number of the storage's elements before the tensor's first."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""

    def __post_init__(self) -> None:
        """Refuse invalid shapes, strides and offsets."""
        numbers = (self.offset, *self.shape, *self.strides)
        if (
            len(self.shape) != len(self.strides)
            or len(self.shape) > MOST_DIMENSIONS
            or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
        ):
            raise ValueError(
                f"a tensor has shape {shorten(self.shape)}, strides {shorten(self.strides)} and "
                f"offset {shorten(self.offset)}"
            )
        if (elements := prod(self.shape)) > max(_MOST_REPEATED, 1000 * self.storage.count):
            raise ValueError(
                f"a tensor has {elements} elements, made of {self.storage.count} in the file"
            )


def storage_of(reference: object) -> Storage:
    """The storage of a pickle's reference: ("storage", kind, key, device, elements)."""
    if type(reference) is tuple and len(reference) == 5:
        what, kind, key, _device, count = reference
        if (
            what == "storage"
            and type(kind) is StorageKind
            and type(key) is str
            and type(count) is int
            and count >= 0
        ):
            return Storage(key, kind.dtype, count)
    raise ValueError("a reference does not name a storage")


def _tensor(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    _requires_grad: object,
    _hooks: object,
    dtype: object,
    metadata: object = None,
) -> PickledTensor:
    if (
        type(storage) is not Storage
        or type(dtype) is not Dtype
        or type(shape) is not tuple
        or type(strides) is not tuple
    ):
        raise TypeError("a tensor has no valid storage, dtype, shape or strides")
    if metadata:
        raise ValueError(
            "a tensor is a lazily conjugated or negated view: call resolve_conj() and "
            "resolve_neg() before saving"
        )
    return PickledTensor(storage, dtype, offset, shape, strides)  # type: ignore[arg-type]  # PickledTensor checks the types


def _tensor_v2(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    grad: object = False,
    hooks: object = None,
    metadata: object = None,
) -> PickledTensor:
    return _tensor(
        storage, offset, shape, strides, grad, hooks, getattr(storage, "dtype", None), metadata
    )


def _parameter(data: object, *_grad_and_hooks: object) -> object:
    return data


def _size(extents: object = ()) -> tuple[int, ...]:
    lengths = tuple(extents)  # type: ignore[arg-type, var-annotated]  # a TypeError is the pickle's
    if not all(type(n) is int for n in lengths):
        raise TypeError("a torch.Size has items that are not integers")
    return lengths


def _dict(pairs: object = ()) -> dict[Any, Any]:
    if not isinstance(pairs, list | tuple) or pairs:
        raise ValueError("dict is called with items")  # pickles give the items afterwards
    return {}


def _bytes(text: object = "", encoding: object = "latin1") -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise ValueError("bytes have another encoding than latin1")
    return text.encode("latin1")


def _layout(name: object) -> object:
    return name


TABLE: Mapping[str, object] = MappingProxyType(
    {
        **{f"torch.{name}": Dtype(name) for name in _DTYPES},
        **{f"torch.{kind}Storage": StorageKind(Dtype(name)) for kind, name in _STORAGES.items()},
        "torch.storage.UntypedStorage": StorageKind(None),
        "torch._utils._rebuild_tensor": Build(_tensor_v2),
        "torch._utils._rebuild_tensor_v2": Build(_tensor_v2),
        "torch._utils._rebuild_tensor_v3": Build(_tensor),
        "torch._utils._rebuild_parameter": Build(_parameter),
        "torch.Size": Build(_size),
        "torch.serialization._get_layout": Build(_layout),
        "collections.OrderedDict": Build(_dict),
        "_codecs.encode": Build(_bytes),
        "__builtin__.bytes": Build(_bytes),
        "builtins.bytes": Build(_bytes),
    }
)
"""Replacements of the names in torch's pickles (`unpickle`)."""
