"""Sharding-aware distributed checkpoints.

    import shardckpt

    shardckpt.save("run/100", state)                     # any mesh, any partition spec
    state = shardckpt.restore("run/100", like=state)     # any other

This is the public interface in full. Names are loaded when they are first used, so that importing
the package costs nothing: not even numpy is imported.
"""

from __future__ import annotations

# Here: it breaks for good where one thread imports it, and another `importlib.util` (CPython).
from importlib import import_module
from os import register_at_fork
from threading import RLock
from typing import TYPE_CHECKING

from shardckpt._version import __version__

if TYPE_CHECKING:
    from shardckpt.convert.comparing import diff
    from shardckpt.convert.export import ExportReport, export, export_safetensors
    from shardckpt.convert.importing import ImportReport, import_checkpoint
    from shardckpt.convert.opening import open  # noqa: A004
    from shardckpt.errors import ShardckptError
    from shardckpt.frameworks.base import Target
    from shardckpt.frameworks.coordination import Coordinator, SingleProcess
    from shardckpt.layout.box import Box
    from shardckpt.layout.hybrid_mesh import HybridMesh
    from shardckpt.layout.mesh import Mesh
    from shardckpt.layout.op_sharding import OpSharding
    from shardckpt.layout.partition_spec import PartitionSpec
    from shardckpt.layout.sharding import Sharding
    from shardckpt.options import SaveOptions
    from shardckpt.plan.bandwidths import Bandwidths
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.restore import restore
    from shardckpt.reshard.execute import reshard
    from shardckpt.reshard.rules import Rules
    from shardckpt.runs.committing import commit
    from shardckpt.serve.client import Client
    from shardckpt.state.composites import register_tensor
    from shardckpt.state.leaves import register_leaf
    from shardckpt.state.per_process import PerProcess
    from shardckpt.training.manager import CheckpointManager
    from shardckpt.training.resuming import Restored
    from shardckpt.training.state import TrainState, train_state
    from shardckpt.versions.follower import follow
    from shardckpt.versions.publisher import Publisher
    from shardckpt.views.model_view import safetensors_view
    from shardckpt.views.pretrained import from_pretrained
    from shardckpt.views.safe_open import safe_open
    from shardckpt.writing.background import save_async
    from shardckpt.writing.fingerprint import fingerprint
    from shardckpt.writing.handle import SaveHandle
    from shardckpt.writing.save import SaveReport, save

__all__ = [
    "Bandwidths",
    "Box",
    "Checkpoint",
    "CheckpointManager",
    "Client",
    "Coordinator",
    "ExportReport",
    "HybridMesh",
    "ImportReport",
    "Mesh",
    "OpSharding",
    "PartitionSpec",
    "PerProcess",
    "Publisher",
    "Restored",
    "Rules",
    "SaveHandle",
    "SaveOptions",
    "SaveReport",
    "ShardckptError",
    "Sharding",
    "SingleProcess",
    "Target",
    "TrainState",
    "__version__",
    "commit",
    "diff",
    "export",
    "export_safetensors",
    "fingerprint",
    "follow",
    "from_pretrained",
    "import_checkpoint",
    "open",
    "register_leaf",
    "register_tensor",
    "reshard",
    "restore",
    "safe_open",
    "safetensors_view",
    "save",
    "save_async",
    "train_state",
]

_HOME = {
    "Bandwidths": "plan.bandwidths",
    "Box": "layout.box",
    "Checkpoint": "reading.checkpoint",
    "CheckpointManager": "training.manager",
    "Client": "serve.client",
    "Coordinator": "frameworks.coordination",
    "ExportReport": "convert.export",
    "HybridMesh": "layout.hybrid_mesh",
    "ImportReport": "convert.importing",
    "Mesh": "layout.mesh",
    "OpSharding": "layout.op_sharding",
    "PartitionSpec": "layout.partition_spec",
    "PerProcess": "state.per_process",
    "Publisher": "versions.publisher",
    "Restored": "training.resuming",
    "Rules": "reshard.rules",
    "SaveHandle": "writing.handle",
    "SaveOptions": "options",
    "SaveReport": "writing.save",
    "ShardckptError": "errors",
    "Sharding": "layout.sharding",
    "SingleProcess": "frameworks.coordination",
    "Target": "frameworks.base",
    "TrainState": "training.state",
    "commit": "commit",
    "diff": "convert.comparing",
    "export": "convert.export",
    "export_safetensors": "convert.export",
    "fingerprint": "writing.fingerprint",
    "follow": "versions.follower",
    "from_pretrained": "views.pretrained",
    "import_checkpoint": "convert.importing",
    "open": "convert.opening",
    "register_leaf": "state.leaves",
    "register_tensor": "state.composites",
    "reshard": "reshard",
    "restore": "reading.restore",
    "safe_open": "views.safe_open",
    "safetensors_view": "views.model_view",
    "save": "writing.save",
    "save_async": "writing.background",
    "train_state": "training.state",
}
"""The module of each public name."""


_importing = RLock()
"""Held during an import: of two threads that import a package and a module of it, one could get an
incomplete module."""


def _after_fork() -> None:
    """Replace the lock, which another thread of the parent may have held.

    Nothing would release it in the child.
    """
    global _importing  # noqa: PLW0603
    _importing = RLock()


register_at_fork(after_in_child=_after_fork)


def __getattr__(name: str) -> object:
    """Import the object with a public name, once."""
    if name not in _HOME:
        raise AttributeError(f"module 'shardckpt' has no attribute {name!r}")
    try:
        with _importing:
            home = import_module(f"shardckpt.{_HOME[name]}")
    except RuntimeError as e:
        if "after shutdown" not in str(e):
            raise
        from shardckpt.errors import CommitError, StorageError

        raise (CommitError if name.startswith("save") else StorageError)(
            f"shardckpt.{name} cannot be used: Python is shutting down and starts no threads any "
            f"more ({e}). Save and read before the program ends, not in a function that `atexit` "
            "calls."
        ) from e
    # A callable package is the object itself.
    value = globals()[name] = home if _HOME[name] == name else getattr(home, name)
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
