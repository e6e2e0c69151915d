"""Every engine does the same job, bit for bit, also when its workers are killed in the middle of
it.

Each job is a program of its own, as are the clusters' workers; what it has done so far is seen in
the directory it writes to.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
from clusters import children, dask_cluster, ray_cluster, wait_for
from paths import CHILDREN

import shardckpt
from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, errors
from shardckpt.reshard import processes
from shardckpt.reshard.clusters import ClusterExecutor

CHILD = CHILDREN / "reshard_job.py"
JOB = {"mesh": "x=3", "rules": ["*=(None,x)"], "task_bytes": 256 << 10, "memory_limit": "64MiB"}
TASKS = 16
PATIENCE = 180
CLUSTERS = [
    pytest.param("dask", marks=pytest.mark.slow),
    pytest.param("ray", marks=pytest.mark.ray),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """8 MiB in two tensors, cut by rows: 16 tasks."""
    place = tmp_path_factory.mktemp("engines") / "a"
    elements = np.random.default_rng(0).integers(0, 1 << 32, 1 << 21, np.uint32)
    state = {
        "a": elements[: 1 << 20].reshape(1024, 1024),
        "b": elements[1 << 20 :].reshape(512, 2048),
    }
    rows = Sharding(Mesh((8,), ("x",)), PartitionSpec("x"))
    shardckpt.save(place, state, options=SaveOptions(shardings={"*": rows}))
    return place


@pytest.fixture(scope="module")
def dask():
    with dask_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray():
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def start():
    """Starts jobs, each in a program of its own; those that still run at the end of the test are
    killed."""
    jobs = []

    def start(source, target, env=None, **options):
        arguments = json.dumps({"src": str(source), "dst": str(target), **JOB, **options})
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(
            subprocess.Popen(
                [sys.executable, CHILD, arguments], env={**os.environ, **(env or {})}, **streams
            )
        )
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        job.communicate()


def finish(job):
    """The report of a job that succeeds."""
    out, err = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def failure(job):
    """Message of a job that fails; Ray may print more when it is left."""
    _, err = job.communicate(timeout=PATIENCE)
    assert job.returncode == 1, err
    lines = err.strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("shardckpt.")), lines[-1])


def records(target):
    return list(target.glob("*/records/*.json"))


def check(source, target):
    made, before = shardckpt.open(target), shardckpt.open(source)
    assert made.verify().ok
    for name in ("a", "b"):
        assert made.read(name).tobytes() == before.read(name).tobytes()
        assert made.info(name).layout.spec == PartitionSpec(None, "x")
    assert len(list((target / made.record.attempt / "hosts").iterdir())) == TASKS, (
        "what lost workers left is gone"
    )


@pytest.mark.long
def test_processes_of_this_machine_do_it(start, source, tmp_path):
    go_on = tmp_path / "go on"
    job = start(source, tmp_path / "b", workers=2, pause=[4, str(go_on)])
    wait_for(lambda: records(tmp_path / "b") or job.poll() is not None)
    os.kill(min(children(job.pid)), signal.SIGKILL)
    go_on.touch()
    report = finish(job)
    assert (report["tasks"], report["committed"]) == (TASKS, True)
    check(source, tmp_path / "b")


@pytest.mark.parametrize("failing", [2, None])
def test_a_process_that_cannot_be_started_is_tried_again_or_told(
    source, tmp_path, monkeypatch, failing
):
    start, starts = subprocess.Popen, []

    def fail(*args, **kwargs):
        starts.append(args)
        if failing is None or len(starts) <= failing:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*args, **kwargs)

    monkeypatch.setattr(processes.subprocess, "Popen", fail)
    options = JOB | {"mesh": Mesh((3,), ("x",)), "workers": 2}
    if failing is None:
        with pytest.raises(errors.CommitError, match=r"could not be started .*ulimit -u"):
            shardckpt.reshard(source, tmp_path / "b", **options)
        monkeypatch.undo()
    shardckpt.reshard(source, tmp_path / "b", **options)
    check(source, tmp_path / "b")


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        (eval, "lambda: 0", "function <lambda>"),
        (exec, "raise type('OwnError', (Exception,), {})('of a library')", "of a library"),
        (
            exec,
            "import urllib.error; raise urllib.error.HTTPError('', 404, 'absent', None, None)",
            "absent",
        ),
    ],
)
def test_an_answer_that_is_not_picklable_is_an_error_and_no_lost_worker(call, code, words):
    with processes.LocalProcesses(1) as one:
        with pytest.raises(RuntimeError, match=f"{words}.* cannot be sent to another process"):
            one.submit(call, code).result()
        assert one.submit(abs, -1).result() == 1


def test_threads_of_a_user_do_it(source, tmp_path):
    with ThreadPoolExecutor(3) as engine:
        options = {**JOB, "mesh": Mesh((3,), ("x",))}
        report = shardckpt.reshard(source, tmp_path / "b", engine=engine, workers=2, **options)
    assert report.tasks == TASKS
    check(source, tmp_path / "b")


def test_one_worker_reports_each_task_before_it_begins_the_next(source, tmp_path):
    target, finished = tmp_path / "b", []
    options = {**JOB, "mesh": Mesh((3,), ("x",)), "workers": 1}
    shardckpt.reshard(
        source, target, progress=lambda *_: finished.append(len(records(target))), **options
    )
    assert finished == list(range(TASKS + 1))


@pytest.mark.long
def test_a_pool_of_a_user_that_breaks_ends_the_job_and_another_continues_it(source, tmp_path):
    options = {**JOB, "mesh": Mesh((3,), ("x",)), "workers": 1}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as engine:
        worker = engine.submit(os.getpid).result()

        def lose(done, _total):
            if done:
                os.kill(worker, signal.SIGKILL)

        with pytest.raises(errors.CommitError, match=r"engine.* takes no more tasks.*new engine"):
            shardckpt.reshard(source, tmp_path / "b", engine=engine, progress=lose, **options)
    with ProcessPoolExecutor(1, spawn) as engine:
        report = shardckpt.reshard(source, tmp_path / "b", engine=engine, **options)
    assert report.done_before == 1
    check(source, tmp_path / "b")


@pytest.mark.long
def test_workers_that_somebody_else_starts_do_it_and_one_that_is_killed_is_started_again(
    start, source, tmp_path
):
    target = tmp_path / "b"
    jobs = [
        start(source, target, worker=[k, 2], workers=1, pause=[4, str(tmp_path / f"go on {k}")])
        for k in range(2)
    ]
    wait_for(lambda: len(records(target)) >= 3 or jobs[0].poll() is not None)
    jobs[0].kill()
    (tmp_path / "go on 1").touch()
    jobs[0].communicate(timeout=PATIENCE)
    finish(jobs[1])
    (outcome,) = shardckpt.commit(target)
    assert outcome.state == "incomplete"
    again = finish(start(source, target, worker=[0, 2], workers=1))
    assert not again["committed"]
    (outcome,) = shardckpt.commit(target)
    assert outcome.state == "committed"
    check(source, target)


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.timeout(400)
def test_a_cluster_does_it(start, source, tmp_path, cluster):
    report = finish(start(source, tmp_path / "b", engine=cluster.url))
    assert (report["tasks"], report["done_before"], report["committed"]) == (TASKS, 0, True)
    check(source, tmp_path / "b")


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.timeout(400)
def test_a_program_within_a_cluster_finds_it_by_itself(start, source, tmp_path, cluster):
    url = f"{cluster.url.partition('://')[0]}://auto"
    report = finish(start(source, tmp_path / "b", engine=url, env=cluster.auto, workers=1))
    assert report["committed"]
    check(source, tmp_path / "b")


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.timeout(400)
def test_an_error_of_a_task_is_raised_as_it_is(start, source, tmp_path, cluster):
    damaged = tmp_path / "a"
    subprocess.run(["cp", "-r", source, damaged], check=True)
    data = max(
        (path for path in damaged.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        file.write(b"damaged!")
    message = failure(start(damaged, tmp_path / "b", engine=cluster.url))
    assert message.startswith("shardckpt.errors.CorruptionError"), message
    with pytest.raises(errors.UncommittedError):
        shardckpt.open(tmp_path / "b")


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.timeout(400)
def test_a_worker_that_is_killed_in_the_middle_is_done_without(start, source, tmp_path, cluster):
    go_on = tmp_path / "go on"
    job = start(source, tmp_path / "b", engine=cluster.url, pause=[4, str(go_on)])
    wait_for(lambda: len(records(tmp_path / "b")) >= 3 or job.poll() is not None)
    killed = cluster.workers()[:1]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    go_on.touch()
    report = finish(job)
    assert killed
    assert report["tasks"] == TASKS
    check(source, tmp_path / "b")


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.timeout(600)
def test_machines_are_lost_one_after_the_other(start, source, tmp_path, cluster):
    """With one of two the job goes on; with none it fails in time, and what was done is not lost.
    The cluster is gone afterwards."""
    go_on = [tmp_path / "go on", tmp_path / "go on again"]
    job = start(source, tmp_path / "b", engine=cluster.url, pause=[4, str(go_on[0])])
    wait_for(lambda: len(records(tmp_path / "b")) >= 3 or job.poll() is not None)
    lose(cluster, 0)
    go_on[0].touch()
    assert finish(job)["tasks"] == TASKS
    check(source, tmp_path / "b")

    job = start(source, tmp_path / "c", engine=cluster.url, patience=2, pause=[4, str(go_on[1])])
    wait_for(lambda: len(records(tmp_path / "c")) >= 3 or job.poll() is not None)
    lose(cluster, 1)
    go_on[1].touch()
    message = failure(job)
    assert message.startswith("shardckpt.errors.CoordinationError"), message
    assert "has had no worker" in message
    done = len(records(tmp_path / "c"))
    report = finish(start(source, tmp_path / "c", workers=1))
    assert 3 <= done <= report["done_before"] < TASKS
    check(source, tmp_path / "c")


STARTS = [
    pytest.param(dask_cluster, marks=pytest.mark.slow),
    pytest.param(ray_cluster, marks=pytest.mark.ray),
]


@pytest.mark.parametrize("begin", STARTS)
@pytest.mark.timeout(400)
def test_a_cluster_whose_head_is_lost_ends_the_job_and_what_was_done_stays(
    start, source, tmp_path, begin
):
    with begin() as cluster:
        job = start(
            source,
            tmp_path / "b",
            engine=cluster.url,
            patience=15,
            pause=[4, str(tmp_path / "go on")],
        )
        wait_for(lambda: len(records(tmp_path / "b")) >= 3 or job.poll() is not None)
        for pid in cluster.head:
            os.kill(pid, signal.SIGKILL)
        (tmp_path / "go on").touch()
        message = failure(job)
    assert message.startswith("shardckpt.errors.CoordinationError"), message
    assert "Finished tasks are kept" in message
    done = len(records(tmp_path / "b"))
    report = finish(start(source, tmp_path / "b", workers=1))
    assert 3 <= done <= report["done_before"] < TASKS
    check(source, tmp_path / "b")


ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "shardckpt":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize("begin", STARTS)
@pytest.mark.timeout(400)
def test_a_worker_without_shardckpt_is_told_of_in_words(start, source, tmp_path, begin):
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    with begin(PYTHONPATH=str(tmp_path)) as cluster:
        message = failure(start(source, tmp_path / "b", engine=cluster.url))
    assert message.startswith("shardckpt.errors.MissingExtraError"), message
    assert f"a worker cannot import shardckpt; install shardckpt {shardckpt.__version__}" in message


def lose(cluster, node):
    """A machine with all its processes."""
    for pid in [cluster.nodes[node], *children(cluster.nodes[node])]:
        os.kill(pid, signal.SIGKILL)


class OneThread(ClusterExecutor):
    """A cluster of one thread, which finishes each call before `submit` returns."""

    def start(self, fn, args, kwargs):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(fn, *args, **kwargs)

    def count(self):
        return 1

    def translate(self, error):
        return error


def fail_with(error):
    raise error


def test_an_error_that_is_its_own_cause_fails_the_call():
    class Cluster(OneThread):
        def start(self, fn, args, kwargs):
            error = ValueError("refused")
            error.__cause__ = error
            raise error

    with pytest.raises(ValueError, match="refused"):
        Cluster("dask://auto").submit(print).result()


def test_an_error_that_cannot_be_explained_fails_the_call():
    class UnreadableError(ValueError):
        def __str__(self):
            raise AttributeError("no text")

    class Cluster(OneThread):
        def translate(self, error):
            return fail_with(LookupError(type(error).__name__))

    with pytest.raises(AttributeError, match="no text"):
        OneThread("dask://auto").submit(fail_with, UnreadableError()).result(timeout=5)
    with pytest.raises(LookupError, match="OSError"):
        Cluster("dask://auto").submit(fail_with, OSError()).result(timeout=5)


@pytest.mark.parametrize(
    "engine",
    [
        "ray",
        "ray://",
        "ray://host",
        "dask://host:port",
        "spark://host:1",
        "dask://a:1/b",
        "ray://user@host:1",
        3,
    ],
)
def test_what_is_no_engine_is_refused(source, tmp_path, engine):
    with pytest.raises(errors.OptionError, match="engine="):
        shardckpt.reshard(source, tmp_path / "b", engine=engine)
    assert not (tmp_path / "b").exists()


def test_a_cluster_is_not_asked_for_what_it_cannot_do(source, tmp_path):
    with pytest.raises(errors.OptionError, match="memory://"):
        shardckpt.reshard(source, "memory://b", engine="ray://host:1")
    with pytest.raises(errors.OptionError, match="worker="):
        shardckpt.reshard(source, tmp_path / "b", engine="ray://host:1", worker=(0, 2))


def test_a_package_that_is_not_installed_is_named(source, tmp_path, monkeypatch):
    for kind, package in (("ray", "ray"), ("dask", "distributed")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"shardckpt.reshard.on_{kind}", raising=False)
        with pytest.raises(errors.MissingExtraError, match=rf"shardckpt\[{kind}\]"):
            shardckpt.reshard(source, tmp_path / "b", engine=f"{kind}://127.0.0.1:1")


@pytest.mark.long
@pytest.mark.parametrize("cancel", [False, True])
def test_dask_drops_the_calls_that_have_not_begun_when_its_executor_is_shut_down(tmp_path, cancel):
    from distributed import Client, LocalCluster

    from shardckpt.reshard.on_dask import OnDask

    begun, released = tmp_path / "begun", tmp_path / "released"
    with LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        protocol="tcp",
        dashboard_address="127.0.0.1:0",
    ) as cluster:
        executor = OnDask("dask://here", cluster.scheduler_address.removeprefix("tcp://"))
        held = f"until [ -e {released} ]; do sleep 0.01; done"
        futures = [executor.submit(os.system, f"echo {n} >>{begun}; {held}") for n in range(6)]
        wait_for(begun.exists)
        executor.shutdown(cancel_futures=cancel)
        wait_for(lambda: not cluster.scheduler.tasks)
        wait_for(lambda: not any(worker.state.ready for worker in cluster.workers.values()))
        released.touch()
        # Its call gets the only thread after the one that had begun.
        with Client(cluster) as client:
            client.submit(os.getpid, pure=False).result(PATIENCE)
        assert len(begun.read_text().split()) == 1
        assert all(isinstance(future.exception(0), errors.CoordinationError) for future in futures)
