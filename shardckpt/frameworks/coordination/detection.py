"""Which store does the job bring along, and is this still the round of it that was agreed on?

torch and jax are looked for among what the program has imported, never imported for the sake of looking.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CoordinationError, OptionError
from shardckpt.frameworks.coordination.devices import told_devices
from shardckpt.frameworks.coordination.single import SingleProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.frameworks.coordination.base import Coordinator
    from shardckpt.frameworks.coordination.jax_client import JaxClient
    from shardckpt.frameworks.coordination.torch_store import TorchStore

__all__ = ["current"]


class _Round(NamedTuple):
    """What was agreed on last."""

    coordinator: TorchStore | JaxClient | SingleProcess
    pid: int
    told: dict[str, list[int]]


_lock = threading.Lock()
_round: _Round | None = None


def _after_fork() -> None:
    """Another thread of the parent may have held the lock, and nobody would ever release it here."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def current(devices: Mapping[str, Iterable[int]] | None, timeout: float) -> Coordinator:
    """The coordinator of this round of the job; see `Coordinator.current`."""
    global _round  # noqa: PLW0603
    told = told_devices(devices) if devices else {}
    with _lock:
        kind = _kind()
        if _round is None or type(_round.coordinator) is not kind or not _is_current(_round):
            _round = _Round(kind(devices=told, timeout=timeout), os.getpid(), told)
        elif devices is not None and told != _round.told:
            raise OptionError(
                f"this process owns the devices {_round.told or 'that its frameworks show'}, as agreed when the job started, and "
                f"not {told}; give devices= with the first call that coordinates."
            )
        return _round.coordinator


def _is_current(agreed: _Round) -> bool:
    forked = agreed.pid != os.getpid()
    if isinstance(agreed.coordinator, SingleProcess):
        return not forked
    if agreed.coordinator.is_current and forked:
        world = agreed.coordinator.world
        raise CoordinationError(
            f"this process was forked from process {world.process} of a job of {world.processes} and is none of them; save and restore "
            f"in process {world.process} itself, or pass coordinator=SingleProcess() for a checkpoint of this process alone."
        )
    return agreed.coordinator.is_current


def _kind() -> type[TorchStore | JaxClient | SingleProcess]:
    """The class of coordinator for the store at hand."""
    found: list[tuple[int, type[TorchStore | JaxClient | SingleProcess]]] = []
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            from shardckpt.frameworks.coordination.torch_store import TorchStore

            found.append((dist.get_world_size(), TorchStore))
    if "jax.distributed" in sys.modules:
        import jax

        if jax.distributed.is_initialized():
            from jax._src.distributed import global_state

            from shardckpt.frameworks.coordination.jax_client import JaxClient

            found.append((global_state.num_processes, JaxClient))
    # A group of one is a habit of scripts: where another store knows of more processes, that is the job's.
    processes, kind = next((f for f in found if f[0] > 1), (found or [(1, SingleProcess)])[0])
    others = _others() if processes == 1 else None
    if others:
        raise CoordinationError(
            f"{others} and has no store in which they could meet; call torch.distributed.init_process_group (with torch_xla: "
            f"'gloo', init_method='xla://') or jax.distributed.initialize first."
        )
    return kind


def _others() -> str | None:
    """The framework that runs in more processes than this one, if any, in words."""
    if "torch_xla" in sys.modules:
        import torch_xla.runtime as xr
        from torch_xla import _XLAC

        if (xr.is_spmd() or _XLAC._xla_runtime_is_initialized()) and xr.process_count() > 1:
            return f"this torch_xla job runs in {xr.process_count()} processes"
    if "jax" in sys.modules:
        import jax
        from jax._src import xla_bridge

        if xla_bridge.backends_are_initialized() and jax.process_count() > 1:
            return f"this JAX job runs in {jax.process_count()} processes"
    return None
