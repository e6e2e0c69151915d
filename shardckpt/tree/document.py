"""What does a tree document say? Reading it, believing nothing.

`parse` checks the whole document and turns it into nodes, with names; everything else walks the nodes. It bounds
depth, knows the type of every part, refuses two equal keys in a dict and a tied tensor whose first name is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt import leaves, names
from shardckpt.errors import FormatError, ShardckptError
from shardckpt.names import shown
from shardckpt.tree.containers import MAX_DEPTH, Form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardckpt.leaves import JSON
    from shardckpt.names import PathKey

__all__ = [
    "Branch",
    "Custom",
    "Node",
    "Small",
    "Tensor",
    "Tied",
    "alias_map",
    "decode_leaf",
    "iter_leaves",
    "leaf_names",
    "leaves_of",
    "parse",
    "stored_names",
    "tensor_names",
    "unflatten",
]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor."""

    name: str
    """Its name."""

    @property
    def stored(self) -> str:
        """The name that the tensor is stored under: this one."""
        return self.name


@dataclass(frozen=True, slots=True)
class Tied:
    """Another name of a tensor."""

    name: str
    """The other name."""
    stored: str
    """The name that the tensor is stored under."""


@dataclass(frozen=True, slots=True)
class Small:
    """A small leaf, not decoded yet."""

    name: str
    """Its name."""
    content: JSON
    """What `leaves.encode` wrote."""


@dataclass(frozen=True, slots=True)
class Custom:
    """A leaf of a registered type, not decoded yet."""

    name: str
    """Its name."""
    type_name: str
    """What its type is registered as."""
    content: Node
    """Its encoded form; every node in it has the leaf's own name."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A container."""

    name: str
    """Its name; "" for the state itself."""
    form: Form
    """What it was stored as."""
    keys: Sequence[PathKey]
    """One per child; 0, 1, … unless the form is dict."""
    children: Sequence[Node]
    """In order."""


Node = Tensor | Tied | Small | Custom | Branch


# --- parsing --------------------------------------------------------------------------------------------------------


def parse(tree: JSON) -> Node:
    """Read a tree document.

    Small leaves are recognised and not decoded yet: `decode_leaf` may still refuse one.

    Raises:
        FormatError: no tree document is written so.
    """
    return _Parser().parse(tree, "", 0)


class _Parser:
    """What parsing one document has seen so far."""

    def __init__(self) -> None:
        self.tensors: set[str] = set()
        self.in_leaf = False

    def parse(self, node: JSON, name: str, depth: int) -> Node:
        if isinstance(node, list):
            return self.branch("list", range(len(node)), node, name, depth)
        if isinstance(node, dict):
            tag = next(iter(node), None) if len(node) == 1 else None
            if isinstance(tag, str) and tag.startswith("$") and not tag.startswith("$$"):
                return self.tagged(tag, node[tag], node, name, depth)
            return self.branch("dict", [leaves.decode_text(key, name) for key in node], list(node.values()), name, depth)
        if node == "$tensor":
            if self.in_leaf:
                raise _refused(node, name)
            self.tensors.add(name)
            return Tensor(name)
        if isinstance(node, str):
            leaves.decode_text(node, name)  # refuses what another "$" word may mean in a format to come
            return Small(name, node)
        if node is None or isinstance(node, bool | int | float):
            return Small(name, node)
        raise _refused(node, name)

    def tagged(self, tag: str, content: JSON, node: JSON, name: str, depth: int) -> Node:
        if tag in leaves.TAGS:
            return Small(name, node)
        if tag == "$tied" and isinstance(content, str) and not self.in_leaf:
            if content not in self.tensors:
                raise FormatError(
                    f"{shown(name)} is tied to {content[:200]!r}, which is no tensor before it; the checkpoint's record is damaged."
                )
            return Tied(name, content)
        if isinstance(content, list):
            if tag == "$tuple":
                return self.branch("tuple", range(len(content)), content, name, depth)
            if tag == "$dict" and all(isinstance(pair, list) and len(pair) == 2 for pair in content):
                keys = [_key(pair[0], name) for pair in content]  # type: ignore[index]
                return self.branch("dict", keys, [pair[1] for pair in content], name, depth)  # type: ignore[index]
            if tag == "$leaf" and len(content) == 2 and isinstance(content[0], str):
                return self.custom(content[0], content[1], name, depth)
        raise _refused(node, name)

    def branch(self, form: Form, keys: Sequence[PathKey], nodes: Sequence[JSON], name: str, depth: int) -> Branch:
        if depth >= MAX_DEPTH:
            raise FormatError(f"{shown(name)} lies in more than {MAX_DEPTH} containers; the checkpoint's record is damaged or not ours.")
        # As Python's dicts see it, where True is 1.
        if len(set(keys)) != len(keys):
            raise FormatError(f"{shown(name)} is a dict with the same key twice; the checkpoint's record is damaged or not ours.")
        children: list[Node] = []
        for component, node in zip(names.component_names(keys), nodes, strict=True):
            children.append(self.parse(node, name if self.in_leaf else names.child_name(name, component), depth + 1))
        return Branch(name, form, keys, children)

    def custom(self, type_name: str, content: JSON, name: str, depth: int) -> Custom:
        if depth >= MAX_DEPTH:
            raise _refused(content, name)
        outer, self.in_leaf = self.in_leaf, True
        parsed = self.parse(content, name, depth + 1)
        self.in_leaf = outer
        return Custom(name, type_name, parsed)


def _key(node: JSON, name: str) -> PathKey:
    if node is None or isinstance(node, bool | int | str) or (isinstance(node, dict) and set(node) in ({"$int"}, {"$str"})):
        key = leaves.decode(node, name)
        assert key is None or isinstance(key, str | int)
        return key
    raise _refused(node, name)


