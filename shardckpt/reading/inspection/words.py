"""Short texts and counts of what a tree holds, and the interface of what can be looked at."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Protocol

from shardckpt.state.document import Branch, Custom, Node, Owned, Small
from shardckpt.state.leaves import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import TensorRecord
    from shardckpt.io.url import Location

_WORD = re.compile(r"[/.]")
_OPTIMIZER = frozenset(
    (
        *(
            "opt",
            "optim",
            "optimizer",
            "optimizers",
            "opt_state",
            "optim_state",
            "optimizer_state",
            "optimizer_states",
        ),
        *(
            "optimizer_state_dict",
            "optim_state_dict",
            "exp_avg",
            "exp_avg_sq",
            "max_exp_avg_sq",
            "momentum_buffer",
        ),
    )
)
_OTHERS = frozenset(
    (
        "random",
        "rng",
        "rng_state",
        "generators",
        "scheduler",
        "lr_scheduler",
        "loader",
        "sampler",
        "counters",
    )
)


class Inspected(Protocol):
    """A checkpoint that can be looked at; `Checkpoint` is one."""

    location: Location
    record: CheckpointRecord
    parsed_tree: Node
    native: bool

    @property
    def format(self) -> str:
        """Name of its format."""

    @property
    def notes(self) -> Sequence[str]:
        """Messages about parts that are not shown, a line each."""

    def tensor(self, name: str) -> TensorRecord:
        """The record of a tensor, by any of its names."""


def nodes_of(root: Node) -> dict[str, Node]:
    """All nodes of a tree by name, in order."""
    return {node.name: node for node in walk_nodes(root)}


def walk_nodes(root: Node) -> Iterator[Node]:
    """All nodes of a tree, in order."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, Branch):
            stack.extend(reversed(node.children))


def parameter_counts(tensors: Iterable[TensorRecord]) -> dict[str, int]:
    """Numbers of elements of the "model" and of the "optimizer", by the words in names.

    Scalars and random states are left out.
    """
    counts = {"model": 0, "optimizer": 0}
    for tensor in tensors:
        words = set(_WORD.split(tensor.name.lower()))
        if tensor.shape and not words & _OTHERS:
            counts["optimizer" if words & _OPTIMIZER else "model"] += prod(tensor.shape)
    return counts


def leaf_text(leaf: Small | Custom | Owned) -> tuple[str, str]:
    """A small leaf's type, and its value in a few characters."""
    if isinstance(leaf, Owned):
        return "per process", ""
    return describe(leaf.content, leaf.name) if isinstance(leaf, Small) else (leaf.type_name, "")
