"""Selecting names by patterns, and the tree document of the selected part of a state.

In that document, names that are not selected are left out, and so are containers without any
selected leaf. All other names stay the same. A list or tuple that has lost an item becomes a dict
from index to item, as in `unflatten`. If the stored name of a tied tensor is left out, the first
selected of its names becomes the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.state.document import Branch, Node, Tensor, Tied, ends, leaves_of, parse, write
from shardckpt.state.glob import compile_glob, is_glob
from shardckpt.state.names import child_name, component_names, shown
from shardckpt.text import Message, few, named, shorten

if TYPE_CHECKING:
    from shardckpt.state.document import Tree
    from shardckpt.state.leaves import JSON
    from shardckpt.state.names import PathKey

Only = str | Sequence[str] | Callable[[str], bool]
"""A selection of names: a pattern, several patterns, or a function."""


def matches(pattern: Only, name: str) -> bool:
    """Whether `pattern` selects `name`.

    In a pattern `*` stands for any characters within one component and `**` for any characters at
    all; a component that is just `**` stands for any number of components, including none. `?` is
    one character within a component and `[ab]`, `[!ab]` are sets of characters. A sequence of
    patterns selects the names that any of them selects. A match takes at most (length of the
    pattern x length of the name) steps.

    >>> matches("model/layers.*.weight", "model/layers.0.weight"), matches("model/*", "model/a/b")
    (True, False)
    >>> matches("**/exp_avg", "exp_avg"), matches(["a", "model/**"], "model/a/b")
    (True, True)

    Raises:
        OptionError: `pattern` is neither text, a sequence of texts nor a function.
    """
    return selector(pattern)(name)


def selector(only: Only | None, option: str = "only") -> Callable[[str], bool]:
    """A function that returns whether `only` selects a name; None selects all names.

    `option`: the name of the option that gives it, for the message.

    Raises:
        OptionError: `only` is neither text, a sequence of texts nor a function.
    """
    if only is None:
        return lambda _name: True
    if callable(only):
        return only
    patterns = [only] if isinstance(only, str) else only
    if not isinstance(patterns, Sequence) or not all(
        isinstance(pattern, str) for pattern in patterns
    ):
        raise OptionError(
            f"{option}={shorten(only)}: give a pattern, a list of patterns, or a function of a "
            "name."
        )
    exact = frozenset(pattern for pattern in patterns if not is_glob(pattern))
    globs = [compile_glob(pattern) for pattern in patterns if pattern not in exact]
    return lambda name: name in exact or any(glob.fullmatch(name) for glob in globs)


def may_select_below(pattern: str, place: str) -> bool:
    """Whether `pattern` can select a name below the container `place`.

    >>> pairs = ("a/*/c", "a/b"), ("a/**", "a"), ("**/c", "a/b"), ("a/b", "a/b")
    >>> tuple(may_select_below(pattern, place) for pattern, place in pairs)
    (True, True, True, False)
    """
    components, places = pattern.split("/"), place.split("/")
    for component, name in zip(components, places, strict=False):
        if "**" in component:
            return True
        if not matches(component, name):
            return False
    return len(components) > len(places)


def unused_patterns(
    only: Only | None, names: Sequence[str], empty: Sequence[str] = ()
) -> Only | None:
    """The patterns of `only` that select none of the names.

    The result is `only` itself if it selects none at all, and None if each pattern selects some.

    >>> unused_patterns(["a/**", "b"], ["a/x", "c"]), unused_patterns("b", ["a/x"])
    (['b'], 'b')
    >>> unused_patterns(["a", "s/**"], ["a", "s"], ["s"])

    Args:
        only: the patterns.
        names: names of leaves and empty containers.
        empty: the empty containers among them; a pattern of several may also select what is below
            these.
    """
    if only is None or not any(map(selector(only), names)):
        return only
    if isinstance(only, str) or callable(only):
        return None
    places = [*names, *(f"{name}/" for name in empty)]
    known = set(places)
    return [
        one
        for one in only
        if not (any(map(selector(one), places)) if is_glob(one) else one in known)
    ] or None


def check_selection(
    only: Only | None,
    tree: Tree,
    where: str,
    *,
    option: str = "only",
    each: bool = True,
    title: Callable[[str], str] = str,
) -> None:
    """Refuse patterns that select nothing of a state: they are probably misspelt.

    Args:
        only: the patterns.
        tree: the document of the state.
        where: its place, for the message.
        option: the name of the option, for the message.
        each: whether every pattern must select a leaf or an empty container, or only one of them.
        title: the name to select a leaf by.

    Raises:
        NamesMismatchError: patterns select nothing.
    """
    nodes = list(ends(parse(tree)))
    names = [title(end.name) for end in nodes]
    wrong = unused_patterns(only, names, [end.name for end in nodes if isinstance(end, Branch)])
    if wrong is not None and (each or wrong is only):
        raise NamesMismatchError(
            Message(
                f"{where}: ",
                named(option, wrong),
                f" selects none of its names, which are {few(names, 3)}.",
            )
        )


def select(tree: Tree, only: Callable[[str], bool]) -> tuple[JSON, dict[str, str]]:
    """Select a part of a state.

    Args:
        tree: the document of the complete state.
        only: whether a name is selected.

    Returns:
        The document of the selected part, and for each of its tensors the name under which it is
        stored in the complete state; both are empty if nothing is selected.

    Raises:
        NamesMismatchError: a name of the part would change without a name that is left out.
    """
    root = parse(tree)
    meaning = {leaf.name: leaf.meaning for leaf in leaves_of(root) if isinstance(leaf, Tensor)}
    selection = [
        leaf for leaf in leaves_of(root) if isinstance(leaf, Tensor | Tied) and only(leaf.name)
    ]
    first: dict[str, str] = {
        leaf.stored: leaf.name for leaf in selection if isinstance(leaf, Tensor)
    }
    for leaf in selection:
        first.setdefault(leaf.stored, leaf.name)

    def selected(node: Node) -> Node | None:
        if isinstance(node, Branch) and node.children:
            kept = [
                (key, child)
                for key, old in zip(node.keys, node.children, strict=True)
                if (child := selected(old)) is not None
            ]
            if not kept:
                return None
            complete = len(kept) == len(node.keys)
            _check_names(node.name, kept)
            form, composite = (node.form, node.composite) if complete else ("dict", None)
            return replace(
                node,
                form=form,
                composite=composite,
                keys=[key for key, _ in kept],
                children=[child for _, child in kept],
            )
        if not only(node.name):
            return None
        if isinstance(node, Tied):
            new = first[node.stored]
            return (
                Tensor(node.name, meaning[node.stored])
                if new == node.name
                else Tied(node.name, new)
            )
        return node

    left = selected(root)
    if left is None:
        return {}, {}
    stored = {name: whole for whole, name in first.items()}
    return write(left), {
        leaf.name: stored[leaf.name] for leaf in leaves_of(left) if isinstance(leaf, Tensor)
    }


def _check_names(place: str, kept: Sequence[tuple[PathKey, Node]]) -> None:
    """Refuse a container in which the names of the kept items depend on items that are left out.

    A document has no names: they follow from its keys.
    """
    for component, (_, child) in zip(component_names([key for key, _ in kept]), kept, strict=True):
        if child.name != child_name(place, component):
            raise NamesMismatchError(
                f"{shown(child.name)} would be called {shown(child_name(place, component))} "
                "without the key beside it that has the same text; select both or neither."
            )
