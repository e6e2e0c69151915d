"""A `torch.nn.Module` as named tensors whose names do not depend on its wrappers.

1. Names are the names in the unwrapped module: the parts that DDP, `torch.compile`, activation checkpointing and torch_xla's
   FSDP add are removed, so that a checkpoint of a wrapped module fits any other wrapping.
2. Values are the module's own Parameters and buffers, DTensors under FSDP2. They are restored in place. Tensors of torch_xla
   and of a module on the meta device are restored as new tensors, which go into the same Parameters, because an optimizer may
   hold these already.
3. Extra state (`get_extra_state`) is restored as it is stored, whatever kind, dtype and shape the module's own has now.
4. Where processes train copies of a module, each process has its own buffers (a BatchNorm's statistics), and the first
   process's buffers are the true ones. Under DDP that is rank 0 of its group, which sends them to the others before each step;
   for a module whose own parameters are DTensors (FSDP2) it is the first process of their mesh. The other processes leave these
   buffers out of their saves if they are small. All processes write large buffers together, so they must agree on them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardckpt.errors import LeafError
from shardckpt.state.document import child
from shardckpt.state.names import shown
from shardckpt.training.likeness import LEFT_OUT, mirror
from shardckpt.writing.save_plan import SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.state.document import Node
    from shardckpt.training.likeness import StoredLeaves

_WRAPPERS = frozenset({"_orig_mod", "_orig_module", "_checkpoint_wrapped_module"})
"""Attributes in which wrappers keep the wrapped module: torch.compile, torch_xla's FSDP, activation checkpointing."""


class NamedModule:
    """A module, and the current names of its tensors."""

    turn: ClassVar[int] = 0

    def __init__(self, key: str, module: torch.nn.Module) -> None:
        """Find the names.

        Args:
            key: the name that the module is saved under.
            module: any module, wrapped or not.

        Raises:
            LeafError: it is wrapped in the first version of FSDP, whose parameters are not the model's tensors.
        """
        self.module = module
        self._hidden = set()
        """Path parts that are removed from names."""
        self.replica = False
        """Whether another process has the true buffers, under DDP."""
        copies: list[torch.nn.Module] = []
        distributed: Any = torch.distributed
        for path, part in module.named_modules():
            if isinstance(part, DistributedDataParallel):
                self._hidden.add(f"{path}.module" if path else "module")
                self.replica |= distributed.get_rank(part.process_group) > 0
            elif type(part).__name__ == "FullyShardedDataParallel" and type(part).__module__.startswith("torch.distributed"):
                raise LeafError(
                    f"{shown(key)} is wrapped in FullyShardedDataParallel, which flattens several parameters into one; "
                    f"use torch.distributed.fsdp.fully_shard, or save what torch's get_model_state_dict gives."
                )
            elif _is_copy(part):
                copies.append(part)
        self._copied = {id(buffer) for part in copies for buffer in part.buffers(recurse=False)}
        """Ids of the buffers whose true values are on another process."""
        self._held = module.state_dict(keep_vars=True)  # also makes FSDP2 show its shards

    def collect(self) -> dict[str, Any]:
        """The module's own tensors and the other entries of its `state_dict`, by name."""
        copied = {id(buffer) for buffer in self.module.buffers()} if self.replica else self._copied
        return {self._clean(name): value for name, value in self._held.items() if id(value) not in copied or not _is_left_out(value)}

    def parameter_names(self) -> dict[int, str]:
        """Each Parameter's name, by its id; the first name where it has several."""
        return {id(parameter): self._clean(name) for name, parameter in self.module.named_parameters()}

    def arranged(self, node: Node, _state: Node) -> Node:
        """The stored state, unchanged."""
        return node

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        """The restore target; `LEFT_OUT` where no part is requested."""
        if not stored.any(node):
            return LEFT_OUT
        found: dict[str, Any] = {}
        for held, value in self._held.items():
            name = self._clean(held)
            below = child(node, name) if _is_extra(held) or not isinstance(value, torch.Tensor) else None
            extra = LEFT_OUT if below is None else mirror(stored, below, value)
            found[name] = value if extra is LEFT_OUT else extra
        return found

    def put_back(self, restored: Mapping[str, Any]) -> None:
        """Give the module the state that was restored into `like`."""
        rest = copy.copy(self._held)  # keeps the attribute in which torch stores the modules' versions
        rest.clear()
        for name, own in self._held.items():
            value = restored.get(self._clean(name), own)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and not _is_extra(name):
                if value is not own:
                    _replace(own, value)
                if own.device.type == "xla":
                    continue  # copied onto itself, it would become a pending computation
                value = own
            rest[name] = value
        # Tensors are copied onto themselves, which does nothing. The module gets its extra state, and its hooks run.
        self.module.load_state_dict(rest, strict=False)

    def _clean(self, name: str) -> str:
        if not self._hidden and not any(wrapper in name for wrapper in _WRAPPERS):
            return name
        parts = name.split(".")
        return ".".join(part for i, part in enumerate(parts) if part not in _WRAPPERS and ".".join(parts[: i + 1]) not in self._hidden)


def _is_extra(name: str) -> bool:
    """Whether an entry is what a module's `get_extra_state` returned: a value of any kind, also a tensor of changing length."""
    return name.rpartition(".")[2] == "_extra_state"


def _is_copy(part: torch.nn.Module) -> bool:
    """Whether a module's own parameters are DTensors, and this process is not the first of their mesh."""
    meshes = [getattr(parameter, "device_mesh", None) for parameter in part.parameters(recurse=False)]
    return any(isinstance(mesh, DeviceMesh) and any(mesh.get_coordinate() or ()) for mesh in meshes)


def _is_left_out(buffer: torch.Tensor) -> bool:
    """Whether a buffer can be saved by one process alone: it is small, and no DTensor."""
    return buffer.nbytes < SMALL_BYTES and getattr(buffer, "device_mesh", None) is None


def _replace(own: Any, value: Any) -> None:
    """Replace a Parameter's or buffer's tensor with the restored one."""
    if own.is_meta:
        torch.utils.swap_tensors(own, torch.nn.Parameter(value, own.requires_grad) if isinstance(own, torch.nn.Parameter) else value)
    else:
        own.data = value
