"""Orbax's managers of steps, with their methods and arguments, on `shardckpt.CheckpointManager`.

    # for orbax.checkpoint.v1.training.Checkpointer
    from shardckpt.training.integrations.orbax import OrbaxCheckpointer
    # for orbax.checkpoint.CheckpointManager
    from shardckpt.training.integrations.orbax import OrbaxCheckpointManager

A program keeps its calls, its policies and its `args`; steps become checkpoints of shardckpt. Each
checkpointable (each item of `args.Composite`) is an entry of the state, by its name.

1. Policies of Orbax decide which steps are kept. Those that decide when to save become policies of
   shardckpt.
2. A save is in the background, and is seen (`latest_step`, `checkpoints`) when it is committed, for
   example after `wait_until_finished`.
3. A load of arrays continues the training from its step: later steps are replaced when training
   reaches them again. Orbax raises an error there.
4. A load without an abstract state returns numpy arrays and random keys of JAX, in dicts, lists and
   tuples.
5. Everything else that Orbax has raises an OptionError that names it.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import v1

from shardckpt.errors import NotFoundError, OptionError
from shardckpt.runs.collecting import delete
from shardckpt.training.integrations.orbax_options import (
    CUSTOM,
    DEFAULT,
    KeptByOrbax,
    check_options,
    decision_of,
    items_of,
    restore_target,
    retention_of,
    saved_value,
    without_placeholders,
)
from shardckpt.training.integrations.orbax_steps import OrbaxSteps

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from shardckpt.options import SaveOptions
    from shardckpt.training.manager import CheckpointManager

__all__ = ["OrbaxCheckpointManager", "OrbaxCheckpointer"]

_saving = v1.training.save_decision_policies


# --- v1


class _Response:
    """A save in the background, in the place of Orbax's `AsyncResponse`."""

    def __init__(self, manager: CheckpointManager) -> None:
        """Refer to the save that was begun last."""
        self._manager = manager

    def result(self, timeout: float | None = None) -> bool:
        """Wait for the commit; True.

        Raises:
            OptionError: a `timeout` is given; `SaveOptions(commit_timeout=…)` limits the wait for
                other processes.
            ShardckptError: the save failed.
        """
        if timeout is not None:
            raise OptionError(
                f"result(timeout={timeout}) is not supported; give SaveOptions(commit_timeout=…)."
            )
        self._manager.wait()
        return True


