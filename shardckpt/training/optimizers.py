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
from torch.utils._pytree import tree_leaves

from shardckpt import frameworks
from shardckpt.errors import LeafError, NamesMismatchError, StructureMismatchError
from shardckpt.frameworks.base import Target
from shardckpt.frameworks.dcp_protocol import described_like, describes_itself
from shardckpt.state.document import Branch, Tensor, Tied, child, leaves_of
from shardckpt.state.names import child_name, shown
from shardckpt.text import few, shorten
from shardckpt.training.likeness import LEFT_OUT, StoredLeaves, fitting, mirror, new_tensor
from shardckpt.training.optimizer_state.forms import OptimizerNodes, read_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.naming.adapt import Adaptation
    from shardckpt.state.document import Node

_OF_THE_GROUP = frozenset({"params", "param_names"})
"""Entries of a group that are not settings."""
_OF_SCHEDULERS = frozenset(
    {"initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
)
"""Settings that schedulers add to groups."""
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
        earlier: Mapping[str, str] | None = None,
    ) -> None:
        """Find the name of each parameter.

        Args:
            key: the name that the optimizer is saved under.
            optimizer: any torch optimizer.
            names: parameter names, by the id of the Parameter.
            modules: keys of modules that prefix the names of their parameters.
            earlier: parameter names, by the name that 0.2.0 gave, where these differ.

        Raises:
            LeafError: a parameter has no name.
        """
        self.optimizer = optimizer
        self.key = key
        self._modules = ["model", *modules]
        self._earlier = earlier or {}
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
                self.parameters[name] = parameter
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
        return [
            members[0] if members else f"(empty group {number})"
            for number, members in enumerate(self.groups)
        ]

    def sources(self) -> list[list[str]]:
        """For each group, the names of its parameters' groups in the state that was restored last."""
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
            if describes_itself(
                self.parameters.get(name)
            ):  # what is like the parameter is the same shard of a global tensor
                for value in of_one.values():
                    described_like(value, self.parameters[name])
        settings: dict[str, dict[str, Any]] = {}
        group_of: dict[str, str] = {}
        for first, group, members in zip(
            self.firsts(), packed["param_groups"], self.groups, strict=True
        ):
            settings[first] = {
                name: value for name, value in group.items() if name not in _OF_THE_GROUP
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
                here; or state cannot be joined.
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
            return nodes.renamed(
                lambda name: (
                    name
                    if name in self.parameters
                    else self._own_name(self.current_name(str(name)))
                )
            )
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
                "as for the save, or save the result of get_optimizer_state_dict, which has "
                "names."
            )
        names = dict(zip(nodes.members(), self.parameters, strict=True))
        return nodes.renamed(lambda number: names[number])

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
            self._check_class(settings)
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
                targets[name] = own[
                    name
                ]  # from our own parameters, so that a name on one side only is an error
            else:
                targets[name] = mirror(stored, below)
        return {name: part for name, part in targets.items() if part is not LEFT_OUT}

    def _check_class(self, settings: Node) -> None:
        """Refuse settings that the optimizer does not have, and without which it would make no step; torch would take them."""
        for group in settings.children if isinstance(settings, Branch) else ():
            names = {str(key) for key in group.keys} if isinstance(group, Branch) else set()
            lacking, strange = (
                self.optimizer.defaults.keys() - names,
                names - self.optimizer.defaults.keys() - _OF_SCHEDULERS,
            )
            own = set().union(*self.optimizer.param_groups)
            if (
                lacking
                and strange - own
                and (lacking := lacking - _filled_in(self.optimizer, names))
            ):
                raise StructureMismatchError(
                    f"{shown(group.name)} has settings of another class of optimizer "
                    f"({few(sorted(strange - own), 3)}), and {type(self.optimizer).__qualname__} "
                    f"needs {few(sorted(lacking), 3)}; make the optimizer that was saved, or "
                    f"leave {self.key} out with only=."
                )

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
        for number, (group, sources) in enumerate(
            zip(self.optimizer.param_groups, self.sources(), strict=True)
        ):
            settings_of_group = self._settings(
                number,
                [
                    settings["param_groups"][source]
                    for source in sources
                    if source in settings["param_groups"]
                ],
            )
            moved = {
                name: _move(value, group.get(name)) for name, value in settings_of_group.items()
            }
            groups.append({**moved, "params": [numbers[name] for name in self.groups[number]]})
        rest = {
            name: restored.get(name, own[name])
            for name in own
            if name not in {"state", "param_groups", "group_of"}
        }
        lent = {
            number: {**part} if isinstance(part, dict) else part for number, part in state.items()
        }  # a class may change it
        self.optimizer.load_state_dict({"state": lent, "param_groups": groups, **rest})
        self._as_stored(state)

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
        """The name that each stored parameter has here, also where it is tied, and the module had its names in another order."""
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
        current = self._earlier.get(name, name.removeprefix(_OF_FABRIC))
        return current if name not in self.parameters and current in self.parameters else name

    def _own_name(self, name: str) -> str:
        return self._prefix + name if self._prefix + name in self.parameters else name

    def _settings(self, number: int, candidates: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Settings of one group of the optimizer, from the saved settings of its parameters."""
        for other in candidates[1:]:
            names = [*candidates[0], *other]
            differs = next(
                (
                    n
                    for n in names
                    if n not in candidates[0] or n not in other or candidates[0][n] != other[n]
                ),
                None,
            )
            if differs is not None:
                raise StructureMismatchError(
                    f"{shown(self.key)}: group {number} has parameters that were saved with "
                    f"different settings, {differs}={candidates[0].get(differs)!r} and "
                    f"{other.get(differs)!r}; give each a group of its own, or leave out "
                    f"{self.key}/param_groups and {self.key}/group_of with only=."
                )
        own = self.optimizer.param_groups[number]
        return (
            candidates[0]
            if candidates
            else {name: value for name, value in own.items() if name not in _OF_THE_GROUP}
        )

    def _as_stored(self, state: Mapping[Any, Any]) -> None:
        """Undo the conversions of `load_state_dict`, also in containers inside of a parameter's state.

        A class may unpack a key: bitsandbytes stores its quantized moments in a dict and keeps its
        entries beside the others.

        Raises:
            NamesMismatchError: the optimizer's class has not loaded a part of the state: it has
                neither the key nor the values.
        """
        lost = []
        for number, (parameter_name, parameter) in enumerate(self.parameters.items()):
            loaded = self.optimizer.state[parameter] if number in state else {}
            part = state.get(number, {})
            unpacked = (
                tree_leaves([value for name, value in loaded.items() if name not in part])
                if part.keys() - loaded
                else []
            )
            for name, value in part.items():
                if name in loaded:
                    loaded[name] = _as_stored_value(value, loaded[name], parameter.device)
                elif all(
                    any(_same(item, other) for other in unpacked) for item in tree_leaves(value)
                ):
                    loaded |= (
                        _as_stored_value(value, loaded, parameter.device)
                        if isinstance(value, dict)
                        else {}
                    )
                else:
                    lost.append(f"{parameter_name}/{name}")
        if lost:
            raise NamesMismatchError(
                f"{shown(self.key)}: load_state_dict() of {type(self.optimizer).__qualname__} has "
                f"not loaded {few(lost)}; change that, leave the names out with only=, or pass "
                "strict=False to go on without them."
            )


def _filled_in(optimizer: torch.optim.Optimizer, names: Collection[str]) -> set[str]:
    """The settings that the optimizer's class adds to a group that has only these: those of later versions of torch."""
    group: dict[str, Any] = {"params": [], **dict.fromkeys(names)}
    blank = object.__new__(type(optimizer))
    blank.__setstate__({"state": {}, "param_groups": [group], "defaults": optimizer.defaults})
    return set(group)


def _same(value: Any, loaded: Any) -> bool:
    """Whether an optimizer has a value, be it converted to another dtype or moved to another device."""
    if not isinstance(value, torch.Tensor) or not isinstance(loaded, torch.Tensor):
        return type(value) is type(loaded) and bool(value == loaded)
    one, other = (getattr(tensor, "_local_tensor", tensor) for tensor in (value, loaded))
    if one.shape != other.shape:
        return False
    one = one.to(other.device, other.dtype)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _as_stored_value(value: Any, loaded: Any, device: torch.device) -> Any:
    """A value as it was stored, on the device that it was loaded to.

    Torch converts whatever it finds to the parameter's dtype.
    """
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == value.dtype else value.to(device)
    if isinstance(value, str):
        return value  # torch takes it for a container
    if isinstance(value, dict) and isinstance(loaded, dict):
        return loaded | {
            key: _as_stored_value(item, loaded[key], device)
            for key, item in value.items()
            if key in loaded
        }
    if (
        isinstance(value, list | tuple)
        and type(loaded) is type(value)
        and len(loaded) == len(value)
    ):
        return type(value)(
            _as_stored_value(item, other, device) for item, other in zip(value, loaded, strict=True)
        )
    return loaded


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


def _move(value: object, own: object) -> object:
    """A setting in the optimizer's own form and on its device.

    Formats without tuples turn them into lists.
    """
    if isinstance(value, list) and isinstance(own, tuple):
        return tuple(value)
    return (
        value.to(own.device)
        if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)
        else value
    )
