"""Restore targets for objects whose shapes and dtypes only the checkpoint knows.

An object's `state_dict` may have another structure when the object is new than after some work: an
optimizer that has made no step has no moments, a scheduler that has passed a milestone may keep
another list. So the `like` of such a state mirrors the stored tree. It reuses the fitting parts of
the object's own state: tensors, which are filled in place, and the classes of containers (a
`Counter` stays a `Counter`).

Not every tensor of an object can be filled where it is: `set_apart` gives new tensors to the
others, and the object takes the values from them. If it writes other values over a tensor that was
filled, that is an error (`SetApart`).
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from shardckpt import frameworks
from shardckpt.errors import OptionError, StructureMismatchError
from shardckpt.frameworks.base import Array, Target, dtype_of
from shardckpt.frameworks.numpy import overlaps_itself, share_memory
from shardckpt.state import PerProcess
from shardckpt.state.document import Branch, Node, Small, Tensor, Tied, leaves_of
from shardckpt.state.names import container_of, imported_module, match_keys, shown
from shardckpt.state.numbers import is_number
from shardckpt.state.unflatten import decode_leaf
from shardckpt.text import few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.naming.adapt import Adaptation
    from shardckpt.state.names import PathKey

LEFT_OUT: Any = object()
"""Placeholder for a state of which no part is requested."""


@dataclass(frozen=True, slots=True)
class StoredLeaves:
    """The contents of a checkpoint, and which of its names are requested."""

    tensor: Callable[[str], TensorRecord]
    """The record of a tensor, by any of its names."""
    selects: Callable[[str], bool]
    """Whether a name is requested."""
    adaptation: Adaptation | None = None
    """The changes of the restore."""

    def any(self, node: Node) -> bool:
        """Whether a node or any part of it is requested."""
        return any(self.selects(leaf.name) for leaf in leaves_of(node)) or self.selects(node.name)

    def all_or_nothing(self, node: Node) -> bool:
        """Whether a node is requested, with all of its parts.

        Raises:
            OptionError: only some of its parts are requested.
        """
        asked = {self.selects(leaf.name) for leaf in leaves_of(node)} or {self.selects(node.name)}
        if len(asked) == 2:
            raise OptionError(
                f"only=… selects a part of {shown(node.name)}, which can only be restored as a "
                "whole; select all of it."
            )
        return asked.pop()


def renamed(node: Branch, names: Mapping[str, str]) -> Branch:
    """A stored dict with other keys, from the new keys by the old ones.

    A key stays if the dict has its new one already.
    """
    free = {old: new for old, new in names.items() if new not in node.keys}
    return replace(
        node, keys=[free.get(key, key) if isinstance(key, str) else key for key in node.keys]
    )


def fitting(record: TensorRecord, own: object) -> object:
    """The target for a tensor: the object's own if shape and dtype match, or else a new one."""
    if is_number(own) and not record.shape:
        return own
    if frameworks.is_tensor(own) and not isinstance(own, Target):
        tensor: Any = own
        if tuple(tensor.shape) == record.shape and dtype_of(tensor.dtype) == record.dtype:
            return tensor
    return new_tensor(record)


def new_tensor(record: TensorRecord) -> object:
    """A target for a new tensor.

    A JAX array if it was one, and the program has JAX. Otherwise a torch tensor on the CPU, if the
    program has torch, torch has the dtype, and it was not an array; or a numpy array.
    """
    jax = imported_module("jax") if record.array == "jax" else None
    if jax is not None and jax.dtypes.canonicalize_dtype(record.dtype.numpy) == record.dtype.numpy:
        return jax.ShapeDtypeStruct(record.shape, record.dtype.numpy)
    torch = None if record.array else imported_module("torch")
    kind = getattr(torch, record.dtype.name, None)
    return (
        Target(shape=record.shape)
        if torch is None or kind is None
        else torch.empty(record.shape, dtype=kind, device="meta")
    )


def _new_keys(record: TensorRecord, meaning: str) -> object:
    """A target for new random keys of JAX.

    A numpy array of their words if the program lacks JAX, or JAX lacks the generator.
    """
    words = Target(shape=record.shape)
    if imported_module("jax") is None:
        return words
    from shardckpt.frameworks.jax_keys import new_keys

    keys = new_keys(meaning, record.shape)
    return words if keys is None else keys


def mirror(
    stored: StoredLeaves,
    node: Node,
    own: object = None,
    tensor: Callable[[TensorRecord, object], object] = fitting,
    beside: object = None,
) -> Any:
    """The restore target for a stored part of a state.

    Args:
        stored: the checkpoint that holds the part.
        node: the part.
        own: the object's current value there, or anything else.
        tensor: makes the target of a tensor from its record and the object's current value.
        beside: the parameter whose state this is, if it is one's; new composite tensors are laid
            out like it.

    Returns:
        Containers with a place for every requested leaf; `LEFT_OUT` where none is requested.

    Raises:
        OptionError: only a part of a list or tuple is requested.
    """
    if isinstance(node, Branch):
        return (
            _container(stored, node, own, tensor, beside)
            if node.composite is None
            else _composite(stored, node, own, beside)
        )
    if not stored.selects(node.name):
        return LEFT_OUT
    if isinstance(node, Tensor | Tied):
        record = stored.tensor(node.name)
        record = record if stored.adaptation is None else stored.adaptation.record_for(record, own)
        if isinstance(node, Tensor) and node.meaning is not None and not frameworks.is_tensor(own):
            return _new_keys(record, node.meaning)
        return tensor(record, own)
    # A small leaf of any kind, or an error where each process has its own.
    return own if isinstance(own, PerProcess) or _takes_number(own, node) else None


