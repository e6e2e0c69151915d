"""Flattening a state into named tensors and one document. Also the definition of containers, and of states that collect themselves.

`flatten` walks a state once, depth first, in the order of the containers. Every value is, in this order: a tensor (the caller
decides), a `PerProcess`, a leaf of a registered type, a small leaf, a container, or an error that names its place.

`container_of` recognises these containers, in this order:

1. dict, OrderedDict, defaultdict, Counter, and list, tuple, deque. Subclasses of these do not count, unless one of the
   following applies: rebuilding them as the base class would lose what makes them different.
2. Named tuples: by field.
3. Classes in the pytree registry of torch or JAX: by the registry's keys. The registries are looked up, never
   imported: an object of a registered class exists only if its framework is imported.
4. Dataclasses: by field. They come after the registries, because a registered dataclass (a flax TrainState, say) keeps
   functions and other constants out of the tree.

A container of any class is stored in one of three plain forms: dict, list or tuple. A `StateOwner` (`shardckpt.TrainState`)
collects its own state as plain containers, and provides the state that a stored one is restored into.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardckpt.errors import LeafError
from shardckpt.excerpt import excerpt
from shardckpt.state import leaves, names
from shardckpt.state.document import MAX_DEPTH, is_meaning, write_dict
from shardckpt.state.names import shown
from shardckpt.state.per_process import PerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from shardckpt.layout.world import World
    from shardckpt.state.document import Form, Meaning, Node
    from shardckpt.state.leaves import JSON
    from shardckpt.state.names import PathKey


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened state."""

    tensors: dict[str, Any]
    """Tensor leaves by name, in tree order; a tied tensor once, under its first name."""
    tree: JSON
    """The tree document: containers and small leaves (grammar in `shardckpt.state`)."""
    aliases: dict[str, str]
    """Further name of a tied tensor → the name under which the tensor is stored."""
    per_process: dict[str, Any] = field(default_factory=dict)
    """This process's values of the `PerProcess` leaves by name, in tree order. The tree contains none of them."""


def flatten(
    state: object,
    is_tensor: Callable[[object], bool],
    identity: Callable[[object], Hashable | None] | None = None,
    meaning: Meaning | None = None,
    *,
    root: str = "",
) -> Flat:
    """Flatten a state into named tensors and the tree document.

    Args:
        state: nested dicts, lists and tuples, and other containers (`shardckpt.state.flatten`), which come back as these.
        is_tensor: whether a value is a tensor leaf. Called first, for every value.
        identity: returns equal values for tensors that are the same view of the same memory, None for a tensor that is never
            shared. Tensors of equal identity are stored once.
        meaning: returns the meaning of a tensor's elements to its framework, e.g. `jax.key:threefry2x32`.
        root: name of `state`, if it is a part of a larger state. All names begin with it.

    Raises:
        LeafError: a value cannot be stored, a key is invalid, there is a cycle, or a value is nested in more than 200
            containers; the message names the place.
    """
    walk = _Walk(is_tensor, identity, meaning)
    tree = walk.visit(state, root, 0)
    return Flat(walk.tensors, tree, walk.aliases, walk.per_process)


NEVER_LEAVES = frozenset({dict, list, tuple})
"""Exactly these types are always containers: they cannot be registered as leaves."""


class _Walk:
    """The state of one walk."""

    def __init__(
        self,
        is_tensor: Callable[[object], bool],
        identity: Callable[[object], Hashable | None] | None,
        meaning: Meaning | None,
    ) -> None:
        self.is_tensor = is_tensor
        self.identity = identity
        self.meaning = meaning
        self.tensors: dict[str, Any] = {}
        self.per_process: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.first_names: dict[Hashable, str] = {}
        self.inside: set[int] = set()
        """ids of the containers around the current value."""
        self.leaf: str | None = None
        """Name of the registered leaf whose encoded form is being walked."""

    def visit(self, value: object, name: str, depth: int) -> JSON:
        if self.is_tensor(value):
            return self.tensor(value, name)
        if isinstance(value, PerProcess):
            self.refuse_in_leaf(value)
            self.per_process[name] = value.value
            return {"$per_process": None}
        if type(value) not in NEVER_LEAVES:
            registered = leaves.leaf_type(value)
            if registered is not None:
                with _Inside(self, value, name, depth):
                    return {"$leaf": [registered.name, self.encoded(registered.encode(value), name, depth + 1)]}
            if leaves.is_small(value):
                return leaves.encode(value, name)
        container = container_of(value, name)
        if container is None:
            raise unsupported(value, name)
        with _Inside(self, value, name, depth):
            return self.container(container, name, depth + 1)

    def tensor(self, value: object, name: str) -> JSON:
        self.refuse_in_leaf(value)
        identity = None if self.identity is None else self.identity(value)
        if identity is not None:
            first = self.first_names.setdefault(identity, name)
            if first != name:
                self.aliases[name] = first
                return {"$tied": first}
        self.tensors[name] = value
        meaning = None if self.meaning is None else self.meaning(value)
        if meaning is None or meaning is ...:
            return "$tensor"
        if not is_meaning(meaning):
            raise LeafError(
                f"{shown(name)} has the meaning {excerpt(meaning)}, which is not a short printable text; store it as plain numbers."
            )
        return {"$tensor": meaning}

    def refuse_in_leaf(self, value: object) -> None:
        """Raise LeafError for a value inside a registered leaf's encoded form."""
        if self.leaf is not None:
            raise LeafError(
                f"{shown(self.leaf)}: the encode function of this registered leaf returned a {type(value).__qualname__}; "
                f"it may return small leaves, dicts, lists and tuples of them only. Keep tensors and PerProcess in the state itself."
            )

    def encoded(self, value: object, name: str, depth: int) -> JSON:
        outer, self.leaf = self.leaf, name
        try:
            return self.visit(value, name, depth)
        finally:
            self.leaf = outer

    def container(self, container: Container, name: str, depth: int) -> JSON:
        nodes: list[JSON] = []
        for component, child in zip(names.component_names(container.keys), container.children, strict=True):
            nodes.append(self.visit(child, names.child_name(name, component), depth))
        if container.form == "dict":
            return write_dict(container.keys, nodes, name)
        return nodes if container.form == "list" else {"$tuple": nodes}


