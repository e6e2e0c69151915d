"""Saving in the background: what was copied is what is saved, failures are told, and nothing is
left half done."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count

import numpy as np
import pytest
from emulators import environment, gcs_emulator
from faults import patience_of
from forks import Forked
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interrupting import interrupted as interrupted_at
from paths import CHILDREN
from processes import Processes

import shardckpt
from shardckpt import Coordinator, SaveOptions, errors
from shardckpt.io.buffers import BufferPool
from shardckpt.layout.world import World
from shardckpt.options import parse_bytes
from shardckpt.writing.background import Saver, _shared_saver
from shardckpt.writing.handle import SaveProgress

FRAMEWORKS = ["torch", "DTensor", "JAX", "torch_xla"]
MiB = 1 << 20


@pytest.fixture(scope="module")
def job():
    with Processes("async_saves") as processes:
        yield processes


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that says what became of a framework's saves; all are asked at once, because
    importing takes longest."""
    env = {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "8",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    root = tmp_path_factory.mktemp("frameworks")
    running = {}
    for framework in FRAMEWORKS:
        command = [sys.executable, CHILDREN / "async_frameworks.py", framework, root / framework]
        # A fork has torch, by which shardckpt decides.
        start = subprocess.Popen if framework == "JAX" else Forked
        running[framework] = start(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def answer(framework):
        out, errors_printed = running[framework].communicate(timeout=250)
        assert running[framework].returncode == 0, errors_printed
        return json.loads(out.splitlines()[-1])

    try:
        yield answer
    finally:
        for child in running.values():
            child.kill()
            child.communicate()


def state(mebibytes=1, shift=0):
    return {
        "w": np.arange(mebibytes * MiB // 4, dtype=np.int32).reshape(mebibytes, -1)
        + np.int32(shift),
        "step": 3,
    }


def assert_holds(url, mebibytes=1, shift=0):
    assert (shardckpt.restore(url)["w"] == state(mebibytes, shift)["w"]).all()
    assert shardckpt.open(url).verify().ok


# --- what was copied is what is saved -------------------------------------------------------------


@pytest.mark.long
@pytest.mark.xla
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_tensors_may_be_overwritten_as_soon_as_the_call_returns(trained, framework):
    answer = trained(framework)
    assert answer["wrong"] == []
    assert answer["changed"]
    assert len(set(answer["written"])) == 1
    assert not answer["streamed"]


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_everything_in_a_state_may_change_as_soon_as_the_call_returns(
    tmp_path, layout, compression
):
    words, metadata = np.arange(4), {"loss": [1.5]}
    saved = {
        "w": np.arange(600_000).reshape(1000, 600),
        "strided": np.arange(500_000.0).reshape(500, 1000)[::2, 1::3],
        "transposed": np.arange(60_000, dtype=">i4").reshape(200, 300).T,
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3)),
        "nested": [{"step": 7}],
        "rng": shardckpt.PerProcess({"words": words}),
    }
    before = {name: value.copy() for name, value in saved.items() if isinstance(value, np.ndarray)}
    options = SaveOptions(layout=layout, compression=compression, metadata=metadata)
    handle = shardckpt.save_async(tmp_path / "c", saved, options=options)
    for name in before:
        saved[name][...] = 0
    saved["nested"][0]["step"] = 8
    words[...], metadata["loss"][0] = 0, 2.5
    handle.wait()
    restored = shardckpt.restore(
        tmp_path / "c", only=["w", "strided", "transposed", "scalar", "empty", "nested/**"]
    )
    for name, array in before.items():
        np.testing.assert_array_equal(restored[name], array)
    assert restored["nested"] == [{"step": 7}]
    assert shardckpt.open(tmp_path / "c").metadata == {"loss": [1.5]}
    rng = shardckpt.restore(tmp_path / "c", like={"rng": shardckpt.PerProcess(None)}, only=["rng"])[
        "rng"
    ]
    assert rng.value["words"].tolist() == [0, 1, 2, 3]


def test_both_kinds_of_save_write_the_same_chunks(tmp_path):
    shardckpt.save(tmp_path / "a", state(3))
    shardckpt.save_async(tmp_path / "b", state(3)).wait()
    a, b = (next((tmp_path / name).glob("*/hosts/00000/0/d/00000")).read_bytes() for name in "ab")
    assert a == b


def test_a_state_larger_than_the_memory_limit_streams(tmp_path):
    report = shardckpt.save_async(
        tmp_path / "c", state(40), options=SaveOptions(memory_limit="16MiB")
    ).wait()
    assert report.streamed
    assert_holds(tmp_path / "c", 40)


def test_saves_to_several_places_are_in_flight_at_once(tmp_path):
    """Some begun by one thread, some by others; some larger than the buffers are together with the
    rest."""
    saver = Saver(memory_limit="24MiB")
    begin = lambda i: saver.begin(tmp_path / str(i), state(1 + 5 * (i % 3), i), SaveOptions())  # noqa: E731
    with ThreadPoolExecutor(4) as threads:
        handles = [*map(begin, range(4)), *threads.map(begin, range(4, 12))]
    assert [handle.wait().url for handle in handles] == [str(tmp_path / str(i)) for i in range(12)]
    for i in range(12):
        assert_holds(tmp_path / str(i), 1 + 5 * (i % 3), i)
    assert saver.pool.high_water <= 24 * MiB
    saver.close()
    assert saver.pool.kept == []


@pytest.mark.long
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    places=st.lists(st.sampled_from(["memory", "disk", "gs"]), min_size=6, max_size=6),
    threads=st.integers(1, 3),
)
# Each larger than what is left beside the others' writers.
@example(sizes=[20, 20, 20], places=["memory", "gs", "disk"] * 2, threads=3)
@settings(max_examples=5, deadline=None)
def test_saves_in_flight_together_never_exceed_the_limit_and_always_end(
    tmp_path_factory, gcs_server, sizes, places, threads
):
    """Writers of object stores take a quarter of it each, for as long as they write."""
    root, saver = tmp_path_factory.mktemp("together"), Saver(memory_limit="16MiB")
    roots = {
        "memory": f"memory://{root.name}",
        "disk": str(root),
        "gs": f"gs://{gcs_server.bucket}/{root.name}",
    }
    urls = [f"{roots[place]}/{i}" for i, (_, place) in enumerate(zip(sizes, places, strict=False))]

    def begin(i):
        return saver.begin(urls[i], state(sizes[i], i), SaveOptions())

    with environment(gcs_server.env()):
        with ThreadPoolExecutor(threads) as loops:
            for handle in [*loops.map(begin, range(len(sizes)))]:
                handle.wait(timeout=60)
        for i, url in enumerate(urls):
            assert (shardckpt.restore(url)["w"] == state(sizes[i], i)["w"]).all()
    assert saver.pool.high_water <= 16 * MiB
    assert saver.pool.take_at_once(saver.pool.limit) is not None  # all was given back