def _takes_number(own: Any, node: Node) -> bool:
    """Whether a number is stored for a tensor without dimensions; the restore converts it."""
    return (
        isinstance(node, Small)
        and frameworks.is_tensor(own)
        and own.shape == ()
        and is_number(decode_leaf(node))
    )


def _composite(stored: StoredLeaves, node: Branch, own: object, beside: object) -> Any:
    """The object's own composite tensor, or a place for a new one."""
    if not stored.all_or_nothing(node):
        return LEFT_OUT
    if frameworks.composite(own, node.name) is not None:
        return own
    assert node.composite is not None
    parts = {
        str(key): mirror(stored, below, None, lambda record, _own: new_tensor(record))
        for key, below in zip(node.keys, node.children, strict=True)
    }
    return frameworks.composite_place(node.name, node.composite, parts, beside)


def _container(
    stored: StoredLeaves,
    node: Branch,
    own: object,
    tensor: Callable[[TensorRecord, object], object],
    beside: object,
) -> Any:
    if (node.form != "dict" or not node.keys) and not stored.all_or_nothing(node):
        return LEFT_OUT
    container = container_of(own, node.name)
    held = (
        {}
        if container is None
        else {
            (type(key), key): value
            for key, value in zip(container.keys, container.children, strict=True)
        }
    )
    items: dict[PathKey, Any] = {}
    keys = (
        node.keys
        if container is None or node.form != "dict"
        else match_keys(node.keys, container.keys)
    )
    for key, below in zip(keys, node.children, strict=True):
        item = mirror(stored, below, held.get((type(key), key)), tensor, beside)
        if item is not LEFT_OUT:
            items[key] = item
    if node.keys and not items:
        return LEFT_OUT
    if node.form != "dict":
        plain = list(items.values())
        if (
            container is not None
            and container.form == node.form
            and (len(held) == len(plain) or isinstance(own, deque))
        ):
            return container.rebuild(plain)
        return plain if node.form == "list" else tuple(plain)
    if (
        container is not None
        and container.form == "dict"
        and {(type(key), key) for key in items} == held.keys()
    ):
        return container.rebuild([items[key] for key in container.keys])
    made: dict[PathKey, Any] = (
        copy.copy(own) if isinstance(own, dict) and container is not None else {}
    )
    made.clear()
    for key, item in items.items():
        made[key] = item  # noqa: PERF403  (update() of a Counter counts)
    return made


# --- tensors that cannot be filled where they are


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor that is to be restored, and its memory."""

    node: Tensor | Tied
    tensor: Any
    memory: Array
    """Only to compare addresses: it may be on a device."""

    @property
    def view(self) -> tuple[Any, ...]:
        """The stored tensor, and the address and form of the memory."""
        return (
            self.node.stored,
            self.memory.ctypes.data,
            self.memory.shape,
            self.memory.strides,
            self.memory.dtype.itemsize,
        )


@dataclass(frozen=True, slots=True)
class SetApart:
    """The tensors of a restore target that others were put in place of."""

    node: Node
    """The stored state."""
    tensors: Mapping[str, tuple[Any, Sequence[Any]]]
    """By name: the tensor, and the tensors that share memory with it and are filled in place."""

    @contextmanager
    def loading(self, restored: Any) -> Iterator[None]:
        """A block that loads the state that was restored into the target.

        Raises:
            StructureMismatchError: the block has written values over others.
        """
        values: dict[str, Any] = {}
        if self.tensors:
            _map(self.node, restored, lambda leaf, value: values.setdefault(leaf.name, value))
        doubtful = [
            (name, tensor, values[name], filled)
            for name, (tensor, filled) in self.tensors.items()
            if filled and name in values and not _is_same(tensor, values[name])
        ]
        neighbours = {id(one): one for *_, filled in doubtful for one in filled}
        before = {key: _digest(one) for key, one in neighbours.items()}
        yield
        changed = {key for key, one in neighbours.items() if _digest(one) != before[key]}
        wrong = [
            name
            for name, tensor, value, filled in doubtful
            if not changed.isdisjoint(map(id, filled)) and _is_same(tensor, value)
        ]
        if wrong:
            raise StructureMismatchError(
                f"other tensors of these objects share memory with {few(wrong)}, and the "
                "checkpoint has different values for the same elements; give each a tensor of its "
                "own, or leave names out with only=. The contents of these tensors are undefined "
                "now."
            )


def _is_same(a: Any, b: Any) -> bool:
    """Whether two arrays, or two torch tensors, are equal bit by bit."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return (a.shape, a.dtype, _digest(a)) == (b.shape, b.dtype, _digest(b))
    from shardckpt.training.tensor_memory import is_same

    return is_same(a, b)


