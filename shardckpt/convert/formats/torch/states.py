"""The state in a file of `torch.save`, and the check whether it may be read.

A file may contain the names that `torch.load(weights_only=True)` accepts; they are checked in the same way, but nothing in the
pickle is ever run (`unpickling`). A file with any other name is refused, and so is a file with a tensor that cannot be stored:
no part of a state is left out.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardckpt.convert.formats.torch.file import open_torch_file
from shardckpt.convert.formats.torch.objects import TABLE
from shardckpt.convert.formats.torch.unpickling import Build, Instance
from shardckpt.convert.plain_values import whole
from shardckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.convert.formats.torch.file import TorchFile
    from shardckpt.convert.span import Span


_BUILTINS = ("builtins", "__builtin__")
"""Names of Python's module of built-in types in pickles of protocol 3 and later, and of earlier ones."""


def _of_type(rebuild: object, _type: object, arguments: object, _attributes: object) -> object:
    """A tensor with Python attributes: torch._tensor._rebuild_from_type_v2."""
    if type(rebuild) is not Build or type(arguments) is not tuple:
        raise TypeError("a tensor is made by an unknown function")
    return rebuild.function(*arguments)


def _first(tensor: object, *_others: object) -> object:
    return tensor


def _complex(real: object, imaginary: object) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("a complex number has parts that are not floats")
    return complex(real, imaginary)


def _lazy_too(name: str) -> Build:
    """A builder of tensors that returns a `_LAZY` instance for a tensor that torch conjugates or negates on use."""
    build = TABLE[name]
    assert isinstance(build, Build)

    def tensor(*arguments: object) -> object:
        lazy = arguments[_METADATA[name] :]
        return Instance(_LAZY, ()) if lazy and lazy[0] else build.function(*arguments)

    return Build(tensor)


_LAZY = "a lazy view"
_METADATA = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
"""Index of the argument that marks such tensors."""
_TABLE: Mapping[str, object] = MappingProxyType(
    {
        **TABLE,
        **{name: _lazy_too(name) for name in _METADATA},
        **{f"{module}.complex": Build(_complex) for module in _BUILTINS},
        "torch._tensor._rebuild_from_type_v2": Build(_of_type),
        "torch._utils._rebuild_parameter_with_state": Build(_first),
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": Build(_first),
    }
)
_UNSTORABLE = {
    _LAZY: "a lazily conjugated or negated tensor: call resolve_conj() and resolve_neg() on it",
    "torch._utils._rebuild_qtensor": "a quantized tensor: save its int_repr(), scales and zero points, or dequantize() it",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor: save its indices and values, or to_dense() it",
    "torch._utils._rebuild_nested_tensor": "a nested tensor: save the tensors that it consists of",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the device meta, which has no elements",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of a class of its own: save the tensors that it consists of",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device that torch saves through numpy: move it to the CPU first",
}
"""Kinds of tensors that cannot be stored, with advice for messages."""
_NAMES = frozenset(
    {
        *_TABLE,
        *_UNSTORABLE,
        *(f"torch.{name}" for name in ("Tensor", "device", "nn.parameter.Parameter", "nn.parameter.Buffer")),
        *(f"torch.per_{of}" for of in ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric")),
        *("argparse.Namespace", "types.SimpleNamespace", "collections.defaultdict", "collections.Counter", "_io.BytesIO"),
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
        *("numpy.dtype", "numpy.ndarray"),
        *(f"{module}.{name}" for module in _BUILTINS for name in ("dict", "float", "int", "list")),  # of a defaultdict
    }
)
"""Names that a pickle may contain: of values that `plain` knows, and of values that are refused with a better message."""


def _unstorable(value: Instance) -> object:
    raise FormatError(f"is {_UNSTORABLE[value.name]}")


def open_state_file(span: Span, names: frozenset[str] = frozenset()) -> TorchFile:
    """Open a file of `torch.save`.

    Args:
        span: the file.
        names: further names that its pickle may contain.

    Raises:
        FormatError: it is not such a file, is damaged, or its pickle contains another name.
        CorruptionError, MissingDataError, StorageError: it cannot be read.
    """
    return open_torch_file(span, _TABLE, _NAMES | names)


def state_in(file: TorchFile, known: Mapping[str, Callable[[Instance], object]] | None = None) -> Any:
    """The state: plain containers, small leaves and `PlacedTensor`s.

    Args:
        file: a file from `open_state_file`.
        known: name in the pickle → function that returns the small leaf or tensor for an instance of that name.

    Raises:
        FormatError: a part of the state cannot be stored; the message names it.
    """
    return whole(file, {**dict.fromkeys(_UNSTORABLE, _unstorable), **(known or {})})
