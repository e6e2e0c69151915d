"""Optimizers of an exported state, in the forms that torch loads.

`train_state` stores an optimizer by the names of its parameters, in its own form
(`training.optimizer_state.forms`), which no other program loads. Each optimizer in the state is
rewritten in the requested form; schedulers get lists in the order of the optimizer's groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.format.structure import Structure
from shardckpt.state.document import Branch, Tensor, Tied, child, leaves_of, write
from shardckpt.state.listing import meanings
from shardckpt.state.names import child_name, component_names, shown
from shardckpt.text import few
from shardckpt.training.optimizer_state.forms import FORMS, map_schedules, read_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from shardckpt.reading.naming.outputs import OutputTensor
    from shardckpt.state.document import Node
    from shardckpt.training.optimizer_state.forms import OptimizerNodes


def with_optimizers_as(
    form: str, structure: Structure, outputs: Sequence[OutputTensor], state: Node
) -> tuple[Structure, list[OutputTensor], tuple[str, ...]]:
    """Rewrite the optimizers of an export in another form.

    Args:
        form: one of `FORMS`.
        structure: the exported structure.
        outputs: the outputs of its tensors, one for each.
        state: the complete stored state, which has the optimizers' modules.

    Returns:
        Structure and outputs in that form, with the names that follow from it, and a note for each
        optimizer.
    """
    root = structure.nodes
    notes: list[str] = []
    arranged = _arrange(root, state, form, notes)
    if not notes:
        return structure, list(outputs), ()
    naming = _Naming(meanings(root))
    tree = write(naming.visit(arranged, ""))
    new = naming.first_names
    tensors = {
        new[name]: replace(tensor, name=new[name])
        for name, tensor in structure.tensors.items()
        if name in new
    }
    return (
        Structure(tree, tensors),
        [replace(output, name=new[output.name]) for output in outputs if output.name in new],
        tuple(notes),
    )


def notes_of_parts(state: Node, selected: Collection[str]) -> Iterator[str]:
    """A note for each optimizer of a state that is exported only in part.

    Args:
        state: the complete stored state.
        selected: the names of its leaves that are exported.
    """
    for node in state.children if isinstance(state, Branch) else ():
        nodes = read_optimizer(node)
        if nodes is None:
            yield from notes_of_parts(node, selected)
            continue
        names = [leaf.name for leaf in leaves_of(node)]
        left_out = [name for name in names if name not in selected]
        if 0 < len(left_out) < len(names):
            yield f"{shown(nodes.name)} is written without {few(left_out)}."


def _arrange(node: Node, state: Node, form: str, notes: list[str]) -> Node:
    """Rewrite the optimizers below a node in another form.

    The schedulers that depend on the optimizers' groups are rewritten as well.
    """
    if not isinstance(node, Branch):
        return node
    rewritten: list[OptimizerNodes] = []
    children: list[Node] = []
    for below in node.children:
        nodes = read_optimizer(below)
        if nodes is None:
            children.append(_arrange(below, state, form, notes))
        elif (
            nodes.form == "numbered"
            or (nodes.form == "flat" and form != "flat")
            or (nodes.form == "listed" and form == "names")
        ):
            children.append(below)  # kept: it has a fitting form, or cannot be rewritten
        else:
            rewritten.append(nodes)
            children.append(FORMS[form](_of_its_module(nodes, state)))
            notes.append(_note(nodes, form))
    return map_schedules(replace(node, children=children), _listing(rewritten))


def _listing(optimizers: Sequence[OptimizerNodes]) -> Callable[[Branch, Branch], Node | None]:
    """A function that turns a scheduler's values by group into a list in the groups' order."""

    def listed(_scheduler: Branch, of_each: Branch) -> Node | None:
        known = (
            dict(zip(of_each.keys, of_each.children, strict=True)) if of_each.form == "dict" else {}
        )
        for nodes in optimizers:
            firsts = nodes.firsts()
            if known and known.keys() == set(firsts):
                return Branch(
                    of_each.name, "list", range(len(firsts)), [known[first] for first in firsts]
                )
        return None

    return listed


def _of_its_module(nodes: OptimizerNodes, state: Node) -> OptimizerNodes:
    """Remove the module's keyword before parameter names, if all belong to one module.

    The keyword was put before the parameter names by `train_state`.
    """
    names = [str(member) for member in nodes.members()]
    keyword, _, first = names[0].partition(".") if names else ("", "", "")
    if (
        not first
        or any(not name.startswith(f"{keyword}.") for name in names)
        or child(child(state, "model"), names[0]) is not None
    ):
        return nodes
    if child(child(state, keyword), first) is None:
        return nodes
    return nodes.renamed(lambda name: str(name).removeprefix(f"{keyword}."))


def _note(nodes: OptimizerNodes, form: str) -> str:
    empty = sum(not group.members for group in nodes.groups)
    lost = (
        f"; settings of {empty} groups without parameters are left out"
        if empty and form == "flat"
        else ""
    )
    how = {
        "names": "as set_optimizer_state_dict loads it, by the names of parameters",
        "numbers": "as Optimizer.load_state_dict loads it, by the numbers of parameters",
        "flat": "flat, as set_optimizer_state_dict loads it into any groups and stages",
    }
    return f"{shown(nodes.name)} is written {how[form]}{lost}."


class _Naming:
    """Renames the leaves of a rearranged state, which still have their old names."""

    def __init__(self, meaning: Mapping[str, str]) -> None:
        self.meaning = meaning
        self.first_names: dict[str, str] = {}
        """Old stored name of a tensor → its first new name."""

    def visit(self, node: Node, name: str) -> Node:
        if isinstance(node, Branch):
            parts = zip(component_names(node.keys), node.children, strict=True)
            return replace(
                node,
                name=name,
                children=[self.visit(below, child_name(name, part)) for part, below in parts],
            )
        if isinstance(node, Tensor | Tied):
            first = self.first_names.setdefault(node.stored, name)
            return (
                Tensor(name, self.meaning.get(node.stored)) if first == name else Tied(name, first)
            )
        return replace(node, name=name)
