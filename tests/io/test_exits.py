"""Programs that end while a manager is open: the last save is finished or given up, and the exit
status is the program's own."""

import json
import subprocess
import sys

import pytest
from faults import TORTURE
from paths import CHILDREN

import shardckpt
from shardckpt import errors

OWN = {
    "returns": {0},
    "exits": {7},
    "raises": {1},
    "exits_in_a_thread": {0},
    "is_terminated": {-15},
    "exits_when_terminated": {143},
    "is_interrupted": {-2},
    # -14 where Python has put the default action of SIGALRM back already.
    "is_interrupted_as_it_ends": {0, -2, -14},
}
"""Exit statuses by the way in which a program ends."""
FINISHED = (
    "returns",
    "exits",
    "raises",
    "exits_in_a_thread",
    "exits_when_terminated",
    "is_interrupted",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", OWN)
def test_a_program_that_leaves_its_manager_open_has_the_exit_status_of_its_own(tmp_path, way):
    times = 200 if TORTURE else 40
    command = [sys.executable, CHILDREN / "exits.py", tmp_path, way, str(times)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    statuses = {int(status): count for status, count in json.loads(done.stdout).items()}
    assert set(statuses) <= OWN[way], f"{statuses}\n{done.stderr[-2000:]}"
    for number in range(times):
        steps = {
            int(path.name): path
            for path in (tmp_path / str(number)).iterdir()
            if path.name.isdecimal()
        }
        if way in FINISHED:
            assert shardckpt.restore(steps[3])["w"][0, 0] == 3
        else:  # what is there is whole
            whole = shardckpt.CheckpointManager(tmp_path / str(number)).restore()
            assert whole is None or whole.state["w"][0, 0] == whole.step


@pytest.mark.long
@pytest.mark.parametrize(
    ("process", "by"), [(0, "manager"), (1, "manager"), (0, "publisher"), (1, "publisher")]
)
def test_a_save_that_waits_for_others_is_given_up_when_the_program_ends(tmp_path, process, by):
    program = """if True:
        import sys, numpy, shardckpt
        from one_of_several import OneOfSeveral
        from shardckpt.writing import background as saver
        class Silent(OneOfSeveral):
            def _set(self, key, value):
                pass
            def _get(self, key):
                return None
        # Longer than the moment for which a first save waits for process 0.
        saver._SHUTDOWN_SECONDS = 6
        silent, state = Silent(int(sys.argv[2]), 2), {"w": numpy.ones(9)}
        if sys.argv[3] == "manager":
            manager = shardckpt.CheckpointManager(sys.argv[1], every=1, coordinator=silent)
            manager.save(1, state)
        else:
            publisher = shardckpt.Publisher(sys.argv[1], coordinator=silent)
            publisher.publish(1, state)
        sys.exit(7)"""
    command = [sys.executable, "-c", program, tmp_path, str(process), by]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=CHILDREN.parent)
    assert done.returncode == 7
    assert (
        "the program ends: `shardckpt commit` publishes the save if all processes have written "
        "their shares." in done.stderr
    )
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(tmp_path / "1")


def test_a_thread_that_saves_while_the_program_ends_is_told_that_it_is_too_late(tmp_path):
    program = """if True:
        import sys, threading
        ended, saved = threading.Event(), threading.Event()
        def let_it_save():  # called back after what is registered later, which is shardckpt's
            ended.set()
            saved.wait()
        threading._register_atexit(let_it_save)
        import numpy, shardckpt
        manager = shardckpt.CheckpointManager(sys.argv[1], keep=1)
        manager.save(1, {"w": numpy.ones(1 << 20)})
        def late():
            ended.wait()
            try:
                manager.save(2, {"w": numpy.ones(9)})
            except shardckpt.ShardckptError as error:
                print(type(error).__name__)
            saved.set()
        threading.Thread(target=late).start()
        sys.exit(7)"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stdout) == (7, "CommitError\n"), done.stderr
    assert shardckpt.CheckpointManager(tmp_path).all_steps() == [1]


def test_the_first_save_or_restore_of_a_process_is_refused_once_python_ends(tmp_path):
    program = """if True:
        import atexit, sys, threading, numpy, shardckpt
        def late():
            for name, given in (
                ("save", {"w": numpy.ones(9)}),
                ("save_async", {"w": numpy.ones(9)}),
                ("restore", None),
            ):
                try:
                    getattr(shardckpt, name)(sys.argv[1] + "/late", given)
                except shardckpt.ShardckptError as error:
                    print(type(error).__name__, error)
        atexit.register(late)"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "CommitError",
        "CommitError",
        "StorageError",
    ]
    assert done.stdout.count("Python is shutting down and starts no threads any more") == 3
    assert not list(tmp_path.iterdir())
