"""Values of a pickled state that can be stored, and notes on those that cannot.

`torch.save` accepts any Python object. For such an object `unpickle` returns containers, leaves,
and `Instance`s, which are records of calls. `plain` visits them once.

1. Objects that are containers, small leaves or tensors in another form are converted: argparse's
   and types' namespaces and defaultdicts become dicts, numpy's scalars and arrays and torch's
   dtypes and devices become themselves, an `io.BytesIO` becomes its bytes.
2. Everything else is left behind, with a note: an enumeration, a user's class, a function, a set.
   A dict then lacks that key; in a list or tuple None takes its place.
3. `whole` leaves no tensor behind: it refuses a state with a tensor that cannot be stored, or with
   an object that has a tensor which is nowhere else in the state.

A pickle can refer to one list from many places, so a short pickle can describe a state of any size.
Such a state is left behind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardckpt.convert.formats.torch.objects import Dtype, PickledTensor, Storage, StorageKind
from shardckpt.convert.formats.torch.unpickling import Build, Instance, Name
from shardckpt.convert.placed import place_array, place_pickled
from shardckpt.errors import CorruptionError, DtypeError, FormatError
from shardckpt.state import leaves
from shardckpt.state.document import MAX_DEPTH
from shardckpt.state.names import child_name, component_names, shown
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardckpt.convert.formats.torch.file import TorchFile

LEFT = object()
"""Marks a value that is left behind."""
MOST_PER_BYTE = 4
"""Most values per byte of the pickle: more values mean that some are shared again and again."""
_NAME_BYTES = 256
"""Bytes of a value's name that count as one more value: names grow with the keys around it."""
_MOST_NOTES = 100
_NUMPY = re.compile(
    r"numpy\.(_core|core)\.(multiarray\.(scalar|_reconstruct)|numeric\._frombuffer)"
)
_NUMBERS = re.compile(r"[biufc][0-9]{1,2}")
"""Dtypes of numbers, as numpy pickles them."""
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_COMPLEX = ("builtins.complex", "__builtin__.complex")
ATTRIBUTED = "torch._utils._rebuild_parameter_with_state"
"""The call that makes a tensor with Python attributes: its first argument is the tensor, and its
last one the attributes."""
_SHOWN = 5
"""Most attributes of a tensor in a note."""
_DICTS = ("collections.defaultdict", "collections.Counter")


def plain(file: TorchFile, name: str) -> tuple[Any, list[str]]:
    """The state that was passed to `torch.save`, as far as it can be stored.

    Args:
        file: a file of `torch.save`.
        name: name of the state.

    Returns:
        Plain containers, small leaves and `PlacedTensor`s, or `LEFT`; and a line for each value
        that is left behind, which says whether a tensor is lost with it.
    """
    walk = _Walk(file, {})
    state = walk.visit(file.state, name, 0)
    lost = {one.name: one for one in walk.with_tensors() if not one.refused}
    return state, _notes([lost.get(one.name, one) for one in walk.left])


def _notes(left: Sequence[_Left]) -> list[str]:
    notes = [
        f"{one.name or 'the state'} is left behind: it {one.why}." for one in left[:_MOST_NOTES]
    ]
    return (
        [*notes, f"{len(left) - _MOST_NOTES:,} more values are left behind."]
        if len(left) > _MOST_NOTES
        else notes
    )


def whole(
    file: TorchFile, known: Mapping[str, Callable[[Instance], object]]
) -> tuple[Any, list[str]]:
    """The state that was passed to `torch.save`, with all its tensors.

    Args:
        file: a file of `torch.save`.
        known: name of an `Instance` → function that returns its small leaf or tensor, or raises
            FormatError ("is a …") with the reason why it cannot be stored.

    Returns:
        The state, and a line for each object that is left behind.

    Raises:
        FormatError: a tensor of the state cannot be stored, nor can the state itself; the message
            names it.
    """
    walk = _Walk(file, known)
    state = walk.visit(file.state, "", 0)
    refused = (
        [one for one in walk.left if one.refused]
        or list(walk.with_tensors())
        or [one for one in walk.left if state is LEFT]
    )
    if refused:
        first, *others = refused
        more = f", nor can {len(others)} other object{'s' * (len(others) > 1)}" if others else ""
        raise FormatError(
            f"{file.span.file}: {shown(first.name) if first.name else 'the state'} {first.why}. "
            f"It cannot be stored{more}. If you trust the file, load it with torch, and save its "
            "state without that, or with a state_dict() in its place."
        )
    return state, _notes(walk.left)


