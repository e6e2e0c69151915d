"""A state as people read it: dotted names as trees, numbers in order, repeated layers folded.

Layers that repeat are folded into one.

Command line, notebooks and web pages show the same outline (`outline`), each in its own form. A
state dict of a model has names such as `model.layers.0.mlp.up_proj.weight`; as an outline it is

    model
    ├─ embed_tokens.weight
    ├─ layers.{0…31}
    │  └─ mlp.up_proj.weight
    └─ norm.weight

1. Keys with dots become groups; a group with one member is joined with it.
2. Siblings whose names differ in a number at the end alone are put into the order of these numbers.
3. A list or tuple of small values is one line, and so are siblings that repeat: at least
   `LEAST_FOLDED` with consecutive numbers and equal contents (names, shapes, dtypes, layouts,
   values).

Cost is linear in the number of leaves, and nothing here recurses: names and trees may come from
another person's checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardckpt.reading.inspection.words import leaf_text
from shardckpt.state.document import Branch, Node, Small, Tensor, Tied

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.inspection.words import Inspected

LEAST_FOLDED = 3
"""Fewest siblings that are folded."""
_MOST_VALUES = 8
"""Most values of a list in its line."""
_MOST_DOTS = 16
"""Most groups that one key makes; its rest stays joined."""
_NUMBERED = re.compile(r"(.*?)(\d{1,18})", re.ASCII | re.DOTALL)


@dataclass(slots=True, eq=False)
class OutlineEntry:
    """One line of an outline."""

    label: str
    """Name relative to the entry above: a key, several joined by dots, or a range as in
    `layers.{0…31}`."""
    name: str
    """Name of the first node that it stands for; "" for the state itself, and for a group a prefix
    of names."""
    node: Node | None
    """The first of these nodes; None for a group of keys with a common beginning."""
    children: list[OutlineEntry] = field(default_factory=list)
    """Entries below; of several folded siblings, those of the first."""
    repeats: int = 1
    """Number of siblings that it stands for."""
    tensors: int = 0
    """Number of tensors in it, of all siblings."""
    nbytes: int = 0
    """Bytes of their elements."""
    values: str | None = None
    """The values of a list or tuple that holds nothing but small values."""
    kind: int = field(default=0, repr=False)
    """Equal for entries with equal contents, whatever their labels."""


def outline(checkpoint: Inspected, node: Node) -> OutlineEntry:
    """The outline of a node of a checkpoint's tree, and of everything below it."""
    root = OutlineEntry(node.name, node.name, node)
    order: list[OutlineEntry] = []
    stack = [root]
    while stack:
        entry = stack.pop()
        order.append(entry)
        if isinstance(entry.node, Branch):
            entry.values = _values(entry.node)
            entry.children = _group(entry.node) if entry.values is None else []
        stack.extend(entry.children)
    kinds: dict[Hashable, int] = {}
    tensors = checkpoint.record.structure.tensors
    for entry in reversed(order):
        _complete(entry, tensors, kinds)
    return root


def walk(root: OutlineEntry, depth: int | None = None) -> Iterator[tuple[OutlineEntry, str, int]]:
    """Every entry below the root, in order, with its guide and its count.

    The guide is what a terminal draws before the entry. The count is the number of entries that the
    entry stands for.

    Args:
        root: an outline.
        depth: most levels below the root; None: all.
    """
    stack = [
        (child, "", i == 0, 1, root.repeats) for i, child in enumerate(reversed(root.children))
    ]
    while stack:
        entry, guide, is_last, level, times = stack.pop()
        times *= entry.repeats
        yield entry, f"{guide}{'└─' if is_last else '├─'} ", times
        if depth is None or level < depth:
            below = guide + ("   " if is_last else "│  ")
            stack += [
                (child, below, i == 0, level + 1, times)
                for i, child in enumerate(reversed(entry.children))
            ]


def number_text(n: int) -> str:
    """A large number in few characters.

    >>> number_text(812), number_text(124_439_808), number_text(6_738_415_616)
    ('812', '124 M', '6.74 B')
    """
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            scaled = n / size
            return f"{scaled:.{max(0, 3 - len(str(int(scaled))))}f} {unit}"
    return str(n)


