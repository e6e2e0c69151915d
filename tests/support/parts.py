"""The oracle of batch dimensions: a program run over a whole batch, and over equal parts of it,
node by node.

What each process holds of the inputs is made from the layouts that were found of them: a partial
sum, of terms that differ.
"""

from __future__ import annotations

import torch
from torch.fx import Interpreter

from shardckpt.reshard.batch_dims import Numbered, Replicate, Shard, Unknown


class Recorder(Interpreter):
    """Keeps what every node came to."""

    def run_node(self, node):
        value = super().run_node(node)
        self.values[node.name] = value
        return value


def values_of(graph_module, inputs):
    recorder = Recorder(graph_module)
    recorder.values = {}
    recorder.run(*inputs)
    return recorder.values


def cut(value, layout, parts):
    """Parts of an input, one for each process, by the input's layout."""
    if not isinstance(value, torch.Tensor) or isinstance(layout, Replicate | Unknown):
        power = getattr(layout, "power", 0)
        return [value // parts**power if power else value] * parts
    if isinstance(layout, Shard):
        unmerged = value.unflatten(layout.dim, (layout.outer, -1))
        return [
            part.flatten(layout.dim, layout.dim + 1)
            for part in unmerged.chunk(parts, layout.dim + 1)
        ]
    noise = [torch.randn_like(value) for _ in range(parts)]
    if layout.reduction == "sum":
        mean = sum(noise) / parts
        return [value / parts ** (layout.power + 1) + n - mean for n in noise]
    sign = -1 if layout.reduction == "max" else 1
    return [value if i == parts - 1 else value + sign * n.abs() for i, n in enumerate(noise)]


def whole(values, layout):
    """The whole value that the parts make up by the layout."""
    if isinstance(layout, Numbered):
        step = values[0].shape[layout.dim] // layout.outer
        return whole(
            [value + i * step for i, value in enumerate(values)], Shard(layout.dim, layout.outer)
        )
    scale = len(values) ** layout.power
    if isinstance(layout, Replicate):
        for value in values[1:]:
            assert same(value, values[0]), (layout, values)
        return values[0] * scale if layout.power else values[0]
    if isinstance(layout, Shard):
        unmerged = [value.unflatten(layout.dim, (layout.outer, -1)) for value in values]
        joined = torch.cat(unmerged, layout.dim + 1).flatten(layout.dim, layout.dim + 1)
        return joined * scale if layout.power else joined
    stacked = torch.stack([v.to(torch.uint8) if v.dtype == torch.bool else v for v in values])
    if layout.reduction == "sum":
        return stacked.sum(0) * scale
    return (stacked.amax(0) if layout.reduction == "max" else stacked.amin(0)).to(values[0].dtype)


def same(a, b):
    if not isinstance(a, torch.Tensor):
        return a == b
    return a.shape == b.shape and torch.allclose(
        a.double(), b.double(), rtol=1e-3, atol=2e-4, equal_nan=True
    )


def is_undefined(node):
    """Whether running a node twice gives different numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or "empty" in str(
        node.target
    )


def contradictions(inferred, graph_module, inputs, parts, part_graph=None):
    """Nodes whose values are not what was claimed of them; and how many claims there were.

    Args:
        inferred: the `BatchDims` of the graph.
        graph_module: the program.
        inputs: all of its placeholders' values, in order.
        parts: how many processes.
        part_graph: the same program traced for a part, where sizes are fixed; None: the program
            itself takes any.
    """
    placeholders = [node.name for node in inferred.program.graph.nodes if node.op == "placeholder"]
    full = values_of(graph_module, inputs)
    pieces = [
        cut(value, inferred.nodes[name], parts)
        for name, value in zip(placeholders, inputs, strict=True)
    ]
    runs = [
        values_of(part_graph or graph_module, [piece[i] for piece in pieces]) for i in range(parts)
    ]
    undefined = {node.name for node in inferred.program.graph.nodes if is_undefined(node)}
    wrong, claims = [], 0
    for name, layouts in inferred.nodes.items():
        several = isinstance(layouts, tuple)
        for i, layout in enumerate(layouts if several else [layouts]):
            value, held = full[name], [run[name] for run in runs]
            if several:
                value, held = value[i], [part[i] for part in held]
            if (
                isinstance(layout, Unknown)
                or value is None
                or isinstance(value, tuple | list)
                or name in undefined
            ):
                continue
            claims += 1
            try:
                right = same(whole(held, layout), value)
            except (RuntimeError, AssertionError, IndexError) as e:
                right = f"{type(e).__name__}: {e}"
            if right is not True:
                wrong.append((name, str(layout), right))
    return wrong, claims


def exported_inputs(exported, arguments):
    """Values of all placeholders of an exported program, for these arguments."""
    values = iter(torch.utils._pytree.tree_leaves(arguments))
    state = {**exported.state_dict, **exported.constants}
    return [
        next(values) if spec.target is None else state[spec.target].detach()
        for spec in exported.graph_signature.input_specs
    ]