def test_later_saves_use_the_buffers_and_the_plan_of_the_first(tmp_path, monkeypatch):
    saver = Saver(memory_limit="16MiB")
    saver.begin(tmp_path / "0", state(5), SaveOptions()).wait()
    kept, most = saver.pool.kept, saver.pool.high_water
    monkeypatch.setattr("shardckpt.writing.save_plan.plan_save", None)  # is not called any more
    for i in range(1, 4):
        saver.begin(tmp_path / str(i), state(5, i), SaveOptions()).wait()
        assert saver.pool.kept == kept
        assert saver.pool.high_water == most
        assert_holds(tmp_path / str(i), 5, i)


# --- what a handle says ---------------------------------------------------------------------------


def test_a_handle_tells_how_far_a_save_is(tmp_path):
    go_on = threading.Event()
    handle = Saver().begin(
        tmp_path / "c", state(), SaveOptions(), before_publish=lambda: go_on.wait(60)
    )
    handle.wait("local")
    assert not handle.done()
    assert handle.report is None
    with pytest.raises(TimeoutError, match="and goes on; call wait") as late:
        handle.wait(timeout=0.01)
    assert isinstance(late.value, errors.ShardckptError)
    with pytest.raises(errors.NotFoundError):
        shardckpt.restore(tmp_path / "c")
    go_on.set()
    report = handle.wait()
    assert handle.done()
    assert handle.report is report
    assert report.attempt == shardckpt.open(tmp_path / "c").record.attempt
    assert (report.tensors, report.nbytes) == (1, MiB)
    assert report.stored_bytes > MiB
    phases = [
        report.planning_s,
        report.copying_s,
        report.blocked_s,
        report.writing_s,
        report.waiting_s,
        report.committing_s,
    ]
    assert min(phases) >= 0
    assert report.total_s == pytest.approx(sum(phases))
    assert report.stall_s == pytest.approx(sum(phases[:3]))
    assert_holds(tmp_path / "c")


