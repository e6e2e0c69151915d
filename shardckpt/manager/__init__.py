"""The training loop: when to save, what to keep, where to resume, and what to do when something goes wrong.

`manager` is what users see. Each question has a file to itself: `decisions` and `timeline` (is this step saved, on all
processes alike?), `preemption` (is this job about to be stopped?), `steps` (which are there?), `resuming` (which one to go on
from?), `cleaning` (which may go?). One checkpoint is saved and restored by `saver` and `restoring`, which know nothing of
steps. The command line and integrations with other libraries may import this package, nothing else.
"""

from __future__ import annotations

from shardckpt.manager.manager import CheckpointManager
from shardckpt.manager.resuming import Restored
from shardckpt.manager.steps import StepInfo

__all__ = ["CheckpointManager", "Restored", "StepInfo"]
