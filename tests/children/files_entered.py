"""Save one tensor twice and restore it twice; as JSON, the files of the package that each call
enters.

python files_entered.py <directory> numpy|torch
"""

import json
import sys
import threading
from importlib import import_module
from pathlib import Path

import shardckpt

PACKAGE = Path(shardckpt.__file__).parent


def files_entered(call):
    """Files in which a function was called, by any thread."""
    files = set()

    def enter(frame, event, _arg):
        if (
            event == "call"
            and frame.f_code.co_filename.startswith(str(PACKAGE))
            and frame.f_code.co_name != "<module>"
        ):
            files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(files)


place, framework = Path(sys.argv[1]), import_module(sys.argv[2])
state, targets = (
    {"w": make((64, 64), dtype=framework.float32)} for make in (framework.ones, framework.zeros)
)
saved = [
    files_entered(lambda name=name: shardckpt.save(place / name, state))
    for name in ("cold", "warm")
]
restored = [
    files_entered(lambda name=name: shardckpt.restore(place / name, targets))
    for name in ("cold", "warm")
]
assert (targets["w"] == 1).all()
print(json.dumps({"save": saved, "restore": restored}))
