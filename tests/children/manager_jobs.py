"""Processes of a training for the tests of `CheckpointManager`.

Each goes at its own pace: nothing but the manager holds them together.
"""

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import tensorstore as ts

import shardckpt
import shardckpt.training.manager
from shardckpt import PerProcess, SaveOptions
from shardckpt.io.store import Store
from shardckpt.runs import retention
from shardckpt.runs.job import JobFence
from shardckpt.training import policies

OPERATIONS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "utime")


def state(coordinator, step):
    """Large enough to be dealt out, and with what each process has for itself."""
    return {
        "w": np.full(40_000, step, np.float32),
        "own": PerProcess([coordinator.world.process, step]),
        "step": step,
    }


def policy(described):
    """[7, "continuous", {"seconds": 0.1}, "preemption"] as policies."""
    made = []
    for one in described:
        if isinstance(one, dict):
            made.append(policies.EverySeconds(one["seconds"]))
        else:
            made.append(
                {"continuous": policies.Continuous(), "preemption": policies.OnPreemption()}.get(
                    one, one
                )
            )
    return policies.any_of(*made) if made else None


def manager(coordinator, root, every, **options):
    timeout = options.pop("commit_timeout", 30)
    made = {
        "every": policy(every),
        "lead_time": 0.02,
        "options": SaveOptions(commit_timeout=timeout),
    } | options
    return shardckpt.CheckpointManager(root, coordinator=coordinator, **made)


def skew(rate):
    """Let this process's clocks run faster or slower, and be wrong."""
    for name in ("monotonic", "time"):
        real = getattr(time, name)
        setattr(time, name, lambda real=real: real() * rate + 1000 * rate)


def train(
    coordinator,
    root,
    every,
    steps,
    rates=None,
    pauses=None,
    signalled=None,
    options=None,
    enough=None,
):
    """Train from where the run is; which steps this process has saved, and where it ended.

    Args:
        rates: by process, how fast its clock runs.
        pauses: by process, seconds that each step takes.
        signalled: [process, step]: the one that gets SIGTERM, and when.
        enough: saves after which it ends.
    """
    process = coordinator.world.process
    if rates is not None:
        skew(rates[process])
    saved = []
    with manager(coordinator, root, every, **(options or {})) as mgr:
        restored = mgr.restore(
            {
                "w": np.zeros(40_000, np.float32),
                "own": PerProcess([0, 0], choose=lambda values: values[0]),
                "step": 0,
            }
        )
        step = first = 0 if restored is None else restored.step + 1
        for step in range(first, first + steps):
            if signalled == [process, step]:
                os.kill(os.getpid(), signal.SIGTERM)
            if pauses is not None:
                time.sleep(pauses[process])
            if mgr.save(step, state(coordinator, step)):
                saved.append(step)
            if mgr.reached_preemption or len(saved) == enough:
                break
    return {"saved": saved, "ended": step, "from": first - 1}


def count_words(coordinator, root, every, steps):
    """Count how many times this process looks for a word, and says one, while all go step by
    step."""
    counts = {"looks": 0, "words": 0}
    get, put = coordinator._get, coordinator._set

    def counted(name, function):
        def call(*arguments):
            counts[name] += 1
            return function(*arguments)

        return call

    with manager(coordinator, root, every, lead_time=0.0) as mgr:
        for step in range(steps):
            if step:  # at the first one, the others wait for process 0 as long as it takes
                coordinator._get, coordinator._set = counted("looks", get), counted("words", put)
            mgr.should_save(step)
            coordinator._get, coordinator._set = get, put
            coordinator.share("step", step)
    return counts


def restore_while_steps_land(coordinator, root, first):
    """Process 1 commits steps while all resume; which step each resumed from, and what it got."""
    with manager(coordinator, root, [1]) as mgr:
        if coordinator.world.process == 1:
            for step in range(first, first + 3):
                shardckpt.save(
                    f"{root}/{step}",
                    {"w": np.full(40_000, step, np.float32), "step": step},
                    coordinator=_alone(),
                )
        restored = mgr.restore()
        return [restored.step, int(restored.state["w"][-1])]


def _alone():
    from shardckpt.frameworks.coordination.base import SingleProcess

    return SingleProcess()


def save_own(coordinator, root, steps):
    """Each process a tensor of its own."""
    name = f"p{coordinator.world.process}"
    options = SaveOptions(host_tensors="local", commit_timeout=30)
    with shardckpt.CheckpointManager(
        root, every=1, coordinator=coordinator, options=options
    ) as mgr:
        for step in steps:
            mgr.save(step, {name: np.full(40_000, step, np.float32)})
    return "saved"


def restore_own(coordinator, root, fallback):
    """Each process restores its own tensor; from which step, and which steps were found damaged,
    with the reason."""
    damaged = []

    def on_event(event):
        if type(event).__name__ == "FellBack":
            damaged.append([event.step, event.reason])

    with shardckpt.CheckpointManager(root, coordinator=coordinator, on_event=on_event) as mgr:
        restored = mgr.restore(only=f"p{coordinator.world.process}", fallback=fallback)
        return [restored.step, damaged]


class KeepsNothingItKnows(retention.Retention):
    """A rule with a mistake, which the leader alone meets."""

    def kept(self, _steps):
        raise KeyError("loss of the rule")


