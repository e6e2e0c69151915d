"""Ray Train's checkpoints through shardckpt.

A `CheckpointManager` reports committed steps to Ray Train and resumes in its retries.

    def train(config):  # for ray.train.torch.TorchTrainer
        with RayTrainManager("gs://bucket/run", every=500, keep=3) as mgr:
            restored = mgr.restore(state)
            for step in range(restored.step + 1 if restored else 0, steps):
                state, loss = train_step(state)
                mgr.save(step, state, {"loss": loss})

Each worker saves its own shards to the run, in the background. Ray Train uploads nothing
(`CheckpointUploadMode.NO_UPLOAD`).

1. Ray takes only directories in the experiment's own directory, and deletes them file by file
   (`CheckpointConfig(num_to_keep=…)`). If one of them is missing, an experiment cannot be resumed.
   So Ray never gets a step's own directory: it gets one with a single small file, Ray's own
   metadata, which has the url of the step. Ray's retention deletes these; the manager's `keep`
   deletes steps.
2. A step is reported when it is committed, with its own metrics: when the next save begins, by
   `wait`, and by `close`. All workers report equally often, because a report is a barrier.
3. A restore takes the run's latest step. If Ray does not know it yet, because a worker died before
   the report, it is reported then.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import ray.train

from shardckpt.errors import CorruptionError, NotFoundError, OptionError
from shardckpt.io.url import parse
from shardckpt.runs.measured import METRICS, decode_metrics, encode_metrics
from shardckpt.training.manager import CheckpointManager

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from shardckpt.training.resuming import Restored

__all__ = ["RayTrainManager", "checkpoint_url"]

_KEY = "shardckpt"
"""The key of the url in the metadata of Ray's checkpoints."""


class RayTrainManager(CheckpointManager):
    """Saves the steps of a run in Ray Train's workers, and reports them to Ray Train.

    A step is reported when it is committed. The manager resumes in Ray Train's retries.

    All workers create one and call the same methods for the same steps, as with
    `shardckpt.CheckpointManager`.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        """Create a manager in the function that a trainer of Ray Train runs.

        Args:
            root: the run's directory, an absolute path or a url, which all workers reach. It need
                not be Ray's `storage_path`.
            options: as for `shardckpt.CheckpointManager`.

        Raises:
            OptionError: an invalid option, or a relative path; Ray Train's version 1, its local
                mode (`num_workers=0`), or workers that no process group connects; Ray's latest
                checkpoint is not a step of this run.
            CorruptionError: Ray's latest checkpoint has damaged metadata.
        """
        parse(root)
        if "://" not in str(root) and not Path(root).expanduser().is_absolute():
            raise OptionError(
                f"RayTrainManager({str(root)!r}): Ray gives its workers another working "
                "directory; give an absolute path."
            )
        context = _context()
        super().__init__(root, **options)
        processes, workers = self._coordinator.world.processes, context.get_world_size()
        if processes != workers:
            raise OptionError(
                f"RayTrainManager: Ray Train runs {workers} workers, and a process group connects "
                f"{processes}; take TorchTrainer, or call torch.distributed.init_process_group or "
                "jax.distributed.initialize first."
            )
        self._reports = context.get_world_rank() == 0
        self._storage = context.get_storage()
        self._known = self._known_step()
        """The step that Ray Train heard of last."""
        self._unreported: tuple[int, dict[str, float]] | None = None
        """The step that was saved last, with its metrics, until it is reported."""

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
        skip: str | Sequence[str] | None = None,
    ) -> bool:
        """Save a step in the background, if it is due.

        The save begins after the previous step was committed and reported to Ray Train.

        Args:
            step: as for `CheckpointManager.save`, as are `state`, `force` and `skip`.
            state: see there.
            metrics: numbers by name. Ray Train gets them with the step's checkpoint, when that is
                committed.
            force: see there.
            skip: see there.

        Returns:
            Whether the step is being saved.

        Raises:
            ShardckptError: as in `CheckpointManager.save`; or the previous save failed, and this
                one was not begun.
        """
        measured = decode_metrics(encode_metrics(metrics or {}))
        if force or self.should_save(step):
            self.wait()
        saving = super().save(step, state, metrics, force=force, skip=skip)
        if saving:
            self._unreported = step, measured
        return saving

    def restore(self, like: Any = None, step: int | None = None, **how: Any) -> Restored | None:
        """Restore the run's latest step, or a given one, and report it if it is new.

        The step is reported if it is later than what Ray Train knows.

        Args:
            like: the restore target, as for `shardckpt.restore`.
            step: the step to restore. None restores the latest.
            how: as for `CheckpointManager.restore`.

        Returns:
            None if there is neither a step nor a checkpoint of Ray's.

        Raises:
            NotFoundError: Ray Train knows a checkpoint, and the run has no step.
            ShardckptError: as in `CheckpointManager.restore`.
        """
        restored = super().restore(like, step, **how)
        if restored is None and self._known is not None:
            raise NotFoundError(
                f"{self.url(self._known)}: Ray Train's latest checkpoint is this step, and the "
                "run has no step; to start anew, give RunConfig another name."
            )
        if restored is not None and (self._known is None or restored.step > self._known):
            self._report(restored.step, decode_metrics(restored.metadata.get(METRICS)))
        return restored

    def wait(self) -> None:
        """Wait until nothing is in flight, and report the committed step to Ray Train.

        The method waits as `CheckpointManager.wait` does.

        Raises:
            ShardckptError: a save failed.
        """
        super().wait()
        self._report_committed()

    def close(self) -> None:
        """Finish the work in flight, and report the last step to Ray Train.

        The method finishes the work as `CheckpointManager.close` does.

        Raises:
            ShardckptError: a save failed; its step is not reported.
        """
        # A save that fails is not reported, in a second call neither.
        unreported, self._unreported = self._unreported, None
        super().close()
        self._unreported = unreported
        self._report_committed()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the manager.

        After an error nothing is reported, because the other workers may not come to the barrier.
        """
        if error is not None:
            self._unreported = None
        super().__exit__(kind, error, trace)

    def _report_committed(self) -> None:
        """Report the step that was saved last.

        A save that failed, which `on_failure` has allowed, is reported without a checkpoint.
        """
        unreported, self._unreported = self._unreported, None
        if unreported is not None:
            step, metrics = unreported
            self._report(step, metrics, committed=step != self._background.lost)

    def _report(self, step: int, metrics: dict[str, float], *, committed: bool = True) -> None:
        """Report a step, on all workers at once; the first one makes Ray's checkpoint."""
        checkpoint = None
        if committed:
            self._known = step
            checkpoint = self._point_to(step) if self._reports else None
        ray.train.report(
            metrics, checkpoint, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD
        )

    def _point_to(self, step: int) -> ray.train.Checkpoint:
        """A checkpoint of Ray's that has the url of a step.

        Its name is new: a step is reported again after a rollback.
        """
        path = PurePosixPath(
            self._storage.experiment_fs_path, f"shardckpt-{step}-{uuid4().hex[:12]}"
        ).as_posix()
        filesystem = self._storage.storage_filesystem
        filesystem.create_dir(path)
        checkpoint = ray.train.Checkpoint(path, filesystem)
        checkpoint.set_metadata({_KEY: self.url(step)})
        return checkpoint

    def _known_step(self) -> int | None:
        """The step of Ray's latest checkpoint; None: Ray has none."""
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        url = checkpoint_url(checkpoint)
        step = url.rpartition("/")[2]
        if not step.isdecimal() or self.url(int(step)) != url:
            raise OptionError(
                f"RayTrainManager({str(self._root)!r}): the latest checkpoint of this experiment "
                f"of Ray Train is {url}, which is not a step of this run; give the run's root, or "
                "RunConfig another name."
            )
        return int(step)