@dataclass(frozen=True, slots=True)
class _Left:
    """A value that is left behind."""

    name: str
    why: str
    """Its problem, such as "is a set"."""
    value: object
    refused: bool
    """Whether it is, or may have, a tensor that cannot be stored."""


@dataclass(slots=True)
class _Walk:
    file: TorchFile
    known: Mapping[str, Callable[[Instance], object]]
    left: list[_Left] = field(default_factory=list)
    kept: set[PickledTensor] = field(default_factory=set)
    seen: int = 0

    def visit(self, value: object, name: str, depth: int) -> Any:
        self.seen += 1 + len(name) // _NAME_BYTES
        if depth > MAX_DEPTH or self.seen > 1000 + MOST_PER_BYTE * self.file.pickle_bytes:
            return self.leave(
                name, "is nested too deep, or has too many shared parts", value, refused=True
            )
        visitor = _VISITORS.get(type(value))
        try:
            if isinstance(value, Instance) and value.name in self.known:
                return self.known[value.name](value)
            if visitor is not None:
                return visitor(self, value, name, depth)
        except FormatError as e:
            return self.leave(name, str(e), value, refused=self.is_tensor(value))
        except CorruptionError:
            raise  # a storable value is missing or damaged
        except (DtypeError, ImportError, ValueError, TypeError, IndexError) as e:
            # TypeError, IndexError: malformed arguments or state.
            why = f"cannot be stored: {clip(str(e), 300)}"
            return self.leave(
                name, why, value, refused=isinstance(e, DtypeError) or self.is_tensor(value)
            )
        return (
            value
            if leaves.is_small(value)
            else self.leave(name, f"is a {type(value).__name__}", value)
        )

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, PickledTensor | Storage) or (
            isinstance(value, Instance) and value.name in self.known
        )

    def with_tensors(self) -> Iterator[_Left]:
        """The objects left behind that have a tensor which is not kept."""
        seen: set[int] = set()
        for one in self.left:
            values = [one.value]
            while values:
                value = values.pop()
                if self.is_tensor(value):
                    if value not in self.kept:
                        yield replace(
                            one, why=f"{one.why} with a tensor that is nowhere else in the file"
                        )
                        break
                elif isinstance(value, Instance | dict | list | tuple) and id(value) not in seen:
                    seen.add(id(value))
                    values.extend(_parts(value))

    def tensor(self, value: PickledTensor, _name: str, _depth: int) -> object:
        placed = place_pickled(self.file, value)
        self.kept.add(value)
        return placed

    def dtype(self, value: Dtype, _name: str, _depth: int) -> object:
        return _torch(lambda torch: getattr(torch, value.name))

    def name(self, value: Name, name: str, _depth: int) -> object:
        return self.leave(name, f"is {clip(value.text)}", value)

    def function(self, value: Build | StorageKind, name: str, _depth: int) -> object:
        return self.leave(name, "is a class or function", value)

    def leave(self, name: str, why: str, value: object, *, refused: bool = False) -> object:
        self.left.append(_Left(name, why, value, refused))
        return LEFT

    def dictionary(self, value: dict[Any, object], name: str, depth: int) -> object:
        kept = {
            key: child for key, child in value.items() if type(key) in (str, int, bool, type(None))
        }
        if len(kept) < len(value):
            odd = [(key, child) for key, child in value.items() if key not in kept]
            why = f"has a key that cannot be stored, as have {len(odd)} values of {name!r}"
            self.leave(f"{name}[{shorten(odd[0][0])}]", why, odd)
        components = component_names(list(kept))
        children = {
            key: self.visit(child, child_name(name, component), depth + 1)
            for (key, child), component in zip(kept.items(), components, strict=True)
        }
        return {key: child for key, child in children.items() if child is not LEFT}

    def sequence(self, value: list[object] | tuple[object, ...], name: str, depth: int) -> object:
        children = [
            self.visit(child, child_name(name, str(i)), depth + 1) for i, child in enumerate(value)
        ]
        return type(value)(None if child is LEFT else child for child in children)

    def instance(self, value: Instance, name: str, depth: int) -> object:
        if (members := _members(value)) is not None:
            return self.dictionary(members, name, depth)
        if (
            value.name == "_io.BytesIO"
            and type(value.state) is tuple
            and type(value.state[0]) is bytes
        ):
            return value.state[0]
        if value.name == "torch.device":
            device = _torch(lambda torch: torch.device(*value.arguments))
            # Torch keeps eight bits of an index.
            if str(device) == ":".join(map(str, value.arguments)):
                return device
        if value.name == ATTRIBUTED:
            return self.attributed(value, name, depth)
        if _NUMPY.fullmatch(value.name) or value.name in _COMPLEX:
            return (
                _scalar(value)
                if value.name in _COMPLEX or value.name.endswith(".scalar")
                else place_array(_array(value))
            )
        return self.leave(name, f"is a {clip(value.name)}", value)

    def attributed(self, value: Instance, name: str, depth: int) -> object:
        """The tensor; its attributes are left behind."""
        tensor, *_others, attributes = value.arguments
        # Attributes in `__slots__` are a second dict.
        dicts = attributes[:2] if type(attributes) is tuple else (attributes,)
        if any(dicts):
            names = [shorten(key) for of in dicts if type(of) is dict for key in islice(of, _SHOWN)]
            self.leave(
                f"{name or 'the state'}.__dict__",
                f"has the attributes {', '.join(names)}",
                attributes,
            )
        return self.visit(tensor, name, depth + 1)


