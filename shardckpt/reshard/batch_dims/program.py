"""The names of a graph's inputs and outputs, and the outputs that are inputs of the next step.

The signature of a `torch.export.ExportedProgram` gives full names of parameters, buffers and
constants, the buffers and inputs that the program changes, and gradients in a joint graph. A plain
`torch.fx.GraphModule` gives only the names of its placeholders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardckpt.errors import OptionError


@dataclass(frozen=True, slots=True)
class Program:
    """A functional graph of ATen operators with names."""

    graph: Any
    """The `torch.fx.Graph`."""
    states: dict[str, Any]
    """Parameters, buffers and constants by full name → their placeholders."""
    kept: tuple[str, ...]
    """States that `state_dict()` has: no constants, and no buffers that are not persistent."""
    inputs: dict[str, Any]
    """The caller's arguments, by name → placeholders."""
    changed: dict[Any, Any]
    """Placeholders of states and inputs that the program changes → the nodes of their new values.

    A state and an input may have one name.
    """
    outputs: dict[str, Any]
    """All other results, by name → nodes. Gradients have their parameters' names, with `.grad`."""

    @classmethod
    def of(cls, exported: Any) -> Program:
        """Read an `ExportedProgram`, or a `GraphModule`.

        Raises:
            OptionError: `exported` is neither, or the shapes of its tensors are not known.
        """
        signature = getattr(exported, "graph_signature", None)
        if signature is not None:
            if signature.backward_signature is None:
                exported = exported.run_decompositions()
            program = _of_exported(exported)
        elif hasattr(exported, "graph") and hasattr(exported.graph, "nodes"):
            program = _of_graph(exported.graph)
        else:
            raise OptionError(
                f"batch_dims: a {type(exported).__name__} is not a graph; give what "
                "torch.export.export returns, or a torch.fx.GraphModule."
            )
        for node in program.graph.nodes:
            if node.op in {"call_method", "call_module"} or getattr(
                getattr(node.target, "_schema", None), "is_mutable", False
            ):
                raise OptionError(
                    f"batch_dims: {node.name} ({node.target}) is not a functional ATen operator, "
                    "so what it does to layouts cannot be followed; give what torch.export.export "
                    "returns, or trace with make_fx(torch.func.functionalize(…))."
                )
            if node.op == "placeholder" and "val" not in node.meta:
                raise OptionError(
                    f"batch_dims: the graph does not say the shape of {node.name}; trace it with "
                    'make_fx(…, tracing_mode="symbolic").'
                )
        return program

    def placeholder(self, name: str) -> Any:
        """The placeholder of an input, or of a state if no input has the name.

        Raises:
            OptionError: there is no placeholder of that name.
        """
        for group in (self.inputs, self.states):
            if name in group:
                return group[name]
        raise OptionError(
            f"batch_dims: the program has no input {name!r}; it has "
            f"{', '.join(map(repr, (*self.inputs, *self.states)))}."
        )


def _of_exported(exported: Any) -> Program:
    signature, nodes = exported.graph_signature, {node.name: node for node in exported.graph.nodes}
    states: dict[str, Any] = {}
    kept: list[str] = []
    inputs: dict[str, Any] = {}
    for spec in signature.input_specs:
        node = nodes.get(getattr(spec.arg, "name", None))
        if node is not None:
            (inputs if spec.target is None else states)[spec.target or node.name] = node
            if spec.kind.name == "PARAMETER" or (spec.kind.name == "BUFFER" and spec.persistent):
                kept.append(spec.target)
    changed: dict[Any, Any] = {}
    outputs: dict[str, Any] = {}
    for spec in signature.output_specs:
        node, kind = nodes.get(getattr(spec.arg, "name", None)), spec.kind.name
        if node is None:
            continue
        if kind == "BUFFER_MUTATION":
            changed[states[spec.target]] = node
        elif kind == "USER_INPUT_MUTATION":
            changed[inputs[spec.target]] = node
        else:
            outputs[f"{spec.target}.grad" if kind.startswith("GRADIENT") else node.name] = node
    return Program(exported.graph, states, tuple(kept), inputs, changed, outputs)


def _of_graph(graph: Any) -> Program:
    inputs = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    (output,) = [node for node in graph.nodes if node.op == "output"]
    return Program(graph, {}, (), inputs, {}, {node.name: node for node in output.all_input_nodes})
