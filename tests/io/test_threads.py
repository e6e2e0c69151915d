"""Threads that do items for a caller, and are at work on none of them once the caller goes on."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, count
from threading import Event

import numpy as np
import pytest
from interrupting import interrupted

import shardckpt
from shardckpt.io.threads import (
    SWITCH_SECONDS,
    PoolCall,
    Workers,
    _Setting,
    collector_paused,
    map_on_threads,
    prompt_turns,
    read_ahead,
    run_on_threads,
)
from shardckpt.writing.background import Saver

SECONDS = 20.0


def test_each_item_is_taken_once():
    taker = [[], [], []]
    run_on_threads(range(1000), [one.append for one in taker], "test")
    assert sorted(chain(*taker)) == [*range(1000)]


def test_an_error_is_raised_here_and_holds_on_to_nothing():
    def fails(item):
        raise ValueError(item)

    with pytest.raises(ValueError, match="0") as caught:
        run_on_threads(range(9), [fails, fails], "test")
    frames = [*_frames(caught.value.__traceback__)]
    assert not any(
        caught.value in held
        for frame in frames
        for held in frame.f_locals.values()
        if isinstance(held, list)
    )


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
            deadline = time.monotonic() + 60
            while len(interrupts) < n and time.monotonic() < deadline:
                time.sleep(0.001)
        early.append(left.wait(0.2))

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_on_threads(range(2), [lambda item: begun.wait(60), slow], "test")
        left.set()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (len(interrupts), early) == (2, [False])


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
    workers, outcomes = Workers(2, "test"), {}

    def call(i):
        done = []

        def work(task):
            if task == 7 and i % 2:
                raise ValueError(i)
            done.append(task)

        try:
            workers.do(work, range(50))
        except ValueError as e:
            outcomes[i] = e.args
        else:
            outcomes[i] = sorted(done)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert outcomes == {i: (i,) if i % 2 else list(range(50)) for i in range(8)}


def test_a_caller_that_joins_waits_for_no_tasks_of_another_one():
    workers, begun, may_end = Workers(2, "test"), threading.Barrier(3), threading.Event()
    done, ended = [], []

    def work(_task):
        begun.wait(20)
        ended.append(may_end.wait(20))

    other = threading.Thread(target=workers.do, args=(work, range(2)))
    other.start()
    begun.wait(20)
    workers.do(done.append, range(5), joins=True)
    may_end.set()
    other.join(20)
    assert (done, ended) == ([*range(5)], [True, True])


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
        assert gone() is None, (
            "an error in a cycle keeps what was read into until the collector comes"
        )
    finally:
        gc.enable()


def _read_ahead(_, work, items):
    with closing(
        read_ahead(items, lambda item, _alone: item + 1, work, ahead=2, copies=False)
    ) as batches:
        list(batches)


@pytest.mark.parametrize(
    ("run", "items"),
    [
        pytest.param(
            lambda _, work, items: run_on_threads(items, [work] * 3, "test"),
            range(20),
            id="run_on_threads",
        ),
        pytest.param(Workers.do, range(40), id="Workers"),
        pytest.param(_read_ahead, range(3), id="read_ahead"),
    ],
)
def test_an_interrupt_at_any_instant_leaves_no_thread_at_work(run, items):
    """Ctrl-C in turn before each line that the calling thread comes to, at each call inside of a
    pool, and when a thread is to begin."""
    data = bytes(300_000)
    pool, waiting = concurrent.futures.thread.__file__, threading.Event.wait.__code__
    for at in count():
        done = []

        def work(_, done=done):
            for _ in range(2):
                done.append(hashlib.sha256(data).digest())  # lets other threads run

        others, workers = set(threading.enumerate()), Workers(2, "test")
        left = interrupted(
            at,
            shardckpt.io.threads.__file__,
            lambda code: code.co_filename == pool or code is waiting,
            lambda work=work, workers=workers: run(workers, work, items),
            lambda done=done: len(done),
        )
        workers._pool.shutdown(wait=False)
        for thread in set(threading.enumerate()) - others:
            thread._started.wait(SECONDS)
            thread.join(SECONDS)  # now all have ended that still did something
        if left is None:
            assert len(done) == 2 * len(items)
            break
        assert len(done) == left, f"interrupted at instant {at}"
    assert at > 20


def test_an_interrupt_while_small_reads_begin_stops_those_that_wait_for_a_thread():
    done = []

    def read(item):
        time.sleep(0.3)
        done.append(item)

    interrupted(
        99,
        None,
        lambda code: code is PoolCall.__init__.__code__,
        lambda: map_on_threads(read, range(100)),
        lambda: None,
    )
    assert len(done) < 99


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_of_the_collector_ends_as_it_was_found(enabled):
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with collector_paused():
            with collector_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(KeyError), collector_paused():
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_a_thread_in_the_background_pauses_no_collector():
    """Else the program's own `gc.disable()` meanwhile would be undone at the end of the pause."""
    seen = []

    def pause():
        with collector_paused():
            seen.append(gc.isenabled())
            gc.disable()
        seen.append(gc.isenabled())

    was = gc.isenabled()
    try:
        gc.enable()
        thread = threading.Thread(target=pause)
        thread.start()
        thread.join()
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [True, False]


# By JAX, where another test has imported it.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_of_pauses_that_overlap_the_last_one_counts():
    one, other = collector_paused(), collector_paused()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not gc.isenabled()
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0, "other threads and their pauses do not exist in a fork"
    other.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.fixture
