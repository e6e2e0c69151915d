"""The bench: shardckpt and its peers, in turn, in one run, on the same state.

    python -m tools.bench                      everything; 33 minutes on 2 cores, and 20 GiB of
                                               memory
    python -m tools.bench --quick              a sixteenth of the bytes, three rounds: a few minutes
    python -m tools.bench --group torch --state llama --operation save --operation restore
    python -m tools.bench --storage gs         in a bucket; --storage gs-tls, gs-20ms and gs-100ms
                                               besides
    python -m tools.bench --write              and docs/performance.md, its chart and tables, and
                                               the figures to compare with later
    python -m tools.bench --compare docs/performance.json
    python -m tools.bench --resume FILE        what the file, of a run that was cut or had failures,
                                               lacks
    python -m tools.bench --again FILE --group jax --operation save
                                               those once more, in place of what the file has
    python -m tools.bench --from FILE --write  no run: the page of an earlier one
    python -m tools.bench --cuda               on a GPU, instead of all that: tools/bench/on_cuda.py
    python -m tools.bench --versions           publishing and following alone:
                                               tools/bench/on_versions.py
    python -m tools.bench --cores              on 1, 2, 4 … all cores, and beside busy threads,
                                               instead: tools/bench/on_cores.py

What was measured is in a file at any time (`--json`). `tools/bench/plan.py` says what is measured
on tmpfs (/dev/shm), on a disk, and in buckets of an emulator of Cloud Storage, near, over TLS, and
some way off. It ends with 1 where something failed, or where a ratio got worse.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.bench.baseline import worse
from tools.bench.chart import chart
from tools.bench.group import GROUPS
from tools.bench.measure import OPERATIONS
from tools.bench.plan import PLAN, QUICK, STORAGES, tasks
from tools.bench.processes import TaskError, measured
from tools.bench.report import page, summary, tables
from tools.bench.results import OtherRunError, Results, read
from tools.bench.states import STATES

DOCS = Path(__file__).parents[2] / "docs"


def main() -> int:
    """Measure, tell, and write."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="a sixteenth of the bytes, three rounds, not on a disk"
    )
    parser.add_argument(
        "--rounds", type=int, default=None, help="at most that count, instead of the plan's"
    )
    parser.add_argument(
        "--part",
        type=int,
        default=None,
        metavar="N",
        help="an Nth of the bytes, instead of the plan's",
    )
    parser.add_argument(
        "--group", action="append", default=[], choices=sorted(GROUPS), help="may be repeated"
    )
    parser.add_argument(
        "--state", action="append", default=[], choices=sorted(STATES), help="may be repeated"
    )
    parser.add_argument(
        "--storage", action="append", default=[], choices=list(STORAGES), help="may be repeated"
    )
    parser.add_argument(
        "--operation",
        action="append",
        default=[],
        choices=sorted(OPERATIONS),
        help="may be repeated",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="a directory on the disk to measure",
    )
    streams = (
        "requests at a time of the floors in a bucket, instead of the storage's own; may be "
        "repeated"
    )
    parser.add_argument(
        "--streams", action="append", type=int, default=[], metavar="N", help=streams
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("bench.json"),
        metavar="FILE",
        help="what was measured; by default ./bench.json",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--resume", type=Path, metavar="FILE", help="go on with that file of results"
    )
    source.add_argument(
        "--again",
        type=Path,
        metavar="FILE",
        help="measure once more what is chosen, in place of what the file has of it",
    )
    source.add_argument(
        "--from",
        dest="earlier",
        type=Path,
        metavar="FILE",
        help="what was measured before, and no run",
    )
    parser.add_argument(
        "--write", action="store_true", help="write performance.md, its tables, figures and chart"
    )
    parser.add_argument(
        "--docs",
        type=Path,
        default=DOCS,
        metavar="DIR",
        help="where --write does; by default docs/",
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="figures of an earlier run")
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="measure on a GPU, and nothing else; with --json its figures go to that file",
    )
    parser.add_argument(
        "--cores",
        action="store_true",
        help="measure on 1, 2, 4 … all cores, and nothing else; needs only torch",
    )
    parser.add_argument(
        "--versions",
        action="store_true",
        help="measure publishing and following, and nothing else; a minute",
    )
    parser.add_argument(
        "--gigabytes",
        type=float,
        metavar="N",
        help="of the state; by default 10 on the GPU, 2 with --cores, and 0.2 with --versions",
    )
    asked = parser.parse_args()
    if asked.cuda:
        from tools.bench import on_cuda

        return on_cuda.measure(
            asked.gigabytes or 10.0,
            Path("cuda.json") if asked.json == Path("bench.json") else asked.json,
        )
    if asked.versions:
        from tools.bench import on_versions

        return on_versions.measure(
            asked.gigabytes or 0.2,
            Path("versions.json") if asked.json == Path("bench.json") else asked.json,
        )
    if asked.cores:
        from tools.bench import on_cores

        return on_cores.measure(
            asked.gigabytes or 2.0,
            Path("cores.json") if asked.json == Path("bench.json") else asked.json,
        )
    # So that a run that is cut removes its files from memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        # Before --write replaces it.
        earlier = None if asked.compare is None else read(asked.compare)
        figures = read(asked.earlier) if asked.earlier is not None else measure(asked)
    except OtherRunError as wrong:
        parser.error(str(wrong))
    print(summary(figures))
    if asked.write:
        (asked.docs / "performance.md").write_text(page(figures), "utf-8")
        (asked.docs / "lab").mkdir(exist_ok=True)
        (asked.docs / "lab" / "performance-tables.md").write_text(tables(figures), "utf-8")
        (asked.docs / "performance.svg").write_text(chart(figures), "utf-8")
        (asked.docs / "performance.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    fallen = [] if earlier is None else worse(earlier, figures)
    if earlier is not None:
        print("\n".join(fallen) or "No ratio is worse than it was.")
    return 1 if fallen or figures["failed"] else 0


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Run all that is asked for; of what is gone on with, what is not there yet."""
    continued = asked.resume or asked.again
    results = Results(continued or asked.json, resumed=continued is not None)
    places = dict.fromkeys(STORAGES, Path("/dev/shm")) | {"disk": asked.disk}
    chosen = {
        name: getattr(asked, name)
        for name in ("part", "rounds")
        if getattr(asked, name) is not None
    }
    lines = [replace(line, **chosen) for line in (QUICK if asked.quick else PLAN)]
    chosen_tasks = [
        t
        for t in tasks(lines, asked.group, asked.state, asked.storage, asked.operation)
        if asked.again or not results.has(t)
    ]
    began = time.monotonic()
    for number, task in enumerate(chosen_tasks, 1):
        what = f"{task.storage}, {STATES[task.state].what}, {task.group}, {task.operation}"
        print(f"{number} of {len(chosen_tasks)}: {what}: ", end="", file=sys.stderr, flush=True)
        task_began = time.monotonic()
        try:
            results.add(task, measured(task, places[task.storage], asked.streams))
        except TaskError as failure:
            print(f"FAILED: {failure}", file=sys.stderr, flush=True)
            results.add_failure(task, str(failure))
        else:
            print(f"{time.monotonic() - task_began:.0f} s", file=sys.stderr, flush=True)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes in all", file=sys.stderr, flush=True)
    return results.figures


if __name__ == "__main__":
    sys.exit(main())
