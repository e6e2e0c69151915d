"""Calls of a store, here of functions that return when the test lets them."""

import gc
import subprocess
import sys
import threading
import weakref
from queue import SimpleQueue

import pytest

from shardckpt.errors import CoordinationError
from shardckpt.frameworks.coordination import SilentStoreError, calls
from shardckpt.frameworks.coordination.calls import StoreCalls


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(calls, "ANSWER_SECONDS", 0.05)
    return StoreCalls("the store")


def test_a_call_returns_or_raises_what_it_would_by_itself(store):
    assert store.make(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        store.make(lambda: 1 / 0)
    assert store.make(lambda: 8) == 8


def test_while_a_call_has_not_returned_others_are_refused_and_not_made(store):
    answers, made = SimpleQueue(), []
    with pytest.raises(
        SilentStoreError, match=r"the store has not answered for 0\.05 s; process 0 "
    ):
        store.make(answers.get)
    with pytest.raises(
        SilentStoreError, match="the store has not answered an earlier question yet; process 0 "
    ):
        store.make(lambda: made.append(1))
    answers.put("at last")
    while True:  # until the first call has returned
        try:
            assert store.make(lambda: 9) == 9
            break
        except SilentStoreError:
            pass
    assert made == []


FORKED = """
import os
from shardckpt.frameworks.coordination.calls import StoreCalls

store = StoreCalls("the store")
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
store.make(lambda: 1)
"""


def test_a_fork_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], stderr=subprocess.PIPE, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert (
        "CoordinationError: this process was forked from one that uses the store, and cannot use it"
        in done.stderr
    )


def test_nothing_of_a_call_is_held_and_the_thread_ends_with_its_calls():
    class Client:
        def ask(self):
            return threading.current_thread()

    store, client = StoreCalls("the store"), Client()
    held, thread = weakref.ref(client), store.make(client.ask)
    del client
    store.make(lambda: None)  # the thread has come round
    gc.collect()
    assert held() is None
    del store
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_the_error_says_that_no_thread_could_be_started(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(
        CoordinationError,
        match=r"the store cannot be asked: Python starts no thread for it \(can't start new "
        r"thread\); allow",
    ):
        StoreCalls("the store")