def _refused(node: JSON, name: str) -> FormatError:
    what = next(iter(node), "{}") if isinstance(node, dict) else type(node).__name__
    return FormatError(
        f"{shown(name)}: a node {str(what)[:60]!r} is not part of the tree's grammar here; the checkpoint's record is damaged or not ours."
    )


# --- walking --------------------------------------------------------------------------------------------------------


def leaves_of(node: Node) -> Iterator[Tensor | Tied | Small | Custom]:
    """All leaves at and below a node, in order."""
    stack = [node]
    while stack:
        top = stack.pop()
        if isinstance(top, Branch):
            stack.extend(reversed(top.children))
        else:
            yield top


def tensor_names(tree: JSON) -> list[str]:
    """The names of the stored tensors, in order; the further names of tied ones are in `alias_map`.

    Raises:
        FormatError: no tree document is written so. (So all functions here.)
    """
    return [leaf.name for leaf in leaves_of(parse(tree)) if isinstance(leaf, Tensor)]


def leaf_names(tree: JSON) -> list[str]:
    """The names of the leaves that are no tensors, in order."""
    return [leaf.name for leaf in leaves_of(parse(tree)) if isinstance(leaf, Small | Custom)]


def alias_map(tree: JSON) -> dict[str, str]:
    """The further names of tied tensors, in order, and for each the name that the tensor is stored under."""
    return {leaf.name: leaf.stored for leaf in leaves_of(parse(tree)) if isinstance(leaf, Tied)}


def stored_names(tree: JSON, only: Callable[[str], bool] | None = None) -> list[str]:
    """The names of the stored tensors that `unflatten` needs with the same `only`, each once."""
    found = leaves_of(parse(tree))
    return list(dict.fromkeys(leaf.stored for leaf in found if isinstance(leaf, Tensor | Tied) and (only is None or only(leaf.name))))


def iter_leaves(tree: JSON) -> Iterator[tuple[str, str, str]]:
    """Every leaf as (name, kind, value on a few characters), for people.

    The kind is `tensor`, `tied`, the leaf's type, or what its type is registered as; nothing needs to be registered
    or installed for that.
    """
    for leaf in leaves_of(parse(tree)):
        if isinstance(leaf, Tensor):
            yield leaf.name, "tensor", ""
        elif isinstance(leaf, Tied):
            yield leaf.name, "tied", leaf.stored
        elif isinstance(leaf, Custom):
            yield leaf.name, leaf.type_name, ""
        else:
            yield leaf.name, *leaves.describe(leaf.content, leaf.name)


# --- building -------------------------------------------------------------------------------------------------------


def decode_leaf(leaf: Small | Custom) -> object:
    """The value of a leaf that is no tensor.

    Raises:
        FormatError: it is not written as leaves are, its type is not registered, or its registered decode function
            does not take what is stored.
        MissingExtraError: the leaf is torch's, and torch is not installed.
    """
    if isinstance(leaf, Small):
        return leaves.decode(leaf.content, leaf.name)
    registered = leaves.leaf_type_named(leaf.type_name, leaf.name)
    content = _Builder({}, None).build(leaf.content)
    try:
        return registered.decode(content)
    except ShardckptError:
        raise
    except Exception as error:
        raise FormatError(
            f"{shown(leaf.name)}: the decode function registered as {leaf.type_name!r} failed on what is stored "
            f"({type(error).__name__}: {error}); register the one that belongs to the encode function it was saved with."
        ) from error


def unflatten(tree: JSON, tensors: Mapping[str, Any], only: Callable[[str], bool] | None = None) -> Any:
    """Put a state together again, of plain dicts, lists and tuples.

    With `only`, what it does not ask for is left out, and so are containers with nothing left in them. A list or
    tuple from which an item is missing comes back as a dict from index to item, so that every item keeps its key. A
    container that was stored empty is there if `only` asks for its own name.

    Args:
        tree: the document.
        tensors: values by stored name, at least those of `stored_names(tree, only)`. Tied names share one value.
        only: which names are wanted; None for all.

    Returns:
        The state; an empty dict where `only` asks for nothing in it.

    Raises:
        FormatError: the document is none, or names a tensor that `tensors` lacks.
        MissingExtraError: a leaf is torch's, and torch is not installed.
    """
    state = _Builder(tensors, only).build(parse(tree))
    return {} if state is _LEFT_OUT else state


_LEFT_OUT = object()


class _Builder:
    """Puts plain containers together from nodes."""

    def __init__(self, tensors: Mapping[str, Any], only: Callable[[str], bool] | None) -> None:
        self.tensors = tensors
        self.only = only

    def build(self, node: Node) -> object:
        if isinstance(node, Branch) and node.children:
            return self.container(node)
        if self.only is not None and not self.only(node.name):
            return _LEFT_OUT
        if isinstance(node, Tensor | Tied):
            if node.stored not in self.tensors:
                raise FormatError(f"The tree names a tensor {node.stored!r} that the checkpoint does not have; its record is damaged.")
            return self.tensors[node.stored]
        if isinstance(node, Branch):
            return {"dict": dict, "list": list, "tuple": tuple}[node.form]()
        return decode_leaf(node)

    def container(self, node: Branch) -> object:
        items: dict[PathKey, object] = {}
        for key, child in zip(node.keys, node.children, strict=True):
            item = self.build(child)
            if item is not _LEFT_OUT:
                items[key] = item
        if not items:
            return _LEFT_OUT
        if node.form == "dict" or len(items) < len(node.keys):
            return items
        return tuple(items.values()) if node.form == "tuple" else list(items.values())
