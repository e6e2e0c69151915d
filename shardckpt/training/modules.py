"""A `torch.nn.Module` as named tensors that do not depend on what it is wrapped in.

1. Names are those of the module by itself: what DDP, `torch.compile`, activation checkpointing and torch_xla's FSDP put
   into them is taken out, so that a checkpoint of one fits the other.
2. Values are the module's own Parameters and buffers, DTensors under FSDP2. They are restored in place; torch_xla's,
   which are restored as new tensors, and those of a module on the meta device go into the same Parameters, which an
   optimizer may hold already.
3. Where processes train copies of a module, each has buffers (a BatchNorm's statistics) of its own, and those of the first
   one count. Under DDP that is its group's rank 0, which gives them to the others before each step; of a module whose own
   parameters are DTensors (FSDP2) the first of their mesh. The others leave them out of what they save: those that are small.
   Large ones all processes write together, so they have to agree on them.
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

__all__ = ["NamedModule"]

_WRAPPERS = frozenset({"_orig_mod", "_orig_module", "_checkpoint_wrapped_module"})
"""Attributes under which wrappers have what they wrap: torch.compile's, torch_xla's FSDP's, activation checkpointing's."""


class NamedModule:
    """A module, and the names of its tensors as they are now."""

    turn: ClassVar[int] = 0

    def __init__(self, key: str, module: torch.nn.Module) -> None:
        """Find the names.

        Args:
            key: under which it is saved.
            module: any, wrapped or not.

        Raises:
            LeafError: it is wrapped in FSDP's first version, whose parameters are no tensors of the model.
        """
        self.module = module
        self._hidden = set()
        """Paths that are no part of names."""
        self.replica = False
        """Whether another process's buffers are the true ones, under DDP."""
        copies: list[torch.nn.Module] = []
        distributed: Any = torch.distributed
        for path, part in module.named_modules():
            if isinstance(part, DistributedDataParallel):
                self._hidden.add(f"{path}.module" if path else "module")
                self.replica |= distributed.get_rank(part.process_group) > 0
            elif type(part).__name__ == "FullyShardedDataParallel" and type(part).__module__.startswith("torch.distributed"):
                raise LeafError(
                    f"{shown(key)} is wrapped in FullyShardedDataParallel, whose parameters are flat pieces of several; "
                    f"use torch.distributed.fsdp.fully_shard, or save what torch's get_model_state_dict gives."
                )
            elif _is_copy(part):
                copies.append(part)
        self._copied = {id(buffer) for part in copies for buffer in part.buffers(recurse=False)}
        """Buffers of which another process has the true ones."""
        self._held = module.state_dict(keep_vars=True)  # also makes FSDP2 show its shards

    def collect(self) -> dict[str, Any]:
        """The module's own tensors, and what else its `state_dict` has, by name."""
        copied = {id(buffer) for buffer in self.module.buffers()} if self.replica else self._copied
        return {self._clean(name): value for name, value in self._held.items() if id(value) not in copied or not _is_left_out(value)}

    def parameter_names(self) -> dict[int, str]:
        """By the id of each Parameter its name; of several the first."""
        return {id(parameter): self._clean(name) for name, parameter in self.module.named_parameters()}

    def arranged(self, node: Node, _state: Node) -> Node:
        """What is stored, as it is."""
        return node

    def like(self, stored: StoredLeaves, node: Node) -> Any:
        """What to restore into; `LEFT_OUT` where nothing of it is asked for."""
        if not stored.any(node):
            return LEFT_OUT
        found: dict[str, Any] = {}
        for held, value in self._held.items():
            name = self._clean(held)
            below = None if isinstance(value, torch.Tensor) else child(node, name)
            extra = LEFT_OUT if below is None else mirror(stored, below, value)
            found[name] = value if extra is LEFT_OUT else extra
        return found

    def put_back(self, restored: Mapping[str, Any]) -> None:
        """Give the module what was restored into `like`."""
        rest = copy.copy(self._held)  # with what torch keeps beside: the modules' versions
        rest.clear()
        for name, own in self._held.items():
            value = restored.get(self._clean(name), own)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
                if value is not own:
                    _replace(own, value)
                if own.device.type == "xla":
                    continue  # copied onto itself it would be a pending computation
                value = own
            rest[name] = value
        # Tensors are copied onto themselves, which does nothing. The module gets its extra state, and what hooks it has, run.
        self.module.load_state_dict(rest, strict=False)

    def _clean(self, name: str) -> str:
        if not self._hidden and not any(wrapper in name for wrapper in _WRAPPERS):
            return name
        parts = name.split(".")
        return ".".join(part for i, part in enumerate(parts) if part not in _WRAPPERS and ".".join(parts[: i + 1]) not in self._hidden)


def _is_copy(part: torch.nn.Module) -> bool:
    """Whether a module's own parameters are DTensors, and this process is not the first of their mesh."""
    meshes = [getattr(parameter, "device_mesh", None) for parameter in part.parameters(recurse=False)]
    return any(isinstance(mesh, DeviceMesh) and any(mesh.get_coordinate() or ()) for mesh in meshes)


def _is_left_out(buffer: torch.Tensor) -> bool:
    """Whether one process alone can save a buffer: it is small, and no DTensor."""
    return buffer.nbytes < SMALL_BYTES and getattr(buffer, "device_mesh", None) is None


def _replace(own: Any, value: Any) -> None:
    """Make a Parameter or buffer be a tensor that was restored in its place."""
    if own.is_meta:
        torch.utils.swap_tensors(own, torch.nn.Parameter(value, own.requires_grad) if isinstance(own, torch.nn.Parameter) else value)
    else:
        own.data = value
