"""A process that is alone, its threads and its fork. JSON on stdout."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import shardckpt.frameworks.coordination
from shardckpt.errors import CoordinationError, OptionError

current = shardckpt.frameworks.coordination.Coordinator.current
together = Barrier(8)


def first(_):
    together.wait()
    return current()


with ThreadPoolExecutor(8) as pool:
    coordinators = list(pool.map(first, range(8)))
alone = coordinators[0]
alone.announce("step", 1)
alone.announce("step", 2)
answers = {
    "same object": all(c is alone for c in coordinators) and current() is alone,
    "world": [alone.world.process, alone.world.processes, dict(alone.world.devices)],
    "run_id": alone.run_id,
    "shared": alone.share("word", ("a", None)),
    "agreed": alone.agree("resume", lambda: 7),
    "peeked": alone.peek("step"),
    "never announced": alone.peek("stop"),
    "imported": [name for name in ("torch", "jax", "tensorstore") if name in sys.modules],
}
try:
    current(devices={"jax": [0]})
except OptionError as error:
    answers["told too late"] = str(error)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    handled = []

    def handle_signal(frame, event, _):
        if event == "return" and frame.f_code.co_name == "_is_current":
            sys.setprofile(None)
            try:
                handled.append(current().run_id)
            except CoordinationError as error:
                handled.append(str(error))

    sys.setprofile(handle_signal)
    own = current()
    sys.setprofile(handle_signal)
    assert current() is own
    report = json.dumps(
        {
            "run_id": own.run_id,
            "peeked": own.peek("step"),
            "same object": own is alone,
            "cached": own is current(),
            "in handlers": handled,
        }
    )
    os.write(writing, report.encode())
    os._exit(0)
os.waitpid(child, 0)
answers["fork"] = json.loads(os.read(reading, 10_000))
answers["after the fork"] = current() is alone
sys.stdout.write(json.dumps(answers) + "\n")
