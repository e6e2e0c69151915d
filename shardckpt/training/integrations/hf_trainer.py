"""Hugging Face's Trainer through shardckpt.

A callback saves at the Trainer's save points, and resumes the Trainer.

    callback = ShardckptCallback("gs://bucket/run", keep=3)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer))

Saving: all that the Trainer's own checkpoints have, as plain data: model, optimizer, scheduler,
gradient scaler and random number generators, as with `shardckpt.train_state`; the Trainer's state
with the states of its callbacks; its arguments. The files of the model's configuration and
tokenizer become metadata, as in an import, and an export writes them back.
1. At a save point (`save_strategy`, `save_steps`) the callback cancels the Trainer's own, pickled,
   checkpoint.
2. The callback saves before the next step begins. By then the Trainer's state includes the logs and
   evaluations of the step, and the batch of the next step has been drawn, so that the generators
   are as the next step needs them.
3. The save goes on in the background; the end of the training waits for it.
4. `save_strategy="best"` decides after all callbacks have run, so it is set to "no" during
   training, and the callback saves when the best metric has changed.
5. With `load_best_model_at_end` the best saved step is kept, and its weights are restored at the
   end.

When an exception leaves `train`, the save in flight is finished and the manager closed if `resume`
was called; otherwise call `close`.

Resuming
1. `resume` writes the Trainer's state of the latest step into a directory, and nothing else. From
   it `train` gets the step count and the number of batches to skip. `train` would also look for
   weights there; `resume` disables that.
2. When the model is on its devices and the optimizer exists, the callback restores everything in
   place.
3. The generators are restored once more where the Trainer does the same: after the batches are
   skipped.

PEFT's models (LoRA, QLoRA, …): the parameters that are trained are saved, and not the base model.
Load the base model again before `resume`; a fingerprint proves that it is the same
([peft_adapters](peft_adapters.py)). `shardckpt export --to peft` writes PEFT's files.

A `CheckpointManager` does the work, so that any number of processes may resume; see it for errors.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy

from shardckpt.errors import AlreadyExistsError, NotFoundError, OptionError
from shardckpt.io.status import exists
from shardckpt.options import SaveOptions
from shardckpt.runs.retention import Best, any_of
from shardckpt.training.generators import Generators
from shardckpt.training.integrations.hf_state import CompleteState, read_values
from shardckpt.training.integrations.hf_values import best_of, model_files
from shardckpt.training.manager import CheckpointManager

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from transformers import Trainer, TrainerControl, TrainingArguments

    from shardckpt.runs.retention import Retention

__all__ = ["ShardckptCallback"]

_STATE = "trainer_state.json"
"""The file that the Trainer looks for."""


class ShardckptCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Saves at the Trainer's save points, and resumes; see the module."""

    def __init__(
        self, root: str | os.PathLike[str], *, keep: Retention | int | None = None, **options: Any
    ) -> None:
        """Save below `root`.

        Args:
            root: the run's directory, a path or url; each step is a checkpoint in it.
            keep: which steps to keep, as for `shardckpt.CheckpointManager`; by default the latest
                `save_total_limit` ones.
            **options: other options of the manager: `options`, `coordinator`, `on_event`,
                `on_failure`, … With `every` or `preemption` it also saves at the steps that these
                choose; after a notice of preemption, training stops.

        Raises:
            OptionError: `fallback` is set.
        """
        if options.get("fallback"):
            raise OptionError(
                "ShardckptCallback(fallback=True): the Trainer begins at the step that resume() "
                "has chosen before its model is read, so no earlier one can be restored then; "
                "leave it out. If a step is damaged, delete it (`shardckpt rm`) and resume again."
            )
        self._root = root
        self._keep = keep
        self._options = options
        self._manager: CheckpointManager | None = None
        self._due = False
        """Whether the step that has just ended is to be saved."""
        self._metrics: dict[str, float] = {}
        """Metrics of the evaluations at this step."""
        self._saves_best: TrainingArguments | None = None
        """The Trainer's arguments, if their `save_strategy` "best" was replaced by "no" for this
        training."""
        self._best: float | None = None
        """The best metric so far, if `save_strategy` is "best"."""
        self._whole = CompleteState(options.get("coordinator"))
        self._resumed: int | None = None
        """The step that is being resumed, until it is restored."""
        self._generators: dict[str, Any] | None = None
        """The generator states to restore again after the batches are skipped; None when that is
        done."""
        self._directory: TemporaryDirectory[str] | None = None
        self._trainer: Trainer | None = None
        """The Trainer given to `resume`. Until training begins it loads no weights; if training
        fails, it closes the manager."""
        self._running: Trainer | None = None
        """The Trainer whose training is running."""
        self._seen: int | None = None
        """The last step that `_save` has decided about."""

    def resume(self, trainer: Trainer) -> str | None:
        """Have a Trainer that has not begun resume from the latest step.

        Args:
            trainer: the Trainer; all processes call this.

        Returns:
            The argument for `trainer.train(resume_from_checkpoint=…)`: a directory that exists
            until training begins, or None if no step was saved, so that training starts from the
            beginning.

        Raises:
            OptionError: this callback is not among the Trainer's callbacks.
            ShardckptError: as `CheckpointManager.restore` does.
        """
        if self not in trainer.callback_handler.callbacks:
            raise OptionError(
                "resume(trainer): the Trainer does not have this callback; make it with "
                "Trainer(callbacks=[callback])."
            )
        if self._trainer is not trainer:
            self._trainer = trainer
            self._close_on_exceptions(trainer)
        restored = read_values(self._manager_of(trainer))
        if restored is None:
            return None
        self._resumed = restored.step
        self._whole.own.load_state_dict(restored.state["trainer"].value)
        self._directory = TemporaryDirectory(prefix="shardckpt-")
        TrainerState(**self._whole.own.state).save_to_json(str(Path(self._directory.name, _STATE)))
        # No callback can do this: without it the Trainer refuses a directory without weights.
        trainer._load_from_checkpoint = lambda *_args, **_kwargs: None  # noqa: SLF001
        return self._directory.name

    def export(self, trainer: Trainer, step: int | None = None) -> str:
        """Write a saved step as a checkpoint of the Trainer's own.

        The checkpoint is `output_dir/checkpoint-<step>`, and a stock Trainer resumes from it.

        Args:
            trainer: a Trainer with this callback that has not begun, made as for `resume`; its
                model, optimizer and scheduler, and the random number generators, take the state of
                the step. All processes call this.
            step: the step; None: the latest.

        Returns:
            The directory.

        Raises:
            NotFoundError: no step was saved.
            AlreadyExistsError: the directory exists.
            OptionError: the Trainer has begun, or uses FSDP or DeepSpeed, whose checkpoints it
                writes only while it trains.
            ShardckptError: as `CheckpointManager.restore` does.
        """
        if (
            getattr(trainer, "is_fsdp_enabled", False)
            or getattr(trainer, "is_deepspeed_enabled", False)
            or self._running is not None
        ):
            raise OptionError(
                "export(trainer): the Trainer has begun, or uses FSDP or DeepSpeed; pass a new "
                "one that trains without these."
            )
        manager = self._manager_of(trainer)
        first = read_values(manager, step)
        if first is None:
            raise NotFoundError(
                f"{manager.url(0).rpartition('/')[0]}: no step was saved, so there is nothing to "
                "export."
            )
        place = Path(trainer.args.output_dir, f"checkpoint-{first.step}")
        if exists(place):
            raise AlreadyExistsError(
                f"{place}: it exists; move it away, or give the Trainer another output_dir."
            )
        self._whole.own.load_state_dict(first.state["trainer"].value)
        trainer.create_optimizer_and_scheduler(self._whole.own.state["max_steps"])
        parts = {
            "model": trainer.model,
            "optimizer": trainer.optimizer,
            "lr_scheduler": trainer.lr_scheduler,
        }
        self._whole.find_adapters(trainer)
        self._whole.restore(manager, parts, first.step)
        self._whole.own.restore_scaler(trainer)
        trainer.state = TrainerState(**copy.deepcopy(self._whole.own.state))
        trainer._save_checkpoint(trainer.model, None)  # noqa: SLF001
        if trainer.args.should_save:  # the Trainer wrote the states of its own, new, callbacks
            TrainerState(**self._whole.own.state).save_to_json(str(place / _STATE))
        self.close()
        return str(place)

    def close(self) -> None:
        """Finish the save in flight and restore signal handlers.

        The end of training calls it, and so does an exception after `resume`.

        Raises:
            ShardckptError: an error in the background.
        """
        self._release()
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def _close_on_exceptions(self, trainer: Trainer) -> None:
        """Close the manager when an exception leaves the Trainer's next `train`.

        The Trainer reports the exception to no callback.
        """
        loop = trainer._inner_training_loop  # noqa: SLF001

        @functools.wraps(loop)
        def closing(*args: Any, **kwargs: Any) -> Any:
            try:
                return loop(*args, **kwargs)
            except BaseException as error:
                self._release()
                manager, self._manager = self._manager, None
                if manager is not None:
                    manager.__exit__(type(error), error, error.__traceback__)
                raise
            finally:
                vars(trainer).pop("_inner_training_loop", None)

        trainer._inner_training_loop = closing  # noqa: SLF001

    def _release(self) -> None:
        """Undo all changes to the Trainer and its arguments, and reset one training's state."""
        if self._saves_best is not None:
            self._saves_best.save_strategy = SaveStrategy.BEST
        if self._trainer is not None:
            vars(self._trainer).pop("_load_from_checkpoint", None)
        if self._directory is not None:
            self._directory.cleanup()
        self._saves_best = self._trainer = self._running = self._directory = self._resumed = (
            self._generators
        ) = None
        self._due, self._metrics = False, {}

    # --- what the Trainer calls

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Restore everything, if the Trainer resumes.

        Raises:
            OptionError: arguments that need the Trainer's own checkpoints; or the Trainer resumes
                from another directory.
        """
        if getattr(args, "deepspeed", None):
            raise OptionError(
                "TrainingArguments(deepspeed=…): DeepSpeed needs the Trainer's own checkpoints; "
                "leave out one of the two."
            )
        self._running = self._trainer or _trainer_of(self)
        manager = self._manager_of(self._running)
        self._whole.find_adapters(self._running)
        self._due, self._seen, self._best = False, self._resumed, state.best_metric
        if args.save_strategy == SaveStrategy.BEST:
            self._saves_best, args.save_strategy = args, SaveStrategy.NO
        if self._resumed is None:
            return
        vars(self._trainer).pop("_load_from_checkpoint", None)
        if state.global_step != self._resumed:
            raise OptionError(
                f"resume() chose step {self._resumed}, but the Trainer begins at step "
                f"{state.global_step}; pass its result: "
                "trainer.train(resume_from_checkpoint=callback.resume(trainer))."
            )
        self._whole.restore(manager, kwargs, self._resumed)
        self._whole.own.restore_scaler(self._running)
        self._generators = Generators().state_dict()
        self._resumed = None
        if self._directory is not None:
            self._directory.cleanup()

    def on_epoch_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Save the last step of the previous epoch if due, or restore the generators.

        The generators are restored if they were saved at this point.
        """
        self._save(state, control, kwargs, between_epochs=True)
        self._put_back(between_epochs=True)

    def on_step_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Save the previous step if due, or restore the generators if saved at this point."""
        self._save(state, control, kwargs, between_epochs=False)
        self._put_back(between_epochs=False)

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Take over the Trainer's decision to save."""
        self._metrics = {}
        self._take_over(control)

    def on_epoch_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Take over the Trainer's decision to save."""
        self._take_over(control)

    def on_evaluate(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        metrics: Mapping[str, Any] | None = None,
        **_kwargs: Any,
    ) -> None:
        """Record the metrics of the step, by which the best steps are kept.

        There may be several evaluations.
        """
        self._metrics |= {
            name: float(value)
            for name, value in (metrics or {}).items()
            if isinstance(value, int | float)
        }

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the last step if due, wait for it, and restore the best weights.

        The best weights are restored if the Trainer is to end with them.

        Raises:
            ShardckptError: an error in the background.
        """
        # A training that is stopped within an epoch resumes after the batches are skipped.
        self._save(state, control, kwargs, between_epochs=float(state.epoch or 0).is_integer())
        if args.load_best_model_at_end and self._manager is not None:
            self._load_best(self._manager, best_of(args), state, kwargs)
        self.close()

    # --- helpers

    def _manager_of(self, trainer: Trainer) -> CheckpointManager:
        if self._manager is None:
            args = trainer.args
            limit = args.save_total_limit if (args.save_total_limit or 0) > 0 else None
            keep = limit if self._keep is None else self._keep
            if keep is not None and args.load_best_model_at_end:
                keep = any_of(keep, best_of(args))
            options = self._options.get("options") or SaveOptions()
            options = dataclasses.replace(
                options, metadata={**model_files(trainer), **options.metadata}
            )
            self._manager = CheckpointManager(
                self._root, keep=keep, **{"every": None, **self._options, "options": options}
            )
        return self._manager

    def _load_best(
        self, manager: CheckpointManager, rule: Best, state: TrainerState, kwargs: Mapping[str, Any]
    ) -> None:
        """Restore the weights of the best saved step, if a step was saved with the metric."""
        manager.wait()
        best = manager.best_step(rule.metric, rule.mode)
        if best is not None:
            manager.restore(self._whole.of(kwargs), best, only="model/**", fallback=False)
            state.best_model_checkpoint = manager.url(best)

    def _take_over(self, control: TrainerControl) -> None:
        self._due |= control.should_save
        control.should_save = False

    def _save(
        self,
        state: TrainerState,
        control: TrainerControl,
        kwargs: Mapping[str, Any],
        *,
        between_epochs: bool,
    ) -> None:
        manager, trainer, step = self._manager, self._running, state.global_step
        if manager is None or trainer is None or step == self._seen:
            return
        due, self._due, self._seen = self._due, False, step
        if self._saves_best is not None and state.best_metric != self._best:
            self._best, state.best_global_step, due = state.best_metric, step, True
        if due or manager.should_save(step):
            trainer.store_flos()
            self._whole.own.take(
                trainer, between_epochs, adapters_alone=self._whole.adapters is not None
            )
            manager.save(step, self._whole.of(kwargs), self._metrics, force=True)
        control.should_training_stop |= manager.reached_preemption

    def _put_back(self, *, between_epochs: bool) -> None:
        if self._generators is not None and self._whole.own.between_epochs == between_epochs:
            Generators().load_state_dict(self._generators)
            self._generators = None


def _trainer_of(callback: ShardckptCallback) -> Trainer:
    """The Trainer that is calling a callback.

    It passes itself to none, so look for it among the callers.
    """
    frame = sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None:
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if callback in getattr(getattr(caller, "callback_handler", None), "callbacks", ()):
            return caller
    raise OptionError(
        "the callback was called by no Trainer; call callback.resume(trainer) before "
        "trainer.train(…)."
    )