def _members(value: Instance) -> dict[Any, object] | None:
    """The members of a namespace or of a dict of another class; None: it is neither."""
    if value.name in _DICTS:
        first = value.arguments[0] if value.arguments else None
        return first if type(first) is dict else value.items
    return value.state if value.name in _NAMESPACES and type(value.state) is dict else None


def _parts(value: object) -> Iterable[object]:
    """The values that a container or an object has."""
    if isinstance(value, Instance):
        return (*value.arguments, value.state, value.items, value.appended)
    return (*value, *value.values()) if isinstance(value, dict) else cast("Iterable[object]", value)


_VISITORS: dict[type, Callable[[_Walk, Any, str, int], Any]] = {
    dict: _Walk.dictionary,
    list: _Walk.sequence,
    tuple: _Walk.sequence,
    Instance: _Walk.instance,
    Name: _Walk.name,
    Build: _Walk.function,
    StorageKind: _Walk.function,
    Dtype: _Walk.dtype,
    PickledTensor: _Walk.tensor,
}


def _torch(make: Callable[[Any], object]) -> object:
    """Make an object of torch; ImportError if torch is not installed."""
    import torch

    try:
        return make(torch)
    except (AttributeError, TypeError, RuntimeError, ValueError) as e:
        raise FormatError(f"is not a leaf of torch's ({shorten(str(e))})") from e


def _scalar(value: Instance) -> object:
    if value.name in _COMPLEX:
        real, imaginary = value.arguments
        if type(real) is float and type(imaginary) is float:
            return complex(real, imaginary)
        raise FormatError(f"is a {value.name} of something else than floats")
    dtype, data = value.arguments
    return _numbers(data, dtype, (), value.name)[()]


def _array(value: Instance) -> np.ndarray[Any, np.dtype[Any]]:
    if value.name.endswith("._frombuffer"):  # of protocol 5
        buffer, dtype, shape, order, *axes = cast("tuple[Any, ...]", value.arguments)
        data = buffer.arguments[0] if isinstance(buffer, Instance) else buffer
        if order == "K" and axes:  # of numpy 2.4
            return _numbers(data, dtype, shape, value.name).transpose(*axes)
        return _ordered(data, dtype, shape, order == "F", value.name)
    if type(value.state) is not tuple or len(value.state) != 5 or type(value.state[1]) is not tuple:
        raise FormatError(f"is a {value.name} without its elements")
    _version, shape, dtype, fortran, data = value.state
    return _ordered(data, dtype, shape, bool(fortran), value.name)


def _ordered(
    data: object, dtype: object, shape: Any, fortran: bool, what: str
) -> np.ndarray[Any, np.dtype[Any]]:
    if not fortran:
        return _numbers(data, dtype, shape, what)
    return _numbers(data, dtype, tuple(reversed(shape)), what).T


def _numbers(
    data: object, dtype: object, shape: tuple[Any, ...], what: str
) -> np.ndarray[Any, np.dtype[Any]]:
    """An array of numbers from its pickled bytes, dtype and shape."""
    if (
        isinstance(dtype, Instance)
        and dtype.name == "numpy.dtype"
        and type(dtype.arguments[0]) is str
        and _NUMBERS.fullmatch(dtype.arguments[0])
    ):
        big = type(dtype.state) is tuple and len(dtype.state) > 1 and dtype.state[1] == ">"
        element = np.dtype((">" if big else "<") + dtype.arguments[0])
        try:
            if type(data) is bytes and len(data) == element.itemsize * int(
                np.prod(shape, dtype=np.int64)
            ):
                return np.frombuffer(data, element).astype(element.newbyteorder("=")).reshape(shape)
        except (TypeError, ValueError, OverflowError):
            pass
    raise FormatError(f"is a {what} of something else than numbers")
