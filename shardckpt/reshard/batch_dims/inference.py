"""Inference of a data-parallel program's tensors: cut along the batch, replicated, or partial.

1. The batch is a dimension of one or several inputs: named by the caller, or the one symbol of a
   graph with dynamic shapes.
2. Parameters, buffers and all other inputs are replicated to begin with.
3. One pass over the graph gives the layout of everything (`propagation`).
4. State that the program changes is the input of its next step, so its layout must equal the layout
   that the program returns. If replicated fails this test (a cache with a row per sample, a sum
   over samples), the other layouts are tried: cut in a dimension of the batch's size, a partial
   sum, mean, maximum or minimum. State without such a layout is Unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.reshard.batch_dims.call import Assumptions
from shardckpt.reshard.batch_dims.layouts import (
    Layout,
    Numbered,
    Partial,
    Replicate,
    Shard,
    Unknown,
)
from shardckpt.reshard.batch_dims.program import Program
from shardckpt.reshard.batch_dims.propagation import propagate
from shardckpt.reshard.batch_dims.sizes import BatchSize, Undecided, symbol_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.reshard.batch_dims.call import Result


@dataclass(frozen=True, slots=True)
class BatchDims:
    """The inferred layouts of a program's tensors."""

    program: Program
    """The graph and its names."""
    nodes: Mapping[str, Result]
    """Layout of every node, by its name in `program.graph`; a tuple for a node with several
    results."""
    states: Mapping[str, Layout]
    """Layouts of parameters, buffers and constants, by their names in the module."""
    inputs: Mapping[str, Layout]
    """Layouts of the caller's arguments."""
    outputs: Mapping[str, Layout]
    """Layouts of the results; in a joint graph, of gradients too, under `<parameter>.grad`."""
    _by_node: Mapping[Any, Result] = field(repr=False)

    def __getitem__(self, name: str) -> Result:
        """The layout of a state, an input, an output or a node, by name.

        Raises:
            NamesMismatchError: there is no tensor of that name.
        """
        for group in (self.states, self.inputs, self.outputs, self.nodes):
            if name in group:
                return group[name]
        raise NamesMismatchError(
            f"batch_dims: the program has no tensor {name!r}; explain what is in .states, "
            ".inputs, .outputs or .nodes."
        )

    @property
    def unknown_operators(self) -> Counter[str]:
        """The operators at which an Unknown begins → number of nodes."""
        begun = {name for result in self._by_node.values() for name in _origins(result)}
        return Counter(str(node.target) for node in self.program.graph.nodes if node.name in begun)

    def explain(self, name: str) -> str:
        """Explain a tensor's layout: one line per node, from the batch's entry to the tensor.

        Raises:
            NamesMismatchError: there is no tensor of that name.
        """
        node = self._node(name)
        lines: list[str] = []
        while node is not None:
            lines.append(
                f"{node.name}: {_call_text(node)} → "
                f"{_text(self._by_node[node])}{_source_line(node)}"
            )
            node = self._cause(node)
        return "\n".join([*reversed(lines), f"{name} is {_text(self[name])}"])

    def _node(self, name: str) -> Any:
        program = self.program
        for group in (
            {n: program.changed.get(node, node) for n, node in program.states.items()},
            {n: program.changed.get(node, node) for n, node in program.inputs.items()},
            program.outputs,
            {n.name: n for n in self._by_node},
        ):
            if name in group:
                return group[name]
        self[name]
        raise AssertionError(name)

    def _cause(self, node: Any) -> Any:
        """The operand that determines a node's layout: equally Unknown, or partial, or cut.

        The latest if there are several.
        """
        own = self._by_node[node]
        telling = [
            n
            for n in self._by_node
            if n in node.all_input_nodes
            and any(layout != Replicate() for layout in _each(self._by_node[n]))
        ]
        if isinstance(own, Unknown):
            telling = [n for n in telling if own in _each(self._by_node[n])]
        alike = [n for n in telling if self._by_node[n] == own]
        return next(reversed(alike or telling), None)


