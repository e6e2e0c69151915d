"""Match a stored tree with `like`: the stored tensor for each leaf, and the resulting state.

Both trees are walked side by side, paired by typed key (0 and "0" are two keys) and in sequences by
index, before anything is read. Some formats write every key as text, so a stored text that is not a
key of `like` matches the key of another type that has this text (`names.match_keys`).

1. A tensor in `like` receives the stored tensor at its place, under whatever name that is stored.
2. A small leaf in `like` is replaced by the stored one, of any type. Numbers, numpy scalars and
   tensors without dimensions match each other: a counter may begin as a number and go on as an
   array. The result has `like`'s form.
3. A `PerProcess` in `like` receives the value that one process stored at its place; the caller
   chooses the process.
4. A composite tensor in `like` matches a stored one of the same class, shape and context, part by
   part.
5. A container matches any stored one that is keyed the same way: dicts, dataclasses and named
   tuples by key, lists and tuples by index. The result has `like`'s class. An empty container
   matches any empty one and None, because neither holds anything, and formats keep no classes.
6. Anything else at one place is a structure mismatch, and so are tensors whose elements mean
   different things. A leaf or empty container that only one side has is a missing or unexpected
   name.

The walk produces a tree of steps, and `Matched.build` runs it with the values that were read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from shardckpt.errors import LeafError
from shardckpt.state import leaves, names
from shardckpt.state.composites import first_difference, same_document
from shardckpt.state.document import (
    MAX_DEPTH,
    Branch,
    Custom,
    Node,
    Owned,
    Small,
    Tensor,
    Tied,
    ends,
    leaves_of,
    parse,
    write,
)
from shardckpt.state.flatten import NEVER_LEAVES, unsupported
from shardckpt.state.mismatches import (
    WRAP,
    description,
    meaning_mismatch,
    names_mismatch,
    parts_text,
    skipped_names,
    structure_mismatch,
)
from shardckpt.state.names import Container, container_of, shown
from shardckpt.state.numbers import in_form_of, is_number
from shardckpt.state.per_process import PerProcess
from shardckpt.state.unflatten import decode_leaf

if TYPE_CHECKING:
    from shardckpt.state.composites import CompositeTensor
    from shardckpt.state.document import Meaning, Tree

_Step = Callable[[Mapping[str, object]], object]
"""Builds one place of the new state from the values by name."""

Agree = Callable[[list[str], list[str]], list[str]]
"""Agrees with other processes on the names that none of them takes: from all stored names and those
that this process does not take."""
Strict = bool | Literal["like"] | Agree
"""The treatment of names that only one side has; see `match`."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The match of a `like` with a tree document."""

    tensors: dict[str, list[tuple[str, Any]]]
    """Stored tensor that is needed → the names in `like` that receive it, with their leaves; in
    tree order of `like`."""
    missing: list[str] = field(default_factory=list)
    """Names in `like` that are not stored and keep `like`'s values; empty unless `strict` is
    False."""
    unexpected: list[str] = field(default_factory=list)
    """Stored names without a place in `like`; empty unless `strict` is False."""
    per_process: dict[str, PerProcess] = field(default_factory=dict)
    """The `PerProcess` leaves of `like` that need a value, by name, in tree order of `like`."""
    numbers: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    """Stored tensor → the names in `like` that have a number there, with these; the tensor must
    have no dimensions."""
    filled: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Names in `like` of tensors without dimensions for which a number is stored, with both."""
    _step: _Step = field(kw_only=True, repr=False)

    def build(self, values: Mapping[str, object]) -> Any:
        """Build a new state of `like`'s own containers around stored values; `like` is not changed.

        Args:
            values: for every name of `like` in `tensors`, `numbers` and `filled`, what goes there;
                for every name in `per_process`, the value, which comes back in a `PerProcess` like
                the one in `like`.
        """
        return self._step(values)

    def skipped(self) -> str:
        """A text about the names that `strict=False` skipped."""
        return skipped_names(self.missing, self.unexpected)


def match(
    like: object,
    tree: Tree,
    is_tensor: Callable[[object], bool],
    *,
    only: Callable[[str], bool] | None = None,
    strict: Strict = True,
    meaning: Meaning | None = None,
    composite: Callable[[object, str], CompositeTensor | None] | None = None,
) -> Matched:
    """Match `like` with a tree document, and check that they fit.

    Args:
        like: a state whose tensor leaves say where tensors go.
        tree: the document.
        is_tensor: whether a value is a tensor leaf, or another object that a tensor can go into.
            Called first.
        only: selects the names to restore. At any other name, `like`'s value stays and the stored
            one is ignored.
        strict: True: names that only one side has are an error. "like": so are names that only
            `like` has. A function: it is called once, and names that only the checkpoint has are an
            error if it returns them. False: `like`'s value stays, or the stored one is ignored; it
            is an error if no name is on both.
        meaning: returns the meaning of the elements of a tensor leaf of `like` to its framework;
            None: do not compare meanings.
        composite: returns the parts of a value, by its name, if it is a composite tensor. Called
            before `is_tensor`.

    Raises:
        NamesMismatchError: names are missing from the checkpoint, or have no place in `like`.
        StructureMismatchError: a tensor, a small leaf, a PerProcess or a container stands opposite
            another of these kinds, or tensors have different meanings.
        LeafError: `like` has a value that no state can have.
        FormatError: the document is invalid.
        MissingExtraError: a leaf is torch's, and torch is not installed.
    """
    root = parse(tree)
    walk = _Walk(root, is_tensor, only or (lambda _name: True), meaning, composite)
    step = walk.visit(like, root, 0)
    if callable(strict):
        walk.unexpected = strict([end.name for end in ends(root)], walk.unexpected)
    elif strict == "like":
        walk.unexpected = []
    if strict and (walk.missing or walk.unexpected):
        like_alone = (
            "" if walk.missing else ' or strict="like" if `like` is to be a part of the checkpoint,'
        )
        raise names_mismatch(
            walk.missing,
            walk.unexpected,
            f"Change `like`, map names with rename=, choose names with only=,{like_alone} or pass "
            "strict=False to skip all of these.",
        )
    if walk.unexpected and walk.restores_nothing(root):
        raise names_mismatch(
            walk.missing,
            walk.unexpected,
            "No name is in both, so nothing would be restored; change the names in `like`.",
        )
    return Matched(
        walk.tensors,
        walk.missing,
        walk.unexpected,
        walk.per_process,
        walk.numbers,
        walk.filled,
        _step=step,
    )


class _Walk:
    """The state of one walk of both trees."""

    def __init__(
        self,
        root: Node,
        is_tensor: Callable[[object], bool],
        selected: Callable[[str], bool],
        meaning: Meaning | None,
        composite: Callable[[object, str], CompositeTensor | None] | None,
    ) -> None:
        self.composite = composite
        self.is_tensor = is_tensor
        self.selected = selected
        self.meaning = meaning
        self.root = root
        self.tensors: dict[str, list[tuple[str, Any]]] = {}
        self.per_process: dict[str, PerProcess] = {}
        self.numbers: dict[str, list[tuple[str, Any]]] = {}
        self.filled: dict[str, tuple[Any, Any]] = {}
        self.missing: list[str] = []
        self.misses_tensors = False
        """Whether a tensor of `like` is not stored."""
        self.unexpected: list[str] = []

    @cached_property
    def meanings(self) -> dict[str, str | None]:
        """Meaning by stored name."""
        stored = (leaf for leaf in leaves_of(self.root) if isinstance(leaf, Tensor))
        return {leaf.name: leaf.meaning for leaf in stored}

    # A place that both sides have. Its name is the checkpoint's.

    def visit(self, value: object, node: Node, depth: int) -> _Step:
        made = None if self.composite is None else self.composite(value, node.name)
        if made is not None:
            return self.composed(value, made, node, depth)
        return self.tensor(value, node) if self.is_tensor(value) else self.other(value, node, depth)

    def other(self, value: object, node: Node, depth: int) -> _Step:
        """A value of `like` that is not a tensor."""
        if isinstance(value, PerProcess):
            return self.own(value, node)
        container = _container_of(value, node.name)
        if container is not None:
            return self.container(value, container, node, depth)
        if not self.any_selected(node):
            return _keep(value)
        if not _is_leaf(value):
            try:
                container_of(value, node.name)  # raises a more precise error for an invalid key
                raise unsupported(value, node.name)
            except LeafError as e:
                raise LeafError(f"`like`: {e}") from None
        if isinstance(node, Small | Custom):
            return _keep(in_form_of(value, decode_leaf(node)))
        if isinstance(node, Tensor | Tied):
            return self.number(value, node)
        if isinstance(node, Owned):
            raise structure_mismatch(node, f"{description(value)}; {WRAP}")
        raise structure_mismatch(
            node,
            f"{description(value)}; put a container of the same keys there, or leave it out with "
            "only=",
        )

    def number(self, value: object, node: Tensor | Tied) -> _Step:
        if not is_number(value):
            raise structure_mismatch(
                node,
                f"{description(value)}; pass a tensor, an ndarray or a shardckpt.Target there",
            )
        name = node.name
        self.numbers.setdefault(node.stored, []).append((name, value))
        return lambda values: values[name]

    def tensor(self, value: object, node: Node) -> _Step:
        if not self.any_selected(node):
            return _keep(value)
        if isinstance(node, Small) and _is_scalar(value):
            number = decode_leaf(node)
            if is_number(number):
                return self.fill(value, node.name, number)
        if not isinstance(node, Tensor | Tied):
            advice = WRAP if isinstance(node, Owned) else "pass a value of the stored kind there"
            raise structure_mismatch(node, f"a tensor ({type(value).__qualname__}); {advice}")
        name = node.name
        own = ... if self.meaning is None else self.meaning(value)
        if own is not ...:
            stored = node.meaning if isinstance(node, Tensor) else self.meanings.get(node.stored)
            if own != stored:
                raise meaning_mismatch(name, stored, own, type(value).__qualname__)
        self.tensors.setdefault(node.stored, []).append((name, value))
        return lambda values: values[name]

    def fill(self, value: object, name: str, number: object) -> _Step:
        self.filled[name] = value, number
        return lambda values: values[name]

    def composed(self, value: object, made: CompositeTensor, node: Node, depth: int) -> _Step:
        if not self.any_selected(node):
            return _keep(value)
        what = f"a composite tensor ({made.type_name})"
        if not isinstance(node, Branch) or node.composite is None:
            raise structure_mismatch(
                node, f"{what}; pass what is stored there, and convert it afterwards"
            )
        of, context = node.composite, write(node.composite.context)
        if (
            of.type_name.rpartition(".")[2] != made.type_name.rpartition(".")[2]
            or set(node.keys) != made.parts.keys()
        ):
            raise structure_mismatch(
                node,
                f"{what} of {parts_text(made.parts)}; make the tensor there as the saved one was "
                "made",
            )
        if of.shape != made.shape:
            raise structure_mismatch(
                node,
                f"{what} of shape {made.shape}; make the tensor there as the saved one was made",
            )
        if not any(same_document(context, own) for own in (made.document, made.context)):
            contrast = first_difference(context, made.document)
            raise structure_mismatch(
                node,
                f"{what} with another context: {contrast}; make the tensor there as the saved one "
                "was made",
            )
        stored = dict(zip(node.keys, node.children, strict=True))
        steps = [self.visit(part, stored[key], depth + 1) for key, part in made.parts.items()]
        return lambda values: made.rebuild([step(values) for step in steps])

    def own(self, value: PerProcess, node: Node) -> _Step:
        if not self.any_selected(node):
            return _keep(value)
        if not isinstance(node, Owned):
            raise structure_mismatch(
                node,
                "a shardckpt.PerProcess; pass what is stored, or any value of its kind, without it",
            )
        name = node.name
        self.per_process[name] = value
        return lambda values: replace(value, value=values[name])

    def container(self, value: object, container: Container, node: Node, depth: int) -> _Step:
        if depth >= MAX_DEPTH:
            raise LeafError(
                f"{shown(node.name)} in `like` lies in more than {MAX_DEPTH} containers, or in "
                "itself."
            )
        if not isinstance(node, Branch):
            if not container.keys and isinstance(node, Small) and node.content is None:
                return _keep(value)
            if self.selected(node.name):
                leaf = (
                    "a tensor, an ndarray or a shardckpt.Target"
                    if isinstance(node, Tensor | Tied)
                    else "a leaf"
                )
                advice = WRAP if isinstance(node, Owned) else f"pass {leaf} there"
                raise structure_mismatch(
                    node, f"a {type(value).__qualname__} of {len(container.keys)} items; {advice}"
                )
            return self.absent(value, node.name, depth)
        if (container.form == "dict") != (node.form == "dict") and (container.keys or node.keys):
            if self.any_selected(node):
                raise structure_mismatch(
                    node, f"a {type(value).__qualname__}; pass a container of the same kind"
                )
            return self.absent(value, node.name, depth)
        keys = names.match_keys(node.keys, container.keys) if node.form == "dict" else node.keys
        stored = {(type(key), key): child for key, child in zip(keys, node.children, strict=True)}
        steps = []
        for key, component, child in zip(
            container.keys, names.component_names(container.keys), container.children, strict=True
        ):
            stored_child = stored.pop((type(key), key), None)
            if stored_child is None:
                steps.append(self.absent(child, names.child_name(node.name, component), depth + 1))
            else:
                steps.append(self.visit(child, stored_child, depth + 1))
        for leftover in stored.values():
            self.unexpected.extend(end.name for end in ends(leftover) if self.selected(end.name))
        return lambda values: container.rebuild([step(values) for step in steps])

    # A place that only `like` has.

    def absent(self, value: object, name: str, depth: int) -> _Step:
        is_tensor = self.is_tensor(value)
        container = None if is_tensor else _container_of(value, name)
        if container is None or not container.keys:
            if self.selected(name):
                self.missing.append(name)
                self.misses_tensors |= is_tensor
            return _keep(value)
        if depth >= MAX_DEPTH:
            raise LeafError(
                f"{shown(name)} in `like` lies in more than {MAX_DEPTH} containers, or in itself."
            )
        for component, child in zip(
            names.component_names(container.keys), container.children, strict=True
        ):
            self.absent(child, names.child_name(name, component), depth + 1)
        return _keep(value)

    def restores_nothing(self, root: Node) -> bool:
        """Whether both sides have names, or both have tensors, and share none.

        Only names that `only` selects count.
        """
        unexpected = set(self.unexpected)
        stored = [leaf for leaf in leaves_of(root) if self.selected(leaf.name)]
        tensors = (
            [leaf for leaf in stored if isinstance(leaf, Tensor | Tied)]
            if self.misses_tensors
            else []
        )
        return any(
            side and all(leaf.name in unexpected for leaf in side) for side in (stored, tensors)
        )

    def any_selected(self, node: Node) -> bool:
        """Whether `only` selects a place, or anything below it."""
        return self.selected(node.name) or (
            isinstance(node, Branch) and any(self.selected(leaf.name) for leaf in leaves_of(node))
        )


def _keep(value: object) -> _Step:
    return lambda _values: value


def _is_leaf(value: object) -> bool:
    if type(value) in NEVER_LEAVES:
        return False
    return (
        isinstance(value, PerProcess)
        or leaves.leaf_type(value) is not None
        or leaves.is_small(value)
    )


def _container_of(value: object, name: str) -> Container | None:
    """Split a container.

    None for a leaf, and for a value that fails to split: it is kept, or refused if `only` selects
    it.
    """
    try:
        return None if _is_leaf(value) else container_of(value, name)
    except LeafError:
        return None


def _is_scalar(tensor: Any) -> bool:
    """Whether a tensor of `like`, or what stands for one, has no dimensions."""
    shape = getattr(tensor, "shape", None)
    return shape is None or tuple(shape) == ()
