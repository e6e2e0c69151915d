"""The state that results when leaves get other names.

1. The containers of the old state are the skeleton. Small leaves and empty containers that keep their names stay in it.
2. Every other leaf moves to the place of its new name. Containers that exist on the path keep their keys, with the types of these. If a
   new name and the old one end with the same components, the containers of these components move with the leaf, and keep their kind and
   keys. The rest of the path consists of dicts with text keys.
3. A container that lost all its contents is removed. A list that has lost an item is a dict from index to item, as in `state.select`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from shardckpt.errors import NamesMismatchError
from shardckpt.state.document import Branch, Custom, Small, Tensor, Tied, ends, parse
from shardckpt.state.names import component_names, shown
from shardckpt.state.unflatten import decode_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardckpt.state.document import Node, Tree
    from shardckpt.state.names import Form, PathKey

_ESCAPED = re.compile(r"~(?:([01e])|u([0-9a-f]{4}))")
_PLAIN = {"0": "~", "1": "/", "e": ""}

LeafPath = tuple[tuple[str, Branch], ...]
"""The components of a leaf's name, each with its container in the old state."""


def renamed_state(tree: Tree, tensors: Mapping[str, object], leaves: Mapping[str, str], origins: Mapping[str, str] | None = None) -> Any:
    """Plain containers that hold the given tensors and leaves.

    Args:
        tree: the old state.
        tensors: name in the new state → tensor leaf.
        leaves: name in the old state → new name, for the small leaves and empty containers to keep.
        origins: new name of a tensor → old name, if it has one.

    Raises:
        NamesMismatchError: another leaf has the place of a leaf, or a leaf has no name.
    """
    node = parse(tree)
    root = _skeleton(node, lambda name: leaves.get(name) == name) if isinstance(node, Branch) else _Container("dict")
    ends = {end.name: (end, path) for end, path in _ends(node, ())}
    for name, tensor in tensors.items():
        _, path = ends.get((origins or {}).get(name, ""), (None, ()))
        _put(root, name, tensor, path)
    for old, name in leaves.items():
        if name != old:
            end, path = ends[old]
            _put(root, name, _Container(end.form, stays=True) if isinstance(end, Branch) else _decode(end), path)
    return _plain(root)


def end_names(tree: Tree) -> list[str]:
    """The names of small leaves and empty containers."""
    return [end.name for end in ends(parse(tree)) if not isinstance(end, Tensor | Tied) and end.name]


def _ends(node: Node, path: LeafPath) -> Iterator[tuple[Node, LeafPath]]:
    """Leaves and empty containers, each with its path."""
    if not isinstance(node, Branch) or not node.children:
        yield node, path
        return
    for component, child in zip(component_names(node.keys), node.children, strict=True):
        yield from _ends(child, (*path, (component, node)))


@dataclass(slots=True)
class _Container:
    form: Form
    keys: dict[str, PathKey] = field(default_factory=dict)
    """Component of a name → key."""
    children: dict[str, object] = field(default_factory=dict)
    """Component of a name → container or leaf. A component without a child may still have a key."""
    stays: bool = False
    """Whether the container is kept if it is empty."""


def _skeleton(branch: Branch, is_kept: Callable[[str], bool]) -> _Container:
    """A container of the old state, without its tensors."""
    copy = _like(branch)
    copy.stays = not branch.children and is_kept(branch.name)
    for component, child in zip(copy.keys, branch.children, strict=True):
        if isinstance(child, Branch):
            copy.children[component] = _skeleton(child, is_kept)
        elif not isinstance(child, Tensor | Tied) and is_kept(child.name):
            copy.children[component] = _decode(child)
    return copy


def _decode(leaf: Node) -> object:
    assert isinstance(leaf, Small | Custom), "no other format has values of processes"
    return decode_leaf(leaf)


def _put(root: _Container, name: str, leaf: object, path: LeafPath) -> None:
    """Put a leaf at the place of its name, given its path in the old state."""
    components = name.split("/")
    if not all(components):
        raise NamesMismatchError(f"{shown(name)}: a name is made of keys joined by slashes, and no key may be empty; choose another name.")
    common = zip(reversed(components), reversed(path), strict=False)
    moved = [branch for _, (_, branch) in takewhile(lambda pair: pair[0] == pair[1][0], common)]
    """Containers that move with the leaf, the innermost first."""
    node = root
    for left, component in zip(range(len(components) - 2, -1, -1), components, strict=False):
        child = node.children.get(component)
        if child is None and component not in node.children:
            node.keys.setdefault(component, _key(component, node.form))
            child = node.children[component] = _like(moved[left]) if left < len(moved) else _Container("dict")
        if not isinstance(child, _Container):
            raise NamesMismatchError(
                f"{shown(name)} would be inside {shown(component)}, which is a value and not a container; rename one of them."
            )
        node = child
    last = components[-1]
    present = node.children.get(last)
    if last in node.children and not (isinstance(present, _Container) and _is_gone(present)):
        raise NamesMismatchError(f"{shown(name)}: the name is used already, by a value or a container; choose another name.")
    node.keys.setdefault(last, _key(last, node.form))
    node.children[last] = leaf


def _like(branch: Branch) -> _Container:
    """An empty container of the same kind and keys."""
    return _Container(branch.form, dict(zip(component_names(branch.keys), branch.keys, strict=True)))


def _key(component: str, form: Form) -> PathKey:
    """The key of a new component."""
    if form != "dict" and component.isdecimal() and str(int(component)) == component:
        return int(component)
    return _ESCAPED.sub(lambda found: _PLAIN[found[1]] if found[1] else chr(int(found[2], 16)), component)


def _is_gone(container: _Container) -> bool:
    return not container.stays and all(isinstance(child, _Container) and _is_gone(child) for child in container.children.values())


def _plain(container: _Container) -> Any:
    """The container as a plain Python container."""
    in_old_order = {name: container.children[name] for name in container.keys if name in container.children}
    left = {name: child for name, child in in_old_order.items() if not (isinstance(child, _Container) and _is_gone(child))}
    items = {container.keys[name]: _plain(child) if isinstance(child, _Container) else child for name, child in left.items()}
    if len(items) != len(left):
        raise NamesMismatchError(f"two of the new names {', '.join(map(shown, list(left)[:5]))} … become the same key; rename one of them.")
    if container.form != "dict" and items.keys() == set(range(len(container.keys))):
        in_order = [items[index] for index in range(len(items))]
        return tuple(in_order) if container.form == "tuple" else in_order
    return items