def test_what_cannot_be_saved_is_told_at_once_and_leaves_nothing(tmp_path):
    with pytest.raises(errors.LeafError, match="object, which cannot be stored"):
        shardckpt.save_async(tmp_path / "c", {"w": np.zeros(5), "f": object()})
    with pytest.raises(errors.OptionError, match="is not a SaveOptions"):
        shardckpt.save_async(tmp_path / "c", {}, options={"overwrite": True})
    assert not (tmp_path / "c").exists()
    handle = shardckpt.save_async(tmp_path / "c", state())
    with pytest.raises(errors.OptionError, match="commit"):
        handle.wait("publish")
    handle.wait()


def test_calls_with_different_memory_limits_share_warm_buffers(tmp_path):
    kept = []
    for i, limit in enumerate(["1GiB", "64MiB", "1GiB"]):
        shardckpt.save_async(
            tmp_path / str(i), state(5), options=SaveOptions(memory_limit=limit)
        ).wait()
        kept.append(_shared_saver().pool.kept)
        assert _shared_saver().pool.limit == parse_bytes(limit, "memory_limit")
    assert kept[0] == kept[1] == kept[2] != []


# --- failures -------------------------------------------------------------------------------------


def test_a_failure_of_the_background_is_raised_by_each_wait(tmp_path):
    shardckpt.save(tmp_path / "c", state())
    handle = shardckpt.save_async(tmp_path / "c", state(1, 5))
    raised = []
    for _ in range(2):
        with pytest.raises(errors.AlreadyExistsError) as failed:
            handle.wait()
        raised.append(failed.value)
    assert raised[0] is raised[1]
    assert handle.done()
    assert handle.report is None
    assert_holds(tmp_path / "c")