def _group(branch: Branch) -> list[OutlineEntry]:
    """The children of a container; keys with dots as groups of entries."""
    top: list[OutlineEntry] = []
    groups: dict[str, OutlineEntry] = {}
    for child in branch.children:
        component = child.name.rpartition("/")[2]
        *parts, last = (
            component.split(".", _MOST_DOTS)
            if branch.form == "dict" and branch.composite is None
            else [component]
        )
        if "" in (*parts, last):  # dots at an end are part of the key
            parts, last = [], component
        siblings, path = top, ""
        for part in parts:
            path = f"{path}.{part}" if path else part
            if path not in groups:
                groups[path] = OutlineEntry(
                    part, f"{branch.name}/{path}" if branch.name else path, None
                )
                siblings.append(groups[path])
            siblings = groups[path].children
        siblings.append(OutlineEntry(last, child.name, child))
    return top


def _values(branch: Branch) -> str | None:
    """The values in a list or tuple of small leaves alone, in one line.

    None: it is another container, or empty.
    """
    if (
        branch.form == "dict"
        or not branch.children
        or not all(isinstance(child, Small) for child in branch.children)
    ):
        return None
    texts = [
        leaf_text(child)[1] for child in branch.children[:_MOST_VALUES] if isinstance(child, Small)
    ]
    texts += [f"… {len(branch.children):,} in all"] if len(branch.children) > _MOST_VALUES else []
    return f"({', '.join(texts)})" if branch.form == "tuple" else f"[{', '.join(texts)}]"


def _complete(
    entry: OutlineEntry, tensors: dict[str, TensorRecord], kinds: dict[Hashable, int]
) -> None:
    """Order, join and fold the children, which are complete, and set totals and kind."""
    if isinstance(entry.node, Tensor):
        entry.tensors, entry.nbytes = 1, tensors[entry.node.name].nbytes
    entry.children = [_join(child) for child in _fold(_in_order(entry.children))]
    entry.tensors += sum(child.tensors for child in entry.children)
    entry.nbytes += sum(child.nbytes for child in entry.children)
    content = (
        _content(entry.node, tensors),
        entry.values,
        *((child.label, child.kind) for child in entry.children),
    )
    entry.kind = kinds.setdefault(content, len(kinds))


def _join(entry: OutlineEntry) -> OutlineEntry:
    """A group with one member as this member."""
    if entry.node is not None or len(entry.children) != 1:
        return entry
    (only,) = entry.children
    only.label = f"{entry.label}.{only.label}"
    only.repeats *= entry.repeats
    only.tensors, only.nbytes = entry.tensors, entry.nbytes
    return only


def _in_order(entries: list[OutlineEntry]) -> list[OutlineEntry]:
    """Entries, with those whose labels differ only in a number sorted by the number.

    The sorted entries occupy the same places together as before.
    """
    places: dict[str, list[int]] = {}
    numbers: dict[int, int] = {}
    for i, entry in enumerate(entries):
        if (match := _NUMBERED.fullmatch(entry.label)) is not None:
            places.setdefault(match[1], []).append(i)
            numbers[i] = int(match[2])
    ordered = list(entries)
    for same in places.values():
        for place, i in zip(same, sorted(same, key=numbers.__getitem__), strict=True):
            ordered[place] = entries[i]
    return ordered


def _fold(entries: list[OutlineEntry]) -> list[OutlineEntry]:
    """Neighbours with consecutive numbers and equal contents as one entry."""
    made: list[OutlineEntry] = []
    run: list[OutlineEntry] = []
    before: tuple[str, int] | None = None

    def finish() -> None:
        if len(run) < LEAST_FOLDED or before is None:
            made.extend(run)
            return
        first, (prefix, last) = run[0], before
        first.label = f"{prefix}{{{last - len(run) + 1}…{last}}}"
        first.repeats = len(run)
        first.tensors *= len(run)
        first.nbytes *= len(run)
        made.append(first)

    for entry in entries:
        match = _NUMBERED.fullmatch(entry.label)
        here = None if match is None else (match[1], int(match[2]))
        follows = (
            before is not None and here == (before[0], before[1] + 1) and entry.kind == run[-1].kind
        )
        if not follows:
            finish()
            run = []
        run.append(entry)
        before = here
    finish()
    return made


def _content(node: Node | None, tensors: dict[str, TensorRecord]) -> Hashable:
    """The contents of a node itself, to be compared with those of its siblings."""
    if node is None:
        return None
    if isinstance(node, Branch):
        return (
            node.form,
            node.local,
            None if node.composite is None else (node.composite.type_name, node.composite.shape),
        )
    if isinstance(node, Tensor):
        tensor = tensors[node.name]
        return (
            tensor.shape,
            tensor.dtype.name,
            id(tensor.layout),
            node.meaning,
            None if tensor.base is None else tensor.base.base.url,
        )
    if isinstance(node, Tied):
        return "tied", node.stored
    return leaf_text(node)
