"""Tensors that are made of other tensors, such as quantized data and their scales.

Other subclasses of a framework's tensor are among them.

A composite tensor is stored as its parts, which are ordinary tensors under its name, and a context:
plain data that describes it completely otherwise (block sizes, dtypes, the kind of rounding). It is
restored into a tensor of the same class in `like`, or made by a class in the register of this
module. A class is never looked up by a name in a checkpoint in any other manner. Without `like` the
parts come back in a dict.

A context may have members of enumerations, dataclasses and named tuples. They are stored as text
and dicts, for comparison: the context of the tensor in `like` must be equal, and is the one that
stays.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from shardckpt.errors import LeafError, OptionError
from shardckpt.state import leaves
from shardckpt.state.names import shown
from shardckpt.state.registered import check_registration
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.state.leaves import JSON


@dataclass(frozen=True, slots=True, eq=False)
class CompositeTensor:
    """A composite tensor of a state, or a place for one in `like`."""

    type_name: str
    """Name of its class, or the name under which the class is registered."""
    shape: tuple[int, ...]
    """Shape of the complete tensor."""
    context: JSON
    """Its context as a document."""
    parts: Mapping[str, Any]
    """Its tensors, by name; a part may be composite, too."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes a tensor of the same class from new parts; returns the tensor itself for its own
    parts."""
    shards: str | None = None
    """The shards that a part has one element or row for, in order; None if no part does."""

    @property
    def document(self) -> JSON:
        """The context to store, with the shards; earlier versions stored the context alone."""
        return (
            self.context if self.shards is None else {"context": self.context, SHARDS: self.shards}
        )


SHARDS = "shards of the parts"
"""Key of the shards in a stored context."""


# --- the register


@dataclass(frozen=True, slots=True)
class TensorType:
    """A class registered with `register_tensor`."""

    type: type
    """The exact class."""
    name: str
    """Name of the class in checkpoints."""
    split: Callable[[Any], tuple[Mapping[str, Any], object]]
    """Returns the parts and the context of a tensor."""
    make: Callable[[Mapping[str, Any], Any, tuple[int, ...]], Any]
    """Makes a tensor of parts, context and shape."""
    shared: frozenset[str] = frozenset()
    """The parts that all shards of a sharded tensor have alike."""


_BY_TYPE: dict[type, TensorType] = {}
_BY_NAME: dict[str, TensorType] = {}


def register_tensor(
    type: type,  # noqa: A002
    *,
    name: str,
    split: Callable[[Any], tuple[Mapping[str, Any], object]],
    make: Callable[[Mapping[str, Any], Any, tuple[int, ...]], Any],
    shared: Sequence[str] = (),
) -> None:
    """Let tensors of exactly this class be stored as parts.

    The parts are made into such tensors where `like` has none.

    Classes with `__tensor_flatten__` are stored without a registration, and restored into tensors
    of the same class.

    Args:
        type: a subclass of a framework's tensor.
        name: name of the class in checkpoints, e.g. `"mypackage.Int4"`. A program that restores
            must register the same name.
        split: returns the parts of a tensor by name, and its context: small leaves in dicts, lists
            and tuples. The parts must be the tensor's own memory, because a restore fills them in
            place.
        make: returns a tensor of parts, context and shape. The context may come from a checkpoint
            of another author.
        shared: names of parts that all shards of a sharded tensor have alike, such as lookup
            tables.

    Raises:
        OptionError: the name belongs to another class, or is empty, or an argument is invalid.
    """
    check_registration("register_tensor", type, split=split, make=make)
    try:
        parts = frozenset[Any](() if isinstance(shared, str) else shared)
    except TypeError:  # no iterable, or of what has no hash
        parts = frozenset([None])
    if isinstance(shared, str) or not all(isinstance(part, str) for part in parts):
        raise OptionError(
            f"register_tensor({type.__qualname__}, shared={shorten(shared)}): give a list of names."
        )
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise OptionError(
            f"register_tensor({type.__qualname__}): name= takes 1 to {_LONGEST_NAME} printable "
            f"characters, not {shorten(name)}."
        )
    leaves.register(
        TensorType(type, name, split, make, parts),
        _BY_TYPE,
        _BY_NAME,
        "register_tensor",
    )


_LONGEST_NAME = 256


def tensor_type(kind: type) -> TensorType | None:
    """The registration of a class, if there is one."""
    return _BY_TYPE.get(kind)


def tensor_type_named(name: str) -> TensorType | None:
    """The registration under a name, if there is one."""
    return _BY_NAME.get(name)


# --- contexts


def plain_context(context: object, where: str) -> Any:
    """A context as plain data that can be compared, and decoded if it was plain data before.

    Args:
        context: the context.
        where: the tensor's name, for messages.

    Raises:
        LeafError: a part of the context is not plain data.
    """
    return _plain(context, where, "the context")


def _plain(value: Any, where: str, path: str) -> Any:
    """A part of a context, of small leaves, dicts, lists and tuples."""
    kind, of_torch = type(value), type(value).__module__.startswith("torch")
    fields = _fields(value)
    plain: Any
    if of_torch and kind.__name__ == "device":
        plain = None  # a tensor is restored on the device where it is
    elif isinstance(value, Enum):
        plain = f"{kind.__qualname__}.{value.name}"
    elif of_torch and kind.__name__ in {"layout", "memory_format"}:
        plain = str(value)
    elif leaves.is_small(value):
        plain = value
    elif fields is not None:
        plain = {
            "class": kind.__qualname__,
            **{key: _plain(of, where, f"{path}.{key}") for key, of in fields.items()},
        }
    elif kind in (list, tuple):
        plain = kind([_plain(of, where, f"{path}[{i}]") for i, of in enumerate(value)])
    elif isinstance(value, dict) and all(isinstance(key, str | int | None) for key in value):
        plain = {key: _plain(of, where, f"{path}[{key!r}]") for key, of in value.items()}
    else:
        raise LeafError(
            f"{shown(where)}: {path} of this composite tensor is a "
            f"{kind.__module__}.{kind.__qualname__}, which is not plain data; call "
            "shardckpt.register_tensor for the tensor's class, with a context of small leaves."
        )
    return plain


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or a named tuple; None for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return (
        dict(zip(value._fields, value, strict=True))
        if isinstance(value, tuple) and hasattr(value, "_fields")
        else None
    )


def same_document(one: JSON, other: JSON) -> bool:
    """Whether two documents are equal, whatever the order of keys.

    1, 1.0 and true are three values.
    """
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def first_difference(one: JSON, other: JSON, path: str = "the context") -> str:
    """The first place where two documents differ, for messages."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = [(str(key), one[key], other[key]) for key in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        pairs = []
    below = next(((key, a, b) for key, a, b in pairs if not same_document(a, b)), None)
    if below is not None:
        return first_difference(below[1], below[2], f"{path}/{below[0]}")
    return f"{path} is {json.dumps(one)[:100]} there and {json.dumps(other)[:100]} here"