@pytest.mark.parametrize("mebibytes", [1, 40])
def test_a_storage_that_refuses_stops_a_save_even_while_it_copies(tmp_path, mebibytes):
    """A small state is copied before the storage is asked; a large one waits for buffers that
    nobody frees any more."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(errors.StorageError, match="a file stands where a directory is needed"):
        shardckpt.save_async(
            tmp_path / "file" / "c", state(mebibytes), options=SaveOptions(memory_limit="16MiB")
        ).wait()
    shardckpt.save_async(tmp_path / "c", state(), options=SaveOptions(memory_limit="16MiB")).wait()


@pytest.mark.parametrize("mebibytes", [6, 40])
def test_a_full_disk_is_told_and_the_next_save_goes_well(tmp_path, job, mebibytes):
    (answer,) = job.run("into_a_full_place", 1, tmp_path / "c", mebibytes)
    begun, waited, local = answer
    error = waited if begun is None else begun
    assert (begun is None) == (mebibytes == 6)
    assert error[0] == "StorageError"
    assert "file too large" in error[1].lower()
    if begun is None:
        assert local == waited
    assert not list((tmp_path / "c").glob("*"))
    assert_holds(tmp_path / "c-later")


def test_an_object_store_that_has_gone_is_told():
    with gcs_emulator("async") as emulator:
        env = emulator.env()
    with environment(env), patience_of("1"):
        handle = shardckpt.save_async(f"gs://{emulator.bucket}/c", state())
        with pytest.raises(errors.StorageError, match="gs://async/c"):
            handle.wait()


def test_what_the_caller_wants_before_publishing_can_fail_the_save(tmp_path):
    def fence():
        raise errors.CommitError("another job is here")

    handle = Saver().begin(tmp_path / "c", state(), SaveOptions(), before_publish=fence)
    with pytest.raises(errors.CommitError, match="another job is here"):
        handle.wait()
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(tmp_path / "c")
    # Its data was complete.
    assert [outcome.state for outcome in shardckpt.commit(tmp_path / "c")] == ["committed"]


def test_a_host_that_never_comes_is_named_after_a_bounded_wait(tmp_path, job):
    first, second = job.run("host_of_several", 2, tmp_path / "c", "absent")
    assert second == "absent"
    assert first[0] is None, "its own share is durable"
    assert first[1][0] == "CommitError"
    assert "host 1 (of 2) did not finish within 1 s" in first[1][1]


def test_processes_that_save_something_else_are_all_told(tmp_path, job):
    for local, error in job.run("host_of_several", 2, tmp_path / "c", "different"):
        assert local is None
        assert error[0] == "CommitError"
    with pytest.raises(errors.NotFoundError):
        shardckpt.open(tmp_path / "c")


def test_ctrl_c_while_copying_gives_the_save_up(tmp_path, job):
    assert job.run("interrupted", 1, tmp_path / "c") == [["KeyboardInterrupt", 0, 1]]
    assert_holds(tmp_path / "c")


@pytest.mark.parametrize("timeout", ["5", float("nan"), np.float32("nan"), True, 1j])
def test_a_wait_of_no_number_of_seconds_is_refused_by_name(tmp_path, timeout):
    handle = shardckpt.save_async(tmp_path / "c", state())
    with pytest.raises(errors.OptionError, match=r"SaveHandle.wait\(timeout="):
        handle.wait(timeout=timeout)
    handle.wait()
    assert handle.wait(timeout=0) is handle.report


@pytest.mark.parametrize("timeout", [float("inf"), 1e20, np.int64(60), np.float32(60)])
def test_a_wait_takes_any_number_of_seconds(tmp_path, timeout):
    handle = shardckpt.save_async(tmp_path / "c", state())
    assert handle.wait(timeout=timeout) is handle.report


@pytest.mark.parametrize("timeout", [-1, -np.inf, np.float64(-0.5)])
def test_a_wait_whose_time_is_over_does_not_wait(tmp_path, timeout):
    handle = shardckpt.save_async(tmp_path / "c", state())
    with suppress(errors.CoordinationError):  # the save may have ended
        assert handle.wait(timeout=timeout) is handle.report
    assert handle.wait() is handle.report


@pytest.mark.timeout(100)
def test_ctrl_c_while_copying_does_not_wait_for_other_processes(tmp_path, job):
    answers = job.run("interrupted_while_the_writer_waits", 1, tmp_path / "c")
    assert answers == [["LeafError", "KeyboardInterrupt"]]


@pytest.mark.timeout(100)
def test_an_error_while_copying_is_announced_with_its_cause(tmp_path, job):
    ((first, other),) = job.run("out_of_memory_while_the_writer_waits", 1, tmp_path / "c")
    assert first[0] == "BudgetError"
    assert "copying the state has failed: MemoryError: no room." in other[1]


@pytest.mark.parametrize("mebibytes", [1, 40])
def test_a_signal_handler_that_saves_amid_another_save_never_waits_for_it(tmp_path, job, mebibytes):
    (error,) = job.run("interrupted_by_another_save", 1, tmp_path / "c", mebibytes)
    kind, message = error
    assert kind == "BudgetError"
    assert "memory_limit=16 MiB is in use by a save that this thread is in the middle of" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c-later"]
    assert_holds(tmp_path / "c-later")


def test_a_signal_handler_that_saves_amid_the_planning_of_another_save_does_not_hang(tmp_path, job):
    (nested,) = job.run("interrupted_as_it_compares_plans", 1, tmp_path / "c")
    assert nested > 0
    for url in (tmp_path / "c", tmp_path / "c-again"):
        assert_holds(url, 2)
    assert_holds(tmp_path / "c-0", 2)


def test_a_process_that_is_stopped_leaves_nothing_half_visible(tmp_path, job):
    shardckpt.save(tmp_path / "c", state(2))
    assert job.run("killed_by_sigterm", 1, tmp_path / "new", 30) == [{"signal": signal.SIGTERM}]
    with pytest.raises(errors.UncommittedError):
        shardckpt.open(tmp_path / "new")
    shardckpt.save(tmp_path / "new", state(3))
    assert_holds(tmp_path / "new", 3)
    assert_holds(tmp_path / "c", 2)


@pytest.mark.parametrize("mode", ["in flight", "done", "error"])
def test_the_end_of_a_program_finishes_what_is_in_flight(tmp_path, mode):
    done = subprocess.run(
        [sys.executable, CHILDREN / "async_saves.py", tmp_path, mode],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode == 0) == (mode != "error")
    assert ("the training loop failed" in done.stderr) == (mode == "error")
    assert "Exception ignored" not in done.stderr
    assert_holds(tmp_path / "0", 4)
    assert_holds(tmp_path / "1", 40)


@pytest.mark.parametrize(
    "dropped", ["before it fails", "after it failed", "when it was waited for"]
)
def test_a_failure_that_no_caller_was_told_is_reported_in_the_log_once(tmp_path, caplog, dropped):
    go_on = threading.Event()

    def fail():
        go_on.wait(60)
        raise ValueError("not fit to be published")

    saver = Saver()
    handle = saver.begin(tmp_path / "c", state(), SaveOptions(), before_publish=fail)
    if dropped == "before it fails":
        del handle
    go_on.set()
    if dropped == "when it was waited for":
        with pytest.raises(ValueError, match="not fit"):
            handle.wait()
    saver.close()
    assert len(caplog.messages) == (dropped == "before it fails")
    if dropped != "before it fails":
        del handle
    gc.collect()
    messages = [
        (
            f"{tmp_path / 'c'}: the save failed in the background, and nothing waited for it: not "
            "fit to be published"
        )
    ]
    assert caplog.messages == (messages if dropped != "when it was waited for" else [])


def test_a_save_that_fails_while_the_program_ends_is_reported_in_the_log(tmp_path):
    """Nobody can wait for it any more, and the program's own exit status says nothing of it."""
    program = """if True:
        import sys, threading, numpy
        from shardckpt import SaveOptions
        from shardckpt.writing.background import Saver
        ends = threading.Event()
        threading._register_atexit(ends.set)
        def fail():
            ends.wait()
            raise ValueError("not fit to be published")
        Saver().begin(sys.argv[1], {"w": numpy.ones(9)}, SaveOptions(), before_publish=fail)"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "c"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (
        done.stderr
        == f"{tmp_path / 'c'}: the save failed in the background, and nothing waited for it: not "
        "fit to be published\n"
    )


def test_a_save_that_begins_when_python_ends_is_refused(tmp_path):
    program = """if True:
        import atexit, sys, numpy, shardckpt
        def late():
            for save in (shardckpt.save, shardckpt.save_async):
                try:
                    save(sys.argv[1] + "/late", {"w": numpy.ones(9)})
                except shardckpt.errors.CommitError as e:
                    print(e)
        shardckpt.save(sys.argv[1] + "/earlier", {"w": numpy.ones(9)})
        atexit.register(late)"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout.count(
            f"{tmp_path / 'late'}: Python is shutting down and starts no threads any more"
        )
        == 2
    )
    assert [path.name for path in tmp_path.iterdir()] == ["earlier"]