def _digest(tensor: Any) -> bytes:
    """A digest of the elements of a tensor that this process has."""
    memory = tensor
    if not isinstance(tensor, np.ndarray):
        from shardckpt.frameworks.torch import addresses

        memory = addresses(getattr(tensor, "_local_tensor", tensor).detach().cpu())
    digest = hashlib.blake2b()
    parts: Any = np.nditer(memory, ["external_loop", "buffered"], order="C")
    for part in parts:  # of at most 8192 elements each
        digest.update(part.tobytes())
    return digest.digest()


def set_apart(stored: StoredLeaves, node: Node, like: Any) -> tuple[Any, SetApart]:
    """A restore target with new tensors in place of those that cannot be filled where they are.

    These are read-only arrays, tensors with elements that share memory, and tensors that share
    memory with a larger one.

    Args:
        stored: the checkpoint.
        node: the stored state.
        like: the restore target.
    """
    places: list[_Place] = []

    def note(leaf: Tensor | Tied, tensor: Any) -> Any:
        memory = _memory(tensor) if stored.selects(leaf.name) else None
        if memory is not None and memory.size:
            places.append(_Place(leaf, tensor, memory))
        return tensor

    _map(node, like, note)
    apart = _crowded(places)
    if apart:
        like = _map(
            node, like, lambda leaf, tensor: _new_like(tensor) if leaf.name in apart else tensor
        )
    return like, SetApart(node, apart)


def _map(node: Node, like: Any, change: Callable[[Tensor | Tied, Any], Any]) -> Any:
    """A restore target with its tensors changed.

    Only containers in which one has changed are rebuilt.
    """
    if isinstance(node, Tensor | Tied):
        return (
            change(node, like)
            if frameworks.is_tensor(like) and not isinstance(like, Target)
            else like
        )
    container = container_of(like, node.name) if isinstance(node, Branch) else None
    if container is None or not isinstance(node, Branch):
        return like
    below = {(type(key), key): child for key, child in zip(node.keys, node.children, strict=True)}
    pairs = [
        (below.get((type(key), key)), item)
        for key, item in zip(container.keys, container.children, strict=True)
    ]
    items = [item if child is None else _map(child, item, change) for child, item in pairs]
    return like if all(map(operator.is_, items, container.children)) else container.rebuild(items)


def _memory(tensor: Any) -> Array | None:
    """The memory of an array, or of a torch tensor on a device that is filled in place."""
    if isinstance(tensor, np.ndarray):
        return tensor
    torch = imported_module("torch")
    local = getattr(tensor, "_local_tensor", tensor)
    if (
        torch is None
        or type(local) not in (torch.Tensor, torch.nn.Parameter)
        or local.is_meta
        or local.device.type == "xla"
    ):
        return None
    from shardckpt.frameworks.torch import addresses

    return addresses(local) if local.layout is torch.strided else None


def _crowded(places: Sequence[_Place]) -> dict[str, tuple[Any, list[Any]]]:
    """The tensors that cannot be filled where they are, if all others are.

    Of two that share memory it is the smaller one.

    Returns:
        As `SetApart.tensors`.
    """
    apart: dict[str, tuple[Any, list[Any]]] = {
        place.node.name: (place.tensor, []) for place in places if not _is_fillable(place)
    }
    rest = sorted(
        (place for place in places if place.node.name not in apart),
        key=lambda place: byte_bounds(place.memory),
    )
    near: list[_Place] = []
    end = 0
    for place in (*rest, None):
        bounds = None if place is None else byte_bounds(place.memory)
        if bounds is None or bounds[0] >= end:
            filled: list[_Place] = []
            for other in sorted(near, key=lambda one: -one.memory.nbytes):
                crowding = [
                    one.tensor
                    for one in filled
                    if other.view != one.view and share_memory(other.memory, one.memory)
                ]
                if crowding:
                    apart[other.node.name] = other.tensor, crowding
                else:
                    filled.append(other)
            near = []
        if place is not None and bounds is not None:
            near.append(place)
            end = max(end, bounds[1])
    return apart


def _is_fillable(place: _Place) -> bool:
    writable = (
        place.tensor.flags.writeable
        if isinstance(place.tensor, np.ndarray)
        else not (place.tensor.is_conj() or place.tensor.is_neg())
    )
    return bool(writable) and not overlaps_itself(place.memory)


def _new_like(tensor: Any) -> Target:
    """The target for a new tensor of the same kind and dtype: on the CPU, or the same devices."""
    if isinstance(tensor, np.ndarray):
        return Target(shape=tensor.shape, dtype=dtype_of(tensor.dtype))
    mesh = getattr(tensor, "device_mesh", None)
    torch: Any = imported_module("torch")
    return Target(
        torch.device("cpu") if mesh is None else (mesh, tensor.placements),
        tuple(tensor.shape),
        dtype_of(tensor.dtype),
    )
