"""A `torch.optim.Optimizer` whose state goes by parameter names instead of numbers.

An optimizer numbers its parameters in the order in which it received them. Another order, other
parameter groups or another wrapping of the model give other numbers. So the saved state goes by
name:

    {"state": {parameter: {"exp_avg": tensor, "step": tensor, …}},
     "param_groups": {first parameter of the group: {"lr": 0.001, …}},
     "group_of": {parameter: first parameter of its group}}

Restoring
1. Each parameter's state goes to the parameter of the same name. If the optimizer has no state yet,
   because it has made no step, tensors of the parameter's shape are made like the parameter (with
   its sharding), and all others on the CPU.
2. A group gets the settings that its parameters had when they were saved. They may come from
   several groups, if those had equal settings.
3. `load_state_dict` then takes everything, in the optimizer's own numbers. It converts state to the
   parameter's dtype; state of another dtype (float32 moments of a bfloat16 parameter) is then put
   back unchanged.

State that torch or DCP has stored in another form (`optimizer_state.forms`) is first converted to
this one. Numbers in it are positions in the optimizer, so its groups must be as long as the stored
ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from shardckpt import frameworks
from shardckpt.errors import LeafError, StructureMismatchError
from shardckpt.frameworks.base import Target
from shardckpt.frameworks.dcp_protocol import described_like, describes_itself
from shardckpt.state.document import Branch, Tensor, Tied, child, leaves_of
from shardckpt.state.moving import ends_by_place
from shardckpt.state.names import child_name, shown
from shardckpt.text import shorten
from shardckpt.training.likeness import LEFT_OUT, StoredLeaves, fitting, mirror, new_tensor
from shardckpt.training.optimizer_state.forms import OptimizerNodes, group_name, read_optimizer
from shardckpt.training.optimizer_state.loaded import put_back_as_stored
from shardckpt.training.optimizer_state.settings import OF_THE_GROUP, check_class, settings_of_group

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.naming.adapt import Adaptation
    from shardckpt.state.document import Node

_OF_FABRIC = "_forward_module."
"""The beginning of the names that 0.2.0 gave to the parameters of a module that Lightning Fabric
wraps."""
_NO_MOMENT = "step"
"""State entry that counts steps, on the CPU; torch itself moves it where the optimizer needs it."""


class NamedOptimizer:
    """An optimizer, and the names of its parameters."""

    turn: ClassVar[int] = 1
    follows: ClassVar[bool] = True

    def __init__(
        self,
        key: str,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        modules: Collection[str] = (),
        earlier: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Find the name of each parameter.

        Args:
            key: the name that the optimizer is saved under.
            optimizer: any torch optimizer.
            names: parameter names, by the id of the Parameter.
            modules: keys of modules that prefix the names of their parameters.
            earlier: returns parameter names, by the name that 0.2.0 gave, where these differ.
                Restores alone need them.

        Raises:
            LeafError: a parameter has no name, or two have the same.
        """
        self.optimizer = optimizer
        self.key = key
        self._modules = ["model", *modules]
        self._earlier = earlier
        self._adapted: OptimizerNodes | None = None
        self.parameters: dict[str, Any] = {}
        """Parameters by name, in the order of their numbers."""
        self.groups: list[list[str]] = []
        """Parameter names of each group."""
        self.group_of: Mapping[str, str] = {}
        """The group of each parameter in the state that was restored last."""
        for number, group in enumerate(optimizer.param_groups):
            self.groups.append([])
            for position, parameter in enumerate(group["params"]):
                name = names.get(id(parameter))
                if name is None:
                    raise LeafError(
                        f"{shown(key)}: parameter {position} of group {number}, of shape "
                        f"{tuple(parameter.shape)}, is in none of the modules that were given; "
                        "give train_state the module that has it, such as model=…, so that it "
                        "has a name."
                    )
                if self.parameters.setdefault(name, parameter) is not parameter:
                    first = next(n for n, names in enumerate(self.groups) if name in names)
                    raise LeafError(
                        f"{shown(key)}: parameter {self.groups[first].index(name)} of group "
                        f"{first} and parameter {position} of group {number} are both called "
                        f"{name!r}: one module has the keyword that another one, model=…, uses "
                        "for a part of itself; give train_state another keyword for it."
                    )
                self.groups[-1].append(name)
        self._prefix = next(
            (
                f"{key}."
                for key in modules
                if all(name.startswith(f"{key}.") for name in self.parameters)
            ),
            "",
        )
        """The common prefix of all parameter names here; forms for a single module do not have
        it."""

    def firsts(self) -> list[str]:
        """The name of each group: the name of its first parameter."""
        return [group_name(members, number) for number, members in enumerate(self.groups)]

    def sources(self) -> list[list[str]]:
        """For each group, the names of its parameters' groups in the state restored last."""
        sources = []
        for first, members in zip(self.firsts(), self.groups, strict=True):
            sources.append(
                list(
                    dict.fromkeys(self.group_of[name] for name in members if name in self.group_of)
                )
                or [first]
            )
        return sources

    def collect(self) -> dict[str, Any]:
        """The state by name; its tensors are the optimizer's own."""
        packed = self.optimizer.state_dict()
        names = list(self.parameters)
        for key in packed["state"]:
            if not (isinstance(key, int) and 0 <= key < len(names)) and (
                not isinstance(key, str) or key in self.parameters
            ):
                raise LeafError(
                    f"{shown(self.key)}: {type(self.optimizer).__qualname__} keeps state under "
                    f"{shorten(key)}, which is neither one of its {len(names)} parameters nor a "
                    "text that differs from their names, so it cannot be named; use another key."
                )
        state = {
            names[number] if isinstance(number, int) else number: of_one
            for number, of_one in packed["state"].items()
        }
        for name, of_one in state.items():
            # A tensor like the parameter is the same shard of a global tensor.
            if describes_itself(self.parameters.get(name)):
                for value in of_one.values():
                    described_like(value, self.parameters[name])
        settings: dict[str, dict[str, Any]] = {}
        group_of: dict[str, str] = {}
        for first, group, members in zip(
            self.firsts(), packed["param_groups"], self.groups, strict=True
        ):
            settings[first] = {
                name: value for name, value in group.items() if name not in OF_THE_GROUP
            }
            group_of |= dict.fromkeys(members, first)
        rest = {
            name: value for name, value in packed.items() if name not in {"state", "param_groups"}
        }
        return {"state": state, "param_groups": settings, "group_of": group_of, **rest}

    def read(
        self, node: Node | None, state: Node, adaptation: Adaptation | None = None
    ) -> OptimizerNodes | None:
        """The stored state of an optimizer, in any form, with the parameter names used here.

        Args:
            node: the stored state.
            state: the complete stored state, which says which parameters are tied.
            adaptation: what becomes of the stored modules.

        Raises:
            StructureMismatchError: parameters go by numbers, and the groups have other lengths than
                here, or the names beside the numbers are those in a part of the module; or state
                cannot be joined.
        """
        nodes = read_optimizer(node)
        if nodes is None:
            return None
        if adaptation is not None and nodes.form != "numbered":
            from shardckpt.training.optimizer_state.moments import follow

            nodes = self._adapted = self._adapted or follow(nodes, adaptation, self._modules)
        if nodes.form == "named":
            own = self._own_names([str(name) for name in nodes.members()], state)
            changed = any(own[str(name)] != name for name in nodes.members())
            return (
                replace(nodes.renamed(lambda name: own[str(name)]), form="listed")
                if changed
                else nodes
            )
        if nodes.form != "numbered":
            nodes = nodes.renamed(
                lambda name: (
                    name
                    if name in self.parameters
                    else self._own_name(self.current_name(str(name)))
                )
            )
            if nodes.beside_numbers:
                self._check_complete(nodes, state)
            return nodes
        if adaptation is not None:
            from shardckpt.training.optimizer_state.moments import place_of

            places = {place_of(name, self._modules) for name in self.parameters}
            made = next(
                (place for name in adaptation.made if (place := adaptation.places[name]) in places),
                None,
            )
            if made is not None:
                raise StructureMismatchError(
                    f"{shown(nodes.name)} has numbers instead of parameter names, so it is not "
                    f"known what belongs to the tensors of which {shown(made)} is made; leave it "
                    "out with only=, or save the result of get_optimizer_state_dict, which has "
                    "names."
                )
        lengths, expected = (
            [len(group.members) for group in nodes.groups],
            [len(members) for members in self.groups],
        )
        if lengths != expected:
            raise StructureMismatchError(
                f"{shown(nodes.name)} has numbers instead of parameter names, in groups of "
                f"{lengths}, but the optimizer here has groups of {expected}; make the optimizer "
                "as for the save, or save the result of get_optimizer_state_dict, which has names."
            )
        names = dict(zip(nodes.members(), self.parameters, strict=True))
        return nodes.renamed(lambda number: names[number])

    def _check_complete(self, nodes: OptimizerNodes, state: Node) -> None:
        """Refuse `param_names` that are parameters here, and are names in a part of the module.

        Torch has what `named_parameters()` of any module returned.
        """
        from shardckpt.training.optimizer_state.moments import place_of

        names = {str(name) for name in nodes.members()}
        if names == self.parameters.keys() or names.isdisjoint(self.parameters):
            return
        places = ends_by_place(state)
        strange = next(
            (
                name
                for name in sorted(names - self.parameters.keys())
                if place_of(self._prefix + name, self._modules) not in places
            ),
            None,
        )
        if strange is not None:
            raise StructureMismatchError(
                f"{shown(nodes.name)}: its param_names have {strange!r}, which is not the name of "
                "a stored parameter, so they may be names in a part of the module, and not those "
                "here; leave it out with only=, or save the result of get_optimizer_state_dict, "
                "which has the names in the complete module."
            )

    def arranged(self, node: Node, state: Node, adaptation: Adaptation | None = None) -> Node:
        """The stored state in the form that `collect` makes.

        Unchanged if it is not recognized as an optimizer's.
        """
        nodes = self.read(node, state, adaptation)
        return node if nodes is None or nodes.form == "named" else nodes.named()

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        """The restore target for a stored optimizer, as `arranged`.

        `LEFT_OUT` where no part is requested.

        Raises:
            OptionError: only a part of the groups, or of one parameter's state, is requested.
            StructureMismatchError: the stored settings are of another class of optimizer.
        """
        if not stored.any(node):
            return LEFT_OUT
        own = self.collect()
        if (settings := child(node, "param_groups")) is not None and stored.any(settings):
            check_class(self.optimizer, self.key, settings)
        targets = {}
        for name in own:
            below = child(node, name)
            if name == "state" and isinstance(below, Branch):
                members = child(node, "group_of")
                targets[name] = self._state_like(
                    stored,
                    below,
                    own["state"],
                    members.keys if isinstance(members, Branch) else None,
                )
            elif below is None or (name == "group_of" and stored.all_or_nothing(below)):
                # From our own parameters, so that a name on one side only is an error.
                targets[name] = own[name]
            else:
                targets[name] = mirror(stored, below)
        return {name: part for name, part in targets.items() if part is not LEFT_OUT}

    def put_back(self, restored: Mapping[str, Any]) -> None:
        """Give the optimizer the state that was restored into `like`.

        Raises:
            StructureMismatchError: the parameters of a group had different settings when they were
                saved.
        """
        own = self.collect()
        numbers = {name: number for number, name in enumerate(self.parameters)}
        state = {
            numbers.get(name, name): part
            for name, part in restored.get("state", own["state"]).items()
        }
        settings = restored if {"param_groups", "group_of"} <= restored.keys() else own
        self.group_of = settings["group_of"]
        groups = []
        for number, sources in enumerate(self.sources()):
            saved = settings["param_groups"]
            candidates = [saved[source] for source in sources if source in saved]
            own_settings = settings_of_group(self.optimizer, self.key, number, candidates)
            members = [numbers[name] for name in self.groups[number]]
            groups.append({**own_settings, "params": members})
        rest = {
            name: restored.get(name, own[name])
            for name in own
            if name not in {"state", "param_groups", "group_of"}
        }
        # A class may change it.
        lent = {
            number: {**part} if isinstance(part, dict) else part for number, part in state.items()
        }
        self.optimizer.load_state_dict({"state": lent, "param_groups": groups, **rest})
        put_back_as_stored(self.optimizer, self.key, self.parameters, state)

    def _state_like(
        self,
        stored: StoredLeaves,
        node: Branch,
        own: Mapping[Any, Any],
        members: Collection[Any] | None,
    ) -> dict[Any, Any]:
        """The restore target by parameter.

        The optimizer's own state for parameters that are not requested.

        Args:
            stored: the contents of the checkpoint.
            node: the stored state by parameter.
            own: the optimizer's own state.
            members: the stored parameters; state under other keys belongs to the optimizer itself.
                None: not known.
        """
        targets: dict[Any, Any] = {}
        for name, below in zip(node.keys, node.children, strict=True):
            parameter = self.parameters.get(name) if isinstance(name, str) else None
            if not stored.all_or_nothing(below):
                continue
            if parameter is not None:
                targets[name] = mirror(
                    stored, below, own.get(name), self._placing(stored, str(name), below), parameter
                )
            elif name in own or (members is not None and name not in members):
                targets[name] = mirror(stored, below, own.get(name))
        for name, part in own.items():
            if name not in targets and not stored.selects(child_name(node.name, str(name))):
                targets[name] = part
        return targets

    def _placing(
        self, stored: StoredLeaves, name: str, state: Node
    ) -> Callable[[TensorRecord, object], object]:
        """The function that makes the restore targets of a parameter's state."""
        parameter, adaptation = self.parameters[name], stored.adaptation
        if adaptation is None:
            return partial(_place, parameter)
        from shardckpt.training.optimizer_state.moments import fit_state, place_of

        shape = tuple(parameter.global_shape if describes_itself(parameter) else parameter.shape)
        tensor = adaptation.at.get(place_of(name, self._modules))
        if tensor is not None:
            fit_state(state, adaptation.tensor(tensor), shape, adaptation)
        return lambda record, own: _place(
            parameter, replace(record, shape=shape) if adaptation.mode(record.name) else record, own
        )

    def _own_names(self, members: Sequence[str], state: Node) -> dict[str, str]:
        """The name that each stored parameter has here.

        The name is also found where the parameter is tied and the module had its names in another
        order.
        """
        names = {name: self.current_name(name) for name in members}
        strange = [name for name in members if names[name] not in self.parameters]
        if not strange:
            return names
        from shardckpt.training.optimizer_state.moments import place_of

        stored = {
            leaf.name: leaf.stored for leaf in leaves_of(state) if isinstance(leaf, Tensor | Tied)
        }
        free = {
            stored.get(place_of(name, self._modules)): name
            for name in self.parameters.keys() - names.values()
        }
        free.pop(None, None)
        return names | {
            name: free.get(stored.get(place_of(name, self._modules)), name) for name in strange
        }

    def current_name(self, name: str) -> str:
        """The name of a parameter, where 0.2.0 has stored it with parts of a wrapper's name."""
        current = self._earlier().get(name, name.removeprefix(_OF_FABRIC))
        return current if name not in self.parameters and current in self.parameters else name

    def _own_name(self, name: str) -> str:
        return self._prefix + name if self._prefix + name in self.parameters else name


def _place(parameter: Any, record: TensorRecord, own: object) -> object:
    """The restore target for one tensor of a parameter's state."""
    if describes_itself(parameter) and tuple(parameter.global_shape) == record.shape:
        kind = getattr(torch, record.dtype.name)
        if isinstance(own, torch.Tensor) and describes_itself(own) and own.dtype is kind:
            return own
        return described_like(
            torch.empty_like(parameter, dtype=kind, requires_grad=False), parameter
        )
    fits = fitting(record, own)
    if fits is own or record.name.replace(".", "/").endswith(f"/{_NO_MOMENT}"):
        return fits
    kind = getattr(torch, record.dtype.name, None)
    if tuple(parameter.shape) == record.shape and kind is not None:
        layout = (
            frameworks.source(record.name, parameter).layout
            if parameter.device.type == "xla"
            else None
        )
        return (
            torch.empty_like(parameter, dtype=kind, requires_grad=False)
            if layout is None
            else Target(layout, record.shape, record.dtype)
        )
    if record.layout is not None and hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import DTensor, Replicate

        local = torch.empty(record.shape, dtype=kind, device=parameter.to_local().device)
        mesh = parameter.device_mesh
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return new_tensor(record)
