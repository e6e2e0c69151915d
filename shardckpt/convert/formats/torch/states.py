"""The state in a file of `torch.save`.

Nothing in the pickle is ever run (`unpickling`), so a file may contain any name. An object of a
class that is not known here is left behind with a note. A tensor never is: a file with a tensor
that cannot be stored is refused.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardckpt.convert.formats.torch.file import open_torch_file
from shardckpt.convert.formats.torch.objects import TABLE
from shardckpt.convert.formats.torch.unpickling import Build, Instance, Name
from shardckpt.convert.plain_values import ATTRIBUTED, whole
from shardckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.convert.formats.torch.file import TorchFile
    from shardckpt.convert.span import Span


_BUILTINS = ("builtins", "__builtin__")
"""Names of Python's module of built-in types in pickles of protocol 3 and later, and of earlier
ones."""


_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def _of_type(rebuild: object, kind: object, arguments: object, attributes: object) -> object:
    """A tensor with Python attributes: torch._tensor._rebuild_from_type_v2."""
    if type(arguments) is not tuple:
        raise TypeError("a tensor is made from something else than arguments")
    if isinstance(rebuild, Name):
        tensor: object = Instance(rebuild.text, arguments)
    elif isinstance(rebuild, Build) and rebuild in _BUILDERS.values():
        tensor = rebuild.function(*arguments)
    else:
        raise TypeError("a tensor is made by something else than a function for tensors")
    if not attributes:
        return tensor
    if isinstance(kind, Name) and kind.text not in _TENSORS:
        # Its elements may mean nothing without the attributes: scales, an index.
        return Instance(kind.text, (tensor,), attributes)
    return Instance(ATTRIBUTED, (tensor, attributes))


def _first(tensor: object, *_others: object) -> object:
    return tensor


def _complex(real: object, imaginary: object) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("a complex number has parts that are not floats")
    return complex(real, imaginary)


def _lazy_too(name: str) -> Build:
    """A builder of tensors that returns a `_LAZY` instance for a lazy tensor.

    A lazy tensor is one that torch conjugates or negates on use.
    """
    build = TABLE[name]
    assert isinstance(build, Build)

    def tensor(*arguments: object) -> object:
        lazy = arguments[_METADATA[name] :]
        return Instance(_LAZY, ()) if lazy and lazy[0] else build.function(*arguments)

    return Build(tensor)


_LAZY = "a lazy view"
_METADATA = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
"""Index of the argument that marks such tensors."""
_BUILDERS = {
    **{name: _lazy_too(name) for name in _METADATA},
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": Build(_first),
}
"""Builders of tensors that may also have Python attributes."""
_TABLE: Mapping[str, object] = MappingProxyType(
    {
        **TABLE,
        **_BUILDERS,
        **{f"{module}.complex": Build(_complex) for module in _BUILTINS},
        "torch._tensor._rebuild_from_type_v2": Build(_of_type),
    }
)
_UNSTORABLE = {
    _LAZY: "a lazily conjugated or negated tensor: call resolve_conj() and resolve_neg() on it",
    "torch._utils._rebuild_qtensor": (
        "a quantized tensor: save its int_repr(), scales and zero points, or dequantize() it"
    ),
    "torch._utils._rebuild_sparse_tensor": (
        "a sparse tensor: save its indices and values, or to_dense() it"
    ),
    "torch._utils._rebuild_nested_tensor": "a nested tensor: save the tensors that it consists of",
    "torch._utils._rebuild_meta_tensor_no_storage": (
        "a tensor on the device meta, which has no elements"
    ),
    "torch._utils._rebuild_wrapper_subclass": (
        "a tensor of a class of its own: save the tensors that it consists of"
    ),
    "torch._utils._rebuild_device_tensor_from_numpy": (
        "a tensor of a device that torch saves through numpy: move it to the CPU first"
    ),
}
"""Kinds of tensors that cannot be stored, with advice for messages."""


def _unstorable(value: Instance) -> object:
    raise FormatError(f"is {_UNSTORABLE[value.name]}")


def open_state_file(span: Span) -> TorchFile:
    """Open a file of `torch.save`.

    Raises:
        FormatError: it is not such a file, or is damaged.
        CorruptionError, MissingDataError, StorageError: it cannot be read.
    """
    return open_torch_file(span, _TABLE)


def state_in(
    file: TorchFile, known: Mapping[str, Callable[[Instance], object]] | None = None
) -> tuple[Any, list[str]]:
    """The state, and a line for each object that is left behind.

    Args:
        file: a file from `open_state_file`.
        known: name in the pickle → function that returns the small leaf or tensor for an instance
            of that name.

    Returns:
        Plain containers, small leaves and `PlacedTensor`s; and the notes.

    Raises:
        FormatError: a tensor of the state cannot be stored; the message names it.
    """
    return whole(file, {**dict.fromkeys(_UNSTORABLE, _unstorable), **(known or {})})
