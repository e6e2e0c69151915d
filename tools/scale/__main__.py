"""Very large jobs, simulated on one machine.

    python -m tools.scale                              8 to 100,000 devices, three models, four
                                                       layouts; ten minutes on one core
    python -m tools.scale --quick                      one model, four sizes of job, DCP up to 64
                                                       ranks: about three minutes
    python -m tools.scale --write                      and docs/scale.md, its chart, tables and
                                                       figures
    python -m tools.scale --from results.json --write  no run: the page of an earlier one
    python -m tools.scale --resume results.json        keeps each measurement there as it is made;
                                                       makes none again
    python -m tools.scale --resume results.json --only requests commit  some of them

Every measurement is a process of its own (`child.py`), one after another. Each says in which run it
was made, and so does the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.scale.chart import chart
from tools.scale.child import MODULES
from tools.scale.lab import tables
from tools.scale.points import FULL, QUICK, SMALLEST, Points
from tools.scale.report import page, summary

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
PAGE, TABLES = ROOT / "docs/scale.md", ROOT / "docs/lab/scale-tables.md"
FIGURES, CHART = ROOT / "docs/scale.json", ROOT / "docs/scale.svg"
TIMEOUT = 600
"""Seconds that one process may take; DCP's plans are built before they are measured."""
BUCKET = "bucket"
"""Name, for `--only`, of the requests that all hosts of a save make to a bucket."""
BYTES_PER_HOST = 4 << 30
"""Of a save of which all requests are counted."""


def main() -> int:
    """Measure, tell, and write."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.scale", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--smallest", action="store_true", help="hardly any, for tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="make what is not there yet, and keep it there"
    )
    parser.add_argument("--only", nargs="+", choices=[*MODULES, BUCKET], help="make nothing else")
    parser.add_argument(
        "--from",
        dest="earlier",
        type=Path,
        metavar="FILE",
        help="what was measured before, and no run",
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/scale.md, its tables, figures and chart"
    )
    asked = parser.parse_args()
    if asked.earlier is not None:
        figures = json.loads(asked.earlier.read_text("utf-8"))
    else:
        figures = measure(
            SMALLEST if asked.smallest else QUICK if asked.quick else FULL, asked.only, asked.resume
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=1), "utf-8")
    print(summary(figures))
    if asked.write:
        PAGE.write_text(page(figures), "utf-8")
        TABLES.write_text(tables(figures), "utf-8")
        CHART.write_text(chart(figures), "utf-8")
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return 0


def measure(points: Points, only: Sequence[str] | None, kept: Path | None) -> dict[str, Any]:
    """Run all of them, or only some, and keep each in a file as soon as it is made."""
    run = time.strftime("%Y-%m-%d %H:%M")
    figures: dict[str, Any] = (
        json.loads(kept.read_text("utf-8"))
        if kept is not None and kept.exists()
        else {"results": [], "bucket": []}
    )
    names = ("shardckpt", "torch", "tensorstore", "numpy")
    figures |= {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }

    def keep() -> None:
        if kept is not None:
            kept.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")

    for jobs in ([job] for job in points.jobs()), points.dcp():
        for several in jobs:
            for job in several:
                made = next((old for old in figures["results"] if old["asked"] == job), None)
                if made is None and (only is None or job["what"] in only):
                    made = one(job) | {"asked": job, "run": run}
                    figures["results"].append(made)
                    keep()
                if made is None or made.get("cut"):
                    break
    if not figures["bucket"] and (only is None or BUCKET in only):
        figures["bucket"] = [load | {"run": run} for load in requests(points.hosts)]
        keep()
    return figures


def one(job: dict[str, Any]) -> dict[str, Any]:
    """One measurement, with what was asked."""
    print("…", ", ".join(map(str, job.values())), file=sys.stderr, flush=True)
    command = [sys.executable, "-W", "ignore", "-m", "tools.scale.child"]
    child = subprocess.run(
        command,
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT,
        check=False,
    )
    if child.returncode != 0:
        raise SystemExit(
            f"{job}: the process ended with {child.returncode}:\n{child.stderr[-3000:]}"
        )
    figures: dict[str, Any] = job | json.loads(child.stdout)
    return figures


def requests(hosts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Load on a bucket in saves by so many hosts, with the pace that they keep and without."""
    if not hosts:
        return []
    from tools.scale.bucket import Job, simulate
    from tools.scale.counted import emulated_save

    print("… requests", file=sys.stderr, flush=True)
    counted = emulated_save()
    return [
        {"hosts": n}
        | {
            name: asdict(simulate(Job(n, BYTES_PER_HOST, paced=paced), counted))
            for name, paced in (("paced", True), ("unpaced", False))
        }
        for n in hosts
    ]


if __name__ == "__main__":
    sys.exit(main())
