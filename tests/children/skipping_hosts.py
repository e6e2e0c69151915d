"""Processes of a job for the tests of saves that leave tensors in a base."""

from many_hosts import state

import shardckpt
from shardckpt import SaveOptions


def save(coordinator, url, options, shift=0):
    """Each process with options of its own; the frozen tensors are those of the base, the others
    are shifted."""
    frozen, ours = state(), state(shift)
    tuned = {name: frozen[name] if name in ("large", "small") else ours[name] for name in ours}
    handle = shardckpt.save_async(
        url,
        tuned,
        options=SaveOptions(**options[coordinator.world.process]),
        coordinator=coordinator,
    )
    report = handle.wait()
    return [report.nbytes, list(report.bases)]


def save_chain(coordinator, root):
    """One job saves three checkpoints, of which the last leaves tensors in both of the others; the
    attempts of all."""
    for step, base, skip in ((1, None, ()), (2, 1, "large"), (3, 2, ("large", "medium"))):
        options = SaveOptions(base=None if base is None else f"{root}/{base}", skip=skip)
        shardckpt.save(f"{root}/{step}", state(), options=options, coordinator=coordinator)
    return [shardckpt.open(f"{root}/{step}").record.attempt for step in (1, 2, 3)]