def restore_where_one_fails(coordinator, root, damaged):
    """Process 1 restores from a copy with a damaged file, or the leader's rule has failed; the
    error's class, and what it says."""
    coordinator._timeout = 600
    options = {"coordinator": coordinator, "options": SaveOptions(fingerprint=True)}
    rule = None if damaged else KeepsNothingItKnows()
    with shardckpt.CheckpointManager(root, every=1, keep=rule, **options) as mgr:
        mgr.save(1, {"w": np.full(40_000, 1, np.float32)})
        if damaged is None:
            return [_error_of(mgr.restore), _error_of(lambda: mgr.restore(step=1))]
    coordinator.share("saved", None)
    if coordinator.world.process == 1:
        root = shutil.copytree(root, f"{root}-copy")
        next(Path(root).rglob(damaged)).write_bytes(b"damaged")
    with shardckpt.CheckpointManager(root, **options) as mgr:
        return _error_of(lambda: mgr.restore(check=True))


def _error_of(act):
    try:
        act()
    except (shardckpt.ShardckptError, KeyError) as e:
        return [type(e).__name__, str(e)]
    return None


def roll_back(coordinator, root, step, steps):
    """Go back, and save these steps; what is there then."""
    with manager(coordinator, root, [1]) as mgr:
        mgr.restore(step=step)
        for later in steps:
            mgr.save(later, state(coordinator, later) | {"again": True})
        mgr.wait()
        coordinator.share("done", None)
        return [[info.step, info.state] for info in mgr.steps()]


def train_without(coordinator, root, missing, on_failure):
    """One process ends before the second save; how far the others get, and what they are told."""
    errors = []

    def decide(error, step):
        errors.append([type(error).__name__, str(error), step])
        return on_failure

    done = -1
    try:
        with manager(coordinator, root, [1], commit_timeout=10, on_failure=decide) as mgr:
            for step in range(3):
                if step == 1 and coordinator.world.process == missing:
                    mgr.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                mgr.save(step, state(coordinator, step), force=True)
                done = step
    except shardckpt.ShardckptError:
        pass
    return {"done": done, "told": errors}


class Killer:
    """Counts what changes the storage, and kills the process before the k-th of that."""

    def __init__(self, k):
        self.left = k

    def arm(self):
        for name in OPERATIONS:
            setattr(os, name, self.operation(getattr(os, name)))
        for name in ("write", "delete_range", "experimental_copy_range_to"):
            setattr(ts.KvStore, name, self.operation(getattr(ts.KvStore, name)))

    def operation(self, function):
        def wrapped(*arguments, **options):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return function(*arguments, **options)

        return wrapped


def clean_until_killed(coordinator, root, k):
    """Save a step and delete those before it, and die on the way; how many operations were left to
    k."""
    killer = Killer(k)
    with manager(coordinator, root, [1], keep=1) as mgr:
        mgr.restore()
        killer.arm()
        mgr.save(5, state(coordinator, 5))
    return killer.left


def roll_back_until_killed(coordinator, root, to, step, k):
    """Go back, save a step, and have process 0 die on the way; how many operations were left to k.

    Of several processes it dies when all have written.
    """
    from shardckpt.runs.lineage import Lineage
    from shardckpt.writing import committer

    committer._COMMITTING = 1.0
    killer = Killer(k)
    if coordinator.world.processes > 1:
        Lineage.tell_storage = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with manager(coordinator, root, [1], commit_timeout=15) as mgr:
        mgr.restore(step=to)
        if coordinator.world.process == 0:
            killer.arm()
        mgr.save(step, state(coordinator, step) | {"again": True})
    return killer.left


def commit_until_killed(_coordinator, root, k):
    """Commit what was left, and die on the way; how many operations were left to k."""
    killer = Killer(k)
    killer.arm()
    shardckpt.commit(root)
    return killer.left


def save_with_metrics(coordinator, root, losses):
    """Each process has another loss; which step is the best, and what is kept with it."""
    loss = retention.Best(1, "loss")
    with manager(coordinator, root, [1], keep=loss) as mgr:
        for step, mine in enumerate(losses, 1):
            mgr.save(step, state(coordinator, step), {"loss": mine[coordinator.world.process]})
        mgr.wait()
        coordinator.share("done", None)
        return [
            mgr.all_steps(),
            mgr.best_step(),
            shardckpt.open(mgr.url(mgr.best_step())).metadata["metrics"],
        ]


def train_and_die(coordinator, root, every, steps, victim, k):
    """Train, keeping three steps; one process dies before the k-th operation of its own that
    changes the storage."""
    from shardckpt.writing import committer

    committer._COMMITTING, coordinator._timeout = 1.0, 3.0
    if coordinator.world.process == victim:
        Killer(k).arm()
    return train(coordinator, root, every, steps, options={"keep": 3, "commit_timeout": 1})


def save_steps(coordinator, root, steps, taken_over=None):
    """Save steps, one after the other; before one of them another run takes the root over. The
    error's class, if there is one."""
    with manager(coordinator, root, []) as mgr:
        try:
            for step in steps:
                if step == taken_over and coordinator.world.process == 0:
                    JobFence(Store.open(root), "another").hold()
                mgr.save(step, state(coordinator, step), force=True)
                mgr.wait()
        except shardckpt.ShardckptError as e:
            return type(e).__name__
    return "saved"


def restore_stages(coordinator, root, stages, likes, strict=True):
    """Save one state from all stages, and restore by other ones: the names that each process has in
    `likes`, and what they got."""
    process = coordinator.world.process
    with manager(coordinator, root, [1]) as saving:
        saving.save(
            1,
            {
                "step": 1,
                **{name: np.full(2_000, ord(name), np.float32) for name in stages[process]},
            },
        )
        saving.wait()
    with manager(coordinator, root, [1]) as restoring:
        names = likes[process]
        like = {"step": 0, **{name: np.zeros(2_000, np.float32) for name in names}}
        if names == "wrong":
            like = {"step": object()}
        restored = restoring.restore(like, strict=strict).state
    return "".join(chr(int(restored[name][0])) for name in names)
