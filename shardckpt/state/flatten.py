"""Flattening a state into named tensors and one document.

Also the interface of states that collect themselves.

`flatten` walks a state once, depth first, in the order of the containers. Every value is, in this
order: a tensor (the caller decides), a `PerProcess`, a leaf of a registered type, a small leaf, a
container, or an error that names its place.

A `StateOwner` (`shardckpt.TrainState`) collects its own state as plain containers, and provides the
state that a stored one is restored into.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.errors import LeafError
from shardckpt.state import leaves, names
from shardckpt.state.document import MAX_DEPTH, is_meaning, write_composite, write_dict
from shardckpt.state.names import Container, container_of, shown
from shardckpt.state.per_process import PerProcess
from shardckpt.state.registered import call_registered
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from shardckpt.layout.world import World
    from shardckpt.state.composites import CompositeTensor
    from shardckpt.state.document import Meaning, Node
    from shardckpt.state.leaves import JSON


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened state."""

    tensors: dict[str, Any]
    """Tensor leaves by name, in tree order; a tied tensor once, under its first name."""
    tree: JSON
    """The tree document: containers and small leaves (grammar in `shardckpt.state`)."""
    per_process: dict[str, Any] = field(default_factory=dict)
    """This process's values of the `PerProcess` leaves by name, in tree order. The tree contains
    none of them."""
    local: frozenset[str] | set[str] = frozenset()
    """Names of the tensors that belong to this process alone."""
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Positions of those values on an axis of the mesh, and the size of the axis, where they have
    any."""


def flatten(
    state: object,
    is_tensor: Callable[[object], bool],
    identity: Callable[[object], Hashable | None] | None = None,
    meaning: Meaning | None = None,
    *,
    root: str = "",
    composite: Callable[[object, str], CompositeTensor | None] | None = None,
    local: Callable[[str], bool] | None = None,
    process: int = 0,
    addresses: Mapping[type, Callable[[Any], int]] | None = None,
) -> Flat:
    """Flatten a state into named tensors and the tree document.

    Args:
        state: nested dicts, lists and tuples, and other containers (`shardckpt.state.names`), which
            come back as these.
        is_tensor: whether a value is a tensor leaf. Called first, for every value.
        identity: returns equal values for tensors that are the same view of the same memory, None
            for a tensor that is never shared. Tensors of equal identity are stored once.
        meaning: returns the meaning of a tensor's elements to its framework, e.g.
            `jax.key:threefry2x32`.
        root: name of `state`, if it is a part of a larger state. All names begin with it.
        composite: returns the parts of a value, by its name, if it is a composite tensor. Called
            before `is_tensor`.
        local: whether the value of a name belongs to this process alone. Names of its tensors get
            the process's number.
        process: the number of this process.
        addresses: by class, a function that returns the address of a tensor's memory, for tensors
            that are not composite and have no meaning; 0 for any other value. The `identity` of
            such tensors, and of whatever else may share their memory, is a tuple whose second item
            is the address. So the identity is computed only of tensors at an address where another
            one is.

    Raises:
        LeafError: a value cannot be stored, a key is invalid, there is a cycle, or a value is
            nested in more than 200 containers; the message names the place.
    """
    walk = _Walk(is_tensor, identity, meaning, composite, local, process, addresses or {})
    tree = walk.visit(state, root, 0)
    return Flat(walk.tensors, tree, walk.per_process, walk.local_tensors, walk.axes)


NEVER_LEAVES = frozenset({dict, list, tuple})
"""Exactly these types are always containers: they cannot be registered as leaves."""


class _Walk:
    """The state of one walk."""

    def __init__(
        self,
        is_tensor: Callable[[object], bool],
        identity: Callable[[object], Hashable | None] | None,
        meaning: Meaning | None,
        composite: Callable[[object, str], CompositeTensor | None] | None,
        local: Callable[[str], bool] | None,
        process: int,
        addresses: Mapping[type, Callable[[Any], int]],
    ) -> None:
        self.addresses = {} if local is not None or identity is None else addresses
        self.at: dict[int, str] = {}
        """The first tensor at each address, whether its identity was asked for or not."""
        self.composite = composite
        self.is_local = local
        self.process = process
        self.local_tensors: set[str] = set()
        self.inside_local = False
        self.is_tensor = is_tensor
        self.identity = identity
        self.meaning = meaning
        self.tensors: dict[str, Any] = {}
        self.per_process: dict[str, Any] = {}
        self.axes: dict[str, tuple[int, int]] = {}
        self.first_names: dict[Hashable, str] = {}
        self.inside: set[int] = set()
        """ids of the containers around the current value."""
        self.leaf: str | None = None
        """Name of the registered leaf whose encoded form is being walked."""

    def visit(self, value: object, name: str, depth: int) -> JSON:
        is_local = None if self.inside_local or self.leaf is not None else self.is_local
        if is_local is not None and is_local(name):
            return self.local(value, name, depth)
        made = None if self.composite is None else self.composite(value, name)
        if made is not None:
            return self.composed(value, made, name, depth)
        return self.tensor(value, name) if self.is_tensor(value) else self.other(value, name, depth)

    def other(self, value: object, name: str, depth: int) -> JSON:
        """A value that is not a tensor."""
        if isinstance(value, PerProcess):
            self.refuse_in_leaf(value)
            self.per_process[name] = value.value
            if value.axis is not None:
                self.axes[name] = value.axis
            return {"$per_process": None}
        if type(value) not in NEVER_LEAVES:
            registered = leaves.leaf_type(value)
            if registered is not None:
                with _Inside(self, value, name, depth):
                    content = call_registered(
                        registered.encode,
                        value,
                        name,
                        "encode function registered as",
                        registered.name,
                    )
                    return {"$leaf": [registered.name, self.encoded(content, name, depth + 1)]}
            if leaves.is_small(value):
                return leaves.encode(value, name)
        container = container_of(value, name)
        if container is None:
            raise unsupported(value, name)
        with _Inside(self, value, name, depth):
            return self.container(container, name, depth + 1)

    def local(self, value: object, name: str, depth: int) -> JSON:
        """A value that belongs to this process alone."""
        if depth + 1 >= MAX_DEPTH:
            raise _too_deep(name)
        self.inside_local, first_names = True, self.first_names
        self.first_names = {}  # another process may have other ties
        node = self.visit(value, names.child_name(name, str(self.process)), depth + 1)
        self.inside_local, self.first_names = False, first_names
        return {"$local": {str(self.process): node}}

    def composed(self, value: object, made: CompositeTensor, name: str, depth: int) -> JSON:
        self.refuse_in_leaf(value)
        with _Inside(self, value, name, depth):
            components = names.component_names([*made.parts])
            nodes = [
                self.visit(part, names.child_name(name, component), depth + 1)
                for component, part in zip(components, made.parts.values(), strict=True)
            ]
        return write_composite(made.type_name, made.shape, made.document, [*made.parts], nodes)

    def tensor(self, value: object, name: str) -> JSON:
        self.refuse_in_leaf(value)
        identity = None if self.identity is None else self.identity(value)
        if identity is not None:
            assert self.identity is not None
            if (
                self.addresses
                and type(identity) is tuple
                and (other := self.at.setdefault(identity[1], name)) != name
            ):
                self.first_names.setdefault(self.identity(self.tensors[other]), other)
            first = self.first_names.setdefault(identity, name)
            if first != name:
                return {"$tied": first}
        self.tensors[name] = value
        if self.inside_local:
            self.local_tensors.add(name)
        meaning = None if self.meaning is None else self.meaning(value)
        if meaning is None or meaning is ...:
            return "$tensor"
        if not is_meaning(meaning):
            raise LeafError(
                f"{shown(name)} has the meaning {shorten(meaning)}, which is not a short "
                "printable text; store it as plain numbers."
            )
        return {"$tensor": meaning}

    def refuse_in_leaf(self, value: object) -> None:
        """Raise LeafError for a value inside a registered leaf's encoded form."""
        if self.leaf is not None:
            raise LeafError(
                f"{shown(self.leaf)}: the encode function of this registered leaf returned a "
                f"{type(value).__qualname__}; it may return small leaves, dicts, lists and tuples "
                "of them only. Keep tensors and PerProcess in the state itself."
            )

    def encoded(self, value: object, name: str, depth: int) -> JSON:
        outer, self.leaf = self.leaf, name
        try:
            return self.visit(value, name, depth)
        finally:
            self.leaf = outer

    def container(self, container: Container, name: str, depth: int) -> JSON:
        nodes: list[JSON] = []
        addresses, at = {} if self.leaf is not None else self.addresses, self.at
        for component, child in zip(
            names.component_names(container.keys), container.children, strict=True
        ):
            inside = f"{name}/{component}" if name else component
            address_of = addresses.get(type(child))
            if (
                address_of is not None
                and (address := address_of(child))
                and at.setdefault(address, inside) is inside
            ):
                self.tensors[inside] = child
                nodes.append("$tensor")
            else:
                nodes.append(self.visit(child, inside, depth))
        if container.form == "dict":
            return write_dict(container.keys, nodes, name)
        return nodes if container.form == "list" else {"$tuple": nodes}


