"""Python can start so many threads and no more: what then fails says so, changes nothing, and goes
well when it can again."""

import subprocess
import sys
import threading
from itertools import count

import numpy as np
import pytest

import shardckpt
from shardckpt import errors
from shardckpt.reading.compare import compare
from shardckpt.runs.catalog import catalog
from shardckpt.runs.collecting import collect

STARTS = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
"""The function of `threading` that starts a thread."""
STATE = {
    "a": np.arange(3 << 20, dtype=np.float32),
    "b": np.ones((2048, 1024)),
    "small": np.arange(7),
}


@pytest.fixture
def fewer_threads(monkeypatch):
    """A function that does something with so many threads, as often as it takes until they suffice;
    what it raised each time."""

    def limited(act, after=lambda: None):
        start, raised = getattr(threading, STARTS), []
        for most in range(100):
            numbers = count()

            def start_some(*arguments, numbers=numbers, most=most, **more):
                if next(numbers) >= most:
                    raise RuntimeError("can't start new thread")
                return start(*arguments, **more)

            with monkeypatch.context() as patched:
                patched.setattr(threading, STARTS, start_some)
                try:
                    act()
                except errors.ShardckptError as error:
                    raised.append(error)
            after()
            if next(numbers) <= most:
                return raised
        raise AssertionError("there is no end to it")

    return limited


def assert_named(raised, kind):
    assert raised
    for error in raised:
        assert isinstance(error, kind)
        assert "can't start new thread" in str(error)


def assert_holds(url, value):
    restored = shardckpt.restore(url)
    assert restored["small"].tolist() == value["small"].tolist()
    assert all(np.array_equal(restored[name], value[name]) for name in value)


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("background", [False, True])
def test_a_save_leaves_the_checkpoint_that_is_there(tmp_path, fewer_threads, layout, background):
    earlier = {name: array + 1 for name, array in STATE.items()}
    options = shardckpt.SaveOptions(layout=layout, overwrite=True)
    shardckpt.save(tmp_path / "c", earlier)

    def save():
        if background:
            shardckpt.save_async(tmp_path / "c", STATE, options=options).wait(timeout=60)
        else:
            shardckpt.save(tmp_path / "c", STATE, options=options)

    def whole():
        small = int(shardckpt.restore(tmp_path / "c")["small"][0])
        assert_holds(tmp_path / "c", (STATE, earlier)[small])

    raised = fewer_threads(save, whole)
    if background or layout == "zarr":
        assert_named(raised, errors.CommitError)
    else:
        assert not raised, "so small a save needs no other thread"
    save()
    assert_holds(tmp_path / "c", STATE)


@pytest.mark.parametrize(
    "read",
    ["restore", "read", "verify", "commit", "reshard", "export", "compare", "catalog", "collect"],
)
def test_reading_works_again_after_a_thread_could_not_be_started(tmp_path, fewer_threads, read):
    shardckpt.save(tmp_path / "c", STATE)
    act = {
        "restore": lambda: assert_holds(tmp_path / "c", STATE),
        "read": lambda: shardckpt.open(tmp_path / "c").read("b"),
        "verify": lambda: shardckpt.open(tmp_path / "c").verify(),
        "commit": lambda: shardckpt.commit(tmp_path),
        "reshard": lambda: shardckpt.reshard(
            tmp_path / "c", tmp_path / "resharded", overwrite=True
        ),
        "export": lambda: shardckpt.export_safetensors(
            tmp_path / "c", tmp_path / "exported.safetensors", overwrite=True
        ),
        "compare": lambda: compare(shardckpt.open(tmp_path / "c"), shardckpt.open(tmp_path / "c")),
        "catalog": lambda: catalog(tmp_path),
        "collect": lambda: collect(tmp_path),
    }[read]
    assert_named(fewer_threads(act), errors.StorageError)
    act()


def test_a_manager_raises_it_and_goes_on(tmp_path, fewer_threads):
    with shardckpt.CheckpointManager(tmp_path, every=1, keep=2) as manager:
        steps = count(1)

        def save():
            try:
                manager.save(next(steps), STATE)
            finally:
                manager.wait()

        assert_named(fewer_threads(save), errors.ShardckptError)
        save()
        assert_holds(tmp_path / str(manager.latest_step()), STATE)
        assert_named(fewer_threads(manager.restore), errors.StorageError)


def test_a_process_that_really_can_start_none_says_so(tmp_path):
    program = """if True:
        import sys, threading, numpy, shardckpt
        state, zarr = {"w": numpy.zeros(3 << 20)}, shardckpt.SaveOptions(layout="zarr")
        shardckpt.save(sys.argv[1] + "/c", state)
        import shardckpt.training.manager
        threading.stack_size(1 << 46)  # more than there are addresses
        shardckpt.save(sys.argv[1] + "/small", state)
        for act in (
            lambda: shardckpt.save(sys.argv[1] + "/d", state, options=zarr),
            lambda: shardckpt.save_async(sys.argv[1] + "/d", state).wait(),
            lambda: shardckpt.restore(sys.argv[1] + "/c"),
            lambda: shardckpt.open(sys.argv[1] + "/c").verify(),
            lambda: shardckpt.CheckpointManager(sys.argv[1], every=1).save(1, state),
        ):
            try:
                act()
            except shardckpt.ShardckptError as e:
                print(e)
        threading.stack_size(0)
        shardckpt.save(sys.argv[1] + "/d", state)"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Python starts no threads any more (can't start new thread)") == 5
    assert shardckpt.open(tmp_path / "d").names() == ["w"]
