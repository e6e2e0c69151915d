"""Comparison of the states in two checkpoints.

1. Structure, from the two records alone: every place of both trees is looked up by name. The
   comparison covers names that only one has, kinds, ties, shapes, dtypes, small leaves and layouts.
   How the bytes are stored (chunks, compression, packed or plain) is not part of the state and
   never a difference.
2. Values of all tensors that both have with the same shape and dtype, bit by bit, block after block
   within a memory limit (`compare_values`).

Different layouts over devices are reported, but are not a difference by themselves: restoring works
from any layout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardckpt.commit.fingerprints import recorded_fingerprint
from shardckpt.errors import OptionError, ShardingError
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.placements import Placements
from shardckpt.options import check_flag, check_function, parse_bytes
from shardckpt.reading.compare_values import DEFAULT_MEMORY_LIMIT, Pair, ValueChange, compare_values
from shardckpt.reading.inspection.words import nodes_of
from shardckpt.state.document import (
    Branch,
    Composite,
    Custom,
    Node,
    Owned,
    Small,
    Tensor,
    Tied,
    leaves_of,
    write,
)
from shardckpt.state.leaves import describe
from shardckpt.state.names import component_names
from shardckpt.text import Message, clip, count, file_size, named_size, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardckpt.format.structure import StoredLayout
    from shardckpt.reading.checkpoint import Checkpoint


Aspect = Literal["kind", "tied", "shape", "dtype", "leaf", "layout", "per process", "context"]
"""The aspect in which two checkpoints differ at a name that both have."""

LEAST_MEMORY_LIMIT = 1 << 20
_MOST_LINES = 60
"""Most differences in the text of a comparison."""


@dataclass(frozen=True, slots=True)
class Change:
    """A difference at one name, other than in a tensor's values."""

    name: str
    aspect: Aspect
    a: object
    """In the first checkpoint. kind: text; tied: the first name of the same tensor, or None; shape:
    tuple; dtype: name; leaf: the value as text, and its type where types differ; layout: the
    `Layout`, or None; context: everything except the tensors of a composite tensor, as text; per
    process: the number of values, as text."""
    b: object
    """The same for the second checkpoint; per process: also how many processes' values differ."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two checkpoints."""

    only_a: tuple[str, ...]
    """Leaves and empty containers that only the first checkpoint has, in its order."""
    only_b: tuple[str, ...]
    """The same for the second checkpoint."""
    changes: tuple[Change, ...]
    """Differences of structure and of small leaves."""
    layouts: tuple[Change, ...]
    """Tensors with different layouts."""
    values: tuple[ValueChange, ...]
    """Tensors with elements that differ."""
    tensors_compared: int
    """Number of tensors whose values were compared; 0 if only the structure was."""
    bytes_compared: int
    """Bytes of their elements, counted in one of the two checkpoints."""

    def equal(self, *, layout: bool = False) -> bool:
        """Whether nothing differs; with `layout`, different layouts count as well."""
        return not (
            self.only_a or self.only_b or self.changes or self.values or (layout and self.layouts)
        )

    def __str__(self) -> str:
        """The differences, a line each."""
        return "\n".join([self._verdict(), *(f"  {line}" for line in self._lines())])

    def _repr_html_(self) -> str:
        """The differences, for notebooks."""
        from shardckpt.reading.inspection.display import framed
        from shardckpt.reading.inspection.markup import el

        return framed(
            el("div", el("strong", self._verdict())),
            el("ul", [el("li", line) for line in self._lines()]),
        )

    def _verdict(self) -> str:
        compared = (
            f"{count(self.tensors_compared, 'tensor')}, {file_size(self.bytes_compared)} compared "
            "bit by bit"
        )
        return f"{'equal' if self.equal() else 'different'}: {compared}"

    def _lines(self) -> Iterator[str]:
        """The differences, a line each, and the number of those that are not shown."""
        lines = [f"only in a: {name}" for name in self.only_a]
        lines += [f"only in b: {name}" for name in self.only_b]
        lines += [
            f"{change.name}: another {change.aspect}: {change.a} → {change.b}"
            for change in self.changes
        ]
        for value in self.values:
            by = "" if value.largest is None else f", by up to {value.largest:.6g}"
            lines.append(f"{value.name}: {value.differing:,} of {value.size:,} elements differ{by}")
        yield from map(visible, lines[:_MOST_LINES])
        if len(lines) > _MOST_LINES:
            yield f"… and {len(lines) - _MOST_LINES:,} more"


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    values: bool = True,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints.

    Args:
        a: One.
        b: The other.
        values: Also compare the tensors' elements, bit by bit: NaNs with the same payload are
            equal, 0.0 and -0.0 are not. Tensors whose recorded fingerprints are equal are not read.
        memory_limit: Bytes (or text such as "512MiB") for elements of both in memory at once, at
            least 1 MiB. Reader threads need a few MiB each in addition.
        progress: Called with bytes compared so far and in all.

    Raises:
        OptionError: The memory limit is too low, or another option is invalid.
        FormatError: A tree is invalid.
        CorruptionError: Stored bytes are damaged or missing; `verify` lists them.
        ReplacedError: A checkpoint was replaced or deleted meanwhile.
    """
    check_flag(values, "values")
    check_function(progress, "progress")
    limit = parse_bytes(memory_limit, "memory_limit")
    if limit < LEAST_MEMORY_LIMIT:
        raise OptionError(
            Message(
                named_size("memory_limit", limit),
                f": comparing takes at least {file_size(LEAST_MEMORY_LIMIT)}.",
            )
        )
    with a.reading(), b.reading():
        structure = _Structure(a, b)
        structure.compare()
        pairs = list(structure.pairs.values()) if values else []
        compared = _unlike(a, b, pairs)
        a.open_bases(pair.a for pair in compared)
        b.open_bases(pair.b for pair in compared)
        differing = tuple(
            compare_values(a.reader, b.reader, compared, limit, progress) if compared else ()
        )
    return Comparison(
        only_a=tuple(structure.only_a),
        only_b=tuple(structure.only_b),
        changes=tuple(structure.changes),
        layouts=tuple(structure.layouts),
        values=differing,
        tensors_compared=len(pairs),
        bytes_compared=sum(pair.a.nbytes for pair in pairs),
    )


def _unlike(a: Checkpoint, b: Checkpoint, pairs: list[Pair]) -> list[Pair]:
    """The pairs that no recorded fingerprints show to be equal: their elements have to be read."""
    if a.record.fingerprint is None or b.record.fingerprint is None:
        return pairs
    one, other = (recorded_fingerprint(of.place, of.record) for of in (a, b))
    return [
        pair
        for pair in pairs
        if pair.a.name not in one or one[pair.a.name] != other.get(pair.b.name)
    ]


class _Structure:
    """Comparison of two trees and of the tensors' records."""

    def __init__(self, a: Checkpoint, b: Checkpoint) -> None:
        self.nodes_a, self.nodes_b = nodes_of(a.parsed_tree), nodes_of(b.parsed_tree)
        self.ties_a, self.ties_b = _ties(self.nodes_a), _ties(self.nodes_b)
        self.tensors_a, self.tensors_b = a.record.structure.tensors, b.record.structure.tensors
        self.only_a = [
            name
            for name, node in self.nodes_a.items()
            if name not in self.nodes_b and _counts(node)
        ]
        self.only_b = [
            name
            for name, node in self.nodes_b.items()
            if name not in self.nodes_a and _counts(node)
        ]
        self.changes: list[Change] = []
        self.layouts: list[Change] = []
        self.pairs: dict[tuple[str, str], Pair] = {}
        """Tensors whose values can be compared; each pair of stored tensors once."""
        self.same_layouts: dict[tuple[int, int, int], bool] = {}
        self.owned = _values_of_processes(a), _values_of_processes(b)

    def compare(self) -> None:
        """Compare every name that both have."""
        for name, node_a in self.nodes_a.items():
            node_b = self.nodes_b.get(name)
            if node_b is None:
                continue
            if isinstance(node_a, Small | Custom) and isinstance(node_b, Small | Custom):
                self.leaf(name, node_a, node_b)
            elif (kinds := _unlike_kinds(node_a, node_b)) is not None:
                self.changes.append(Change(name, "kind", *kinds))
            elif (
                isinstance(node_a, Branch)
                and isinstance(node_b, Branch)
                and node_a.composite
                and node_b.composite
            ):
                self.composite(name, node_a.composite, node_b.composite)
            elif isinstance(node_a, Tensor | Tied) and isinstance(node_b, Tensor | Tied):
                self.tensor(name, node_a, node_b)
            elif isinstance(node_a, Owned):
                self.values_of_processes(name)

    def leaf(self, name: str, a: Small | Custom, b: Small | Custom) -> None:
        """Compare two small leaves, including their types."""
        kinds = _kind(a), _kind(b)
        if kinds[0] != kinds[1]:
            self.changes.append(
                Change(name, "leaf", f"{_value(a)} {kinds[0]}", f"{_value(b)} {kinds[1]}")
            )
        elif _content(a) != _content(b):
            self.changes.append(Change(name, "leaf", _value(a), _value(b)))

    def values_of_processes(self, name: str) -> None:
        """Compare the values that processes have for themselves at a name."""
        a, b = (of.get(name, {}) for of in self.owned)
        differing = sum(a.get(process) != b.get(process) for process in a | b)
        if differing:
            number_a, number_b = (count(len(values), "value") for values in (a, b))
            other = f"{number_b}, different in {differing:,} process{'es'[: 2 * (differing > 1)]}"
            self.changes.append(Change(name, "per process", number_a, other))

    def composite(self, name: str, a: Composite, b: Composite) -> None:
        """Compare everything except the parts of two composite tensors of one type."""
        if a.shape != b.shape:
            self.changes.append(Change(name, "shape", a.shape, b.shape))
        contexts = [json.dumps(write(of.context), sort_keys=True) for of in (a, b)]
        if contexts[0] != contexts[1]:
            self.changes.append(Change(name, "context", *map(clip, contexts)))

    def tensor(self, name: str, node_a: Tensor | Tied, node_b: Tensor | Tied) -> None:
        """Compare everything except the values of a tensor."""
        first_a, first_b = (
            node.stored if isinstance(node, Tied) else None for node in (node_a, node_b)
        )
        if first_a != first_b and self.ties_a[node_a.stored] != self.ties_b[node_b.stored]:
            self.changes.append(Change(name, "tied", first_a, first_b))
        a, b = self.tensors_a[node_a.stored], self.tensors_b[node_b.stored]
        if a.shape != b.shape:
            self.changes.append(Change(name, "shape", a.shape, b.shape))
        if a.dtype != b.dtype:
            self.changes.append(Change(name, "dtype", a.dtype.name, b.dtype.name))
        if not self.same_layout(a.layout, b.layout, len(a.shape), len(b.shape)):
            self.layouts.append(Change(name, "layout", a.layout, b.layout))
        if a.shape == b.shape and a.dtype == b.dtype and a.nbytes:
            self.pairs.setdefault((a.name, b.name), Pair(name, a, b))

    def same_layout(
        self, a: StoredLayout | None, b: StoredLayout | None, ndim_a: int, ndim_b: int
    ) -> bool:
        """Whether every device holds the same part, regardless of the names of the mesh's axes."""
        if a is None or b is None or ndim_a != ndim_b:
            return a is b or (a == b and ndim_a == ndim_b)
        # Many tensors share a layout, so the result of one comparison is reused.
        key = (id(a), id(b), ndim_a)
        if key not in self.same_layouts:
            self.same_layouts[key] = a == b or _equivalent(a, b, ndim_a)
        return self.same_layouts[key]


