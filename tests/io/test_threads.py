"""Items that several threads take."""

from __future__ import annotations

import os
import signal
import time
from itertools import chain
from threading import Event

import pytest

from shardckpt.io.threads import taken


def test_each_item_is_taken_once():
    taker = [[], [], []]
    taken(range(1000), [one.append for one in taker])
    assert sorted(chain(*taker)) == [*range(1000)]


def test_an_error_is_raised_here_and_holds_on_to_nothing():
    def fails(item):
        raise ValueError(item)

    with pytest.raises(ValueError, match="0") as caught:
        taken(range(9), [fails])
    frames = [*_frames(caught.value.__traceback__)]
    assert not any(caught.value in held for frame in frames for held in frame.f_locals.values() if isinstance(held, list))


def _frames(traceback):
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def test_however_often_it_is_interrupted_no_thread_is_at_work_when_it_is_left():
    interrupts, begun, left, early = [], Event(), Event(), []

    def interrupt(number, frame):
        interrupts.append(number)
        raise KeyboardInterrupt

    def slow(item):
        begun.set()
        for n in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 10
            while len(interrupts) < n and time.monotonic() < deadline:
                time.sleep(0.001)
        early.append(left.wait(0.2))

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            taken(range(2), [lambda item: begun.wait(10), slow])
        left.set()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (len(interrupts), early) == (2, [False])
