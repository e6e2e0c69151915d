"""The tree of a job's complete state, merged from the trees of its processes.

Processes of one job may hold different parts of a state (pipeline stages, a loader on some of
them). Their documents are merged, all at once, from the root down. At each place, among those
documents that have it:

1. Dicts are merged by typed key: the keys of the lowest process first, then new keys in the order
   of the processes. Lists and tuples must have equal lengths, and are merged item by item.
2. Everything else must be equal in all: a tensor of one meaning, the same tie, an equal small leaf,
   a PerProcess. A place that only one document has is copied.
3. Names do not change. A tensor was written under the name that its own process gave it, so keys
   that have the same name (0 on one process, "0" on another) are refused, although one dict could
   have both.

Ties need no further rule. A process in which a name is tied has the stored tensor as well, so the
union has it. In another process the same name may be a separate tensor, because that process lacks
the stored name or does not tie the two. These processes disagree: two tensors were stored where
others restore one. Two names that are tied in no process are two tensors.

Every node is visited once, and nodes are compared only where documents meet.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from shardckpt.errors import CommitError
from shardckpt.state import leaves
from shardckpt.state.document import Branch, Custom, Node, Owned, Small, Tensor, Tied, parse, write
from shardckpt.state.names import shown
from shardckpt.text import clip, numbered, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.state.leaves import JSON
    from shardckpt.state.names import PathKey

_SHOWN = 80
"""Most characters of a value in a message."""


def union(trees: Sequence[tuple[Sequence[int], JSON]]) -> JSON:
    """Merge the tree documents of all processes.

    >>> union([([0, 1], {"step": 3, "first": "$tensor"}), ([2], {"last": "$tensor", "step": 3})])
    {'step': 3, 'first': '$tensor', 'last': '$tensor'}

    Args:
        trees: the distinct documents, at least one, each with the ascending numbers of the
            processes that have it; ordered by the lowest of these numbers.

    Raises:
        CommitError: two processes disagree about a place; the message names the place, the values
            and the processes.
        FormatError: one of several documents is invalid. A single document is returned unchecked.
    """
    if len(trees) == 1:
        return trees[0][1]
    merged = _Union([processes for processes, _ in trees]).merge(
        [(i, parse(tree)) for i, (_, tree) in enumerate(trees)]
    )
    return write(merged)


_Document = tuple[int, Node]
"""Position of a document, and its node at some place."""


class _Union:
    """Merges documents."""

    def __init__(self, processes: Sequence[Sequence[int]]) -> None:
        self.processes = processes

    def merge(self, documents: list[_Document]) -> Node:
        """The merged node of a place, from the one or more documents that have it."""
        first = documents[0][1]
        if len(documents) == 1:
            return first
        groups: dict[object, list[_Document]] = {}
        for i, node in documents:
            groups.setdefault(_essence(node), []).append((i, node))
        if len(groups) > 1:
            raise self.disagreement(list(groups.values()))
        return self.branch(first, documents) if isinstance(first, Branch) else first

    def branch(self, first: Branch, documents: list[_Document]) -> Branch:
        by_key: dict[_Key, list[_Document]] = {}
        for i, node in documents:
            assert isinstance(node, Branch)
            for key, child in zip(node.keys, node.children, strict=True):
                by_key.setdefault((type(key), key), []).append((i, child))
        if len({kind for kind, _ in by_key}) > 1:
            self.check_keys(first.name, by_key)
        return replace(
            first,
            keys=[key for _, key in by_key],
            children=[self.merge(below) for below in by_key.values()],
        )

    def check_keys(self, name: str, by_key: dict[_Key, list[_Document]]) -> None:
        """Refuse two keys of different types that are equal in a dict, or have the same name."""
        claimed: dict[object, _Key] = {}
        for key, below in by_key.items():
            # To a dict 1 and True are one key; 0 and "0" have one name, unless their own dict has
            # both.
            for claim in {("key", key[1]), *(("name", child.name) for _, child in below)}:
                other = claimed.setdefault(claim, key)
                if other != key:
                    raise CommitError(
                        f"{shown(name)} has the key {shorten(other[1])} on "
                        f"{self.who(by_key[other])} and {shorten(key[1])} on {self.who(below)}, "
                        "which cannot be told apart; use keys of one type. Nothing was published."
                    )

    def disagreement(self, groups: list[list[_Document]]) -> CommitError:
        descriptions = [f"{_in_words(group[0][1])} on {self.who(group)}" for group in groups[:2]]
        others = (
            f" (and something else on {self.who(list(chain(*groups[2:])))})"
            if len(groups) > 2
            else ""
        )
        one, other = groups[0][0][1], groups[1][0][1]
        return CommitError(
            f"{shown(one.name)} is {' and '.join(descriptions)}{others}; {_advice(one, other)}. "
            "Nothing was published."
        )

    def who(self, documents: list[_Document]) -> str:
        """The processes of some documents, for messages."""
        return numbered(
            "process", sorted({process for i, _ in documents for process in self.processes[i]})
        )


_Key = tuple[type, "PathKey"]
"""A key with its type."""


def _essence(node: Node) -> object:
    """A value that is equal for nodes that can be merged.

    Children of containers are compared separately.
    """
    if isinstance(node, Branch) and node.composite is not None:
        of = node.composite
        context = json.dumps(write(of.context), sort_keys=True)
        return of.type_name, of.shape, context, frozenset(node.keys)
    if isinstance(node, Branch):
        return node.form, node.local, None if node.form == "dict" else len(node.children)
    if isinstance(node, Tensor):
        return Tensor, node.meaning
    if isinstance(node, Tied):
        return Tied, node.stored
    # Compared as text, because in Python the leaves 1, 1.0 and True are equal, and so are 0.0 and
    # -0.0.
    return type(node), json.dumps(write(node), sort_keys=True)


def _in_words(node: Node) -> str:
    if isinstance(node, Branch):
        of = node.composite
        if of is None:
            return f"a {node.form} of {len(node.children)} items"
        context = clip(json.dumps(write(of.context)), _SHOWN)
        return f"a {clip(of.type_name, _SHOWN)} of shape {of.shape} with the context {context}"
    if isinstance(node, Tensor):
        return "a tensor of its own" + (
            "" if node.meaning is None else f" that means {node.meaning!r}"
        )
    if isinstance(node, Tied):
        return f"the same tensor as {shown(node.stored)}"
    if isinstance(node, Custom):
        return (
            f"a {clip(node.type_name, _SHOWN)} of {clip(json.dumps(write(node.content)), _SHOWN)}"
        )
    return "a shardckpt.PerProcess" if isinstance(node, Owned) else _small_in_words(node)


def _small_in_words(node: Small) -> str:
    kind, value = leaves.describe(node.content, node.name)
    return value if node.content is None else f"{value} ({kind})"


def _advice(one: Node, other: Node) -> str:
    if isinstance(one, Small | Custom) and isinstance(other, Small | Custom):
        return (
            "make it equal on all processes, or, where it differs on purpose, wrap it in "
            "shardckpt.PerProcess or name it in train_state(local=…)"
        )
    if isinstance(one, Tensor | Tied) and isinstance(other, Tensor | Tied):
        return "let it be one tensor to all processes that have it"
    if isinstance(one, Branch) and isinstance(other, Branch):
        return "make it of one kind and length on all processes, or a dict"
    return "store things of one kind under one name"
