"""PyTorch Lightning's checkpoints through shardckpt.

Use `Trainer(plugins=[ShardckptIO()])` or `Trainer(callbacks=[ShardedRun(root)])`.

`ShardedRun` is for `ModelParallelStrategy`, which shards the model: each process saves its own
shards. It restores in `on_fit_start`, when the strategy has made the sharded model and its
optimizers, and the Trainer's loops have not begun.

`ShardckptIO` is for the other strategies. Lightning collects one dict on its first process and
passes it over with a path; all processes load it. So that process alone saves the checkpoint, in
the background: training goes on when the tensors are copied. `teardown` (which a Trainer calls at
its end), the next save and a load wait for the save, and raise its error, once.

1. The dict is made plain: Lightning's and torch's own dict classes become dicts. Any other value
   that would have to be pickled is refused by name; mostly it is a hyperparameter:
   `save_hyperparameters(ignore=…)`.
2. A checkpoint that Lightning removes is deleted when the latest save is committed, and stays if
   that save fails or if the checkpoint is pinned. Its directory goes too, tombstone included:
   Lightning gives a later checkpoint another name if the path exists, and only this process saves
   there.
3. Functions in a scheduler's state are dropped: `LRScheduler.load_state_dict` keeps the functions
   of the scheduler that it loads into.
4. Strategies that shard the model do not save through plugins, so a `Trainer` with such a strategy
   is refused when it is made.

A checkpoint is a directory, whatever its name ends with. `LightningModule.load_from_checkpoint`
ignores plugins and needs a file: create the module, and load `shardckpt.restore(path,
only="state_dict/**")["state_dict"]` into it.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)

from shardckpt.errors import NotFoundError, OptionError
from shardckpt.frameworks.coordination import SingleProcess
from shardckpt.frameworks.torch import tensor_of
from shardckpt.io.failures import storage_errors
from shardckpt.io.status import is_link
from shardckpt.io.store import Store
from shardckpt.io.url import parse
from shardckpt.layout.dtypes import of_numpy
from shardckpt.options import SaveOptions, checked_options
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.restore import restore
from shardckpt.runs.collecting import delete
from shardckpt.training.background import noted_on
from shardckpt.training.integrations.plain import plain
from shardckpt.training.manager import CheckpointManager
from shardckpt.training.state import TrainState, train_state
from shardckpt.writing.background import save_async
from shardckpt.writing.save import save

if TYPE_CHECKING:
    import os

    from lightning.pytorch import LightningModule, Trainer

    from shardckpt.writing.handle import SaveHandle

__all__ = ["ShardckptIO", "ShardedRun"]

_log = logging.getLogger("shardckpt")
_SCHEDULER = frozenset({"base_lrs", "last_epoch"})
"""Keys in the state of every torch scheduler."""
_DICTS = (dict, OrderedDict, defaultdict, Counter, AttributeDict)
"""Classes whose objects are loaded as dicts; the code that saved them accepts dicts as well."""


class ShardckptIO(CheckpointIO):
    """Stores checkpoints of a Lightning `Trainer`, for strategies in which one process saves."""

    def __init__(self, *, options: SaveOptions | None = None, asynchronous: bool = True) -> None:
        """Store with `options`.

        Args:
            options: as for `shardckpt.save`. By default, or with `overwrite=True`, a checkpoint
                replaces an existing one at the same path, as Lightning's files do.
            asynchronous: whether training goes on while a checkpoint is written; otherwise it waits
                for the commit.

        Raises:
            OptionError: `options` is not a `SaveOptions`.
        """
        self._options = SaveOptions(overwrite=True) if options is None else checked_options(options)
        self._asynchronous = asynchronous
        self._saving: SaveHandle | None = None
        self._doomed: list[str | os.PathLike[str]] = []
        """Paths that Lightning has removed since the save in flight began."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save Lightning's dict after the previous save has ended.

        Raises:
            LeafError: a value would have to be pickled, by name; nothing was begun.
            OptionError: `storage_options` were given; use `ShardckptIO(options=…)`.
            ShardckptError: the previous save failed in the background; or as in `shardckpt.save`.
        """
        if storage_options is not None:
            raise OptionError(
                "save_checkpoint(storage_options=…): is not supported; give "
                "ShardckptIO(options=shardckpt.SaveOptions(…))."
            )
        state = plain(_without_functions(checkpoint), "", tensors=True, dicts=_DICTS)
        self._finish()
        if self._asynchronous:
            self._saving = save_async(
                path, state, options=self._options, coordinator=SingleProcess()
            )
            if (
                local := parse(path).local_path
            ) is not None:  # Lightning may link to it at once, or look for its name
                with suppress(OSError):  # the save itself reports it
                    local.mkdir(parents=True, exist_ok=True)
        else:
            save(path, state, options=self._options, coordinator=SingleProcess())

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: torch.device | str | None = None,
        weights_only: bool | None = None,  # noqa: ARG002 - Lightning's signature; nothing that is loaded here is code
    ) -> dict[str, Any]:
        """Lightning's dict, with tensors on the CPU or on `map_location`.

        Raises:
            OptionError: a `map_location` that is not a device.
            NotFoundError, CorruptionError: as in `shardckpt.restore`.
            ShardckptError: the previous save failed in the background.
        """
        if map_location is not None and not isinstance(map_location, str | torch.device):
            raise OptionError(
                f"load_checkpoint(map_location={map_location!r:.100}): give a torch.device, or "
                "its name."
            )
        self._finish()
        loaded: dict[str, Any] = _on_device(
            restore(Checkpoint(path)), torch.device(map_location or "cpu")
        )
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, at once or when the save in flight is committed.

        A missing one is no error, and a pinned one stays.

        Raises:
            StorageError: as in `shardckpt.runs.collecting.delete`.
            ShardckptError: the previous save failed in the background; then nothing is removed.
        """
        self._doomed.append(path)
        if self._saving is None or self._saving.done():
            self._finish()

    def teardown(self) -> None:
        """Wait for the save in flight.

        A `Trainer` also calls it when training raises; a failed save is then added to that error as
        a note.

        Raises:
            ShardckptError: the save failed.
        """
        with noted_on(sys.exception()):
            self._finish()

    def _finish(self) -> None:
        saving, self._saving = self._saving, None
        doomed, self._doomed = self._doomed, []
        if saving is not None:
            saving.wait()
        for path in doomed:
            _remove(path)


