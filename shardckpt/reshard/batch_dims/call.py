"""One call in a graph, as a rule sees it: arguments by schema name, shapes and known layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardckpt.reshard.batch_dims.layouts import (
    Layout,
    Numbered,
    Partial,
    Replicate,
    Shard,
    Unknown,
)
from shardckpt.reshard.batch_dims.sizes import BatchSize, Undecided, is_number

Result = Layout | tuple[Layout, ...]
"""Layout of one tensor, or of each tensor in a tuple."""

_SIZES = frozenset(
    {
        "size",
        "shape",
        "sizes",
        "split_size",
        "split_sizes",
        "repeats",
        "N",
        "HxW",
        "num_weights",
        "output_size",
        "normalized_shape",
    }
)
"""Arguments, by schema name, that give the shape of the result."""
_POSITIONS = frozenset({"start", "end", "index", "shifts", "diagonal", "k", "pad"})
"""Arguments that give a position in a dimension, if they are numbers."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions about a program that its graph does not show; by default all are off.

    See `batch_dims`.
    """

    even_counts: bool = False
    """Masks have the same number of true elements in every part of the batch."""
    local_batch_norm: bool = False
    """Batch normalisation is meant to use the statistics of each process's own part."""


class Unresolved(Exception):  # noqa: N818 - it carries an operand's Unknown
    """An operand is Unknown, so the result is."""

    def __init__(self, unknown: Unknown) -> None:
        super().__init__(str(unknown))
        self.unknown = unknown


def is_node(value: object) -> bool:
    """Whether an argument is another node of the graph."""
    return hasattr(value, "all_input_nodes") and hasattr(value, "meta")


