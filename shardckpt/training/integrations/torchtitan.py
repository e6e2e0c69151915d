"""torchtitan's checkpoints through shardckpt: a manager with torchtitan's own configuration.

    from shardckpt.training.integrations.torchtitan import TorchtitanCheckpointer

    config.checkpoint = TorchtitanCheckpointer.Config(
        enable=True, folder="checkpoint", interval=500
    )

For torchtitan 0.3.0, whose trainer builds the manager that the configuration belongs to. Steps are
at `<dump folder>/<folder>/<step>`.

1. Saved are torchtitan's own states: the model and the optimizers by names of parameters, the
   schedulers, the trainer's counts, and the data loader of each rank. Its state is stored as plain
   values, where torchtitan pickles it.
2. A save is in the background; the last one is waited for. A load fits any mesh. With another
   number of data ranks it is an error unless `exclude_from_loading=["dataloader"]`.
3. Weights from and to Hugging Face are imports and exports, so `initial_load_in_hf` and
   `last_save_in_hf` are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

from shardckpt.errors import NotFoundError, OptionError
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.restore import restore
from shardckpt.state import PerProcess
from shardckpt.training.manager import CheckpointManager

if TYPE_CHECKING:
    from torch import nn

__all__ = ["TorchtitanCheckpointer"]

_HF = {
    "initial_load_in_hf": "import the weights (shardckpt import), and give initial_load_path=",
    "last_save_in_hf": "export the step (shardckpt export)",
}
"""Options that are refused, and what to do."""


class TorchtitanCheckpointer(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan is not followed
    """Saves and loads for torchtitan's trainer; see the module."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's own options."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Take what torchtitan's trainer gives.

        Raises:
            OptionError: the configuration asks for Hugging Face's format.
        """
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        del sd_adapter
        for name, advice in _HF.items():
            if getattr(config, name):
                raise OptionError(f"checkpoint.{name}=True is not supported: {advice}.")
        self._config = config
        self._states = states
        states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        folder = (
            config.folder if "://" in config.folder else filesystem.join(base_folder, config.folder)
        )
        self._manager = CheckpointManager(folder, every=None, keep=config.keep_latest_k or None)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        if last_step and config.last_save_model_only:
            dtype = TORCH_DTYPE_MAP[config.export_dtype]
            weights = self._states[MODEL].state_dict()
            cast = {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in weights.items()
            }
            state: dict[str, Any] = {MODEL: cast}
        else:
            state = {key: _state_of(of) for key, of in self._states.items() if of is not None}
        saved = self._manager.save(curr_step, state, force=True)
        if last_step:
            self._manager.wait()
        return saved

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _load(self, step: int = -1) -> bool:
        newest = self._manager._newest_step()  # noqa: SLF001  (which also publishes a given step)
        at = newest if step == -1 else step
        if at is None:
            if self._config.initial_load_path is None:
                return False
            return self._load_initially(self._config.initial_load_path)
        if at not in self._manager.all_steps():
            raise NotFoundError(
                f"{self._manager.url(at)}: there is no such step; checkpoint.load_step=-1 loads "
                "the latest."
            )
        excluded = self._config.exclude_from_loading
        if unknown := [key for key in excluded if key not in self._states]:
            raise OptionError(
                f"checkpoint.exclude_from_loading: there is no {unknown[0]!r}; give some of "
                f"{', '.join(self._states)}."
            )
        keys = (
            [MODEL]
            if at == 0
            else [key for key, of in self._states.items() if of is not None and key not in excluded]
        )
        like = {key: _state_of(self._states[key]) for key in keys}
        restored = self._manager.restore(
            like,
            at,
            only=[f"{key}/**" for key in keys if key != DATALOADER]
            + [DATALOADER] * (DATALOADER in keys),
            fallback=False,
        )
        assert restored is not None, "the step is there"
        self._put(restored.state, keys)
        return True

    def _load_initially(self, url: str) -> bool:
        """Load from a checkpoint of another run; the model alone if the configuration says so."""
        keys = [MODEL] if self._config.initial_load_model_only else [MODEL, OPTIMIZER, LR_SCHEDULER]
        like = {key: _state_of(self._states[key]) for key in keys}
        self._put(
            restore(Checkpoint(url), like, only=[f"{key}/**" for key in keys], strict="like"), keys
        )
        return True

    def _put(self, state: dict[str, Any], keys: list[str]) -> None:
        for key in keys:
            of = self._states[key]
            if key == DATALOADER:
                _loads_plainly(of).load_state_dict(of, state[key].value)
            else:
                of.load_state_dict(state[key])

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a save returns when the state may change."""

    def _wait_for_saving(self) -> None:
        """Do nothing: torchtitan calls this only for saves in its own futures."""

    def _close(self) -> None:
        if hasattr(self, "_manager"):
            self._manager.close()


def _state_of(of: Any) -> Any:
    """The state of one of torchtitan's objects.

    Of a data loader with the position on the data axis.
    """
    if hasattr(of, "dp_world_size"):
        return PerProcess(_loads_plainly(of).state_dict(of), axis=(of.dp_rank, of.dp_world_size))
    return of.state_dict()


def _loads_plainly(loader: Any) -> Any:
    """The class whose methods give a loader's state as plain values.

    It lies below torchtitan's class, which pickles the state.
    """
    return StatefulDataLoader if isinstance(loader, StatefulDataLoader) else type(loader)
