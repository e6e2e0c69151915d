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
from shardckpt.state.document import Branch, Custom, Small, Tensor, Tied, parse
from shardckpt.state.names import component_names, shown
from shardckpt.state.unflatten import decode_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardckpt.state.document import Node, Tree
    from shardckpt.state.names import Form, PathKey

_ESCAPED = re.compile(r"~(?:([01e])|u([0-9a-f]{4}))")
_PLAIN = {"0": "~", "1": "/", "e": ""}


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
    ways = {end.name: (end, way) for end, way in _ends(node, ())}
    for name, tensor in tensors.items():
        _put(root, name, tensor, ways.get((origins or {}).get(name, ""), (None, ()))[1])
    for old, name in leaves.items():
        if name != old:
            end, way = ways[old]
            _put(root, name, _Container(end.form, stays=True) if isinstance(end, Branch) else _small(end), way)
    return _state(root)


def end_names(tree: Tree) -> list[str]:
    """The names of small leaves and empty containers."""
    return [end.name for end, _ in _ends(parse(tree), ()) if not isinstance(end, Tensor | Tied) and end.name]


def _ends(node: Node, way: tuple[tuple[str, Branch], ...]) -> Iterator[tuple[Node, tuple[tuple[str, Branch], ...]]]:
    """Leaves and empty containers, each with the components of its name and the container of each component."""
    if not isinstance(node, Branch) or not node.children:
        yield node, way
        return
    for component, child in zip(component_names(node.keys), node.children, strict=True):
        yield from _ends(child, (*way, (component, node)))


@dataclass(slots=True)
class _Container:
    form: Form
    keys: dict[str, PathKey] = field(default_factory=dict)
    """Component of a name → key."""
    children: dict[str, object] = field(default_factory=dict)
    """Component of a name → container or leaf. A component without a child may still have a key."""
    stays: bool = False
    """Whether the container is kept if it is empty."""


def _skeleton(branch: Branch, wanted: Callable[[str], bool]) -> _Container:
    """A container of the old state, without its tensors."""
    components = component_names(branch.keys)
    made = _Container(branch.form, dict(zip(components, branch.keys, strict=True)), stays=not branch.children and wanted(branch.name))
    for component, child in zip(components, branch.children, strict=True):
        if isinstance(child, Branch):
            made.children[component] = _skeleton(child, wanted)
        elif not isinstance(child, Tensor | Tied) and wanted(child.name):
            made.children[component] = _small(child)
    return made


def _small(leaf: Node) -> object:
    assert isinstance(leaf, Small | Custom), "no other format has values of processes"
    return decode_leaf(leaf)


def _put(root: _Container, name: str, tensor: object, way: Sequence[tuple[str, Branch]]) -> None:
    """Put a leaf at the place of its name, given its path in the old state."""
    components = name.split("/")
    if not all(components):
        raise NamesMismatchError(f"{shown(name)}: slashes are between keys; none may be empty. Rename it otherwise.")
    common = zip(reversed(components), reversed(way), strict=False)
    moved = [branch for _, (_, branch) in takewhile(lambda pair: pair[0] == pair[1][0], common)]
    """Containers that move with the leaf, the innermost first."""
    node = root
    for left, component in zip(range(len(components) - 2, -1, -1), components, strict=False):
        child = node.children.get(component)
        if child is None and component not in node.children:
            node.keys.setdefault(component, _key(component, node.form))
            child = node.children[component] = _like(moved[left]) if left < len(moved) else _Container("dict")
        if not isinstance(child, _Container):
            raise NamesMismatchError(f"{shown(name)} would lie in {shown(component)}, which is a leaf itself; rename one of them.")
        node = child
    last = components[-1]
    there = node.children.get(last)
    if last in node.children and not (isinstance(there, _Container) and _is_gone(there)):
        raise NamesMismatchError(f"{shown(name)}: something else lies there that is no tensor, or contains some; rename it otherwise.")
    node.keys.setdefault(last, _key(last, node.form))
    node.children[last] = tensor


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


def _state(container: _Container) -> Any:
    """The container as a plain Python container."""
    there = {name: container.children[name] for name in container.keys if name in container.children}  # in the old order
    left = {name: child for name, child in there.items() if not (isinstance(child, _Container) and _is_gone(child))}
    found = {container.keys[name]: _state(child) if isinstance(child, _Container) else child for name, child in left.items()}
    if len(found) != len(left):
        raise NamesMismatchError(f"two of the new names {', '.join(map(shown, list(left)[:5]))} … are one key; rename one of them.")
    if container.form != "dict" and found.keys() == set(range(len(container.keys))):
        items = [found[index] for index in range(len(found))]
        return tuple(items) if container.form == "tuple" else items
    return found
