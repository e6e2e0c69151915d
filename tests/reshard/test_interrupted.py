"""Jobs that are killed, interrupted or lose workers: nothing is half there, nothing that was
finished is done again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paths import CHILDREN

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, errors
from shardckpt.io.store import Store
from shardckpt.reshard.job import Job, OpenJob
from shardckpt.reshard.options import ReshardOptions
from shardckpt.reshard.processes import LocalProcesses
from shardckpt.reshard.rules import Rules
from shardckpt.reshard.task import run_task

CHILD = CHILDREN / "reshard_job.py"
PATIENCE = 60
MESH = Mesh((3,), ("x",))
TASKS = {"task_bytes": 256 << 10, "rules": ["*=(None,x)"]}


@pytest.fixture
def source(tmp_path):
    """32 MiB in two tensors, cut by rows: 16 tasks, or 8 in the plain layout."""
    elements = np.random.default_rng(0).integers(0, 1 << 32, 1 << 23, np.uint32)
    state = {"a": elements[: 1 << 22].reshape(1024, -1), "b": elements[1 << 22 :].reshape(512, -1)}
    rows = Sharding(Mesh((8,), ("x",)), PartitionSpec("x"))
    shardckpt.save(tmp_path / "a", state, options=SaveOptions(shardings={"*": rows}))
    return tmp_path / "a"


def contents(place):
    return {
        path.relative_to(place): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in place.rglob("*")
        if path.is_file()
    }


def records(place):
    return {path.name: path.read_bytes() for path in place.glob("*/records/*.json")}


def start(source, target, **options):
    """A job in a process of its own."""
    arguments = json.dumps(
        {"src": str(source), "dst": str(target), "mesh": "x=3", **TASKS, **options}
    )
    return subprocess.Popen(
        [sys.executable, CHILD, arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def children(pid):
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_job_that_is_killed_again_and_again_goes_on_where_it_was(source, tmp_path, layout):
    target, before = tmp_path / "b", contents(source)
    rng = np.random.default_rng(len(layout))
    finished = {}
    for kill in range(3):
        more = len(finished) + int(rng.integers(1, 4))
        job = start(source, target, workers=1 + kill % 2, layout=layout, pause=[4, "never"])
        wait_for(lambda more=more, job=job: len(records(target)) >= more or job.poll() is not None)
        job.kill()
        job.communicate(timeout=PATIENCE)
        if job.returncode == 0:
            break
        latest = records(target)
        assert finished.items() <= latest.items(), "what was finished is as it was"
        finished = latest
        with pytest.raises(errors.UncommittedError):
            shardckpt.open(target)
    assert finished

    job = start(source, target, workers=2, layout=layout)
    out, err = job.communicate(timeout=PATIENCE)

    assert job.returncode == 0, err
    report = json.loads(out)
    assert len(finished) <= report["done_before"] <= report["tasks"]
    assert finished.items() <= records(target).items()
    made = shardckpt.open(target)
    assert made.verify().ok
    assert len(list((target / report["attempt"] / "hosts").iterdir())) == report["tasks"], (
        "what killed runs left is gone"
    )
    for name in ("a", "b"):
        assert made.read(name).tobytes() == shardckpt.open(source).read(name).tobytes()
    assert contents(source) == before


def test_ctrl_c_ends_all_processes_and_the_same_call_goes_on(source, tmp_path):
    target = tmp_path / "b"
    job = start(source, target, workers=2, pause=[5, "never"])
    wait_for(lambda: len(records(target)) >= 3 or job.poll() is not None)
    workers = children(job.pid)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=PATIENCE)
    assert job.returncode == -signal.SIGINT or "KeyboardInterrupt" in err
    assert len(workers) == 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    done = len(records(target))

    report = shardckpt.reshard(source, target, mesh=MESH, workers=1, **TASKS)

    assert 3 <= done <= report.done_before < report.tasks
    assert shardckpt.open(target).verify().ok


@pytest.mark.long
def test_workers_end_with_the_program_that_started_them(source, tmp_path):
    job = start(source, tmp_path / "b", workers=2, pause=[2, "never"])
    wait_for(lambda: records(tmp_path / "b") or job.poll() is not None)
    workers = children(job.pid)
    job.kill()
    job.communicate(timeout=PATIENCE)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_a_worker_that_is_killed_is_replaced_and_its_task_done_again(source, tmp_path):
    killed, others = [], {*children(os.getpid())}  # emulators, say

    def kill_one(done, total):
        if done and not killed:
            killed.append(min({*children(os.getpid())} - others))
            os.kill(killed[0], signal.SIGKILL)

    report = shardckpt.reshard(
        source, tmp_path / "b", mesh=MESH, workers=2, progress=kill_one, **TASKS
    )

    assert killed
    assert report.done_before <= 1, "only what the killed worker had completed and not reported"
    assert shardckpt.open(tmp_path / "b").verify().ok


class Deadly(Executor):
    """Does tasks in a thread, but for one, over which its workers die."""

    def __init__(self, task):
        self.task, self.deaths, self.threads = task, 0, ThreadPoolExecutor(1)

    def submit(self, fn, /, *args, **kwargs):
        if args[1] != self.task:
            return self.threads.submit(fn, *args, **kwargs)
        self.deaths += 1
        future = Future()
        future.set_exception(BrokenExecutor("The worker is gone."))
        return future


def test_a_task_over_which_workers_die_again_and_again_is_named(source, tmp_path):
    with (
        Deadly(5) as engine,
        pytest.raises(errors.CommitError, match=r"Task 5 \('a'\) lost its worker 3 times"),
    ):
        shardckpt.reshard(source, tmp_path / "b", mesh=MESH, engine=engine, **TASKS)
    assert engine.deaths == 3
    engine.threads.shutdown()


def test_a_process_that_dies_breaks_only_what_it_was_doing():
    with LocalProcesses(1) as processes:
        first = processes.submit(os.getpid).result(PATIENCE)
        with pytest.raises(BrokenExecutor, match="SIGKILL"):
            processes.submit(os.kill, first, signal.SIGKILL).result(PATIENCE)
        second = processes.submit(os.getpid).result(PATIENCE)
        with pytest.raises(ZeroDivisionError):
            processes.submit(divmod, 1, 0).result(PATIENCE)
    assert first != second
    assert not Path(f"/proc/{second}").exists()


def opened(source, target, **options):
    options = ReshardOptions(
        rules=Rules.parse("*=(None,x)", mesh=MESH), task_bytes="256KiB", **options
    )
    return Job(str(source), str(target), options), OpenJob(Job(str(source), str(target), options))


@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_a_task_done_twice_at_the_same_time_is_there_once(source, tmp_path, layout):
    job, plan = opened(source, tmp_path / "b", layout=layout)
    together = threading.Barrier(4)

    def run():
        together.wait(PATIENCE)
        return run_task(job, 1)

    with ThreadPoolExecutor(4) as threads:
        reports = [future.result(PATIENCE) for future in [threads.submit(run) for _ in range(4)]]

    assert [report.done_before for report in reports].count(False) == 1
    hosts = list((tmp_path / "b" / plan.attempt / "hosts").iterdir())
    assert len(hosts) == 1
    shardckpt.reshard(
        source,
        tmp_path / "b",
        mesh=MESH,
        rules=["*=(None,x)"],
        layout=layout,
        task_bytes="256KiB",
        workers=1,
    )
    assert shardckpt.open(tmp_path / "b").verify().ok


def test_workers_that_others_start_meet_in_one_attempt_and_anybody_commits(source, tmp_path):
    options = {"mesh": MESH, "rules": ["*=(None,x)"], "task_bytes": "1MiB", "workers": 1}
    reports = [
        shardckpt.reshard(source, tmp_path / "b", worker=(k, 3), **options) for k in (2, 0, 1)
    ]
    assert len({report.attempt for report in reports}) == 1
    assert not any(report.committed for report in reports)
    with pytest.raises(errors.UncommittedError):
        shardckpt.open(tmp_path / "b")
    (outcome,) = shardckpt.commit(tmp_path / "b")
    assert outcome.state == "committed"
    assert shardckpt.open(tmp_path / "b").verify().ok
    late = shardckpt.reshard(source, tmp_path / "b", worker=(1, 3), **options)
    assert (late.committed, late.stored_bytes) == (True, 0)


@pytest.mark.parametrize("gone", ["d/00000", "manifest.ocdbt", "table"])
def test_a_finished_task_of_which_a_file_was_removed_is_done_again(source, tmp_path, gone):
    options = {"mesh": MESH, "rules": ["*=(None,x)"], "task_bytes": "1MiB", "workers": 1}
    first = shardckpt.reshard(source, tmp_path / "b", worker=(0, 2), **options)
    removed = next((tmp_path / "b").glob(f"{first.attempt}/hosts/00002-*/**/{gone}"))
    removed.unlink()
    again = shardckpt.reshard(source, tmp_path / "b", **options)
    assert (again.attempt, again.done_before) == (first.attempt, (again.tasks + 1) // 2 - 1)
    assert shardckpt.open(tmp_path / "b").verify().ok
    assert not removed.exists(), "each run has files of its own"


def test_other_options_at_the_same_place_are_another_attempt(source, tmp_path):
    options = {"mesh": MESH, "task_bytes": "1MiB", "workers": 1, "worker": (0, 3)}
    first = shardckpt.reshard(source, tmp_path / "b", rules=["*=(None,x)"], **options)
    second = shardckpt.reshard(source, tmp_path / "b", rules=["*=(x)"], **options)
    assert first.attempt != second.attempt
    assert second.done_before == 0
    done = shardckpt.reshard(source, tmp_path / "b", rules=["*=(x)"], **{**options, "worker": None})
    assert done.attempt == second.attempt
    assert done.done_before == (done.tasks + 2) // 3
    assert shardckpt.open(tmp_path / "b").verify().ok


def test_collecting_leaves_a_job_alone_until_nothing_is_written_any_more(source, tmp_path):
    from shardckpt.runs.catalog import catalog
    from shardckpt.runs.collecting import collect

    report = shardckpt.reshard(
        source,
        tmp_path / "b",
        mesh=MESH,
        rules=["*=(x)"],
        task_bytes="1MiB",
        worker=(0, 2),
        workers=1,
    )
    (entry,) = catalog(tmp_path / "b", everything=True)
    assert (entry.state, entry.attempt, entry.hosts) == (
        "uncommitted",
        report.attempt,
        report.tasks,
    )
    assert entry.finished == (report.tasks + 1) // 2
    assert [one.outcome for one in collect(tmp_path / "b")] == ["kept"]
    long_ago = time.time() - 48 * 3600
    for path in (tmp_path / "b").rglob("*"):
        os.utime(path, (long_ago, long_ago))
    assert [one.outcome for one in collect(tmp_path / "b")] == ["removed"]
    again = shardckpt.reshard(
        source, tmp_path / "b", mesh=MESH, rules=["*=(x)"], task_bytes="1MiB", workers=1
    )
    assert (again.committed, again.done_before) == (True, 0)
    assert again.attempt != report.attempt, "what was collected can never be published"


def test_a_worker_compares_the_call_of_a_task_and_not_all_its_options(source, tmp_path):
    class Uncomparable(ReshardOptions):
        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = None

    options = Uncomparable(rules=Rules.parse("*=(None,x)", mesh=MESH), task_bytes="256KiB")
    job = Job(str(source), str(tmp_path / "b"), options, call="first")
    assert not run_task(job, 0).done_before
    assert run_task(replace(job, options=replace(options)), 0).done_before
    assert run_task(replace(job, call="second"), 0).done_before


def test_a_run_that_fails_leaves_nothing_of_its_own(source, tmp_path):
    for data in source.glob("*/hosts/*/*/d/0*"):
        data.write_bytes(bytes(data.stat().st_size))
    job, plan = opened(source, tmp_path / "b")
    with pytest.raises(errors.CorruptionError):
        run_task(job, 0)
    assert list((tmp_path / "b").glob("*/hosts/*")) == []
    assert not plan.place.exists("records/00000.json")


def test_a_record_whose_answer_was_lost_keeps_all_that_it_names(source, monkeypatch):
    """Not on a disk, where the answer says that the record is not durable."""
    url = f"memory://{uuid.uuid4().hex}/b"
    job, plan = opened(source, url)
    create = Store.create

    def lose_the_answer(store, key, data):
        create(store, key, data)
        raise errors.StorageError("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "create", lose_the_answer)
        with pytest.raises(errors.StorageError):
            run_task(job, 0)
    report = shardckpt.reshard(source, url, rules=job.options.rules, task_bytes="256KiB", workers=1)
    assert (report.attempt, report.done_before) == (plan.attempt, 1)
    assert shardckpt.open(url).verify().ok
