"""Events of a manager about progress and failures; the rest is in `test_saving`."""

from __future__ import annotations

import numpy as np
import pytest

import shardckpt
from shardckpt.errors import ShardckptError
from shardckpt.training import events

STATE = {"w": np.arange(50_000.0), "n": 1}


@pytest.fixture
def seen():
    return []


@pytest.fixture
def manager(tmp_path, seen):
    """Saves every step, and tells."""
    with shardckpt.CheckpointManager(tmp_path / "run", every=1, on_event=seen.append) as manager:
        yield manager


def kinds_and_steps(seen):
    """All but how far it is."""
    return [
        (type(event).__name__, event.step)
        for event in seen
        if not isinstance(event, events.Progressed)
    ]


def test_progress_of_a_save_and_a_restore_ends_with_all_bytes(manager, seen):
    manager.save(1, STATE)
    manager.wait()
    manager.restore(STATE)
    for doing in ("save", "restore"):
        progress = [
            event for event in seen if isinstance(event, events.Progressed) and event.doing == doing
        ]
        assert (progress[-1].done, progress[-1].total) == (STATE["w"].nbytes, STATE["w"].nbytes)
    assert kinds_and_steps(seen)[-2:] == [("RestoreStarted", 1), ("RestoreFinished", 1)]


def test_a_restore_that_fails_is_told_of_with_its_error(manager, seen):
    manager.save(1, STATE)
    manager.wait()
    with pytest.raises(ShardckptError) as caught:
        manager.restore({"w": np.zeros(3)})
    assert kinds_and_steps(seen)[-2:] == [("RestoreStarted", 1), ("RestoreFailed", 1)]
    assert type(seen[-1].error) is type(caught.value)


def test_a_save_that_cannot_begin_is_told_of_as_failed(manager, seen):
    with pytest.raises(ShardckptError):
        manager.save(1, {"w": object()})
    assert kinds_and_steps(seen) == [("SaveStarted", 1), ("SaveFailed", 1)]
