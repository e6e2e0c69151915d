"""An optimizer's state that follows the tensors of its modules in a restore.

The restore renames, joins, splits or fits these tensors.

What has the shape of a parameter (Adam's moments) is joined, split and fitted as the parameter is.
What has one element, and what is no tensor (the number of steps), must be equal for all parameters
that are joined, and each parameter that is split off gets it. Any other state has no meaning for
the new parameter, and is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from shardckpt.errors import StructureMismatchError
from shardckpt.plan.views import View
from shardckpt.reading.naming.outputs import OutputTensor
from shardckpt.state.document import Branch, Small, Tensor, Tied
from shardckpt.state.names import child_name, shown
from shardckpt.text import few

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.naming.adapt import Adaptation
    from shardckpt.reading.read_list import MadeTensor
    from shardckpt.state.document import Node
    from shardckpt.state.names import PathKey
    from shardckpt.training.optimizer_state.forms import Group, OptimizerNodes

_ADVICE = 'restore without the optimizer, as with only=["model/**", "step"]'
_ONE_VALUE = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of torch's optimizers for one value, also where the parameter has no dimension or one
element."""
_FACTORS = frozenset({"row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col"})
"""Keys of Adafactor's sums over a row or a column, also where these happen to have the parameter's
shape or one element."""
_UNFACTORED = "variance"
"""Adafactor's key of a parameter with fewer than two dimensions; others have sums of rows and
columns."""


def place_of(parameter: str, modules: Sequence[str]) -> str:
    """The place of a parameter in the state of the modules, from its name in an optimizer.

    >>> place_of("a.weight", ["model", "ema"]), place_of("ema.a.weight", ["model", "ema"])
    ('model/a.weight', 'ema/a.weight')
    """
    key, _, rest = parameter.partition(".")
    return f"{key}/{rest}" if rest and key != "model" and key in modules else f"model/{parameter}"


def follow(nodes: OptimizerNodes, adaptation: Adaptation, modules: Sequence[str]) -> OptimizerNodes:
    """A stored optimizer with the names and the parameters of `like`.

    Args:
        nodes: its state, by the names of parameters.
        adaptation: what becomes of the modules' tensors.
        modules: keys of the modules.

    Raises:
        StructureMismatchError: parameters that are joined have state that cannot be.
    """
    return _Following(nodes, adaptation, modules).done()


