"""Processes that agree on names, some of which fail or are interrupted."""

import os
import signal
import threading
import time

from shardckpt.frameworks.coordination.names import Agreement


def fail_before(coordinator, who, present, error):
    """The processes `who` leave the block by an error, `present` ones agree, and others never
    come."""
    coordinator._timeout = 600
    process = coordinator.world.process
    if process in who:
        try:
            with Agreement(coordinator):
                raise {"KeyboardInterrupt": KeyboardInterrupt, "ValueError": ValueError}[error]
        except (KeyboardInterrupt, ValueError) as e:
            return type(e).__name__
    return _agreed(coordinator, process) if process in present else "absent"


def interrupt_the_wait(coordinator):
    """Process 0 is interrupted while it waits for process 1; then they agree anew."""
    coordinator._timeout = 600
    process = coordinator.world.process
    if process == 0:
        interrupt = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    else:
        while coordinator.peek("interrupted") is None:
            time.sleep(0.01)
    try:
        if process == 0:
            interrupt.start()
        first = _agreed(coordinator, process)
    except KeyboardInterrupt:
        coordinator.announce("interrupted", True)
        first = "interrupted"
    return [first, _agreed(coordinator, process)]


def _agreed(coordinator, process):
    with Agreement(coordinator) as agreement:
        return agreement(["both", "one"], ["both", "one"] if process else ["both"])