@pytest.mark.parametrize("ending", [0, 1])
def test_others_do_not_wait_for_a_process_that_refuses_because_python_ends(
    tmp_path, monkeypatch, ending
):
    words = {}

    class Words(Coordinator):
        def __init__(self, process):
            self.world, self.run_id = World(process, 2), "20261121T115800-1f2e3d4c"

        def _set(self, key, value):
            words[key] = value

        def _get(self, key):
            return words.get(key)

    def save(process):
        with pytest.raises(errors.CommitError) as refused:
            shardckpt.save(tmp_path / "c", {"w": np.ones(3)}, coordinator=Words(process))
        return str(refused.value)

    with monkeypatch.context() as exiting:
        exiting.setattr("shardckpt.writing.attempt.is_shutting_down", lambda: True)
        assert "Python is shutting down" in save(ending)
    assert "Python is shutting down" in save(1 - ending)  # which has two minutes to wait for it


def test_a_restore_that_begins_when_python_ends_says_so_where_it_takes_threads(tmp_path):
    program = """if True:
        import atexit, sys, numpy, shardckpt
        def late():
            checkpoint = shardckpt.open(sys.argv[1] + "/c")
            print(checkpoint.read("small"))
            for read in (
                lambda: shardckpt.restore(sys.argv[1] + "/c"),
                lambda: checkpoint.read("w"),
                checkpoint.verify,
            ):
                try:
                    read()
                except shardckpt.errors.StorageError as e:
                    print(e)
        shardckpt.save(sys.argv[1] + "/c", {"w": numpy.zeros(3 << 20), "small": numpy.ones(2)})
        atexit.register(late)"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "[1. 1.]" in done.stdout
    assert (
        done.stdout.count(
            f"cannot read {tmp_path / 'c'}: Python is shutting down and starts no threads any more"
        )
        == 3
    )


def test_other_reads_are_refused_with_the_same_reason_once_python_ends(tmp_path):
    program = """if True:
        import atexit, sys, numpy, shardckpt
        from safetensors.numpy import save_file
        place = sys.argv[1]
        def late():
            for read in (
                manager.steps,
                lambda: manager.restore({"w": numpy.empty(1 << 20)}),
                lambda: shardckpt.commit(place),
                lambda: shardckpt.reshard(place + "/1", place + "/resharded"),
                lambda: shardckpt.import_checkpoint(place + "/m.safetensors", place + "/imported"),
            ):
                try:
                    read()
                except shardckpt.errors.StorageError as e:
                    print(e)
        state = {"w": numpy.zeros(1 << 20)}
        save_file(state, place + "/m.safetensors")
        manager = shardckpt.CheckpointManager(place, every=1)
        for step in (1, 2):  # one alone would be read without threads
            manager.save(step, state)
        manager.wait()
        atexit.register(late)"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (
        done.returncode,
        done.stdout.count(": Python is shutting down and starts no threads any more"),
    ) == (0, 5), done.stderr


