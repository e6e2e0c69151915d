"""Finder of the torch objects of a training, which name the state of each object from the others.

Optimizer state is named after the modules' parameters: without a prefix for `model`, as
`keyword.name` for other modules. Scheduler state is named after its optimizer's groups.

An optimizer around other optimizers may have a `state_dict` of its own form, which does not tell
which tensors belong to which parameter. Such a state is stored as it is, and restored completely or
not at all. Keys that a state cannot have, such as the tuple (group, position) of some wrappers, are
stored as values:

    {(0, 1): {"slow": tensor}}
    → {"keys of pairs": [(0, 1)], "values of pairs": [{"slow": tensor}]}

This module is imported only for programs that have torch.
"""

from __future__ import annotations

import re
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from shardckpt.errors import StructureMismatchError
from shardckpt.state.names import imported_module, is_key, shown
from shardckpt.training.likeness import LEFT_OUT, mirror
from shardckpt.training.modules import NamedModule
from shardckpt.training.optimizer_state.forms import keyed_by_ints
from shardckpt.training.optimizers import NamedOptimizer
from shardckpt.training.parts import collecting
from shardckpt.training.schedulers import NamedScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from shardckpt.reading.naming.adapt import Adaptation
    from shardckpt.state.document import Node
    from shardckpt.training.likeness import StoredLeaves

_DATA = frozenset({"batch", "data", "ddp", "dp", "fsdp", "hsdp"})
_OTHER = frozenset(
    {
        "context",
        "cp",
        "ep",
        "expert",
        "model",
        "pipe",
        "pipeline",
        "pp",
        "seq",
        "sequence",
        "sp",
        "tensor",
        "tp",
    }
)
_UNKNOWN = (-1, -1)
_KEYS, _VALUES = "keys of pairs", "values of pairs"


def of_torch(
    objects: Mapping[str, Any],
    is_local: Callable[[str], bool] | None = None,
    left_out: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, NamedModule | NamedOptimizer | OwnFormOptimizer | NamedScheduler]:
    """The torch objects among some objects, with their names, by the same keys.

    Schedulers of optimizers that are not given, or have a form of their own, are left out.
    `left_out` has names of a module's tensors that are neither collected nor restored, by the key
    of the module.

    Raises:
        LeafError: a module or optimizer whose tensors have no names, or that does not give its
            state.
    """
    modules = {
        key: _named(key, of, is_local, left_out.get(key, ()))
        for key, of in objects.items()
        if isinstance(of, torch.nn.Module)
    }
    prefixes = {key: "" if key == "model" else f"{key}." for key in modules}
    names: dict[int, str] = {}
    for key, module in modules.items():
        names = {i: prefixes[key] + name for i, name in module.parameter_names().items()} | names
        # Averaged weights are not wrapped in DDP themselves.
        module.replica = any(other.replica for other in modules.values())

    @cache
    def earlier() -> dict[str, str]:
        return {
            prefixes[key] + before: prefixes[key] + now
            for key, module in modules.items()
            for before, now in module.earlier_parameter_names().items()
        }

    optimizers: dict[str, NamedOptimizer] = {}
    own_forms: dict[str, OwnFormOptimizer] = {}
    for key, of in objects.items():
        if isinstance(of, torch.optim.Optimizer):
            with collecting(key):
                own_form = has_own_form(of)
            if own_form:
                own_forms[key] = OwnFormOptimizer(of)
            else:
                optimizers[key] = NamedOptimizer(
                    key, of, names, modules.keys() - {"model"}, earlier
                )
    schedulers = {}
    for key, of in objects.items():
        if isinstance(of, torch.optim.lr_scheduler.LRScheduler):
            optimizer = next(
                (named for named in optimizers.values() if named.optimizer is of.optimizer), None
            )
            if optimizer is not None:
                schedulers[key] = NamedScheduler(key, of, optimizer)
    return {**modules, **optimizers, **own_forms, **schedulers}


def _named(
    key: str,
    module: torch.nn.Module,
    is_local: Callable[[str], bool] | None,
    left_out: Collection[str],
) -> NamedModule:
    with collecting(key):
        return NamedModule(key, module, is_local, left_out)