def _equivalent(a: StoredLayout, b: StoredLayout, ndim: int) -> bool:
    if isinstance(a, Placements) or isinstance(b, Placements):
        return False
    try:
        one, other = (
            layout if isinstance(layout, OpSharding) else layout.op_sharding(ndim)
            for layout in (a, b)
        )
    except ShardingError:
        return False
    return one.equivalent(other)


def _ties(nodes: Mapping[str, Node]) -> dict[str, set[str]]:
    """Name under which a tensor is stored → all its names."""
    ties: dict[str, set[str]] = {}
    for name, node in nodes.items():
        if isinstance(node, Tensor | Tied):
            ties.setdefault(node.stored, set()).add(name)
    return ties


def _values_of_processes(checkpoint: Checkpoint) -> dict[str, dict[int, str]]:
    """Processes' own values as JSON text: name → process → value."""
    by_name: dict[str, dict[int, str]] = {}
    if any(isinstance(node, Owned) for node in leaves_of(checkpoint.parsed_tree)):
        for process in range(checkpoint.record.processes):
            for name, value in checkpoint.process_values(process).items():
                # As text, because to Python's == the values 1, 1.0 and True are equal.
                by_name.setdefault(name, {})[process] = json.dumps(value, sort_keys=True)
    return by_name


def _counts(node: Node) -> bool:
    """Whether a name carries information that its children's names do not."""
    return not isinstance(node, Branch) or not node.children