def checkpoint_url(checkpoint: ray.train.Checkpoint) -> str:
    """The url of the step that a checkpoint of Ray Train stands for.

    The url is for `shardckpt.open` and `shardckpt.restore`.

    Args:
        checkpoint: for example `result.checkpoint` of `trainer.fit()`.

    Raises:
        OptionError: `RayTrainManager` has not reported it, or it is gone.
        CorruptionError: its metadata is damaged.
    """
    try:
        url = checkpoint.get_metadata().get(_KEY)
    except (ValueError, AttributeError) as e:
        raise CorruptionError(
            f"{checkpoint.path}/.metadata.json is not an object in JSON ({e}); restore from the "
            "run's url instead."
        ) from e
    if not isinstance(url, str):
        raise OptionError(
            f"{checkpoint.path}: this checkpoint of Ray Train has no url of a step; "
            "RayTrainManager has not reported it."
        )
    return url


def _context() -> Any:
    """Ray's context of this worker.

    Raises:
        OptionError: there is none that can be used.
    """
    if not hasattr(ray.train, "CheckpointUploadMode"):
        raise OptionError(
            "RayTrainManager: needs version 2 of Ray Train, which Ray 2.60 has unless "
            "RAY_TRAIN_V2_ENABLED=0."
        )
    try:
        context = ray.train.get_context()
        context.get_storage()
    except NotImplementedError as e:
        raise OptionError(
            "RayTrainManager: Ray Train's local mode keeps no checkpoints; give "
            "ScalingConfig(num_workers=1)."
        ) from e
    except RuntimeError as e:
        raise OptionError(
            "RayTrainManager: this is not a worker of Ray Train; make it in the function that a "
            "trainer runs."
        ) from e
    return context
