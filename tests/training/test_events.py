"""Events: what a callback is told, and that no callback costs a save."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import typing

import numpy as np
import pytest

import shardckpt
import shardckpt.writing.background
from shardckpt.training import events
from shardckpt.training.events import (
    Event,
    Events,
    Progressed,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
)

KINDS = typing.get_args(Event)


@pytest.fixture
def report(tmp_path):
    """Of a real save."""
    return shardckpt.save_async(tmp_path / "c", {"w": np.arange(10_000)}).wait()


def example(kind, report):
    """An event of that class."""
    values = {
        "report": report,
        "error": OSError("disk full"),
        "doing": "save",
        "done": 1,
        "total": 2,
        "nbytes": 1,
        "seconds": 0.5,
        "times": 3,
    }
    needed = {field.name for field in dataclasses.fields(kind)} - {"url", "step"}
    return kind(url="run/100", step=100, **{name: values.get(name, "a reason") for name in needed})


def test_every_event_is_a_frozen_dataclass_that_names_its_url_and_step_and_reads_as_one_line(
    report,
):
    for kind in KINDS:
        event = example(kind, report)
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.step = 1
        assert str(event).startswith("run/100 (step 100): ")
        assert "\n" not in str(event)
        assert kind.__name__ in events.__all__
    assert set(events.__all__) == {kind.__name__ for kind in KINDS} | {
        "Callback",
        "Event",
        "Events",
    }


def test_an_event_outside_of_a_manager_has_no_step():
    assert str(SaveStarted(url="run/x")) == "run/x: save begins"


def test_a_callback_exits_the_thread_that_trains_which_need_not_be_the_main_one():
    raised = []

    def train():
        try:
            Events(lambda _event: sys.exit(3)).emit(SaveStarted(url="run/1"))
        except SystemExit as e:
            raised.append(e.code)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert raised == [3]


def test_callbacks_are_told_of_each_event_in_order():
    seen = []
    emitter = Events(
        lambda event: seen.append(("a", event)), None, lambda event: seen.append(("b", event))
    )
    first, second = SaveStarted(url="run/1", step=1), SaveStarted(url="run/2", step=2)
    emitter.emit(first)
    emitter.emit(second)
    assert seen == [("a", first), ("b", first), ("a", second), ("b", second)]


def test_a_callback_that_raises_is_logged_with_its_traceback_and_the_others_are_told(caplog):
    def broken(event):
        raise RuntimeError(f"cannot count {event.step}")

    seen = []
    Events(broken, seen.append).emit(SaveStarted(url="run/1", step=1))
    assert len(seen) == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.name == "shardckpt"
    assert record.exc_info[0] is RuntimeError
    assert "the save goes on" in record.getMessage()


def test_every_event_is_logged_at_the_level_that_it_deserves(caplog, report):
    caplog.set_level(logging.DEBUG, "shardckpt")
    for kind in KINDS:
        Events().emit(example(kind, report))
    levels = {kind: record.levelno for kind, record in zip(KINDS, caplog.records, strict=True)}
    assert levels[SaveFailed] == logging.ERROR
    assert levels[SaveCommitted] == logging.INFO
    assert levels[Progressed] == logging.DEBUG
    assert {record.name for record in caplog.records} == {"shardckpt"}


def test_callbacks_are_called_for_one_event_at_a_time_whatever_thread_it_is_from():
    inside, overlaps, calls = threading.Lock(), [], []

    def callback(event):
        overlaps.append(not inside.acquire(blocking=False))
        calls.append(event)
        inside.release()

    emitter = Events(callback)
    threads = [
        threading.Thread(target=lambda: [emitter.emit(SaveStarted(url="run")) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 800
    assert not any(overlaps)


def test_a_callback_may_cause_an_event_itself():
    seen = []

    def callback(event):
        seen.append(event.step)
        if event.step == 1:
            emitter.emit(SaveStarted(url="run/2", step=2))

    emitter = Events(callback)
    emitter.emit(SaveStarted(url="run/1", step=1))
    assert seen == [1, 2]


def test_progress_is_told_first_and_last_and_not_for_every_chunk_between():
    seen = []
    tell = Events(seen.append).progress("save", "run/1", 1)
    for done in range(10_001):
        tell(done, 10_000)
        if done == 10_000:
            tell(done, 10_000)
    assert (seen[0].done, seen[-1].done) == (0, 10_000)
    assert [event.done for event in seen] == sorted({event.done for event in seen})
    assert len(seen) < 1000


def test_a_save_and_a_restore_tell_how_far_they_are(tmp_path):
    state = {f"w{i}": np.arange(50_000.0) + i for i in range(4)}
    total = sum(w.nbytes for w in state.values())
    saver, options, calls = shardckpt.writing.background.Saver(), shardckpt.SaveOptions(), []
    saver.begin(tmp_path / "c", state, options, progress=lambda *now: calls.append(now)).wait()
    saver.close()
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    calls.clear()
    shardckpt.restore(tmp_path / "c", state, progress=lambda *now: calls.append(now))
    assert calls[-1] == (total, total)