def _unlike_kinds(a: Node, b: Node) -> tuple[str, str] | None:
    """The kinds at a place, or the types of a key that two dicts have; None: they are the same."""
    if isinstance(a, Branch) and isinstance(b, Branch) and a.form == b.form:
        if not (a.children and b.children):
            return None  # an empty dict has keys of no type
        types_a, types_b = (
            dict(zip(component_names(of.keys), map(type, of.keys), strict=True)) for of in (a, b)
        )
        key = next((key for key in types_a if types_b.get(key, types_a[key]) != types_a[key]), None)
        if key is not None and _kind(a) == _kind(b):
            return (
                f"dict, key {key} of type {types_a[key].__name__}",
                f"dict, key {key} of type {types_b[key].__name__}",
            )
    kinds = _kind(a), _kind(b)
    return None if kinds[0] == kinds[1] else kinds


def _kind(node: Node) -> str:
    """The kind at a place: a tensor, the type of a leaf or composite tensor, or a container.

    The kind of a container includes the types of keys that are not text.
    """
    if isinstance(node, Tensor | Tied):
        return "tensor"
    if isinstance(node, Small):
        return describe(node.content, node.name)[0]
    if isinstance(node, Custom):
        return node.type_name
    if isinstance(node, Owned):
        return "per process"
    if node.composite is not None:
        return node.composite.type_name
    types = sorted({type(key).__name__ for key in node.keys}) if node.form == "dict" else []
    return node.form if types in ([], ["str"]) else f"dict[{'|'.join(types)}]"


def _content(leaf: Small | Custom) -> str:
    # The repr, because to Python's == the leaves 1, 1.0 and True are equal, and so are 0.0 and
    # -0.0.
    return repr(leaf.content)


def _value(leaf: Small | Custom) -> str:
    return describe(leaf.content, leaf.name)[1] if isinstance(leaf, Small) else "…"
