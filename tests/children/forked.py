"""Calls in a forked process, and afterwards in its parent. Prints JSON."""

import json
import os
import signal
import sys
from threading import Event

import numpy as np

import shardckpt
from shardckpt.errors import ShardckptError
from shardckpt.runs.collecting import collect

STATE = {"w": np.arange(1000.0)}
WHEN, PLACE = sys.argv[1], sys.argv[2]
held = Event()


def answer(call):
    try:
        call()
    except ShardckptError as e:
        return [type(e).__name__, str(e)]
    return "ok"


def in_a_fork(calls):
    """Results of calls in a forked process; one that hangs ends the fork."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os.write(writing, json.dumps({name: answer(call) for name, call in calls.items()}).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        results = json.load(answers)
    assert os.waitpid(pid, 0)[1] == 0
    return results


manager = shardckpt.CheckpointManager(f"{PLACE}/run", every=1)
calls = {
    "save": lambda: shardckpt.save(
        f"{PLACE}/c", STATE, options=shardckpt.SaveOptions(overwrite=True)
    ),
    "save_async": lambda: shardckpt.save_async(f"{PLACE}/d", STATE).wait(),
    "restore": lambda: shardckpt.restore(f"{PLACE}/c"),
    "open": lambda: shardckpt.open(f"{PLACE}/c"),
    "reshard": lambda: shardckpt.reshard(f"{PLACE}/c", f"{PLACE}/r", workers=1),
    "export": lambda: shardckpt.export_safetensors(f"{PLACE}/c", f"{PLACE}/m.safetensors"),
    "import": lambda: shardckpt.import_checkpoint(f"{PLACE}/m.safetensors", f"{PLACE}/i"),
    "commit": lambda: shardckpt.commit(f"{PLACE}/c"),
    "gc": lambda: collect(f"{PLACE}/c"),
    "manager.pin": lambda: manager.pin(1) if WHEN != "before" else None,
    "manager.save": lambda: manager.save(5, STATE),
    "manager.should_save": lambda: manager.should_save(6),
    "manager.all_steps": manager.all_steps,
    "manager.latest_step": manager.latest_step,
    "manager.wait": manager.wait,
    "manager.restore": manager.restore,
    "manager.close": manager.close,
}
if WHEN == "before":
    answers = in_a_fork(calls)
else:
    shardckpt.save(f"{PLACE}/c", STATE)
    shardckpt.export_safetensors(f"{PLACE}/c", f"{PLACE}/m.safetensors")
    opened = shardckpt.open(f"{PLACE}/c")
    opened.read("w")
    if WHEN == "while a save is in flight":
        manager._background._before_publish = lambda _step: held.wait(60)
    manager.save(1, STATE)
    answers = in_a_fork({**calls, "read": lambda: opened.read("w"), "verify": opened.verify})
    held.set()
    manager.close()
    assert shardckpt.CheckpointManager(f"{PLACE}/run").all_steps() == [1]
print(json.dumps(answers))