def interval():
    """The interpreter's own switch interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before)


def test_threads_get_the_interpreter_promptly_during_every_save_and_restore(tmp_path, interval):
    seen = []

    def look(*_):
        seen.append(sys.getswitchinterval())

    state = {"w": np.zeros(10)}
    shardckpt.save(tmp_path / "a", state)
    shardckpt.save_async(tmp_path / "b", state).wait()
    shardckpt.restore(tmp_path / "a", state, progress=look)
    shardckpt.open(tmp_path / "b").verify(progress=look)
    assert seen
    assert max(seen) <= SWITCH_SECONDS
    assert sys.getswitchinterval() == interval


@pytest.mark.usefixtures("interval")
def test_the_switch_interval_that_a_program_chooses_during_a_save_stays():
    with prompt_turns():
        with prompt_turns():
            assert sys.getswitchinterval() == SWITCH_SECONDS
        assert sys.getswitchinterval() == SWITCH_SECONDS
        sys.setswitchinterval(0.002)
    assert sys.getswitchinterval() == 0.002
    sys.setswitchinterval(0.0002)
    chosen = sys.getswitchinterval()
    with prompt_turns():
        assert sys.getswitchinterval() == chosen
    assert sys.getswitchinterval() == chosen


@pytest.mark.usefixtures("interval")
def test_what_a_program_chooses_during_a_background_save_stays_though_another_save_begins(tmp_path):
    chosen = threading.Event()
    saver = Saver()
    handle = saver.begin(
        tmp_path / "a",
        {"w": np.zeros(10)},
        shardckpt.SaveOptions(),
        before_publish=lambda: chosen.wait(SECONDS),
    )
    sys.setswitchinterval(0.02)
    shardckpt.save(tmp_path / "b", {"w": np.zeros(10)})
    chosen.set()
    handle.wait()
    assert sys.getswitchinterval() == 0.02


@pytest.mark.parametrize("at", range(12))
def test_a_signal_handler_that_saves_amid_a_change_of_a_setting_leaves_the_programs_value(at):
    """At each read and write of the setting, by the outer user, another one comes and goes."""
    value, calls, inside = [5.0], count(), []

    def interrupted():
        if next(calls) == at and not inside:
            inside.append(None)
            with setting.changed():
                pass

    def read():
        interrupted()
        return value[0]

    def write(new):
        interrupted()
        value[0] = new
        interrupted()

    setting = _Setting(read, write, lambda seconds: min(seconds, 0.5))
    for _ in range(2):
        with setting.changed():
            pass
    assert value == [5.0]


def test_a_setting_comes_back_however_often_users_in_threads_and_ctrl_c_overlap():
    value = [True]
    setting = _Setting(lambda: value[0], lambda new: value.__setitem__(0, new), lambda _: False)

    def use():
        for _ in range(200):
            with setting.changed():
                pass

    gc.freeze()  # a collection of everything that other tests have left takes a second
    try:
        for at in range(150):
            threads = [threading.Thread(target=use) for _ in range(2)]
            for thread in threads:
                thread.start()
            interrupted(
                at, _Setting._leave.__code__.co_filename, lambda _code: False, use, lambda: None
            )
            for thread in threads:
                thread.join()
            gc.collect()
            assert value == [True]
    finally:
        gc.unfreeze()


@pytest.mark.long
def test_a_background_save_in_a_signal_handler_amid_the_change_of_a_setting_ends(tmp_path):
    """In a process of its own: the thread of the handler's save needs the setting, too."""
    program = """
import signal, sys, random, numpy, shardckpt
from shardckpt.io.failures import saving_takes_threads
state, saves = {"a": numpy.ones(9)}, []
def handler(*_):
    options = shardckpt.SaveOptions(overwrite=True)
    saves.append(shardckpt.save_async(sys.argv[1], state, options=options).wait(timeout=60))
handler()
signal.signal(signal.SIGALRM, handler)
for _ in range(100):
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-5))
    for _ in range(20):
        with saving_takes_threads("x"):
            pass
assert len(saves) > 10, len(saves)
"""
    run = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "c"], capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.usefixtures("interval")
def test_the_switch_interval_is_the_same_after_many_saves():
    for microseconds in range(501, 2000, 7):
        sys.setswitchinterval((microseconds + 0.5) / 1e6)
        before = sys.getswitchinterval()
        for _ in range(3):
            with prompt_turns():
                pass
        assert sys.getswitchinterval() == before


@pytest.mark.long
def test_a_save_and_a_restore_of_many_small_tensors_begin_no_full_collection(tmp_path):
    """Each would visit all objects of the program."""
    state = {f"t{i}": np.zeros(10) for i in range(500)}
    shardckpt.save(tmp_path / "first", state)
    shardckpt.restore(tmp_path / "first", state)
    gc.collect()
    before = gc.get_stats()[2]["collections"]
    for i in range(10):
        shardckpt.save(tmp_path / str(i), state)
        shardckpt.restore(tmp_path / str(i), state)
    assert gc.get_stats()[2]["collections"] == before


def test_a_call_returns_or_raises_what_its_work_did_and_frees_it():
    class Held:
        pass

    with ThreadPoolExecutor(1) as pool:
        assert PoolCall(pool, divmod, 7, 2).result() == (3, 1)
        held = Held()
        gone = weakref.ref(held)
        failing = PoolCall(pool, lambda one: 1 / (one is None), held)
        del held
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                failing.result()
        assert failing.done()
        gc.disable()
        try:
            del failing
            assert gone() is None
        finally:
            gc.enable()


def test_an_interrupt_of_a_wait_for_a_call_leaves_the_call_to_its_thread():
    go_on = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        call = PoolCall(pool, go_on.wait)
        threading.Timer(
            0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        ).start()
        with pytest.raises(KeyboardInterrupt):
            call.result()
        assert not call.done()
        go_on.set()
        assert call.result()
