"""A job that is about to be stopped saves one last time."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from paths import CHILDREN
from training_runs import state

from shardckpt import errors
from shardckpt.training.policies import EverySteps, OnPreemption, any_of
from shardckpt.training.preemption import Notices


@pytest.fixture
def terminated():
    """Signals that the handler of before was called with."""
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def train(manager, steps, notice):
    """A loop that ends when the job is about to be stopped, which happens at step 5."""
    for step in range(steps):
        if step == 5:
            notice()
        manager.save(step, state(step))
        if manager.reached_preemption:
            return step
    return None


def test_a_signal_saves_at_once_and_the_handler_of_before_is_called_too(run, terminated):
    with run.manager(every=None, preemption=OnPreemption()) as manager:
        assert train(manager, 10, lambda: os.kill(os.getpid(), signal.SIGTERM)) == 5
    assert run.holds(5)
    assert terminated == [signal.SIGTERM]
    assert [(e.step, e.source) for e in run.events_of("PreemptionNoticed")] == [(5, "SIGTERM")]


def test_so_does_a_file(run, tmp_path):
    with run.manager(
        every=None, preemption=OnPreemption(signals=(), file=tmp_path / "notice")
    ) as manager:
        assert train(manager, 10, (tmp_path / "notice").touch) == 5
    assert run.events_of("PreemptionNoticed")[0].source == str(tmp_path / "notice")


def test_and_a_function(run):
    notices = []
    policy = any_of(EverySteps(3), OnPreemption(signals=(), when=lambda: bool(notices)))
    with run.manager(every=policy) as manager:
        assert train(manager, 10, lambda: notices.append(1)) == 5
        assert manager.all_steps()[0] == 3
    assert run.holds(5)


def test_a_notice_is_acted_on_once(run):
    with run.manager(every=None, preemption=OnPreemption(signals=(), when=lambda: True)) as manager:
        assert [manager.save(step, state(step)) for step in range(4)] == [True, False, False, False]
        assert manager.reached_preemption


def test_closing_brings_back_the_handlers_of_before(terminated):
    before = signal.getsignal(signal.SIGTERM)
    outer = Notices([OnPreemption()])
    inner = Notices([OnPreemption()])
    os.kill(os.getpid(), signal.SIGTERM)
    assert outer.look() == inner.look() == "SIGTERM"
    assert terminated == [signal.SIGTERM]
    inner.close()
    outer.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_somebody_has_set_since_stays(terminated):
    notices = Notices([OnPreemption()])
    mine = signal.getsignal(signal.SIGTERM)
    later = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert later is mine
    notices.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_handlers_can_only_be_set_in_the_main_thread(run):
    caught = []

    def make():
        try:
            run.manager(preemption=OnPreemption())
        except errors.OptionError as e:
            caught.append(str(e))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


def test_a_manager_that_cannot_be_made_leaves_no_handler(run, terminated):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(errors.OptionError, match="progress"):
        run.manager(preemption=OnPreemption(), progress="a line")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def interrupted():
    """A function that interrupts this thread, as Ctrl-C does, after some seconds."""

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# It may come within a callback of the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_of_a_save_leaves_nothing_half_visible(run, interrupted):
    large = {"w": np.zeros(4_000_000, np.float32)}
    begun = 0
    with run.manager() as manager:
        manager.save(1, large)
        for step in range(2, 12):
            large["w"][:] = step
            manager.wait()
            try:
                interrupted(0.001 * (step - 1))
                manager.save(step, large)
                interrupted(0)
            except KeyboardInterrupt:
                begun += 1
            except RuntimeError as e:
                # Python's own: `Event.wait`, and so `Thread.start`, release a lock that Ctrl-C kept
                # them from taking again.
                assert (str(e), type(e.__context__)) == ("release unlocked lock", KeyboardInterrupt)  # noqa: PT017
                begun += 1
    assert begun
    steps = run.manager().all_steps()
    assert steps[0] == 1
    assert all(run.holds(step) for step in steps[1:])


@pytest.mark.parametrize(
    ("kind", "printed"),
    [
        ("process", -signal.SIGTERM),
        ("thread", -signal.SIGTERM),
        ("two managers", -signal.SIGTERM),
        ("pool", "joined"),
        ("just forked", f"{-signal.SIGTERM} set()"),
        ("daemon", "the end"),
        ("own handler on top", -signal.SIGTERM),
        ("group", f"True {-signal.SIGTERM}"),
    ],
)
def test_a_signal_ends_forked_children_as_without_a_manager(tmp_path, kind, printed):
    program = [sys.executable, CHILDREN / "preempted_children.py", kind, tmp_path / "run"]
    done = subprocess.run(
        program, stdout=subprocess.PIPE, text=True, timeout=200, check=True, start_new_session=True
    )
    assert done.stdout == f"{printed}\n"