def batch_dims(
    exported: Any,
    batch: Mapping[str, int] | None = None,
    *,
    even_counts: bool = False,
    local_batch_norm: bool = False,
) -> BatchDims:
    """Infer the layout of every tensor of a program over equal parts of its batch.

    Args:
        exported: a `torch.export.ExportedProgram`, of a forward pass or joint with its backward
            pass, or a `torch.fx.GraphModule` of functional ATen operators whose nodes have
            `meta["val"]`.
        batch: input or buffer → the dimension that is its batch. Optional for a graph with one
            dynamic dimension. In a graph with dynamic shapes every other input with the same symbol
            is cut, too.
        even_counts: masks have the same number of true elements in every part of the batch. The
            mean loss over targets that are not ignored is then the mean of the parts' means, as
            data-parallel training assumes; otherwise it is Unknown.
        local_batch_norm: batch normalisation in training by the statistics of each process's own
            part is intended, as in data-parallel training without SyncBatchNorm. This function
            differs from normalisation over the complete batch. Its result is then cut, and later
            results apply to the parts' results put together; if False, the result is Unknown.

    Raises:
        OptionError: there is no such input or dimension, the batch has several sizes, or the batch
            was not named and cannot be inferred.
    """
    program = Program.of(exported)
    size, given = _batch_of(program, batch)
    inputs: dict[Any, Layout] = {**_with_symbol(program, size), **given}
    settled = _settle(program, inputs, size, Assumptions(even_counts, local_batch_norm))
    known = {node: _in_numbers(node, result, size) for node, result in settled.items()}
    return BatchDims(
        program,
        {node.name: result for node, result in known.items()},
        {name: _single(known[node]) for name, node in program.states.items()},
        {name: _single(known[node]) for name, node in program.inputs.items()},
        {name: _single(known[node]) for name, node in program.outputs.items()},
        known,
    )


def _in_numbers(node: Any, result: Result, batch: BatchSize) -> Result:
    """The layout, if it has no symbols; a size that is not known yet cannot be a number of runs."""
    if isinstance(result, tuple):
        return tuple(_single(_in_numbers(node, layout, batch)) for layout in result)
    if isinstance(result, Shard | Numbered) and not batch.is_literal(result.outer):
        return Unknown(
            f"dimension {result.dim} has the batch behind another dynamic size", node.name
        )
    return result


def _single(result: Result) -> Layout:
    assert not isinstance(result, tuple)
    return result


# --- The batch ------------------------------------------------------------------------------------


def _batch_of(
    program: Program, batch: Mapping[str, int] | None
) -> tuple[BatchSize, dict[Any, Layout]]:
    """The size of the batch, and the layouts of the named inputs."""
    if not batch:
        symbols = {
            str(expr): size
            for node in _tensors(program)
            for size in node.meta["val"].shape
            if (expr := symbol_of(size)) is not None
        }
        if len(symbols) != 1:
            raise OptionError(
                f"batch_dims: {len(symbols)} dimensions of the inputs are dynamic "
                f"({', '.join(symbols) or 'none'}), so the batch is not clear; name an input and "
                "its dimension: batch={'input': 0}."
            )
        return _checked_size(next(iter(symbols.values()))), {}
    sizes: dict[str, Any] = {}
    given: dict[Any, Layout] = {}
    for name, dim in batch.items():
        node = program.placeholder(name)
        shape = getattr(node.meta["val"], "shape", ())
        if type(dim) is not int or not 0 <= dim < len(shape):
            raise OptionError(
                f"batch_dims: {name!r} of shape {tuple(shape)} has no dimension {dim!r}; give one "
                f"from 0 to {len(shape) - 1}."
            )
        sizes[f"{name!r} has {shape[dim]} in dimension {dim}"] = shape[dim]
        given[node] = Shard(dim)
    if len(set(map(str, sizes.values()))) > 1:
        raise OptionError(
            f"batch_dims: all batch dimensions need one size, but {' and '.join(sizes)}."
        )
    return _checked_size(next(iter(sizes.values()))), given