def has_own_form(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `state_dict` has another form than torch's.

    Only the optimizer itself can read such a state.
    """
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", ())
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not hooks:
        return False
    packed: Any = optimizer.state_dict()
    groups = (
        packed.get("param_groups")
        if isinstance(packed, dict) and isinstance(packed.get("state"), dict)
        else None
    )
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    return (
        not isinstance(groups, list)
        or [len(group.get("params", ())) for group in groups] != lengths
    )


class OwnFormOptimizer:
    """An optimizer with a form of its own."""

    turn: ClassVar[int] = 1

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Take any optimizer for which `has_own_form` is true."""
        self.optimizer = optimizer

    def collect(self) -> Any:
        """The optimizer's own form; its tensors are the optimizer's own."""
        return _map(self.optimizer.state_dict(), _pair)

    def arranged(self, node: Node, _state: Node, _adaptation: Adaptation | None = None) -> Node:
        """The stored state, with ints for the keys that other formats write as text."""
        return keyed_by_ints(node, self.collect())

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        """The restore target; `LEFT_OUT` if it is not requested.

        Raises:
            StructureMismatchError: parameters are joined, split or fitted; its state would have to
                be, too.
        """
        if not stored.all_or_nothing(node):
            return LEFT_OUT
        if stored.adaptation is not None and stored.adaptation.changes_tensors:
            raise StructureMismatchError(
                f"{shown(node.name)}: {type(self.optimizer).__qualname__} has a form of its own, "
                "so it is not known which of its tensors belong to parameters that mapping= or "
                "fit= changes; leave it out with only=."
            )
        return mirror(stored, node, self.collect())

    def put_back(self, restored: Any) -> None:
        """Give the optimizer the state that was restored into `like`."""
        self.optimizer.load_state_dict(_map(restored, _unpair))


def _map(value: Any, change: Callable[[dict[Any, Any]], Any]) -> Any:
    """A state with all of its dicts changed, from the innermost ones outwards."""
    if type(value) in (list, tuple):
        return type(value)(_map(item, change) for item in value)
    return (
        change({key: _map(item, change) for key, item in value.items()})
        if type(value) is dict
        else value
    )


def _pair(value: dict[Any, Any]) -> dict[Any, Any]:
    return value if all(map(is_key, value)) else {_KEYS: [*value], _VALUES: [*value.values()]}


def _unpair(value: dict[Any, Any]) -> dict[Any, Any]:
    return (
        dict(zip(value[_KEYS], value[_VALUES], strict=True))
        if value.keys() == {_KEYS, _VALUES}
        else value
    )


def data_axis(objects: Iterable[object]) -> tuple[int, int] | None:
    """Position of this process on the data axis, and the size of that axis; or None.

    The result is None unless the meshes of all modules agree.

    All axes with a name such as `data`, `dp_replicate` or `fsdp` together are the data axis.
    Without such names nothing is known: a mesh axis without a name may be one of model parallelism.
    """
    tensors = imported_module("torch.distributed.tensor")
    if tensors is None:
        return None
    modules = [of for of in objects if isinstance(of, torch.nn.Module)]
    meshes = {
        id(parameter.device_mesh): parameter.device_mesh
        for module in modules
        for parameter in module.parameters()
        if isinstance(parameter, tensors.DTensor)
    }
    axes = {axis for mesh in meshes.values() for axis in _axes_of(mesh)}
    axis = axes.pop() if len(axes) == 1 else None
    return axis if axis != _UNKNOWN else None


def _axes_of(mesh: Any) -> list[tuple[int, int]]:
    """The data axis of a mesh: none, one, or the unknown one."""
    words = [set(re.findall("[a-z]+", name.lower())) for name in mesh.mesh_dim_names or ()]
    if any(parts & _DATA and parts & _OTHER for parts in words):  # one axis for both
        return [_UNKNOWN]
    coordinate = mesh.get_coordinate()
    dims = [dim for dim, parts in enumerate(words) if parts & _DATA]
    if not dims or coordinate is None:
        return []
    position, size = 0, 1
    for dim in dims:
        position, size = position * mesh.size(dim) + coordinate[dim], size * mesh.size(dim)
    return [(position, size)]
