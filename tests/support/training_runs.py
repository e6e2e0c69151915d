"""Runs of a small training, whose state says which step it is of."""

from __future__ import annotations

import numpy as np

import shardckpt


def state(step):
    return {"w": np.full(1000, step, np.float32), "step": step}


class Run:
    """A root, managers of it, and what they told."""

    def __init__(self, root):
        self.root = root
        self.events = []
        self.open = []

    def manager(self, **options):
        made = shardckpt.CheckpointManager(
            self.root, **{"every": 1, "on_event": self.events.append} | options
        )
        self.open.append(made)
        return made

    def train(self, *steps, metrics=None, **options):
        """A job that saves these steps and ends."""
        with self.manager(**options) as manager:
            manager.restore()
            for step in steps:
                manager.save(step, state(step), None if metrics is None else metrics(step))
                manager.wait()

    def events_of(self, kind):
        return [event for event in self.events if type(event).__name__ == kind]

    def holds(self, step):
        """Whether a step is there, and what was saved last."""
        try:
            restored = shardckpt.restore(self.root / str(step))
        except shardckpt.errors.NotFoundError:
            return False
        np.testing.assert_array_equal(restored["w"], restored["w"][0])
        assert int(restored["w"][0]) % 1_000_000 == step
        return True
