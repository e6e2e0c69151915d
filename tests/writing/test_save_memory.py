"""Host memory of a save beside the state, as the peak of a process of its own; on a disk and on an
object store."""

import gc
import json
import os
import subprocess
import sys
import traceback
import tracemalloc

import numpy as np
import pytest
from paths import CHILDREN, TOOLS

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import BudgetError
from shardckpt.writing.handle import SaveProgress

TOOL = TOOLS / "save_memory.py"
MiB = 1 << 20


def measured(to, *options):
    command = [sys.executable, TOOL, "--to", to, *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "layout"),
    [
        ("a disk", "packed"),
        ("gs", "zarr"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("a disk", "zarr"), ("gs", "packed"))
        ),
    ],
)
def test_a_save_larger_than_its_memory_limit_stays_inside_it(tmp_path, to, layout):
    place = str(tmp_path) if to == "a disk" else to
    figures = measured(place, "--gibibytes", "0.25", "--memory-limit", "128MiB", "--layout", layout)
    assert figures["state"] == 256 * MiB
    assert figures["memory_limit"] == 128 * MiB
    assert 0 < figures["growth"] <= (32 * MiB if to == "a disk" else 128 * MiB)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_threads_lay_out_and_compress_is_inside_the_limit_together(
    tmp_path, monkeypatch, compression
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    # 64 MiB that are not smaller compressed.
    raw = np.random.default_rng(0).integers(0, 1 << 63, (4, 1024, 2048))
    options = SaveOptions(memory_limit=16 * MiB, compression=compression)
    shardckpt.save(tmp_path / "first", {"w": raw}, options=options)
    tracemalloc.start()
    try:
        shardckpt.save(tmp_path / "second", {"w": raw}, options=options)
        assert tracemalloc.get_traced_memory()[1] <= 16 * MiB
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_no_objects_stay_for_each_save_and_verification(tmp_path):
    """`ts.ocdbt.dump` would keep some of what it returns for good (0.1.86)."""
    state = {str(i): np.zeros(10, np.float32) for i in range(20)}

    def objects_after(saves):
        for _ in range(saves):
            shardckpt.save(tmp_path / "c", state, options=shardckpt.SaveOptions(overwrite=True))
            assert shardckpt.open(tmp_path / "c").verify().ok
        gc.collect()
        return len(gc.get_objects())

    objects_after(5)
    # The least of three, because threads that earlier tests have left may make objects meanwhile.
    assert min(-objects_after(0) + objects_after(10) for _ in range(3)) < 10


def test_what_the_system_gives_no_memory_for_is_an_error_of_ours(tmp_path):
    shardckpt.save(tmp_path / "large", {"w": np.zeros(64 << 20, np.uint8)})
    child = CHILDREN / "out_of_memory.py"
    run = subprocess.run(
        [sys.executable, child, tmp_path], capture_output=True, text=True, check=False, timeout=250
    )
    assert run.returncode == 0, run.stderr
    failures = [line.split(" ", 2) for line in run.stdout.splitlines()]
    assert [name for name, _, _ in failures] == [
        "export_safetensors",
        "restore",
        "save_async",
        "manager",
    ]
    assert {kind for _, kind, _ in failures} == {"BudgetError"}
    assert failures[0][2].startswith(
        f"{tmp_path}/large: the system gave this process no more memory"
    )
    assert failures[1][2].startswith("w: there is no memory for an array")


def test_memory_that_a_save_in_the_background_is_refused_is_an_error_of_ours():
    outcome = SaveProgress("runs/7")
    outcome.end(MemoryError("no 64 MiB"))
    with pytest.raises(
        BudgetError, match=r"runs/7: the system gave this process no more memory \(no 64 MiB\)"
    ):
        outcome.wait("commit", 0)


def test_an_error_that_is_raised_again_and_again_keeps_the_frames_of_one_wait_alone():
    outcome = SaveProgress("runs/7")
    outcome.end(BudgetError("full"))

    def frames_of_error():
        with pytest.raises(BudgetError) as raised:
            outcome.wait("commit", 0)
        return len([*traceback.walk_tb(raised.value.__traceback__)])

    assert frames_of_error() == frames_of_error() == frames_of_error()


def test_memory_that_a_verification_is_refused_is_an_error_of_ours(tmp_path):
    shardckpt.save(tmp_path / "c", {"w": np.zeros(10)})

    def refused(_done, _total):
        raise MemoryError("no 64 MiB")

    with pytest.raises(
        BudgetError, match=r"/c: the system gave this process no more memory \(no 64 MiB\)"
    ):
        shardckpt.open(tmp_path / "c").verify(refused)


MANY_TENSORS = """
import sys
import numpy as np
import shardckpt

def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) >> 10

work = {
    "verify": lambda url: shardckpt.open(url).verify(),
    "export": lambda url: shardckpt.export_safetensors(
        url, url + ".safetensors", memory_limit="64MiB"
    ),
    "reshard": lambda url: shardckpt.reshard(url, url + ".new", memory_limit="64MiB"),
}[sys.argv[2]]
shardckpt.save(sys.argv[1] + "/few", {"w": np.zeros(10)})
work(sys.argv[1] + "/few")
before = peak()
work(sys.argv[1] + "/many")
print(peak() - before)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "work",
    ["verify", *(pytest.param(work, marks=pytest.mark.slow) for work in ("export", "reshard"))],
)
def test_work_on_10_000_tensors_takes_less_than_10_kib_for_each(tmp_path, work):
    shardckpt.save(
        tmp_path / "many",
        {"model": {f"layers.{i}.w": np.full(10, i, np.float32) for i in range(10_000)}},
    )
    run = subprocess.run(
        [sys.executable, "-c", MANY_TENSORS, tmp_path, work],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 10 * 10_000 >> 10


FEW_DESCRIPTORS = """
import os, resource, stat, sys, time
import numpy as np
import shardckpt

def slow_fsync(fd):
    # Files are written faster than they become durable, and each is open until it is.
    if stat.S_ISREG(os.fstat(fd).st_mode):
        time.sleep(0.1)

os.fsync = slow_fsync
state = {str(i): np.full((100, 100), float(i)) for i in range(100)}
resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
shardckpt.save(sys.argv[1], state, options=shardckpt.SaveOptions(layout=sys.argv[2]))
restored = shardckpt.restore(sys.argv[1])
assert all(np.array_equal(restored[name], value) for name, value in state.items())
"""


@pytest.mark.long
@pytest.mark.parametrize("layout", ["packed", "zarr"])
def test_forty_descriptors_are_enough(tmp_path, layout):
    run = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS, tmp_path / "c", layout],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