def _too_deep(name: str) -> LeafError:
    return LeafError(
        f"{shown(name)} lies in more than {MAX_DEPTH} containers, one within the other; flatten "
        "that part of the state."
    )


class _Inside:
    """Context of one container: detects cycles and limits the depth."""

    def __init__(self, walk: _Walk, value: object, name: str, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise _too_deep(name)
        if id(value) in walk.inside:
            raise LeafError(
                f"{shown(name)} is a {type(value).__qualname__} that contains itself; a state is "
                "a tree. Take the cycle out."
            )
        self.inside, self.key = walk.inside, id(value)

    def __enter__(self) -> None:
        self.inside.add(self.key)

    def __exit__(self, *_error: object) -> None:
        self.inside.discard(self.key)


def unsupported(value: object, name: str) -> LeafError:
    """The error for a value that is neither a tensor, a small leaf nor a container."""
    kind = type(value)
    type_name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    what = (
        f"{shown(name)} is {'an' if type_name[0] in 'aeio' else 'a'} {type_name}, which cannot be "
        "stored."
    )
    base = next((base for base in kind.__mro__[1:] if base in _BASES), None)
    if isinstance(value, set | frozenset):
        return LeafError(f"{what} Sets have no order: store sorted(…) of it, a list.")
    instead = next((text for types, text in _INSTEAD if isinstance(value, types)), None)
    if instead is not None:
        return LeafError(f"{what} Store {instead}.")
    if base is not None:
        return LeafError(
            f"{what} Convert it with {base.__name__}(…), or keep its class: call "
            "shardckpt.register_leaf for it."
        )
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return LeafError(
            f"{what} Store its state_dict(), or make the state with "
            "shardckpt.train_state(model=…), which also restores into it."
        )
    if callable(value):
        return LeafError(
            f"{what} Leave functions and classes out of the state, and make them anew when "
            "restoring."
        )
    return LeafError(
        f"{what} Store numbers, text or tensors that describe it, or call shardckpt.register_leaf "
        "for its class."
    )


_INSTEAD: tuple[tuple[Any, str], ...] = (
    (Enum, "its value, or its name"),
    (os.PathLike, "str(…) of it"),
    (bytearray | memoryview, "bytes(…) of it"),
    (range, "list(…) of it"),
    (np.random.Generator, "its bit_generator.state"),
    (np.random.RandomState, "its get_state(legacy=False)"),
)
"""Types that have no place in a state, and what to store in their place."""
_BASES = frozenset({bool, int, float, complex, str, bytes, dict, list, tuple})


# --- states that collect themselves


class StateOwner(ABC):
    """The interface of an object that owns a complete state, such as `shardckpt.TrainState`.

    The interface is for saving and restoring.
    """

    is_local: Callable[[str], bool] | None = None
    """Whether the value of a name belongs to each process alone; None: no value does."""

    def unused_local(self) -> list[str]:
        """The patterns behind `is_local` that have selected no value of this process yet.

        They are unused although all values that they name exist.
        """
        return []

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state as plain containers, for saving."""

    @abstractmethod
    def arranged(self, tree: Node, wanted: Callable[[str], bool], adaptation: Any = None) -> Node:
        """Convert a stored state to the form that `state_dict` returns.

        Args:
            tree: the stored state.
            wanted: whether a name is to be restored.
            adaptation: the `Adaptation` of a restore that renames or joins tensors; the owner
                applies it.
        """

    @abstractmethod
    def like(
        self,
        tree: Node,
        tensor: Callable[[str], Any],
        wanted: Callable[[str], bool],
        world: Callable[[], World],
        adaptation: Any = None,
    ) -> dict[str, Any]:
        """The state to restore a stored one into, so that `load_state_dict` accepts the result.

        Args:
            tree: the result of `arranged`.
            tensor: returns the record of a stored tensor, by its name.
            wanted: whether a name is to be restored.
            world: returns this process's number and the number of processes; called if other
                processes saved.
            adaptation: as for `arranged`.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load the state that was restored into `like`; `strict` as for `restore`."""


def plain_state(state: Any) -> Any:
    """The plain containers of a state: a `StateOwner` collects its own.

    Any other state is returned unchanged.
    """
    return state.state_dict() if isinstance(state, StateOwner) else state


def local_names(state: Any) -> Callable[[str], bool] | None:
    """The function that selects the values of a state that belong to each process alone.

    None if no value does.
    """
    return state.is_local if isinstance(state, StateOwner) else None


def unused_local(state: Any) -> list[str]:
    """The patterns of `local_names` that have selected no value of this process.

    Call it after `flatten`.
    """
    return state.unused_local() if isinstance(state, StateOwner) else []
