"""What is a container, which keys and children does it have, and how is one like it made of other children?

In this order:

1. dict, OrderedDict, defaultdict, Counter, and list, tuple, deque: themselves. Subclasses of these are none, unless
   one of the following applies: rebuilding them as the base class would lose what makes them different.
2. named tuples: by field.
3. whatever torch's or JAX's pytree registry knows: by the keys that it gives. The registries are looked up, never
   imported: nobody can hold an object of a registered class without its framework.
4. dataclasses: by field. After the registries, because a registered dataclass (a flax TrainState, say) keeps
   functions and other constants out of the tree.

A container of any class is stored in one of three plain forms: dict, list or tuple.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import LeafError
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardckpt.state.names import PathKey

__all__ = ["MAX_DEPTH", "Container", "Form", "container_of"]

MAX_DEPTH = 200
"""Containers around a leaf, at most: more is a mistake, or an attack on the stack of whoever reads it."""

Form = Literal["dict", "list", "tuple"]
"""How a container is stored."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container taken apart, one level deep."""

    form: Form
    """How it is stored."""
    keys: Sequence[PathKey]
    """The children's keys; 0, 1, … where the form is not dict."""
    children: Sequence[object]
    """As many as keys."""
    rebuild: Callable[[list[object]], object]
    """Makes a container of the same class, with everything else alike, of as many other children."""


def container_of(value: object, where: str) -> Container | None:
    """Take a container apart, or return None where `value` is none.

    Args:
        value: anything.
        where: its name, for messages.

    Raises:
        LeafError: a key that is neither str, int, bool nor None, or that occurs twice.
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


# --- Python's own ---------------------------------------------------------------------------------------------------

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
        # What was set on it as attributes stays: torch's Module.load_state_dict looks for `_metadata`.
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
        # Neither __init__ nor __post_init__: the stored values are the fields, and need no second treatment.
        new = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(new, name, child)  # a frozen one as well
        return new

    return Container("dict", names, [getattr(value, name) for name in names], rebuild)


def _key_text(key: object) -> str:
    # Only for these is repr() known to be short and harmless.
    return repr(key) if isinstance(key, int | float | str) else f"in {type(key).__module__}"


# --- registered pytree nodes ----------------------------------------------------------------------------------------


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
    # JAX that has no `is_tree_node` yet does not mind what it is asked to flatten; younger ones warn about iterators.
    if tree_util is None or not getattr(tree_util, "is_tree_node", lambda _kind: True)(type(value)):
        return None
    pairs, structure = tree_util.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    if any(not path for path, _ in pairs):  # a leaf of JAX's: its path is empty
        return None
    return _of_node([path[0] for path, _ in pairs], [child for _, child in pairs], structure.unflatten, where)


def _of_node(entries: Iterable[object], children: Sequence[object], rebuild: Callable[[list[object]], object], where: str) -> Container:
    """A registered node as a list where its registry only counts its children, otherwise as a dict."""
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
