"""`python -m tools.bench --cores`: rates on 1, 2, 4 … all cores of this machine.

The same run also measures rates beside work of other kinds.

Each row is a process of its own that may run on so many cores. Its state is matrices of 64 MiB, in
torch tensors. Files are in /dev/shm, so reads come from memory; each save goes to a fresh place,
which is removed when the clock is stopped. The floors move the same bytes with as many threads as
the row has cores. DCP and safetensors are measured where they are installed. The best of several
rounds counts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
_MATRIX = 4096
OPERATIONS = ("save", "background save", "restore", "verify", "export")
"""The operations of shardckpt."""
_BESIDE = {"Python": "a thread busy in Python", "kernels": "a thread that runs torch operations"}


def measure(gigabytes: float, file: Path, most: int | None = None) -> int:
    """Measure, print a table, and write the figures to a file; 1 if a row failed."""
    allowed = sorted(os.sched_getaffinity(0))[:most]
    counts = sorted({min(1 << i, len(allowed)) for i in range(len(allowed).bit_length() + 1)})
    rows = [{"cores": allowed[:count]} for count in counts]
    for beside in _BESIDE:
        rows += [
            {"cores": allowed, "beside": beside},
            {"cores": allowed, "beside": beside, "busy": len(allowed)},
        ]
    rows += [{"cores": allowed, "disk": True}, {"cores": allowed, "processes": 2}]
    figures: list[dict[str, Any]] = []
    print(
        f"{gigabytes:g} GB of matrices of 64 MiB, GB/s\n\n{'':44}"
        + "".join(f"{name:>12}" for name in OPERATIONS)
    )
    for row in rows:
        try:
            figures.append(row | {"GB/s": _measured(row, gigabytes)})
        except (subprocess.SubprocessError, ValueError) as e:
            figures.append(row | {"failed": str(e)})
        _print(figures[-1])
    file.write_text(json.dumps({"gigabytes": gigabytes, "rows": figures}, indent=1) + "\n")
    return int(any("failed" in row for row in figures))


def _measured(row: dict[str, Any], gigabytes: float) -> dict[str, float]:
    """The figures of a row; those of several processes together."""
    count = row.get("processes", 1)
    asked = row | {"bytes": int(gigabytes * 1e9 / count)}
    environment = {
        **os.environ,
        "LOCAL_WORLD_SIZE": str(count),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "tools.bench.on_cores", json.dumps(asked)]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    programs = [subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) for _ in range(count)]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()  # it has made its state
        outputs = [program.communicate("begin\n", timeout=150) for program in programs]
    finally:
        for program in programs:
            program.kill()
    for program, (_, errors) in zip(programs, outputs, strict=True):
        if program.returncode:
            raise ValueError(
                errors.strip().splitlines()[-1]
                if errors.strip()
                else f"status {program.returncode}"
            )
    figures = [json.loads(output) for output, _ in outputs]
    return {name: sum(one[name] for one in figures) for name in figures[0]}


def _print(row: dict[str, Any]) -> None:
    count = len(row["cores"])
    name = f"{count} core{'s' if count > 1 else ''}"
    name += f", beside {_BESIDE[row['beside']]}" if "beside" in row else ""
    name += (
        ", all busy" * ("busy" in row)
        + ", on a disk" * ("disk" in row)
        + ", two processes" * ("processes" in row)
    )
    if "failed" in row:
        print(f"{name:44}FAILED: {row['failed']}", flush=True)
        return
    rates = row["GB/s"]
    print(
        f"{name:44.44}"
        + "".join(f"{rates.get(operation, float('nan')):12.2f}" for operation in OPERATIONS),
        flush=True,
    )
    others = [f"{other} {rates[other]:.2f}" for other in rates if other not in OPERATIONS]
    print(f"    {', '.join(others)}", flush=True)


# --- in the process of a row


def row(asked: dict[str, Any]) -> dict[str, float]:
    """Measure one row: GB/s by operation and peer.

    Of a loop beside it the share of its undisturbed rate, and its longest gap in ms.
    """
    os.sched_setaffinity(0, asked["cores"])
    import torch

    torch.set_num_threads(1)
    count = max(1, asked["bytes"] // (4 * _MATRIX * _MATRIX))
    state = {f"layers.{i}.weight": torch.full((_MATRIX, _MATRIX), float(i)) for i in range(count)}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    directory = Path(
        tempfile.mkdtemp(prefix="shardckpt-cores-", dir=None if "disk" in asked else "/dev/shm")
    )
    try:
        ways = _ways(state, into, directory, asked)
        rates: dict[str, float] = {}
        with _all_busy(asked.get("busy", 0)), _loop(asked.get("beside")) as loop:
            print("ready", flush=True)
            sys.stdin.readline()  # processes of a row begin together
            for name, (before, run) in ways.items():
                for _ in range(2 if loop is not None else 3):
                    before()
                    if loop is not None:
                        loop.begin()
                    began = time.perf_counter()
                    run()
                    seconds = time.perf_counter() - began
                    rates[name] = max(rates.get(name, 0.0), nbytes / seconds / 1e9)
                    if loop is not None and name in OPERATIONS:
                        share, gap = loop.end()
                        rates[f"loop beside {name}"] = max(
                            rates.get(f"loop beside {name}", 0.0), share
                        )
                        rates[f"gap beside {name}"] = min(rates.get(f"gap beside {name}", 1e9), gap)
        return rates
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _ways(
    state: dict[str, Any], into: dict[str, Any], directory: Path, asked: dict[str, Any]
) -> dict[str, tuple[Callable[[], None], Callable[[], Any]]]:
    """The call before the clock starts, and the timed call, by operation.

    Reads come after the writes that they read.
    """
    import shardckpt
    from shardckpt import SaveOptions

    options = SaveOptions(memory_limit=3 * sum(tensor.nbytes for tensor in state.values()))
    threads = max(1, len(asked["cores"]) // asked.get("processes", 1))

    def fresh(*names: str) -> Callable[[], None]:
        def remove() -> None:
            for name in names:
                path = directory / name
                path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
            os.sync()

        return remove

    def nothing() -> None:
        pass

    write, read = _floors(state, into, directory / "floor", threads)
    ways: dict[str, tuple[Callable[[], None], Callable[[], Any]]] = {
        "write(2)": (fresh("floor"), write),
        "readv(2)": (nothing, read),
        "background save": (
            fresh("saved"),
            lambda: shardckpt.save_async(directory / "saved", state, options=options).wait(),
        ),
        "save": (
            fresh("floor", "saved"),
            lambda: shardckpt.save(directory / "saved", state, options=options),
        ),
        "restore": (nothing, lambda: shardckpt.restore(directory / "saved", into)),
        "verify": (nothing, lambda: shardckpt.open(directory / "saved").verify()),
        "export": (
            fresh("export"),
            lambda: shardckpt.export(directory / "saved", directory / "export"),
        ),
    }
    if "disk" in asked or "processes" in asked:
        return {name: way for name, way in ways.items() if name != "export"}
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(directory / "dcp", thread_count=threads, sync_files=False)
    ways["DCP save"] = (
        fresh("export", "dcp"),
        lambda: dcp.save(state, storage_writer=writer, no_dist=True),
    )
    ways["DCP load"] = (
        nothing,
        lambda: dcp.load(into, checkpoint_id=directory / "dcp", no_dist=True),
    )
    if find_spec("safetensors") is not None:
        from safetensors.torch import load_file, save_file

        ways["safetensors save"] = (
            fresh("dcp", "model.safetensors"),
            lambda: save_file(state, directory / "model.safetensors"),
        )
        ways["safetensors load"] = (
            nothing,
            lambda: [
                into[name].copy_(tensor)
                for name, tensor in load_file(directory / "model.safetensors").items()
            ],
        )
    return ways


def _floors(
    state: dict[str, Any], into: dict[str, Any], directory: Path, threads: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Write the bytes, a file for each thread, and read them back."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from tools.bench.floors import _read, _shared_out, _write

    sources, places = (
        [tensor.numpy().reshape(-1).view(np.uint8) for tensor in group.values()]
        for group in (state, into)
    )
    pool = ThreadPoolExecutor(threads)
    paths = [directory / str(i) for i in range(threads)]

    def write() -> None:
        directory.mkdir()
        list(pool.map(_write, paths, _shared_out(sources, threads)))

    def read() -> None:
        list(pool.map(_read, paths, _shared_out(places, threads)))

    return write, read


class _Loop:
    """A thread that works beside, and counts its turns."""

    def __init__(self, kind: str) -> None:
        self._over = False
        self._turns = 0
        self._longest = 0.0
        self._thread = threading.Thread(
            target=self._python if kind == "Python" else self._kernels, daemon=True
        )
        self._thread.start()
        time.sleep(0.2)
        self.begin()
        time.sleep(0.5)
        self._alone = self._turns / (time.perf_counter() - self._began)

    def begin(self) -> None:
        """Begin to count."""
        self._turns, self._longest, self._began = 0, 0.0, time.perf_counter()

    def end(self) -> tuple[float, float]:
        """Turns since `begin` as a part of the undisturbed ones, and the longest gap.

        The gap is the time between two turns, in milliseconds.
        """
        return self._turns / (time.perf_counter() - self._began) / self._alone, self._longest * 1e3

    def stop(self) -> None:
        """End the thread."""
        self._over = True
        self._thread.join()

    def _turn(self, last: float) -> float:
        now = time.perf_counter()
        self._turns += 1
        self._longest = max(self._longest, now - last)
        return now

    def _python(self) -> None:
        last = time.perf_counter()
        while not self._over:
            sum(i * i for i in range(200))
            last = self._turn(last)

    def _kernels(self) -> None:
        import torch

        a, last = torch.ones(128, 128), time.perf_counter()
        while not self._over:
            a = torch.tanh(a @ a)
            last = self._turn(last)


@contextmanager
def _loop(kind: str | None) -> Iterator[_Loop | None]:
    if kind is None:
        yield None
        return
    loop = _Loop(kind)
    try:
        yield loop
    finally:
        loop.stop()


def _spin() -> None:
    while True:
        pass


@contextmanager
def _all_busy(count: int) -> Iterator[None]:
    """So many processes that compute, on the cores of this one."""
    busy = [
        multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
        for _ in range(count)
    ]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


if __name__ == "__main__":
    print(json.dumps(row(json.loads(sys.argv[1]))))