def _checked_size(size: Any) -> BatchSize:
    expr = symbol_of(size)
    if expr is not None and not expr.is_Symbol:
        raise OptionError(
            f"batch_dims: the batch's size is {expr}; export it as a dimension of its own, "
            "torch.export.Dim('batch')."
        )
    if expr is None and int(size) < 2:
        raise OptionError(
            f"batch_dims: a batch of {int(size)} looks like any dimension of one element; trace "
            "the program with more."
        )
    return BatchSize(size)


def _tensors(program: Program) -> list[Any]:
    return [
        node
        for node in (*program.inputs.values(), *program.states.values())
        if hasattr(node.meta["val"], "shape")
    ]


def _with_symbol(program: Program, batch: BatchSize) -> dict[Any, Layout]:
    """Inputs whose shape contains the batch's symbol, and plain numbers equal to its size."""
    layouts: dict[Any, Layout] = {}
    for node in (*program.inputs.values(), *program.states.values()):
        try:
            shape = batch.shape(getattr(node.meta["val"], "shape", ()))
            if symbol_of(node.meta["val"]) is not None:
                layouts[node] = Replicate(batch.power(node.meta["val"]))
        except Undecided as reason:
            layouts[node] = Unknown(str(reason), node.name)
            continue
        cut = [d for d, size in enumerate(shape) if batch.divides(size) and not batch.literal_sizes]
        if cut:
            layouts[node] = Shard(cut[0])
    return layouts


# --- State that the program changes ---------------------------------------------------------------


def _settle(
    program: Program, inputs: dict[Any, Layout], batch: BatchSize, assume: Assumptions
) -> dict[Any, Result]:
    """The layouts of all nodes, such that changed state keeps its layout from step to step."""
    left = {node: _candidates(node, batch) for node in program.changed if node not in inputs}
    first: dict[Any, Result] = {}
    while True:
        known = propagate(program.graph, inputs, batch, assume)
        first = first or known
        moving = [
            node
            for node, new in program.changed.items()
            if known[new] != known[node] and not isinstance(known[node], Unknown)
        ]
        if not moving:
            return known
        for node in moving:
            if left.get(node):
                inputs[node] = left[node].pop(0)
            else:
                inputs[node] = _no_layout(node, _single(first[program.changed[node]]))


def _candidates(node: Any, batch: BatchSize) -> list[Layout]:
    """The candidate layouts of state that is not replicated, in the order of the attempts."""
    try:
        shape = batch.shape(node.meta["val"].shape)
    except Undecided:
        return []
    cut: list[Layout] = [Shard(d) for d, size in enumerate(shape) if batch.divides(size)]
    return [*cut, Partial("sum"), Partial("sum", -1), Partial("max"), Partial("min")]


def _no_layout(node: Any, first: Layout) -> Unknown:
    if isinstance(first, Unknown):
        return first
    return Unknown(
        f"it is {first} after one step from a replicated start, and no layout stays the same from "
        "step to step",
        node.name,
    )


# --- Text -----------------------------------------------------------------------------------------


def _each(result: Result) -> tuple[Layout, ...]:
    return result if isinstance(result, tuple) else (result,)


def _origins(result: Result) -> list[str]:
    return [layout.node for layout in _each(result) if isinstance(layout, Unknown)]


def _text(result: Result) -> str:
    return ", ".join(map(str, _each(result)))


def _call_text(node: Any) -> str:
    shape = getattr(node.meta.get("val"), "shape", None)
    shaped = "" if shape is None else f" of shape [{', '.join(map(str, shape))}]"
    if node.op != "call_function":
        return f"input{shaped}"
    name = (
        getattr(node.target, "__name__", str(node.target))
        if not str(node.target).startswith("aten.")
        else str(node.target)
    )
    return f"{name}({', '.join(n.name for n in node.all_input_nodes)}){shaped}"


def _source_line(node: Any) -> str:
    """The place of a node in the user's program, if the graph records it."""
    trace = node.meta.get("stack_trace") or ""
    lines = [
        (path, line)
        for path, line in re.findall(r'File "([^"]*)", line (\d+)', trace)
        if "/torch/" not in path
    ]
    return f"  # {lines[-1][0].rpartition('/')[2]}:{lines[-1][1]}" if lines else ""
