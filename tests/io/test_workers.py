"""Threads that do tasks for several callers, and are at work on nobody's once the caller goes on."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import hashlib
import threading
import weakref
from itertools import count

from interrupting import interrupted

import shardckpt.io.workers
from shardckpt.io.workers import Workers


def test_each_task_is_done_once():
    done = []
    workers = Workers(3, "test")
    for n in (0, 1, 2, 100):
        workers.do(done.append, range(n))
    assert sorted(done) == sorted([*range(1), *range(2), *range(100)])


def test_a_task_may_be_anything_and_a_single_one_is_done_by_the_calling_thread():
    done, threads = [], []
    Workers(2, "test").do(done.append, [None, (), False])
    Workers(2, "test").do(lambda _: threads.append(threading.current_thread()), [None])
    assert len(done) == 3
    assert threads == [threading.current_thread()]


def test_several_callers_have_their_own_tasks_and_errors():
    workers, found = Workers(2, "test"), {}

    def call(i):
        done = []

        def work(task):
            if task == 7 and i % 2:
                raise ValueError(i)
            done.append(task)

        try:
            workers.do(work, range(50))
        except ValueError as e:
            found[i] = e.args
        else:
            found[i] = sorted(done)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert found == {i: (i,) if i % 2 else list(range(50)) for i in range(8)}


def test_the_first_error_stops_the_rest_and_keeps_nothing_alive():
    class Memory:
        pass

    def failing(memory):
        workers, began = Workers(2, "test"), []

        def work(task):
            began.append(task)
            assert memory
            raise IndexError(task)

        try:
            workers.do(work, range(100))
        except IndexError:
            workers._pool.shutdown()
        return len(began)

    gc.collect()
    gc.disable()
    try:
        memory = Memory()
        gone = weakref.ref(memory)
        assert 1 <= failing(memory) <= 2
        del memory
        assert gone() is None, "an error in a cycle keeps what was read into until the collector comes"
    finally:
        gc.enable()


def test_whoever_is_interrupted_at_any_instant_leaves_no_thread_at_work():
    """Ctrl-C in turn before each line that the calling thread comes to, and at each call inside of the pool."""
    data = bytes(200_000)
    for at in count():
        workers, done = Workers(2, "test"), []

        def work(_, done=done):
            done.append(hashlib.sha256(data).digest())  # lets other threads run

        left = interrupted(
            at,
            shardckpt.io.workers.__file__,
            lambda code: code.co_filename == concurrent.futures.thread.__file__,
            lambda workers=workers, work=work: workers.do(work, range(40)),
            lambda done=done: len(done),
        )
        workers._pool.shutdown()  # now all have ended that still did something
        if left is None:
            assert len(done) == 40
            break
        assert len(done) == left, f"interrupted at instant {at}"
    assert at > 20
