"""The tree that results when leaves move to other places.

Leaves keep the names that they are stored under.

The *place* of a node is its keys joined with slashes; in a stored tree it is its name.

1. The containers of the old tree are the skeleton. Every leaf and every empty container is put at
   its new place.
2. Containers that exist on the way to a place keep their keys, with the types of these. If the new
   place and the old one end with the same components, the containers of these components move with
   the leaf, and keep their kind and keys. The rest of the way consists of dicts with text keys.
3. A container that lost all its contents is removed. A list that has lost an item is a dict from
   index to item, as in `select`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import NamesMismatchError
from shardckpt.state.document import Branch
from shardckpt.state.names import child_name, component_names, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardckpt.state.document import Node
    from shardckpt.state.names import Form, PathKey

_ESCAPED = re.compile(r"~(?:([01e])|u([0-9a-f]{4}))")
_INDEX = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_PLAIN = {"0": "~", "1": "/", "e": ""}


class End(NamedTuple):
    """A leaf, an empty container or a composite tensor of a tree."""

    node: Node
    path: tuple[tuple[str, Branch], ...] = ()
    """The components of its place, each with its container."""


def ends_by_place(root: Node) -> dict[str, End]:
    """The leaves, empty containers and composite tensors of a tree by their places, in order.

    The root itself is not among them.
    """
    return {
        "/".join(component for component, _ in end.path): end for end in _ends(root, ()) if end.path
    }


def _ends(node: Node, path: tuple[tuple[str, Branch], ...]) -> Iterator[End]:
    if not isinstance(node, Branch) or not node.children or node.composite is not None:
        yield End(node, path)
        return
    for component, child in zip(component_names(node.keys), node.children, strict=True):
        yield from _ends(child, (*path, (component, node)))


def moved_tree(root: Node, ends: Iterable[tuple[str, End]]) -> Branch:
    """A tree with the containers of another one, and other contents.

    Args:
        root: the other tree.
        ends: the contents, each with its place. Those of the other tree have the paths that they
            had there.

    Raises:
        NamesMismatchError: another end has the place of an end, or one has no place.
    """
    tree = _skeleton(root) if isinstance(root, Branch) else _Container("dict")
    for place, end in ends:
        _put(tree, place, end)
    return _branch(tree, root.name)


@dataclass(slots=True)
class _Container:
    form: Form
    keys: dict[str, PathKey] = field(default_factory=dict)
    """Component of a name → key."""
    children: dict[str, _Container | Node] = field(default_factory=dict)
    """Component of a name → container or leaf. A component without a child may still have a key."""
    stays: bool = False
    """Whether the container is kept if it is empty."""


def _skeleton(branch: Branch) -> _Container:
    copy = _like(branch)
    for component, child in zip(copy.keys, branch.children, strict=True):
        if isinstance(child, Branch) and child.composite is None:
            copy.children[component] = _skeleton(child)
    return copy


def _put(root: _Container, place: str, end: End) -> None:
    components = place.split("/")
    if not all(components):
        raise NamesMismatchError(
            f"{shown(place)}: a name is made of keys joined by slashes, and no key may be empty; "
            "choose another name."
        )
    common = zip(reversed(components), reversed(end.path), strict=False)
    moved = [branch for _, (_, branch) in takewhile(lambda pair: pair[0] == pair[1][0], common)]
    """Containers that move with the leaf, the innermost first."""
    container = root
    for left, component in zip(range(len(components) - 2, -1, -1), components, strict=False):
        child = container.children.get(component)
        if child is None:
            container.keys.setdefault(component, _key(component, container.form))
            child = container.children[component] = (
                _like(moved[left]) if left < len(moved) else _Container("dict")
            )
        if not isinstance(child, _Container):
            raise NamesMismatchError(
                f"{shown(place)} would be inside {shown(component)}, which is a value and not a "
                "container; rename one of them."
            )
        container = child
    last = components[-1]
    present = container.children.get(last)
    empty = isinstance(end.node, Branch) and not end.node.children
    if present is not None and not (
        isinstance(present, _Container) and (_is_gone(present) or empty)
    ):
        raise NamesMismatchError(
            f"{shown(place)}: the name is used already, by a value or a container; choose another "
            "name."
        )
    container.keys.setdefault(last, _key(last, container.form))
    if not empty:
        container.children[last] = end.node
    elif isinstance(present, _Container):
        present.stays = True
    else:
        container.children[last] = _Container(end.node.form, stays=True)  # type: ignore[union-attr]


def _like(branch: Branch) -> _Container:
    """An empty container of the same kind and keys."""
    return _Container(
        branch.form, dict(zip(component_names(branch.keys), branch.keys, strict=True))
    )


def _key(component: str, form: Form) -> PathKey:
    """The key of a new component."""
    if form != "dict" and _INDEX.fullmatch(component):
        return int(component)
    return _ESCAPED.sub(
        lambda match: _PLAIN[match[1]] if match[1] else chr(int(match[2], 16)), component
    )


def _is_gone(container: _Container) -> bool:
    return not container.stays and all(
        isinstance(child, _Container) and _is_gone(child) for child in container.children.values()
    )


def _branch(container: _Container, name: str) -> Branch:
    in_old_order = {
        component: container.children[component]
        for component in container.keys
        if component in container.children
    }
    left = {
        component: child
        for component, child in in_old_order.items()
        if not (isinstance(child, _Container) and _is_gone(child))
    }
    items = {
        container.keys[component]: _branch(child, child_name(name, component))
        if isinstance(child, _Container)
        else child
        for component, child in left.items()
    }
    if len(items) != len(left):
        raise NamesMismatchError(
            f"two of the new names {', '.join(map(shown, list(left)[:5]))} … become the same key; "
            "rename one of them."
        )
    if container.form != "dict" and items.keys() == set(range(len(container.keys))):
        return Branch(
            name, container.form, range(len(items)), [items[index] for index in range(len(items))]
        )
    return Branch(name, "dict", list(items), list(items.values()))
