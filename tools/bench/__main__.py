"""The bench: shardckpt and its peers, in turn, in one run, on the same state.

    python -m tools.bench                        everything; about half an hour on 2 cores, and 24 GiB of memory
    python -m tools.bench --quick                a sixteenth of the bytes, three rounds: a few minutes
    python -m tools.bench --group torch --state llama --operation save --operation restore
    python -m tools.bench --write                and docs/performance.md, its chart, and the figures to compare with later
    python -m tools.bench --compare docs/performance.json
    python -m tools.bench --from results.json --write        no run: the page of an earlier one

On tmpfs (/dev/shm), and for the Llama-like state with plain tensors and jax.Arrays on a disk, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.bench.baseline import worse
from tools.bench.chart import chart
from tools.bench.group import GROUPS
from tools.bench.measure import OPERATIONS
from tools.bench.report import page, summary
from tools.bench.states import STATES

ROOT = Path(__file__).parents[2]
PAGE, FIGURES, CHART = ROOT / "docs/performance.md", ROOT / "docs/performance.json", ROOT / "docs/performance.svg"
PLAN: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = [
    ("tmpfs", "llama", ("torch", "dtensor", "jax", "xla"), tuple(OPERATIONS)),
    ("tmpfs", "bf16", ("torch", "jax"), ("save", "restore")),
    ("tmpfs", "small", ("torch", "jax"), ("save", "restore")),
    ("tmpfs", "one", ("torch", "jax"), ("save", "restore", "columns")),
    ("disk", "llama", ("torch", "jax"), ("save", "restore", "export")),
]
"""Storage, state, groups, operations."""
TIMEOUT = 3600
"""Seconds that a group may take."""


def run_group(group: str, state: str, part: int, directory: Path, rounds: int, operation: str) -> list[dict[str, Any]]:
    """Measure one operation of one group, in one process or in several."""
    request = {"group": group, "state": state, "part": part, "directory": str(directory), "rounds": rounds, "operation": operation}
    processes = 2 if group == "dtensor" else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if processes == 1:
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                environment.pop(name, None)
        command = [sys.executable, "-W", "ignore", "-m", "tools.bench.group"]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment, text=True
        )
        assert child.stdin is not None
        child.stdin.write(json.dumps(request))
        child.stdin.close()
        child.stdin = None
        children.append(child)
    answers = [child.communicate(timeout=TIMEOUT) for child in children]
    for child, (_, errors) in zip(children, answers, strict=True):
        if child.returncode != 0:
            raise SystemExit(f"{group}, {state}: the process ended with {child.returncode}:\n{errors[-3000:]}")
    found: list[dict[str, Any]] = json.loads(answers[0][0])
    return found


def machine() -> dict[str, Any]:
    """What it was measured on, and with what."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("shardckpt", "torch", "torch_xla", "jax", "orbax-checkpoint", "safetensors", "tensorstore", "numpy")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


def main() -> int:
    """Measure, tell, and write."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the bytes, three rounds, on tmpfs")
    parser.add_argument("--rounds", type=int, default=None, help="that count; by default 5, or 3")
    parser.add_argument("--part", type=int, default=None, metavar="N", help="an Nth of the bytes")
    parser.add_argument("--group", action="append", choices=sorted(GROUPS), help="may be repeated")
    parser.add_argument("--state", action="append", choices=sorted(STATES), help="may be repeated")
    parser.add_argument("--storage", action="append", choices=["tmpfs", "disk"], help="may be repeated")
    parser.add_argument("--operation", action="append", choices=sorted(OPERATIONS), help="may be repeated")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="what was measured before, and no run")
    parser.add_argument("--write", action="store_true", help="write docs/performance.md, its figures and its chart")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="figures of an earlier run; ends with 1 if ratios got worse")
    asked = parser.parse_args()
    found = json.loads(asked.earlier.read_text("utf-8")) if asked.earlier is not None else measure(asked)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1), "utf-8")
    print(summary(found))
    if asked.write:
        PAGE.write_text(page(found), "utf-8")
        CHART.write_text(chart(found), "utf-8")
        FIGURES.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if asked.compare is not None:
        fallen = worse(json.loads(asked.compare.read_text("utf-8")), found)
        print("\n".join(fallen) or "No ratio is worse than it was.")
        return 1 if fallen else 0
    return 0


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Run all that is asked for."""
    part, rounds = asked.part or (16 if asked.quick else 1), asked.rounds or (3 if asked.quick else 5)
    places = {"tmpfs": Path("/dev/shm"), "disk": asked.disk}
    results = []
    for storage, state, groups, operations in PLAN:
        if storage not in (asked.storage or (["tmpfs"] if asked.quick else ["tmpfs", "disk"])) or state not in (asked.state or STATES):
            continue
        for group in groups:
            chosen = [o for o in operations if o in (asked.operation or OPERATIONS)]
            if group not in (asked.group or GROUPS) or not chosen:
                continue
            for operation in chosen:  # each in a process and with files of its own: all together need more memory than there may be
                print(f"… {storage}, {STATES[state].what}, {group}, {operation}", file=sys.stderr, flush=True)
                directory = Path(tempfile.mkdtemp(prefix="bench-", dir=places[storage]))
                try:
                    results += [r | {"storage": storage} for r in run_group(group, state, part, directory / "here", rounds, operation)]
                finally:
                    shutil.rmtree(directory, ignore_errors=True)
    return machine() | {"part": part, "rounds": rounds, "results": results}


if __name__ == "__main__":
    sys.exit(main())