class OrbaxCheckpointer(OrbaxSteps):
    """`orbax.checkpoint.v1.training.Checkpointer`; see the module."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        options: SaveOptions | None = None,
        **others: Any,
    ) -> None:
        """Manage the steps below a directory.

        Args:
            directory: a path or url.
            save_decision_policy: a policy of Orbax or of shardckpt; by default the first step, then
                as soon as the last save has ended, and before the job is stopped.
            preservation_policy: a policy of Orbax; by default all steps are kept.
            options: options of every save.
            **others: Orbax's `cleanup_tmp_directories` and `lightweight_initialize` are not needed.

        Raises:
            OptionError: another argument of Orbax, or a policy that is not supported, by name.
        """
        if odd := others.keys() - {"cleanup_tmp_directories", "lightweight_initialize"}:
            raise OptionError(f"Checkpointer({min(odd)}=…) is not supported; leave it out.")
        default = (
            _saving.InitialSavePolicy(),
            _saving.ContinuousCheckpointingPolicy(),
            _saving.PreemptionCheckpointingPolicy(),
        )
        when = (
            _saving.AnySavePolicy(list(default))
            if save_decision_policy is None
            else save_decision_policy
        )
        super().__init__(
            directory,
            when,
            None if preservation_policy is None else KeptByOrbax(preservation_policy),
            options,
        )

    @property
    def latest(self) -> Any:
        """Orbax's `CheckpointMetadata` of the latest step; None if there is none."""
        checkpoints = self.checkpoints
        return checkpoints[-1] if checkpoints else None

    @property
    def checkpoints(self) -> list[Any]:
        """Orbax's `CheckpointMetadata` of each step, ascending, with metrics and commit time.

        Damaged steps are left out.
        """
        return [
            v1.training.CheckpointMetadata(
                info.step,
                epath.Path(self._manager.url(info.step)),
                metadata=None,
                metrics=dict(info.metrics) or None,
                commit_timestamp_nsecs=int(datetime.fromisoformat(info.created).timestamp() * 1e9),
            )
            for info in self._manager.steps()
            if info.state == "committed"
        ]

    def save(self, step: int, state: Any, **choices: Any) -> bool:
        """Save a state if the policy says so, and wait for it; see `save_async`."""
        return _wait(self.save_async(step, state, **choices))

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = "state", **choices: Any
    ) -> _Response | None:
        """Save a state in the background, if the policy says so.

        See `save_checkpointables_async`.
        """
        return self.save_checkpointables_async(step, {checkpointable_name: state}, **choices)

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **choices: Any
    ) -> bool:
        """Save several states if the policy says so, and wait for them.

        See `save_checkpointables_async`.
        """
        return _wait(self.save_checkpointables_async(step, checkpointables, **choices))

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Any = None,
    ) -> _Response | None:
        """Save several states in the background, if the policy says so.

        Args:
            step: the step; steps ascend.
            checkpointables: states by name.
            force: save although the policy does not say so.
            overwrite: not supported; load an earlier step, and the later ones are replaced.
            metrics: numbers by name.
            custom_metadata: any storable value.

        Returns:
            The save; None if the policy does not save this step, or a later one was saved or loaded
            last.

        Raises:
            AlreadyExistsError: the step is saved already.
            OptionError: `overwrite`, an item that cannot be restored, or steps that do not ascend.
            ShardckptError: as `shardckpt.CheckpointManager.save` does.
        """
        if overwrite:
            raise OptionError(
                "save(overwrite=True) is not supported; load(step) goes back, and later saves "
                "replace the steps after it."
            )
        if "metrics" in checkpointables:
            raise OptionError(
                "'metrics' is a reserved name in Orbax's v1; give the state another name."
            )
        saved = self._save(
            step, checkpointables, metrics, custom_metadata, force=force, strict=True
        )
        return _Response(self._manager) if saved else None

    def load(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = "state"
    ) -> Any:
        """Load a state; see `load_checkpointables`."""
        return self.load_checkpointables(step, {checkpointable_name: abstract_state})[
            checkpointable_name
        ]

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Load states by name, onto the shardings of abstract ones.

        Args:
            step: a step, or a `CheckpointMetadata`; None: the latest.
            abstract_checkpointables: abstract states by name (None: as stored, in numpy arrays);
                None: all, as stored.

        Raises:
            NotFoundError: there is no such step, or no such state in it.
            ShardckptError: as `shardckpt.CheckpointManager.restore` does.
        """
        return self._load(
            getattr(step, "step", step), without_placeholders(abstract_checkpointables)
        )[1]

    def checkpointables_metadata(self, step: Any = None) -> Any:
        """Orbax's `CheckpointMetadata`, whose `metadata` has the states by name.

        The states have abstract arrays.
        """
        at = getattr(step, "step", step)
        checkpoint = next(
            (one for one in reversed(self.checkpoints) if at in (None, one.step)), None
        )
        if checkpoint is None:
            raise NotFoundError(f"{self.directory}: there is no step {'' if at is None else at}.")
        items = self._items(checkpoint.step)
        custom = items.pop(CUSTOM, None)
        return v1.training.CheckpointMetadata(
            checkpoint.step,
            checkpoint.path,
            metadata=items,
            metrics=checkpoint.metrics,
            commit_timestamp_nsecs=checkpoint.commit_timestamp_nsecs,
            custom_metadata=custom,
        )

    def delete(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> bool:
        """Delete a step; one process suffices. A state alone cannot be deleted.

        Raises:
            NotFoundError: there is no such step, and `missing_ok` is not set.
            OptionError: `checkpointable_name`; or the step is pinned or a base.
        """
        if checkpointable_name is not None:
            raise OptionError(
                "delete(checkpointable_name=…) is not supported: a checkpoint is deleted as a "
                "whole."
            )
        self._manager.wait()
        try:
            delete(self._manager.url(getattr(step, "step", step)))
        except NotFoundError:
            if not missing_ok:
                raise
            return False
        return True

    def wait(self) -> None:
        """Wait for the save in the background."""
        self._manager.wait()

    def __getattr__(self, name: str) -> Any:
        """Refuse what Orbax has and this has not, by name."""
        raise _lacking(v1.training.Checkpointer, name)


def _wait(response: _Response | None) -> bool:
    return response is not None and response.result()


# --- v0


class OrbaxCheckpointManager(OrbaxSteps):
    """`orbax.checkpoint.CheckpointManager` with `args`; see the module."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        options: ocp.CheckpointManagerOptions | None = None,
        item_names: Sequence[str] | None = None,
        save_options: SaveOptions | None = None,
        **others: Any,
    ) -> None:
        """Manage the steps below a directory.

        Args:
            directory: a path or url.
            options: Orbax's options.
            item_names: not needed; items have the names that `args.Composite` gives them.
            save_options: shardckpt's options of every save.
            **others: refused by name.

        Raises:
            OptionError: an option of Orbax that is not supported, by name.
        """
        if others:
            raise OptionError(
                f"CheckpointManager({min(others)}=…) is not supported; leave it out, and pass "
                "args= to save and restore."
            )
        del item_names
        self._options = given = options or ocp.CheckpointManagerOptions()
        check_options(given)
        super().__init__(
            directory,
            decision_of(given),
            retention_of(given),
            save_options,
            reads_only=given.read_only,
        )

    def save(
        self,
        step: int,
        *,
        args: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
        custom_metadata: Any = None,
    ) -> bool:
        """Save in the background if the options say so, and return whether.

        Args:
            step: the step; steps ascend.
            args: one of `StandardSave`, `PyTreeSave`, `ArraySave`, `JsonSave`, `JaxRandomKeySave`,
                or `Composite` of these.
            metrics: numbers by name.
            force: save although the options do not say so.
            custom_metadata: any storable value.

        Raises:
            AlreadyExistsError: the step is saved already, and `force` is set.
            OptionError: other `args`, by name; the manager is read-only.
            ShardckptError: as `shardckpt.CheckpointManager.save` does.
        """
        if self._options.read_only:
            raise OptionError(
                "CheckpointManagerOptions(read_only=True): nothing is saved; leave it out."
            )
        items = {name: saved_value(name, one) for name, one in items_of(args).items()}
        saved = self._save(step, items, metrics, custom_metadata, force=force, strict=force)
        if saved and not self._options.enable_async_checkpointing:
            self._manager.wait()
        return saved

    def restore(self, step: int | None = None, *, args: Any = None) -> Any:
        """Restore the items of a step, onto the shardings of abstract ones.

        Args:
            step: the step; None: the latest.
            args: one of `StandardRestore`, `PyTreeRestore`, `ArrayRestore`, `JsonRestore`,
                `JaxRandomKeyRestore`, or `Composite` of these; None: all items, as stored.

        Returns:
            The restored value; with several items a `Composite`.

        Raises:
            NotFoundError: there is no such step, or no such item in it.
            OptionError: other `args`, by name.
            ShardckptError: as `shardckpt.CheckpointManager.restore` does.
        """
        like = (
            None
            if args is None
            else {name: restore_target(name, one) for name, one in items_of(args).items()}
        )
        _, items = self._load(step, like)
        single = items.keys() == {DEFAULT} and not isinstance(args, ocp.args.Composite)
        return items[DEFAULT] if single else ocp.args.Composite(**items)

    def item_metadata(self, step: int) -> Any:
        """The items of a step with abstract arrays, as `restore` would return them.

        Each abstract array is a `jax.ShapeDtypeStruct`.
        """
        items = self._items(step)
        items.pop(CUSTOM, None)
        return items[DEFAULT] if items.keys() == {DEFAULT} else ocp.args.Composite(**items)

    def metadata(self, step: int | None = None) -> Any:
        """Orbax's `StepMetadata` of a step: its items, metrics and custom metadata.

        A step must be given.
        """
        if step is None:
            raise OptionError(
                "CheckpointManager.metadata() without a step is not supported; give a step."
            )
        custom = self._items(step).get(CUSTOM) or {}
        return ocp.metadata.StepMetadata(
            item_metadata=self.item_metadata(step),
            metrics=self._metrics(step),
            custom_metadata=custom,
        )

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a step; empty if it has none."""
        return self._metrics(step)

    def best_step(self) -> int | None:
        """The step with the best `best_fn`; without `best_fn` the latest, as in Orbax."""
        best_fn = self._options.best_fn
        if best_fn is None:
            return self.latest_step()
        sign = 1 if self._options.best_mode == "max" else -1
        having = [info for info in self._manager.steps() if info.live and info.metrics]
        return (
            max(having, key=lambda info: (sign * best_fn(dict(info.metrics)), info.step)).step
            if having
            else None
        )

    def delete(self, step: int) -> None:
        """Delete a step; one process suffices, and the others save this step again only after that.

        Raises:
            NotFoundError: there is no such step.
            OptionError: it is pinned or a base.
        """
        self._manager.wait()
        delete(self._manager.url(step))

    def reached_preemption(self, step: int) -> bool:
        """Whether this step was saved because the job is about to be stopped."""
        del step
        return self._manager.reached_preemption

    def wait_until_finished(self) -> None:
        """Wait for the save in the background.

        Raises:
            ShardckptError: it failed.
        """
        self._manager.wait()

    check_for_errors = wait_until_finished

    def __getattr__(self, name: str) -> Any:
        """Refuse what Orbax has and this has not, by name."""
        raise _lacking(ocp.CheckpointManager, name)


def _lacking(kind: type, name: str) -> AttributeError | OptionError:
    if name.startswith("_") or not hasattr(kind, name):
        return AttributeError(name)
    return OptionError(
        f"{kind.__name__}.{name} is not supported; see docs/integrations.md for what is."
    )
