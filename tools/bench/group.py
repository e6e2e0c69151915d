"""One operation of one group of subjects, in a process of its own, or in several.

The command is `python -m tools.bench.group`.

On stdin it is told `{"group", "state", "part", "directory", "server", "rounds", "operation"}`; on
stdout it lists what was measured. Without a server, files go into the directory.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

GROUPS = {"torch": "on_torch", "dtensor": "on_dtensor", "jax": "on_jax", "xla": "on_xla"}

__all__ = ["GROUPS"]


def main() -> int:
    """Measure, and answer."""
    request: dict[str, Any] = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not part of the answer
    from tools.bench.bucket import Folder, Server
    from tools.bench.measure import in_turn
    from tools.bench.states import STATES, scaled

    group = import_module(f"tools.bench.{GROUPS[request['group']]}")
    state = scaled(STATES[request["state"]], request["part"])
    directory = (
        Path(request["directory"])
        if request["server"] is None
        else Folder(Server(**request["server"]), "bench")
    )
    subjects = group.subjects(state, directory, request["operation"])
    others = {name: getattr(group, name) for name in ("meet", "agree") if hasattr(group, name)}
    results = in_turn(group.GROUP, subjects, request["operation"], request["rounds"], **others)
    if getattr(group, "speaks", lambda: True)():
        json.dump([measured.to_json() for measured in results], answer)
        answer.flush()
    getattr(group, "close", lambda: None)()
    os._exit(0)  # torch_xla's and Orbax' threads have nothing more to say


if __name__ == "__main__":
    sys.exit(main())
