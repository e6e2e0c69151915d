"""The steps of a run as both of Orbax's managers of steps save, restore and list them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import jax
from etils import epath

from shardckpt.errors import AlreadyExistsError, NotFoundError
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.runs.steps import check_step
from shardckpt.training.integrations.orbax_options import (
    CUSTOM,
    Abstract,
    abstract_items,
    below,
    check_items,
    policy_of,
    with_keys,
)
from shardckpt.training.manager import CheckpointManager

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from types import TracebackType

    from shardckpt.options import SaveOptions
    from shardckpt.runs.retention import Retention


class OrbaxSteps(AbstractContextManager[Any]):
    """The common part of both managers."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        when: Any,
        keep: Retention | None,
        options: SaveOptions | None,
        *,
        reads_only: bool = False,
    ) -> None:
        """Publish what an earlier run left complete, unless nothing is to be written.

        A program asks for the latest step before it restores that step.
        """
        every = policy_of(when, lambda: self.all_steps())  # noqa: PLW0108  (the manager is made below)
        self._manager = CheckpointManager(root, every=every, keep=keep, options=options)
        self.directory = epath.Path(root)
        """The root directory."""
        if not reads_only:
            try:
                self._manager._newest_step()  # noqa: SLF001
            except BaseException:
                self._manager.close()
                raise

    def all_steps(self, read: bool = False) -> list[int]:
        """The committed steps, ascending.

        They are always read from the storage, also without `read`.
        """
        del read
        return self._manager.all_steps()

    def latest_step(self) -> int | None:
        """The latest committed step; None if there is none."""
        return self._manager.latest_step()

    def should_save(self, step: int) -> bool:
        """Whether `save` would save this step."""
        return not self._behind(step) and self._manager.should_save(step)

    def reload(self) -> None:
        """Do nothing: steps are always read from the storage."""

    def is_saving_in_progress(self) -> bool:
        """Whether a save is in the background."""
        return self._manager._background.in_flight  # noqa: SLF001

    def close(self) -> None:
        """Wait for the save in the background, and release everything.

        Raises:
            ShardckptError: the save failed.
        """
        self._manager.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; if the block raised, a failed save is added to that error as a note."""
        self._manager.__exit__(kind, error, trace)

    def __enter__(self) -> Self:
        """The manager."""
        return self

    def _behind(self, step: int) -> bool:
        """Whether a step is less than the one that was saved or restored last.

        Orbax does not save it, without an error.
        """
        self._manager._check_open()  # noqa: SLF001
        last = self._manager._last  # noqa: SLF001
        return last is not None and check_step(step) < last

    def _save(
        self,
        step: int,
        items: Mapping[str, Any],
        metrics: Any,
        custom: Any,
        *,
        force: bool,
        strict: bool,
    ) -> bool:
        """Save items; `strict`: a step that is saved already is an error."""
        check_items(items)
        if self._behind(step) and not force:
            return False
        if step == self._manager._last:  # noqa: SLF001
            self._manager._background.join()  # noqa: SLF001
            if step not in self.all_steps():
                self._manager._last = None  # noqa: SLF001  (it was deleted, and may be saved again)
            elif strict:
                raise AlreadyExistsError(
                    f"{self._manager.url(step)}: this step is saved already; delete it to save it "
                    "again."
                )
        return self._manager.save(
            step, {**items, **({} if custom is None else {CUSTOM: custom})}, metrics, force=force
        )

    def _load(self, step: int | None, like: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Restore items: those of `like`, or all.

        The value None in `like` restores an item as it is stored.
        """
        self._manager.wait()
        at = self._manager._newest_step() if step is None else step  # noqa: SLF001
        if at is None:
            raise NotFoundError(f"{self.directory}: there is no checkpoint to load.")
        stored = self._items(at)
        names = [name for name in stored if name != CUSTOM] if like is None else list(like)
        if lost := [name for name in names if name not in stored]:
            raise NotFoundError(
                f"{self._manager.url(at)}: it has no {lost[0]!r}; it has {', '.join(stored)}."
            )
        targets = {name: target for name, target in (like or {}).items() if target is not None}
        arrays = [
            name
            for name in names
            if any(isinstance(leaf, Abstract) for leaf in jax.tree.leaves(stored[name]))
        ]
        items = {name: stored[name] for name in names}
        for target, group in (
            (targets, list(targets)),
            (None, [name for name in arrays if name not in targets]),
        ):
            if group:
                restored = self._manager.restore(
                    target, at, only=below(group), cast=True, fallback=False
                )
                assert restored is not None, "the step is given"
                items |= (
                    restored.state
                    if target
                    else {name: with_keys(stored[name], restored.state[name]) for name in group}
                )
        return at, {name: items[name] for name in names}

    def _items(self, step: int) -> dict[str, Any]:
        """The items of a step: abstract arrays (`jax.ShapeDtypeStruct`) in the place of arrays."""
        return abstract_items(Checkpoint(self._manager.url(step)))

    def _metrics(self, step: int) -> dict[str, float]:
        return next((dict(info.metrics) for info in self._manager.steps() if info.step == step), {})
