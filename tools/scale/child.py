"""One measurement, in a process of its own: `python -m tools.scale.child`.

On stdin it is told `{"what", …}`; on stdout it says what was counted, and `cpu` and `wall` seconds,
`above` (bytes of resident memory at the most, above what there was before) and `peak` (with Python,
numpy and all that was prepared). What is measured is prepared first, and has never run before in
this process: caches are cold.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = {
    "save": "host",
    "restore": "host",
    "metadata": "host",
    "requests": "reads",
    "commit": "commits",
    "reshard": "reshards",
    "dcp save": "on_dcp",
    "dcp restore": "on_dcp",
}
"""Each has `MEASURED`: by name a function of what is asked, that prepares it and returns what is
measured."""


def main() -> int:
    """Measure, and answer."""
    request: dict[str, Any] = json.load(sys.stdin)
    what = request.pop("what")
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not part of the answer
    np.unique(np.zeros(1))  # imports a part of numpy
    prepare: Callable[..., Callable[[], dict[str, Any]]] = import_module(
        f"tools.scale.{MODULES[what]}"
    ).MEASURED[what]
    run = prepare(**request)
    gc.collect()
    gc.freeze()  # what was prepared is not gone through again while something is measured
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    cpu, wall = time.process_time(), time.perf_counter()
    figures = run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = _resident("VmHWM")
    json.dump({"cpu": cpu, "wall": wall, "above": peak - before, "peak": peak} | figures, answer)
    answer.flush()
    os._exit(
        0
        # Nobody needs the threads of torch and TensorStore any more, nor what was planned to be
        # taken apart.
    )


def _resident(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    sys.exit(main())
