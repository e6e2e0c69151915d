"""Sharding-aware distributed checkpoints.

    import shardckpt

    shardckpt.save("run/100", state)                     # any mesh, any partition spec
    state = shardckpt.restore("run/100", like=state)     # any other

This is the whole public interface. Names are loaded when they are first used, so that importing the package costs
nothing: not even numpy is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt._version import __version__

if TYPE_CHECKING:
    from shardckpt.box import Box
    from shardckpt.checkpoint import Checkpoint, open  # noqa: A004
    from shardckpt.committing import commit
    from shardckpt.coordination import Coordinator
    from shardckpt.errors import ShardckptError
    from shardckpt.frameworks.base import Target
    from shardckpt.hybrid_mesh import HybridMesh
    from shardckpt.leaves import register_leaf
    from shardckpt.mesh import Mesh
    from shardckpt.op_sharding import OpSharding
    from shardckpt.options import SaveOptions
    from shardckpt.partition_spec import PartitionSpec
    from shardckpt.per_process import PerProcess
    from shardckpt.restoring import restore
    from shardckpt.saving import save
    from shardckpt.sharding import Sharding

__all__ = [
    "Box",
    "Checkpoint",
    "Coordinator",
    "HybridMesh",
    "Mesh",
    "OpSharding",
    "PartitionSpec",
    "PerProcess",
    "SaveOptions",
    "ShardckptError",
    "Sharding",
    "Target",
    "__version__",
    "commit",
    "open",
    "register_leaf",
    "restore",
    "save",
]

_HOME = {
    "Box": "box",
    "Checkpoint": "checkpoint",
    "Coordinator": "coordination",
    "HybridMesh": "hybrid_mesh",
    "Mesh": "mesh",
    "OpSharding": "op_sharding",
    "PartitionSpec": "partition_spec",
    "PerProcess": "per_process",
    "SaveOptions": "options",
    "ShardckptError": "errors",
    "Sharding": "sharding",
    "Target": "frameworks.base",
    "commit": "committing",
    "open": "checkpoint",
    "register_leaf": "leaves",
    "restore": "restoring",
    "save": "saving",
}
"""The module that each name comes from."""


def __getattr__(name: str) -> object:
    """Import what `name` stands for, once."""
    if name not in _HOME:
        raise AttributeError(f"module 'shardckpt' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"shardckpt.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