def test_a_fork_knows_of_no_save_in_flight(tmp_path, job):
    (message,) = job.run("forked", 1, tmp_path)
    assert "forked" in message
    assert_holds(tmp_path / "parent")


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("mebibytes", "limit"), [(60, 96), (200, 32)])
def test_a_save_takes_no_more_memory_than_its_limit(tmp_path, job, mebibytes, limit):
    ((growth, high_water, streamed, stored),) = job.run(
        "peak", 1, tmp_path / "c", mebibytes, limit * MiB
    )
    assert streamed == (mebibytes > limit)
    assert high_water <= limit * MiB
    assert growth <= limit * MiB + 16 * MiB
    assert stored >= mebibytes * MiB
    assert_holds(tmp_path / "c", mebibytes)


@pytest.mark.slow
def test_a_hundred_saves_take_no_more_memory_than_the_first_ones(tmp_path, job):
    ((sizes, high_water),) = job.run("growth", 1, tmp_path / "c", 110)
    assert (sizes[-1] - sizes[0]) / 100 < MiB // 8
    assert high_water < 3 * MiB, "the buffer, and what the writing thread lays out"


@pytest.mark.slow
def test_the_stall_is_measured_beside_a_copy_of_the_same_bytes():
    command = [
        sys.executable,
        CHILDREN.parents[1] / "tools" / "stall.py",
        "--framework=torch",
        "--width=64",
        "--layers=2",
        "--saves=1",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["torch"]
    # Parameters, two moments, steps.
    assert (figures["tensors"], figures["bytes"]) == (16, 3 * 4 * 2 * (64 * 64 + 64) + 4 * 4)
    assert min(figures["memcpy_s"], figures["planning_s"], figures["step_s"]) > 0
    assert figures["stall_s"] > figures["planning_s"]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("what", ["save", "memory"])
def test_ctrl_c_at_any_line_of_a_wait_leaves_nothing_locked_and_stays_ctrl_c(what, waits):
    """The thread that writes could not note the end of its save, and the program never ended."""
    for at in count():
        if what == "save":
            progress = SaveProgress("runs/7")
            end = lock = progress.durable
            act = partial(progress.wait, "local", None)
        else:
            pool = BufferPool(1 << 20)
            end, lock = pool.take(1 << 20).give_back, pool.clear
            act = lambda pool=pool: pool.take(1 << 20).give_back()  # noqa: E731
        other = threading.Thread(
            target=lambda waits=waits, end=end: (time.sleep(0.02 if waits else 0), end()),
            daemon=True,
        )
        other.start()
        if not waits:
            other.join(60)

        def free(other=other, lock=lock):
            later = threading.Thread(target=lock, daemon=True)
            later.start()
            for thread in (other, later):
                thread.join(60)
            return not other.is_alive() and not later.is_alive()

        outcome = interrupted_at(at, threading.__file__, lambda _code: False, act, free)
        if outcome is None:
            break
        assert outcome, f"interrupt {at}"
    assert at > (10 if waits else 0)


@pytest.mark.long
def test_an_interrupt_as_the_background_begins_leaves_a_checkpoint_that_is_whole_or_none(tmp_path):
    """In a process of its own, over and over: Ctrl-C comes the moment when the thread that writes
    starts."""
    program = """
import signal, sys, threading, time
import numpy as np
import shardckpt
from shardckpt import errors
from shardckpt.writing import background as saver
main, finish = threading.main_thread().ident, saver._Save._finish
def interrupted(self):
    signal.pthread_kill(main, signal.SIGINT)
    finish(self)
saver._Save._finish = interrupted
for n in range(100):
    url = f"{sys.argv[1]}/{n}"
    try:
        shardckpt.save_async(url, {"w": np.arange(1000.0)})
        threading.Event().wait(60)
    except KeyboardInterrupt:
        pass
    for save in [*saver._in_flight]:
        save.join(60)
    try:
        assert (shardckpt.restore(url)["w"] == np.arange(1000.0)).all()
    except errors.NotFoundError:
        pass
"""
    run = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr
