"""The complete state of a Trainer, saved and restored without the base model of PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.state import PerProcess
from shardckpt.training.integrations.hf_values import TrainerValues, unwrapped
from shardckpt.training.integrations.peft_adapters import adapters_of, check_base
from shardckpt.training.state import train_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import Trainer

    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.training.integrations.peft_adapters import Adapters
    from shardckpt.training.manager import CheckpointManager
    from shardckpt.training.resuming import Restored
    from shardckpt.training.state import TrainState


class CompleteState:
    """Contents of a checkpoint of a Trainer."""

    def __init__(self, coordinator: Coordinator | None) -> None:
        """Begin without adapters; `coordinator` is the one given to the manager."""
        self.own = TrainerValues()
        """The Trainer's own values."""
        self.adapters: Adapters | None = None
        """PEFT's adapters of the model that is trained; None: the whole model is saved."""
        self._base: dict[str, Any] | None = None
        """Name and fingerprint of the base model below the adapters."""
        self._coordinator = coordinator

    def of(self, kwargs: Mapping[str, Any]) -> TrainState:
        """The complete state, to save or to restore into.

        Args:
            kwargs: the keyword arguments that the Trainer passes to callbacks.
        """
        more: dict[str, Any] = {} if self.adapters is None else {"base_model": self._base}
        more["trainer"] = PerProcess(self.own, choose=_first)
        state = train_state(
            model=kwargs["model"],
            optimizer=kwargs["optimizer"],
            scheduler=kwargs["lr_scheduler"],
            **more,
        )
        if self.adapters is not None:
            state.leave_out("model", self.adapters.base)
        return state

    def find_adapters(self, trainer: Trainer) -> None:
        """Find the adapters of a Trainer's model, before anything is saved or restored."""
        self.adapters = adapters_of(unwrapped(trainer))
        self._base = None if self.adapters is None else self.adapters.fingerprint(self._coordinator)

    def restore(self, manager: CheckpointManager, kwargs: Mapping[str, Any], step: int) -> None:
        """Restore a step completely; of a PEFT model the adapters, if the base model is the same.

        Raises:
            MismatchError: the base model is another one.
            ShardckptError: as `CheckpointManager.restore` does.
        """
        adapters = self.adapters
        # A release before 0.3 saved the base model, too.
        if adapters is not None and not self.own.adapters_alone:
            self.adapters = None
        elif adapters is not None and self._base is not None:
            restored = manager.restore(None, step, only="base_model/**", fallback=False)
            assert restored is not None, "the step was found before"
            check_base(self._base, restored.state["base_model"], manager.url(step))
        # The Trainer has counted to this step already.
        manager.restore(self.of(kwargs), step, fallback=False)
        if adapters is not None and self.adapters is None:
            self.adapters, self._base = adapters, adapters.fingerprint(self._coordinator)


def read_values(manager: CheckpointManager, step: int | None = None) -> Restored | None:
    """Restore the Trainer's own values of a step (None: the latest), and nothing else."""
    like = {"trainer": PerProcess(None, choose=_first)}
    return manager.restore(like, step, only="trainer", fallback=False)


def _first(values: list[Any]) -> Any:
    return values[0]