class Call:
    """A node whose operation has a rule.

    Args:
        node: a `torch.fx.Node` that calls an ATen operator.
        batch: the size of the batch.
        known: layouts of the nodes before it.
        assume: the caller's assumptions.
    """

    def __init__(
        self, node: Any, batch: BatchSize, known: Mapping[Any, Result], assume: Assumptions
    ) -> None:
        self.node = node
        self.batch = batch
        self.assume = assume
        self._known = known
        self._arguments = _by_name(node)

    def __getitem__(self, name: str) -> Any:
        """The argument of that schema name, or its default.

        None if the schema has no such argument.
        """
        return self._arguments.get(name)

    @property
    def operands(self) -> list[Any]:
        """Nodes among the arguments, lists flattened, in order."""
        return list(self.node.all_input_nodes)

    def layout(self, value: Any) -> Replicate | Shard | Partial:
        """The layout of an argument: a node, or a number.

        Raises:
            Unresolved: the layout is Unknown.
            Undecided: the argument is a number that depends on the batch, but not on a power of it.
        """
        if not is_node(value):
            return (
                Replicate(self.batch.power(value))
                if isinstance(value, int | float)
                else Replicate()
            )
        layout = self._known[value]
        if isinstance(layout, tuple):
            raise Undecided(f"{value.name} is a tuple of tensors")
        if isinstance(layout, Unknown):
            raise Unresolved(layout)
        if isinstance(layout, Numbered):
            raise Undecided(f"{value.name} counts the samples, and every process starts at 0")
        return layout

    def known(self, value: Any) -> Result:
        """The layout of a node, or the layouts of its results."""
        return self._known[value]

    def steady(self, value: Any) -> Replicate | Shard:
        """The layout of an operand that must not be partial or scaled by the batch.

        The layout is replicated or cut, and scaled by no power of the batch.

        Raises:
            Unresolved: the layout is Unknown.
            Undecided: the operand is partial.
        """
        layout = self.layout(value)
        if isinstance(layout, Partial):
            raise Undecided(
                f"{shown(value)} is {layout}, and the operation is not linear in it: it must be "
                "reduced before"
            )
        if layout.power:
            raise Undecided(f"{shown(value)} is {layout}: it scales with the size of the part")
        return layout

    def replicated(self, value: Any) -> Replicate:
        """The layout of an operand that must be the same everywhere.

        None as an argument counts as replicated.

        Raises:
            Unresolved: the layout is Unknown.
            Undecided: the operand is cut or partial.
        """
        layout = self.steady(value)
        if isinstance(layout, Shard):
            raise Undecided(
                f"{shown(value)} is {layout}, but only a replicated operand is supported"
            )
        return layout

    def shape(self, value: Any) -> tuple[int, ...]:
        """An argument's shape; () for a number."""
        if not is_node(value):
            return ()
        return self.batch.shape(getattr(value.meta["val"], "shape", ()))

    @property
    def outs(self) -> list[tuple[int, ...] | None]:
        """Shapes of all results; None for a result that is not a tensor."""
        value = self.node.meta["val"]
        return [
            self.batch.shape(v.shape) if hasattr(v, "shape") else None
            for v in (value if isinstance(value, tuple | list) else [value])
        ]

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the only result.

        Raises:
            Undecided: there are several results.
        """
        shapes = self.outs
        if len(shapes) > 1:
            raise Undecided("it has several results")
        return shapes[0] or ()

    def each_result(self, layout: Layout) -> Result:
        """The same layout for every result of the call."""
        return layout if len(self.outs) == 1 else (layout,) * len(self.outs)

    def refuse_counts(self) -> None:
        """Refuse numeric arguments that differ with the size of the part, except sizes.

        Sizes are allowed, because the result's shape shows them.

        Raises:
            Unresolved: the dependence of an argument on the batch is not known.
            Undecided: an argument is a multiple of the batch, or, in a graph of fixed sizes, a
                position that may be one.
        """
        for name, argument in self._arguments.items():
            if name in {"start", "end"} and self._takes_all():
                continue
            for value in argument if isinstance(argument, list | tuple) else [argument]:
                counts = is_number(value.meta.get("val")) if is_node(value) else name in _POSITIONS
                if counts and name not in _SIZES and self.layout(value).power:
                    raise Undecided(f"its {name}, {shown(value)}, depends on the size of the part")

    def _takes_all(self) -> bool:
        """Whether a slice covers the complete dimension."""
        return all(
            self.shape(self[name]) == self.out for name in ("self", "src") if self[name] is not None
        )

    def dim(self, value: Any, ndim: int) -> int:
        """A dimension as a non-negative index; negative values count from the end."""
        return int(value) % max(ndim, 1)

    def dims(self, value: Any, ndim: int) -> tuple[int, ...]:
        """Dimensions as non-negative indices, from a list or a single one.

        None or an empty list means all.
        """
        if value is None or value == []:
            return tuple(range(ndim))
        return tuple(self.dim(d, ndim) for d in (value if isinstance(value, Sequence) else [value]))

    def is_zero(self, value: Any) -> bool:
        """Whether an argument is zero everywhere: a literal zero, or a tensor created as zeros."""
        if not is_node(value):
            return isinstance(value, int | float) and value == 0
        if value.op != "call_function":
            return False
        name, arguments = op_name(value), _by_name(value)
        if name in {"zeros", "zeros_like", "new_zeros"}:
            return True
        if name in {"full", "full_like", "new_full"}:
            return self.is_zero(arguments["fill_value"])
        if name == "scalar_tensor":
            return self.is_zero(arguments["s"])
        inner = arguments.get("self")
        return (
            name in {"expand", "view", "clone", "alias", "_to_copy", "detach"}
            and inner is not None
            and self.is_zero(inner)
        )


def op_name(node: Any) -> str:
    """An ATen operator's name without its overload, or the text of any other target.

    The name of "aten.add.Tensor" is "add".
    """
    target = str(node.target)
    if target.startswith("aten."):
        return target.split(".")[1]
    return target if "." in target else str(getattr(node.target, "__name__", target))


def shown(value: Any) -> str:
    """An argument, for messages."""
    return str(value.name) if is_node(value) else repr(value)


def _by_name(node: Any) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return dict(node.kwargs)
    named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    named.update(zip((a.name for a in schema.arguments), node.args, strict=False))
    return {**named, **node.kwargs}
