"""What the processes of a job do in the tests of saves that leave tensors in a base."""

from many_hosts import state

import shardckpt
from shardckpt import SaveOptions


def save(coordinator, url, options, shift=0):
    """Each process with options of its own; the frozen tensors are those of the base, the others are shifted."""
    frozen, ours = state(), state(shift)
    tuned = {name: frozen[name] if name in ("large", "small") else ours[name] for name in ours}
    handle = shardckpt.save_async(url, tuned, options=SaveOptions(**options[coordinator.world.process]), coordinator=coordinator)
    report = handle.wait()
    return [report.nbytes, list(report.bases)]
