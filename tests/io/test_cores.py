"""Cores and memory that this process may use."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardckpt.errors import OptionError
from shardckpt.io import cores as cores_module
from shardckpt.io.cores import cores, free_memory, note_local_processes, quota_of_groups

CPU = Path("/sys/fs/cgroup/cpu")


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Eight cores, no quota, and no launcher."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(cores_module, "quota_of_groups", lambda: None)
    monkeypatch.setattr(cores_module, "_known_processes", None)
    for variable in (
        "SHARDCKPT_THREADS",
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "SLURM_NTASKS_PER_NODE",
    ):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    "variable", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"]
)
@pytest.mark.parametrize(
    ("processes", "expected"), [("1", 8), ("2", 4), ("3", 2), ("16", 1), ("0", 8), ("4(x2)", 8)]
)
def test_processes_that_the_launcher_starts_on_a_host_share_its_cores(
    monkeypatch, variable, processes, expected
):
    monkeypatch.setenv(variable, processes)
    assert cores() == expected


def test_what_the_processes_told_each_other_replaces_the_launchers_number(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    note_local_processes(1)  # says nothing
    assert cores() == 1
    note_local_processes(2)
    assert cores() == 4


@pytest.mark.parametrize(
    ("quota", "expected"), [(None, 8), (0.5, 1), (1.0, 1), (2.5, 3), (64.0, 8)]
)
def test_a_quota_is_rounded_up_and_no_more_than_the_affinity(monkeypatch, quota, expected):
    monkeypatch.setattr(cores_module, "quota_of_groups", lambda: quota)
    assert cores() == expected


def test_the_variable_replaces_everything(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("SHARDCKPT_THREADS", "24")
    assert cores() == 24


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5", "100000"])
def test_a_wrong_variable_is_refused_by_name(monkeypatch, given):
    monkeypatch.setenv("SHARDCKPT_THREADS", given)
    with pytest.raises(
        OptionError, match=r"SHARDCKPT_THREADS=.*: give a number of threads from 1 to 1024"
    ):
        cores()


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/a/b/cpu.max": "400000 100000\n",
                f"{V2}/a/cpu.max": "150000 100000\n",
            },
            1.5,
        ),
        ({"proc/self/cgroup": "0::/on/the/host\n", f"{V2}/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
                f"{V1}/a/cpu.cfs_quota_us": "-1\n",
                f"{V1}/a/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/a\n0::/x\n",
                f"{V1}/a/cpu.cfs_quota_us": "50000\n",
                f"{V1}/a/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpuset:/a\n",
                f"{V1}/a/cpu.cfs_quota_us": "50000\n",
                f"{V1}/a/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_the_least_quota_of_all_groups_above_counts(tmp_path, files, expected):
    write(tmp_path, files)
    assert quota_of_groups(tmp_path) == expected


MEMORY = "sys/fs/cgroup/memory"
HOST = {"proc/meminfo": "MemTotal: 999999 kB\nMemAvailable:   1000 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (HOST, 1000 << 10),
        (
            HOST
            | {
                "proc/self/cgroup": "0::/a\n",
                f"{V2}/a/memory.max": "max\n",
                f"{V2}/a/memory.current": "5\n",
            },
            1000 << 10,
        ),
        (
            HOST
            | {
                "proc/self/cgroup": "0::/a\n",
                f"{V2}/a/memory.max": "9000\n",
                f"{V2}/a/memory.current": "5000\n",
            },
            4000,
        ),
        (
            HOST
            | {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/a/b/memory.max": "max\n",
                f"{V2}/a/memory.max": "9000\n",
            }
            | {
                f"{V2}/a/memory.current": "9500\n",
                f"{V2}/a/memory.stat": "anon 1\ninactive_file 700\n",
            },
            200,
        ),
        (
            HOST
            | {"proc/self/cgroup": "4:memory:/a\n", f"{MEMORY}/a/memory.limit_in_bytes": "9000\n"}
            | {
                f"{MEMORY}/a/memory.usage_in_bytes": "8000\n",
                f"{MEMORY}/a/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
            },
            1001,
        ),
    ],
)
def test_the_least_free_memory_of_the_host_and_of_all_groups_above_counts(
    tmp_path, files, expected
):
    write(tmp_path, files)
    assert free_memory(tmp_path) == expected


def test_processes_on_a_host_share_its_free_memory(tmp_path, monkeypatch):
    write(tmp_path, HOST)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(tmp_path) == 250 << 10


def cores_after(first):
    """The answer of a new process, which runs some code first."""
    program = f"import os; {first}; from shardckpt.io.cores import cores; print(cores())"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=250
    )
    return int(run.stdout)


def test_a_process_that_is_bound_to_a_core_uses_one():
    assert cores_after(f"os.sched_setaffinity(0, {{{min(psutil.Process().cpu_affinity())}}})") == 1


@pytest.mark.skipif(
    not (CPU / "cpu.cfs_quota_us").exists() and not os.access(CPU, os.W_OK),
    reason="needs control groups that may be made",
)
def test_a_process_in_a_group_with_a_quota_uses_as_many():
    group = CPU / f"shardckpt-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("50000")
    except OSError as e:
        pytest.skip(f"control groups may not be made here: {e}")
    try:
        assert (
            cores_after(f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))") == 1
        )
    finally:
        group.rmdir()
