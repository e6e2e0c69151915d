"""The bench measures what it says, on a small state; that figures are good is not a test."""

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from paths import ROOT

pytestmark = pytest.mark.slow
TORCH = "torch tensors on the CPU, one process"


@pytest.fixture(autouse=True)
def _tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def threads_to_save(nbytes):
    from shardckpt.io.cores import cores

    count = max(1, min(cores(), nbytes >> 25))
    return "1 thread" if count == 1 else f"{count} threads"


def bench(*arguments):
    command = [sys.executable, "-m", "tools.bench", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Of a small run of two operations, the second of which another run added."""
    file = tmp_path_factory.mktemp("bench") / "found.json"
    small = [
        "--part",
        "64",
        "--rounds",
        "1",
        "--storage",
        "tmpfs",
        "--state",
        "llama",
        "--group",
        "torch",
    ]
    first = bench(*small, "--operation", "save", "--json", file)
    assert first.returncode == 0, first.stderr[-3000:]
    assert "1 of 1" in first.stderr
    second = bench(*small, "--operation", "save", "--operation", "restore", "--resume", file)
    assert second.returncode == 0, second.stderr[-3000:]
    assert "1 of 1" in second.stderr
    return file


def test_the_bench_runs_all_subjects_in_turn_and_tells_rates_and_ratios(file):
    figures = json.loads(file.read_text())
    results = {(r["operation"], r["subject"]): r for r in figures["results"]}
    nbytes = results["save", "shardckpt"]["nbytes"]
    save = {s for o, s in results if o == "save"}
    assert save == {
        f"write(2), {threads_to_save(nbytes)}",
        "shardckpt",
        "DCP",
        "DCP, at its best",
        "safetensors",
        "torch.save",
    }
    for who in ("shardckpt", "DCP"):
        assert nbytes <= results["save", who]["written_bytes"] <= 1.03 * nbytes + (1 << 20)
        assert results["restore", who]["read_bytes"] >= nbytes
    assert all(len(r["seconds"]) == len(r["cpu_seconds"]) == 1 for r in results.values())


def test_a_page_with_a_chart_is_made_of_the_results(file, tmp_path):
    finished = bench("--from", file, "--compare", file, "--write", "--docs", tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "save, torch: ≥ 0.6 × write(2)" in finished.stdout
    page = (tmp_path / "performance.md").read_text()
    titles = [line for line in page.splitlines() if line.startswith("#")]
    assert titles == [
        "# Performance",
        "## What you gain",
        "## Where peers are faster",
        "## How it was measured",
        "## Terms",
        "## Targets",
    ]
    assert "| save, torch | ≥ 0.6 × write(2) |" in page
    tables = (tmp_path / "lab" / "performance-tables.md").read_text()
    assert f"| {TORCH} | DCP, at its best | thread_count=2, sync_files=False" in tables
    for table in f"{page}\n\n{tables}".split("\n\n"):
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) <= 1
    drawn = ET.parse(tmp_path / "performance.svg").getroot()
    bars = [
        rect
        for rect in drawn.iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("class") != "page"
    ]
    results = json.loads((tmp_path / "performance.json").read_text())["results"]
    assert len(bars) == len(results) + len(("ours", "peer", "floor"))


def test_what_is_in_a_bucket_stands_beside_floors_and_is_told_in_processor_time(file, tmp_path):
    added = tmp_path / "found.json"
    added.write_text(file.read_text())
    small = [
        "--part",
        "64",
        "--rounds",
        "1",
        "--state",
        "flat",
        "--operation",
        "save",
        "--streams",
        "2",
    ]
    finished = bench(
        *small,
        "--storage",
        "gs",
        "--storage",
        "gs-tls",
        "--resume",
        added,
        "--write",
        "--docs",
        tmp_path,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    results = {
        (r["storage"], r["subject"]): r
        for r in json.loads(added.read_text())["results"]
        if r["state"] == "flat"
    }
    common = {"HTTP puts, 2 streams", "raw TensorStore, 2 streams", "shardckpt"}
    assert {s for storage, s in results if storage == "gs-tls"} == common
    assert {s for storage, s in results if storage == "gs"} == common | {"DCP", "DCP, at its best"}
    assert results["gs", "HTTP puts, 2 streams"]["files"] == 2
    assert all(
        r["nbytes"] <= r["written_bytes"] <= 1.03 * r["nbytes"] + (1 << 20)
        for r in results.values()
    )
    assert all(r["cpu_median"] > 0 for r in results.values())
    page = (tmp_path / "performance.md").read_text()
    assert "| save 1-D tensors to a bucket, torch | ≥ 0.85 × HTTP puts |" in page
    assert "| save 1-D tensors to a bucket, torch | ≤ 0.45 CPU s/GB |" in page
    title = f"### {TORCH}: 16 1-D tensors of 64 MiB, float32, 1/64 of it, in a bucket, over TLS"
    assert title in (tmp_path / "lab" / "performance-tables.md").read_text()


def test_a_bucket_some_way_off_answers_after_that_time():
    from emulators import child_server, gcs_emulator

    from tools.bench.bucket import Folder, HttpClient, Server

    source, place = np.arange(1 << 20, dtype=np.uint32).view(np.uint8), np.zeros(4 << 20, np.uint8)
    with gcs_emulator() as emulator:
        command = [sys.executable, "-m", "tools.bench.delay"]
        with child_server(lambda port: [*command, str(port), str(emulator.port), "100"]) as port:
            server = Server(
                "bucket", f"http://127.0.0.1:{port}", emulator.endpoint, [1], peers=False
            )
            with closing(HttpClient(server, 1)) as client:
                client.put({"far/0": [source[:100], source[100:]]})
                assert Folder(server, "far").objects() == {"far/0": 4 << 20}
                began = time.monotonic()
                client.get(
                    [
                        ("far/0", at, [place[at : at + 10], place[at + 10 : at + (1 << 19)]])
                        for at in range(0, 4 << 20, 1 << 19)
                    ]
                )
                assert time.monotonic() - began >= 0.8
    assert np.array_equal(source, place)


def test_floors_move_all_bytes_on_all_threads(tmp_path, monkeypatch):
    from tools.bench import floors

    monkeypatch.setattr(floors, "cores", lambda: 3)
    rng = np.random.default_rng(1)
    arrays = {
        str(i): rng.integers(0, 255, (count, 1 << 20), np.uint8)
        for i, count in enumerate((40, 3, 61))
    }
    arrays |= {f"small {i}": rng.integers(0, 255, 100, np.uint8) for i in range(5)}
    targets = {name: np.zeros_like(array) for name, array in arrays.items()}
    runs_of = {s.name: s.runs for s in floors.floors(arrays, targets, tmp_path)}
    write, export, read, copy = runs_of
    assert (write, export, copy) == (
        "write(2), 3 threads",
        "write(2), 1 thread",
        "memcpy, 3 threads",
    )
    runs_of[write]["save"].do()
    files = list((tmp_path / "floor-out").iterdir())
    assert (len(files), sum(f.stat().st_size for f in files)) == (
        3,
        sum(a.nbytes for a in arrays.values()),
    )
    runs_of[export]["export"].do()
    assert (tmp_path / "floor-file").read_bytes() == b"".join(a.tobytes() for a in arrays.values())
    for runs in (runs_of[read]["restore"], runs_of[copy]["stall"]):
        runs.before()
        runs.do()
        for name, array in arrays.items():
            assert np.array_equal(array, targets[name])
            targets[name][:] = 0


def test_results_of_another_machine_are_not_gone_on_with(file, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(file.read_text()) | {"cores": 1000}))
    refused = bench("--state", "llama", "--resume", other)
    assert refused.returncode == 2
    assert f"{other}: cores was 1000 and is " in refused.stderr


@pytest.mark.parametrize("option", ["--resume", "--again", "--from", "--compare"])
def test_a_file_without_results_is_told_in_a_line(option, tmp_path):
    missing, empty = tmp_path / "missing.json", tmp_path / "empty.json"
    empty.write_text("{}")
    for path, why in (
        (missing, "cannot be read: No such file or directory"),
        (empty, "is not a file that --json wrote"),
    ):
        refused = bench(option, path)
        assert refused.returncode == 2
        assert f"error: {path} {why}" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_results_of_other_sizes_are_not_gone_on_with(tmp_path):
    from tools.bench.plan import Task
    from tools.bench.results import OtherRunError, Results

    results = Results(tmp_path / "found.json", resumed=False)
    results.add(Task("tmpfs", "llama", "torch", "save", 64, 1), [{"subject": "shardckpt"}])
    assert results.has(Task("tmpfs", "llama", "torch", "save", 64, 5))
    assert not results.has(Task("tmpfs", "llama", "torch", "restore", 32, 1))
    with pytest.raises(OtherRunError, match="--part was 64 and is 32"):
        results.has(Task("tmpfs", "llama", "torch", "save", 32, 1))


def test_a_task_that_is_measured_again_replaces_what_it_gave_before(tmp_path):
    from tools.bench.plan import Task
    from tools.bench.results import Results

    results = Results(tmp_path / "found.json", resumed=False)
    save, restore = (
        Task("tmpfs", "llama", "torch", "save", 64, 1),
        Task("tmpfs", "llama", "torch", "restore", 64, 1),
    )
    for task, seconds in ((save, 1), (restore, 2), (save, 3)):
        results.add(task, [{"subject": "shardckpt", "seconds": seconds}])
    assert {(r["operation"], r["seconds"]) for r in results.figures["results"]} == {
        ("save", 3),
        ("restore", 2),
    }
    results.add_failure(save, "it died")
    assert [r["operation"] for r in results.figures["results"]] == ["restore"]


def test_a_task_that_dies_is_told_leaves_nothing_and_is_tried_again_by_the_next_run(tmp_path):
    from tools.bench import processes
    from tools.bench.plan import Task
    from tools.bench.results import Results

    task, place = Task("tmpfs", "llama", "torch", "save", 64, 1), tmp_path / "place"
    place.mkdir()
    dead = Task("tmpfs", "no such state", "torch", "save", 64, 1)
    with pytest.raises(
        processes.TaskError, match=r"(?s)a process ended with 1: .*KeyError: 'no such state'"
    ):
        processes.measured(dead, place, [])
    assert list(place.iterdir()) == []
    results = Results(tmp_path / "found.json", resumed=False)
    results.add_failure(task, "it died")
    again = Results(tmp_path / "found.json", resumed=True)
    assert [f["message"] for f in again.figures["failed"]] == ["it died"]
    assert not again.has(task)
    again.add(task, [{"group": "g", "subject": "shardckpt"}])
    assert again.has(task)
    assert again.figures["failed"] == []


def test_a_run_that_is_ended_leaves_no_files(tmp_path):
    asked = [
        "--storage",
        "disk",
        "--disk",
        tmp_path,
        "--part",
        "64",
        "--group",
        "torch",
        "--json",
        tmp_path / "found",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "tools.bench", *asked], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as run:
        while not list(tmp_path.glob("bench-*/0.err")):
            assert run.poll() is None
            time.sleep(0.01)
        run.terminate()
        _, errors = run.communicate(timeout=60)
    assert (run.returncode, "Traceback" in errors) == (143, False)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_stands_on_the_page_and_in_the_exit_status(file, tmp_path):
    failed = {
        "storage": "tmpfs",
        "state": "small",
        "task": "jax",
        "operation": "save",
        "part": 1,
        "message": "a\nValueError: no",
    }
    (tmp_path / "found.json").write_text(
        json.dumps(json.loads(file.read_text()) | {"failed": [failed]})
    )
    finished = bench("--from", tmp_path / "found.json", "--write", "--docs", tmp_path)
    assert finished.returncode == 1
    assert (
        "FAILED tmpfs, 2,000 tensors of 64 KiB, float32, jax, Save: ValueError: no"
        in finished.stdout
    )
    assert "## What could not be measured" in (tmp_path / "performance.md").read_text()


def run(ours, theirs, part=1):
    """Results of one operation, with those seconds in each round."""
    where = {
        "storage": "tmpfs",
        "state": "llama",
        "group": "torch",
        "operation": "save",
        "part": part,
        "nbytes": 10,
        "floor": False,
    }
    return {
        "results": [
            where | {"subject": "shardckpt", "seconds": ours},
            where | {"subject": "DCP", "seconds": theirs},
        ]
    }


def test_a_ratio_that_fell_is_told():
    from tools.bench.baseline import worse

    before = run([1.0, 1.0, 1.1], [1.0, 1.0, 1.1])
    assert worse(before, run([1.1, 1.1, 1.2], [1.0, 1.0, 1.1])) == []
    assert worse(before, run([1.5, 1.5, 2.0], [1.0, 1.0, 1.0])) == [
        (
            "tmpfs, llama, torch, save: shardckpt / DCP was 1.00 (1.00 to 1.00) and is 0.67 "
            "(0.50 to 0.67)"
        )
    ]


def test_a_ratio_that_fell_less_than_rounds_differ_is_not_told():
    from tools.bench.baseline import worse

    assert worse(run([1.0, 1.0, 2.0], [1.0, 1.0, 1.0]), run([1.5, 1.5, 2.0], [1.0, 1.0, 1.0])) == []


def test_ratios_of_other_sizes_are_not_compared():
    from tools.bench.baseline import worse

    assert worse(run([1.0], [1.0], part=4), run([9.0], [1.0], part=16)) == [
        (
            "tmpfs, llama, torch, save: 1/4 of the bytes then, and 1/16 now; not compared: measure "
            "it with --part 4"
        )
    ]


def test_processor_time_above_its_target_is_told():
    from tools.bench.targets import TARGETS, Held

    target = next(t for t in TARGETS if t.most_cpu == 0.6)
    assert Held(target, 0.6).verdict == "yes"
    assert Held(target, 0.9).verdict == "**no** (+50.0%)"


def test_a_target_that_is_missed_says_by_how_much():
    from tools.bench.targets import TARGETS, Held

    target = next(t for t in TARGETS if t.least == 3.0)
    assert Held(target, 3.0).verdict == "yes"
    assert [Held(target, value).shown for value in (3.0, 2.999, 2.4)] == ["3.00", "2.999", "2.40"]
    assert Held(target, 2.4).verdict == "**no** (−20.0%)"


def test_no_round_begins_when_the_time_is_over_and_three_are_made(monkeypatch):
    from tools.bench import measure

    monkeypatch.setattr(measure, "SECONDS", -1.0)
    ran = []
    subject = measure.Subject("one", {"save": measure.Run(lambda: ran.append("do"), 1)})
    (result,) = measure.in_turn("group", [subject], "save", 9)
    assert len(result.seconds) == measure.LEAST_ROUNDS
    assert len(ran) == 1 + measure.LEAST_ROUNDS


@pytest.mark.filterwarnings("ignore")  # of DCP
def test_the_bench_of_a_gpu_measures_everything_in_its_file(tmp_path, monkeypatch, capsys):
    """On the CPU: what is timed is real, and none of it says anything about a GPU."""
    from tools.bench import on_cuda

    monkeypatch.setattr(on_cuda, "ROUNDS", 2)
    monkeypatch.setattr(on_cuda, "_ROWS", 64)
    assert on_cuda.measure(1e-4, tmp_path / "cuda.json", "cpu") == 0, capsys.readouterr().out
    figures = json.loads((tmp_path / "cuda.json").read_text())
    assert {key.partition(":")[0] for key in figures} >= {
        "wait",
        "warm",
        "overlap",
        "restore in place",
        "restore of a train_state",
    }
    assert {key.partition(":")[0] for key in figures} >= {
        "background save beside a loop in kernels",
        "versions",
        "JAX",
        "DCP",
        "safetensors",
    }
    assert figures["versions: bytes of a version, against the state's"] > 0
    assert figures["bytes"] == 6 * 64 * 65 * 4


def test_the_bench_of_versions_measures_everything_in_its_file(tmp_path):
    """Bytes alone are compared: they do not depend on the load of the machine."""
    command = [
        sys.executable,
        "-m",
        "tools.bench",
        "--versions",
        "--gigabytes",
        "0.017",
        "--json",
        str(tmp_path / "versions.json"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    figures = json.loads((tmp_path / "versions.json").read_text())
    assert figures["bytes"] == 2 * 2048 * 2048 * 2
    assert figures["bytes of a version, against whole-tensor XOR with zstd"] <= 0.6
    assert figures["read by a follower of an eighth of the rows, against its share"] <= 1.1
    assert figures["publish to the bucket until it is durable, against that"] > 0


def test_a_row_of_the_bench_on_all_cores_has_rates_and_what_a_busy_loop_beside_kept():
    asked = {"cores": [min(os.sched_getaffinity(0))], "bytes": 64 << 20, "beside": "Python"}
    command = [sys.executable, "-m", "tools.bench.on_cores", json.dumps(asked)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=True, input="begin\n"
    )
    rates = json.loads(run.stdout.splitlines()[1])
    operations = {"save", "background save", "restore", "verify", "export"}
    peers = {"write(2)", "readv(2)", "DCP save", "DCP load", "safetensors save", "safetensors load"}
    assert rates.keys() == operations | peers | {
        f"{what} beside {name}" for what in ("loop", "gap") for name in operations
    }
    assert all(rate > 0 for rate in rates.values())
