"""Processes of a job of which one, or all, die, sleep, lack room or rights, or have a wrong clock.

A `fate` is what happens to one process: {"process": p, "act": "kill", "kill all" or "stop", "at":
operation's number} or, in place of `at`, "before" or "after": the end of the path of an object that
it writes, or "seconds", after which the kernel kills it. Whoever saves notes in the directory
`diary` what it does: `fate`, once it is met, and `outcome<p>`.
"""

import json
import os
import select
import signal
import threading
import time
from contextlib import nullcontext, suppress

import numpy as np
from torture_afflictions import AFFLICTIONS, wrong_clock
from torture_operations import Operations

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import CoordinationError
from shardckpt.runs import catalog, collecting
from shardckpt.writing import committer


def state(process, value):
    """Plain tensors that all processes write together, a small one, a leaf, and what each process
    owns by itself."""
    return {
        "large": np.full((160, 150), value, np.float32),
        "second": np.full((130, 70), value, np.int64),
        "small": np.arange(value, value + 5),
        "leaf": value,
        "own": shardckpt.PerProcess({"process": process, "value": value}),
    }


class Others:
    """The processes of the job, as the kernel knows them."""

    def __init__(self, coordinator):
        self._self = coordinator.world.process
        self._pids = coordinator.share("pid", os.getpid())
        self._files = [os.pidfd_open(pid) for pid in self._pids]
        coordinator.share("met", None)  # nobody ends before all have been found

    def ended(self, process):
        return bool(select.select([self._files[process]], [], [], 0)[0])

    def asleep(self, process):
        with (
            suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/{self._pids[process]}/stat") as file,  # noqa: PTH123
        ):
            return file.read().rpartition(") ")[2].startswith("T")

    def kill(self):
        for process, file in enumerate(self._files):
            if process != self._self and not self.ended(process):
                signal.pidfd_send_signal(file, signal.SIGKILL)


def keep_the_store_in_process_0(coordinator, others):
    """As jax.distributed does, and torch.distributed without a launcher: when that does not answer,
    there is no store any more."""
    peek = coordinator.peek

    def peek_if_it_answers(key):
        if others.ended(0) or others.asleep(0):
            raise CoordinationError("process 0, which keeps the store, does not answer.")
        return peek(key)

    coordinator.peek = peek_if_it_answers


def save(coordinator, url, value, options=None, fate=None, diary=None):
    """Save, and meet the fate if it is this process's; returns the names of this process's
    operations."""
    process, met = coordinator.world.process, fate or {}
    others = Others(coordinator)
    committer._COMMITTING = 30  # a committer that is merely slow is waited for
    if process and met.get("process") == 0:
        keep_the_store_in_process_0(coordinator, others)

    def act(name):
        note(diary, "fate", {"operation": name, "pid": os.getpid()})
        if met["act"] == "kill all":
            others.kill()
        # Sent to this thread: sent to the process, it would let the thread go on for a moment.
        signal.pthread_kill(
            threading.get_ident(), signal.SIGSTOP if met["act"] == "stop" else signal.SIGKILL
        )

    mine = met.get("process") == process
    operations = Operations(
        act, **{key: met[key] for key in ("at", "before", "after") if mine and key in met}
    )
    operations.arm()
    if mine and "seconds" in met:
        signal.setitimer(signal.ITIMER_REAL, met["seconds"])
    # A host that is gone is waited for in vain. Of the committer the others know at once, and it
    # must not lose patience before its fate.
    options = SaveOptions(
        **{"commit_timeout": 1.0 if met.get("process") else 30, **(options or {})}
    )
    outcome = "saved"
    try:
        shardckpt.save(url, state(process, value), options=options, coordinator=coordinator)
    except shardckpt.ShardckptError as e:
        outcome = f"{type(e).__name__}: {e}"
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        operations.disarm()
        note(diary, f"outcome{process}", outcome)
    return operations.names


def note(diary, name, what):
    if diary is not None:
        # Not by os.open, which is counted.
        with open(f"{diary}/{name}", "w") as file:  # noqa: PTH123
            json.dump(what, file)


def outcome_of(coordinator, url, value, **options):
    """Save: `saved`, or the error."""
    try:
        shardckpt.save(
            url,
            state(coordinator.world.process, value),
            options=SaveOptions(**options),
            coordinator=coordinator,
        )
    except shardckpt.ShardckptError as e:
        return f"{type(e).__name__}: {e}"
    return "saved"


def save_afflicted(coordinator, url, values, afflicted, affliction, options):
    """Save a value while one process is afflicted, then others with all in good health; what this
    process was told, per save."""
    mine = coordinator.world.process == afflicted
    with AFFLICTIONS[affliction["kind"]](coordinator, url, affliction) if mine else nullcontext():
        outcomes = [outcome_of(coordinator, url, values[0], **options)]
    return outcomes + [
        outcome_of(coordinator, url, value, **{**options, "overwrite": True})
        for value in values[1:]
    ]


def save_steps(coordinator, root, steps, value, options, start):
    """Save the same value as many steps, once as many jobs are ready as `start` says; what became
    of each."""
    if coordinator.world.process == 0:
        with open(f"{start['place']}/{value}", "w"):  # noqa: PTH123
            pass
        while len(os.listdir(start["place"])) < start["jobs"]:  # noqa: PTH208
            time.sleep(0.001)
    coordinator.share("start", None)
    return [
        outcome_of(coordinator, f"{root}/step_{step}", value, commit_timeout=30, **options)
        for step in steps
    ]


def save_out_of_step(coordinator, url, odd, late, values, timeouts):
    """Save one value after another. One process leaves out the first save; or, if it is `late`,
    makes it when the others have."""
    committer._COMMITTING = 0.3
    outcomes = []
    for i, (value, timeout) in enumerate(zip(values, timeouts, strict=True)):
        coordinator.share("before", None)
        waits = i == 0 and coordinator.world.process == odd
        if not waits:
            outcomes.append(save_only_values(coordinator, url, value, timeout))
        coordinator.share("after", None)
        if waits:
            outcomes.append(
                save_only_values(coordinator, url, value, timeout) if late else "absent"
            )
    return outcomes


def save_only_values(coordinator, url, value, timeout):
    """A state that does not say of which save it is, but by its values."""
    options = SaveOptions(overwrite=True, commit_timeout=timeout)
    try:
        shardckpt.save(
            url,
            {"w": np.full((200, 300), value, np.float32)},
            options=options,
            coordinator=coordinator,
        )
    except shardckpt.ShardckptError as e:
        return f"{type(e).__name__}: {e}"
    return "saved"


def with_clocks(coordinator, seconds, function, *arguments):
    """Something else of this module, each process with a clock that is so many seconds ahead."""
    with wrong_clock(seconds[coordinator.world.process]):
        world, directory = coordinator.world, coordinator.directory / "wrong"
        directory.mkdir(exist_ok=True)
        # A coordinator of its own: the run id says when the run began.
        ours = type(coordinator)(directory, world.process, world.processes, timeout=30)
        return globals()[function](ours, *arguments)


def collect(coordinator, root, grace):
    return [[one.attempt, one.outcome] for one in collecting.collect(root, grace=grace)]


def listed(coordinator, root):
    entries = catalog.catalog(root, everything=True)
    return [
        [entry.name, entry.state, entry.attempt, entry.created, entry.idle] for entry in entries
    ]