class _Following:
    def __init__(
        self, nodes: OptimizerNodes, adaptation: Adaptation, modules: Sequence[str]
    ) -> None:
        self.nodes = nodes
        self.adaptation = adaptation
        self.places = {str(member): self._place(str(member), modules) for member in nodes.members()}
        self.group_of = {str(member): group for group in nodes.groups for member in group.members}
        self.said_by = {
            str(m): leaf
            for group in nodes.groups
            for m, leaf in zip(group.members, group.said_by, strict=True)
        }
        self.equal: list[tuple[str, list[str]]] = []
        """Stored tensors that must be equal, with the name of what is made of them."""

    def _place(self, parameter: str, modules: Sequence[str]) -> str:
        """The stored place of a parameter; the key of its module may be another one than now."""
        key, _, rest = parameter.partition(".")
        likely = (place_of(parameter, modules), f"model/{parameter}", f"{key}/{rest}")
        return next((place for place in likely if place in self.adaptation.stored), likely[0])

    def done(self) -> OptimizerNodes:
        members = {
            name: [self._short(self.adaptation.renamed(place))]
            for name, place in self.places.items()
        }
        state = {
            members[str(key)][0] if str(key) in members else key: node
            for key, node in self.nodes.state.items()
        }
        by_tensor = {
            stored: name
            for name, place in reversed(self.places.items())
            if (stored := self._stored_name(place)) is not None
        }
        made: dict[str, list[str]] = {}
        joined: dict[PathKey, Node] = {}
        for name, tensor in list(self.adaptation.made.items()):
            place = self.adaptation.places[name]
            sources = list(dict.fromkeys(record.name for _, record in tensor.sources))
            parts = [by_tensor[source] for source in sources if source in by_tensor]
            if not parts:
                continue
            new = self._short(place)
            if len(parts) < len(sources) or any(
                self.group_of[part] is not self.group_of[parts[0]] for part in parts
            ):
                raise StructureMismatchError(
                    f"{shown(self.nodes.name)}: {new} is made of {few(sources, 3)}, which are not "
                    f"all in one of its groups; {_ADVICE}."
                )
            node = self._join(new, tensor, {part: self.nodes.state.get(part) for part in parts})
            made.setdefault(parts[0], []).append(new)
            for moved in [moved for part in parts for moved in members[part]]:
                state.pop(moved, None)
            members |= {part: [] for part in parts}
            if node is not None:
                joined[new] = node
        members |= made
        self._check_equal()
        groups = tuple(self._group(group, members) for group in self.nodes.groups)
        return replace(self.nodes, form="listed", state=state | joined, groups=groups)

    def _group(self, group: Group, members: Mapping[str, list[str]]) -> Group:
        pairs = [
            (new, self.said_by[str(member)])
            for member in group.members
            for new in members[str(member)]
        ]
        return replace(
            group, members=tuple(new for new, _ in pairs), said_by=tuple(leaf for _, leaf in pairs)
        )

    def _short(self, place: str) -> str:
        key, _, rest = place.partition("/")
        return rest if key == "model" else f"{key}.{rest}"

    def _stored_name(self, place: str) -> str | None:
        """The name under which the tensor of a place is stored."""
        return self.adaptation.stored.get(place)

    def _join(self, new: str, tensor: MadeTensor, parts: Mapping[str, Node | None]) -> Node | None:
        """The state of a parameter that is made of others."""
        nodes = [node for node in parts.values() if node is not None]
        if not nodes:
            return None
        name = child_name(child_name(self.nodes.name, "state"), new)
        keys = [list(node.keys) if isinstance(node, Branch) else None for node in nodes]
        if (
            len(nodes) < len(parts)
            or None in keys
            or any(set(one or ()) != set(keys[0] or ()) for one in keys)
        ):
            raise StructureMismatchError(
                f"{shown(name)}: {few(list(parts), 3)} have different kinds of state, so it "
                f"cannot be made; {_ADVICE}."
            )
        by_part = dict(zip(parts, nodes, strict=True))
        entries_by_key: dict[PathKey, Node] = {}
        for key in keys[0] or ():
            entries = {
                part: node.children[list(node.keys).index(key)]
                for part, node in by_part.items()
                if isinstance(node, Branch)
            }
            entries_by_key[key] = self._entry(child_name(name, str(key)), str(key), tensor, entries)
        return Branch(name, "dict", list(entries_by_key), list(entries_by_key.values()))

    def _entry(self, name: str, key: str, tensor: MadeTensor, entries: Mapping[str, Node]) -> Node:
        nodes = list(entries.values())
        if all(isinstance(node, Small) for node in nodes):
            if any(
                node.content != nodes[0].content
                for node in nodes
                if isinstance(node, Small) and isinstance(nodes[0], Small)
            ):
                raise self._unequal(name, [node.name for node in nodes])
            return nodes[0]
        stored = [node.stored for node in nodes if isinstance(node, Tensor | Tied)]
        records = [self.adaptation.tensor(one) for one in stored]
        if len(stored) < len(nodes) or any(record.dtype != records[0].dtype for record in records):
            raise StructureMismatchError(
                f"{shown(name)}: {few([node.name for node in nodes], 3)} cannot be joined or "
                f"split; {_ADVICE}."
            )
        shapes = [
            self.adaptation.tensor(self._stored_name(self.places[part]) or "").shape
            for part in entries
        ]
        follows = key not in _FACTORS and (
            key != _UNFACTORED or len(tensor.shape) == len(shapes[0])
        )
        if key not in _ONE_VALUE and follows and [record.shape for record in records] == shapes:
            of_part = {
                self._stored_name(self.places[part]): record.name
                for part, record in zip(entries, records, strict=True)
            }
            views = tuple(
                replace(view, tensor=of_part[whole.name]) for view, whole in tensor.sources
            )
            return Tensor(
                self.adaptation.make(
                    name, OutputTensor(name, tensor.shape, records[0].dtype, views)
                )
            )
        if not follows or any(prod(record.shape) != 1 for record in records):
            raise StructureMismatchError(
                f"{shown(name)}: {shown(stored[0])} has the shape {records[0].shape}, so nothing "
                f"can be made of it; {_ADVICE}."
            )
        if len(stored) > 1:
            self.equal.append((name, stored))
        view = View.whole(stored[0], records[0].shape)
        return Tensor(
            self.adaptation.make(
                name, OutputTensor(name, records[0].shape, records[0].dtype, (view,))
            )
        )

    def _check_equal(self) -> None:
        """Read the tensors that must be equal, and compare them."""
        elements = (
            iter(self.adaptation.elements([name for _, stored in self.equal for name in stored]))
            if self.equal
            else iter(())
        )
        for name, stored in self.equal:
            values = [next(elements).tobytes() for _ in stored]
            if any(value != values[0] for value in values):
                raise self._unequal(name, stored)

    def _unequal(self, name: str, stored: Sequence[str]) -> StructureMismatchError:
        return StructureMismatchError(
            f"{shown(name)} would be made of {few(stored, 3)}, which are not equal: one parameter "
            f"has one value; {_ADVICE}."
        )


def fit_state(
    node: Node, parameter: TensorRecord, shape: Sequence[int], adaptation: Adaptation
) -> None:
    """Fit the state of a parameter whose shape differs from the stored one, and that `fit` selects.

    Args:
        node: the state of the parameter.
        parameter: its stored tensor.
        shape: its shape in `like`.
        adaptation: knows what `fit` says; is told of the state.

    Raises:
        StructureMismatchError: a part of the state has neither the parameter's shape nor one
            element.
    """
    mode = adaptation.mode(parameter.name)
    if mode is None or parameter.shape == tuple(shape):
        return
    for leaf in _tensors(node):
        if isinstance(leaf, Branch):
            own, is_known = leaf.composite and leaf.composite.shape, False
        else:
            own, key = adaptation.tensor(leaf.stored).shape, leaf.name.rpartition("/")[2]
            is_known = key not in _FACTORS and (
                prod(own) == 1 or adaptation.mode(leaf.stored) is not None
            )
            if own == parameter.shape and key not in _ONE_VALUE | _FACTORS:
                adaptation.fit_like(leaf.stored, mode)
                continue
        if not is_known:
            raise StructureMismatchError(
                f"{shown(leaf.name)} has the shape {own}, and {shown(parameter.name)}, which it "
                f"belongs to, changes from {parameter.shape} to {tuple(shape)} (fit=): it is not "
                f"known what becomes of it; {_ADVICE}."
            )


def _tensors(node: Node) -> Iterator[Tensor | Tied | Branch]:
    """The tensors of a state; composite ones as they are."""
    if isinstance(node, Tensor | Tied) or (isinstance(node, Branch) and node.composite is not None):
        yield node
    elif isinstance(node, Branch):
        for below in node.children:
            yield from _tensors(below)
