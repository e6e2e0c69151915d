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
    from shardckpt.convert.export import ExportReport, export, export_safetensors
    from shardckpt.convert.importing import ImportReport, import_checkpoint
    from shardckpt.coordination import Coordinator
    from shardckpt.errors import ShardckptError
    from shardckpt.frameworks.base import Target
    from shardckpt.hybrid_mesh import HybridMesh
    from shardckpt.leaves import register_leaf
    from shardckpt.manager import CheckpointManager, Restored
    from shardckpt.mesh import Mesh
    from shardckpt.op_sharding import OpSharding
    from shardckpt.options import SaveOptions
    from shardckpt.partition_spec import PartitionSpec
    from shardckpt.per_process import PerProcess
    from shardckpt.planning.bandwidths import Bandwidths
    from shardckpt.reshard.execute import reshard
    from shardckpt.restoring import restore
    from shardckpt.rules import Rules
    from shardckpt.save_handle import SaveHandle, SaveReport
    from shardckpt.saving import save, save_async
    from shardckpt.sharding import Sharding
    from shardckpt.training import TrainState, train_state

__all__ = [
    "Bandwidths",
    "Box",
    "Checkpoint",
    "CheckpointManager",
    "Coordinator",
    "ExportReport",
    "HybridMesh",
    "ImportReport",
    "Mesh",
    "OpSharding",
    "PartitionSpec",
    "PerProcess",
    "Restored",
    "Rules",
    "SaveHandle",
    "SaveOptions",
    "SaveReport",
    "ShardckptError",
    "Sharding",
    "Target",
    "TrainState",
    "__version__",
    "commit",
    "export",
    "export_safetensors",
    "import_checkpoint",
    "open",
    "register_leaf",
    "reshard",
    "restore",
    "save",
    "save_async",
    "train_state",
]

_HOME = {
    "Bandwidths": "planning.bandwidths",
    "Box": "box",
    "Checkpoint": "checkpoint",
    "CheckpointManager": "manager",
    "Coordinator": "coordination",
    "ExportReport": "convert.export",
    "HybridMesh": "hybrid_mesh",
    "ImportReport": "convert.importing",
    "Mesh": "mesh",
    "OpSharding": "op_sharding",
    "PartitionSpec": "partition_spec",
    "PerProcess": "per_process",
    "Restored": "manager",
    "Rules": "rules",
    "SaveHandle": "save_handle",
    "SaveOptions": "options",
    "SaveReport": "save_handle",
    "ShardckptError": "errors",
    "Sharding": "sharding",
    "Target": "frameworks.base",
    "TrainState": "training",
    "commit": "committing",
    "export": "convert.export",
    "export_safetensors": "convert.export",
    "import_checkpoint": "convert.importing",
    "open": "checkpoint",
    "register_leaf": "leaves",
    "reshard": "reshard",
    "restore": "restoring",
    "save": "saving",
    "save_async": "saving",
    "train_state": "training",
}
"""The module that each name comes from."""


def __getattr__(name: str) -> object:
    """Import what `name` stands for, once."""
    if name not in _HOME:
        raise AttributeError(f"module 'shardckpt' has no attribute {name!r}")
    from importlib import import_module

    try:
        home = import_module(f"shardckpt.{_HOME[name]}")
    except RuntimeError as e:
        if "after shutdown" not in str(e):
            raise
        from shardckpt.errors import CommitError, StorageError

        raise (CommitError if name.startswith("save") else StorageError)(
            f"shardckpt.{name} cannot be used: Python is ending and starts no threads any more ({e}). "
            f"Save and read before the program ends, not in a function that `atexit` calls."
        ) from e
    value = globals()[name] = home if _HOME[name] == name else getattr(home, name)  # a package that can be called is itself
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