class _Inside:
    """Context of one container: detects cycles and limits the depth."""

    def __init__(self, walk: _Walk, value: object, name: str, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise LeafError(
                f"{shown(name)} lies in more than {MAX_DEPTH} containers, one within the other; flatten that part of the state."
            )
        if id(value) in walk.inside:
            raise LeafError(f"{shown(name)} is a {type(value).__qualname__} that contains itself; a state is a tree. Take the cycle out.")
        self.inside, self.key = walk.inside, id(value)

    def __enter__(self) -> None:
        self.inside.add(self.key)

    def __exit__(self, *_error: object) -> None:
        self.inside.discard(self.key)


def unsupported(value: object, name: str) -> LeafError:
    """The error for a value that is neither a tensor, a small leaf nor a container."""
    kind = type(value)
    what = f"{shown(name)} is a {kind.__module__}.{kind.__qualname__}".replace(" builtins.", " ") + ", which cannot be stored."
    base = next((base for base in kind.__mro__[1:] if base in _BASES), None)
    if isinstance(value, set | frozenset):
        return LeafError(f"{what} Sets have no order: store sorted(…) of it, a list.")
    if base is not None:
        return LeafError(f"{what} Convert it with {base.__name__}(…), or keep its class: call shardckpt.register_leaf for it.")
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return LeafError(
            f"{what} Store its state_dict(), or make the state with shardckpt.train_state(model=…), which also restores into it."
        )
    if callable(value):
        return LeafError(f"{what} Leave functions and classes out of the state, and make them anew when restoring.")
    return LeafError(f"{what} Store what it consists of (its state_dict(), say), or call shardckpt.register_leaf for its class.")


_BASES = frozenset({bool, int, float, complex, str, bytes, dict, list, tuple})


@dataclass(frozen=True, slots=True)
class Container:
    """One level of a container."""

    form: Form
    """The stored form."""
    keys: Sequence[PathKey]
    """Keys of the children; 0, 1, … unless the form is dict."""
    children: Sequence[object]
    """Children, one per key."""
    rebuild: Callable[[list[object]], object]
    """Makes a container of the same class and other attributes from as many new children."""


def container_of(value: object, where: str) -> Container | None:
    """Split a container into keys and children; None if `value` is not a container.

    Args:
        value: any object.
        where: its name, for messages.

    Raises:
        LeafError: a key is neither str, int, bool nor None, or occurs twice.
    """
    kind = type(value)
    if value is None:  # a leaf here; to JAX, a node without children
        return None
    if kind in _DICTS:
        return _of_dict(value, where)  # type: ignore[arg-type]
    if kind in _SEQUENCES:
        return _of_sequence(value)  # type: ignore[arg-type]
    if isinstance(value, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
        return Container("dict", kind._fields, value, kind._make)
    return _of_torch_node(value, where) or _of_jax_node(value, where) or _of_dataclass(value)


# --- containers: Python's own ---------------------------------------------------------------------------------------------------

_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES = frozenset({list, tuple, deque})
_KEYS = frozenset({str, int, bool, type(None)})


def _of_dict(value: dict[Any, object], where: str) -> Container:
    for key in value:
        if type(key) not in _KEYS:
            raise LeafError(
                f"{shown(where)} has a key of type {type(key).__qualname__}, {_key_text(key)}; "
                f"keys are str, int, bool or None. Convert it to one of these first."
            )

    def rebuild(children: list[object]) -> object:
        new: dict[Any, object] = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        # Attributes of the dict are kept: torch's Module.load_state_dict looks for `_metadata`.
        if hasattr(value, "__dict__"):
            vars(new).update(vars(value))
        for key, child in zip(value, children, strict=True):
            new[key] = child  # noqa: PERF403  # a Counter's constructor and update() count
        return new

    return Container("dict", list(value), list(value.values()), rebuild)


def _of_sequence(value: list[object] | tuple[object, ...] | deque[object]) -> Container:
    def rebuild(children: list[object]) -> object:
        return deque(children, value.maxlen) if isinstance(value, deque) else type(value)(children)

    return Container("tuple" if isinstance(value, tuple) else "list", range(len(value)), value, rebuild)


def _of_dataclass(value: object) -> Container | None:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]

    def rebuild(children: list[object]) -> object:
        # Neither __init__ nor __post_init__ runs: the stored values are final field values.
        new = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(new, name, child)  # works for frozen dataclasses, too
        return new

    return Container("dict", names, [getattr(value, name) for name in names], rebuild)


def _key_text(key: object) -> str:
    # Only of these types is repr() known to be short and free of side effects.
    return repr(key) if isinstance(key, int | float | str) else f"in {type(key).__module__}"


# --- containers: registered pytree nodes ----------------------------------------------------------------------------------------


def _of_torch_node(value: object, where: str) -> Container | None:
    pytree = sys.modules.get("torch.utils._pytree")
    node = getattr(pytree, "SUPPORTED_NODES", {}).get(type(value))
    if node is None:
        return None
    if node.flatten_with_keys_fn is None:
        children, context = node.flatten_fn(value)
        entries: Iterable[object] = [None] * len(children)
    else:
        pairs, context = node.flatten_with_keys_fn(value)
        pairs = list(pairs)
        entries, children = [entry for entry, _ in pairs], [child for _, child in pairs]
    return _of_node(entries, children, lambda children: node.unflatten_fn(children, context), where)


def _of_jax_node(value: object, where: str) -> Container | None:
    tree_util = sys.modules.get("jax.tree_util")
    # Older versions of JAX without `is_tree_node` flatten any value; newer ones warn about iterators.
    if tree_util is None or not getattr(tree_util, "is_tree_node", lambda _kind: True)(type(value)):
        return None
    pairs, structure = tree_util.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    if any(not path for path, _ in pairs):  # JAX treats `value` as a leaf: the path is empty
        return None
    return _of_node([path[0] for path, _ in pairs], [child for _, child in pairs], structure.unflatten, where)


def _of_node(entries: Iterable[object], children: Sequence[object], rebuild: Callable[[list[object]], object], where: str) -> Container:
    """A registered node: a list if its registry only numbers the children, otherwise a dict."""
    entries = list(entries)
    if children and all(entry is None or hasattr(entry, "idx") or type(entry).__name__ == "FlattenedIndexKey" for entry in entries):
        return Container("list", range(len(children)), children, rebuild)
    keys = [_plain_key(entry) for entry in entries]
    if len({(type(key), key) for key in keys}) != len(keys):
        raise LeafError(
            f"{shown(where)} is a pytree node whose registry gives two children the same key: {keys[:10]!r}; give them different keys."
        )
    return Container("dict", keys, children, rebuild)


def _plain_key(entry: object) -> PathKey:
    for attribute in ("key", "idx", "name"):
        key = getattr(entry, attribute, entry)
        if type(key) in _KEYS:
            return key  # type: ignore[return-value]
    return str(entry)


# --- states that collect themselves


class StateOwner(ABC):
    """The interface of an object that owns a complete state, such as `shardckpt.TrainState`, for saving and restoring."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state as plain containers, for saving."""

    @abstractmethod
    def arranged(self, tree: Node, wanted: Callable[[str], bool]) -> Node:
        """Convert a stored state to the form that `state_dict` returns.

        Args:
            tree: the stored state.
            wanted: whether a name is to be restored.
        """

    @abstractmethod
    def like(self, tree: Node, tensor: Callable[[str], Any], wanted: Callable[[str], bool], world: Callable[[], World]) -> dict[str, Any]:
        """The state to restore a stored one into, so that `load_state_dict` accepts the result.

        Args:
            tree: the result of `arranged`.
            tensor: returns the record of a stored tensor, by its name.
            wanted: whether a name is to be restored.
            world: returns this process's number and the number of processes; called if other processes saved.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that was restored into `like`."""


def plain_state(state: Any) -> Any:
    """The plain containers of a state: a `StateOwner` collects its own; any other state is returned unchanged."""
    return state.state_dict() if isinstance(state, StateOwner) else state