class ShardedRun(Callback):
    """Saves the shards of a model under `ModelParallelStrategy`, and resumes on any mesh.

    It saves in the background, and resumes from the latest step.

    Saved are the module, its one optimizer, its schedulers, fp16's gradient scaler, the random
    states, and the progress of the Trainer's loops. States of other callbacks and of data loaders
    are not. Give the Trainer `enable_checkpointing=False`, and `fit` no `ckpt_path`.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        """Save to a run.

        Args:
            root: the run's directory, a path or url.
            options: as for `shardckpt.CheckpointManager`, for example `every` in optimizer steps,
                and `keep`. After a notice of `preemption` training stops, also
                before `min_epochs` and `min_steps`.
        """
        self._root = root
        self._options = options
        self._manager: CheckpointManager | None = None
        self._saved = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the latest step, if there is one.

        Raises:
            OptionError: another strategy, or several optimizers.
            ShardckptError: as in `CheckpointManager.restore`.
        """
        if not isinstance(trainer.strategy, ModelParallelStrategy):
            raise OptionError(
                f"ShardedRun: the strategy is {type(trainer.strategy).__name__}; take "
                "ModelParallelStrategy, or ShardckptIO."
            )
        if len(trainer.optimizers) != 1:
            raise OptionError(
                f"ShardedRun: the module has {len(trainer.optimizers)} optimizers, and one is "
                "supported."
            )
        self._manager = CheckpointManager(self._root, **self._options)
        state = self._state(trainer, pl_module)
        restored = self._manager.restore(state)
        self._saved = restored.step if restored else 0
        if restored:
            trainer.fit_loop.load_state_dict(state.values["loops"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """Handle the signals of `preemption` instead of Lightning.

        Its handler of SIGTERM, which it has installed since `on_fit_start`, ends training before
        the processes have saved.
        """
        assert self._manager is not None, "fit has started"
        self._manager._notices.install()  # noqa: SLF001

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save if an optimizer step has ended that is due; after a notice of preemption, stop.

        Raises:
            ShardckptError: as in `CheckpointManager.save`.
        """
        assert self._manager is not None, "fit has started"
        if trainer.global_step > self._saved and self._manager.should_save(trainer.global_step):
            self._saved = trainer.global_step
            self._manager.save(trainer.global_step, self._state(trainer, pl_module))
        if self._manager.reached_preemption:
            trainer.should_stop = True
            # Lightning does not stop before its minimum.
            trainer.fit_loop.min_epochs = None
            trainer.fit_loop.epoch_loop.min_steps = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Wait for the save in flight.

        Raises:
            ShardckptError: the save failed.
        """
        self._close()

    def on_exception(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,  # noqa: ARG002
        exception: BaseException,
    ) -> None:
        """Wait for the save in flight; its error is added to the exception as a note."""
        with noted_on(exception):
            self._close()

    def _close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def _state(self, trainer: Trainer, module: LightningModule) -> TrainState:
        schedulers = {
            f"scheduler{i}": config.scheduler
            for i, config in enumerate(trainer.lr_scheduler_configs)
        }
        loops = plain(trainer.fit_loop.state_dict(), "loops", tensors=True, dicts=_DICTS)
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of fp16
        return train_state(
            model=module, optimizer=trainer.optimizers[0], scaler=scaler, loops=loops, **schedulers
        )


def _remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint with its directory, or only the link to it.

    Pinned checkpoints stay, and so do paths without a checkpoint.
    """
    place = parse(path)
    if (local := place.local_path) is not None and is_link(local):
        with storage_errors("remove", local):
            local.unlink()
        return
    try:
        left = delete(path, reason="removed by Lightning")
    except NotFoundError:
        return
    except OptionError as e:
        _log.warning("%s", e)
        return
    if not left:  # otherwise a save to this path may be under way
        Store.open(place).delete_prefix()


def _without_functions(value: Any) -> Any:
    """Remove functions from the states of schedulers in a value (torch's `SWALR` has one)."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(_without_functions, value))
    if kind in _DICTS:
        scheduler = value.keys() >= _SCHEDULER
        return {
            k: _without_functions(inner)
            for k, inner in value.items()
            if not (scheduler and isinstance(inner, FunctionType))
        }
    return value


def _on_device(value: Any, device: torch.device) -> Any:
    """Restored containers with torch tensors instead of arrays.

    Tensors for the CPU are not copied.
    """
    if isinstance(value, np.ndarray):
        return tensor_of(value, of_numpy(value.dtype)).to(device)
    if isinstance(value, dict):
        return {key: _on_device(inner, device) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_device(inner, device) for inner in value)
    return value


def _set_checkpoint_io(strategy: Strategy, io: CheckpointIO) -> None:
    """Give a plugin to a strategy.

    Refuse strategies that would not use it, as Fabric's strategies do by themselves.
    """
    if isinstance(io, ShardckptIO) and isinstance(
        strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy
    ):
        raise OptionError(
            f"ShardckptIO: {type(strategy).__name__} shards the model, and saves and loads "
            "without plugins; take the strategy "
            f'"ddp", or ModelParallelStrategy with the callback ShardedRun instead of this plugin.'
        )
    _of_lightning.fset(strategy, io)


_of_lightning: Any = Strategy.checkpoint_io
Strategy.checkpoint_io = _of_lightning.setter(_set_checkpoint_io)  # type: ignore[method-assign]
