"""Processes of a job for the tests of saves by many hosts. States are numpy's; a `Held` array says
which host holds which box."""

import numpy as np

import shardckpt
from shardckpt import SaveOptions, errors
from shardckpt.frameworks.coordination.base import SingleProcess


def state(shift=0):
    """A state that every process has: large and small arrays, leaves."""
    return {
        "large": np.arange(2_400_000, dtype=np.float32).reshape(2400, 1000) + shift,
        "medium": np.arange(40_000, dtype=np.int32) + shift,
        "small": np.arange(5) + shift,
        "empty": np.zeros((0, 3)),
        "scalar": np.array(2.5 + shift),
        "step": 7 + shift,
        "nested": [{"lr": 0.1}, ("a", None)],
    }


def save(coordinator, url, options=None, shift=0):
    shardckpt.save(
        url, state(shift), options=SaveOptions(**(options or {})), coordinator=coordinator
    )
    return "saved"


def race(coordinator, url, times):
    """Each process is a job of its own; all save to the same places at once."""
    outcomes = []
    for attempt in range(times):
        coordinator.share(f"race {attempt}", None)
        try:
            shardckpt.save(
                f"{url}/{attempt}", state(coordinator.world.process), coordinator=SingleProcess()
            )
            outcomes.append("saved")
        except errors.AlreadyExistsError as e:
            outcomes.append(type(e).__name__)
    return outcomes


def save_different(coordinator, url, states, options=None):
    """Each process its own state, given as name → [shape, value] for arrays or a leaf."""
    mine = {
        name: np.full(value["shape"], value["value"], value.get("dtype", "float32"))
        if isinstance(value, dict) and "shape" in value
        else value
        for name, value in states[coordinator.world.process].items()
    }
    shardckpt.save(url, mine, options=SaveOptions(**(options or {})), coordinator=coordinator)
    return "saved"


def save_with_the_store_lost(coordinator, url, *lost):
    """Once all have begun, no process of `lost` reaches the store any more; where process 0 does
    not, nobody hears of the commit."""
    from shardckpt import errors
    from shardckpt.writing import committer

    committer._STORAGE_LOOK = 0.1
    coordinator.share("begun", None)
    if coordinator.world.process in lost:

        def fail(*_arguments):
            raise errors.CoordinationError("the store is gone")

        coordinator._set = coordinator._get = fail
    shardckpt.save(url, state(), options=SaveOptions(commit_timeout=20), coordinator=coordinator)
    return "saved"


def save_under_two_names(coordinator, url, link):
    """Process 1 goes by a link of another name, so it hears nothing of the commit."""
    from shardckpt.writing import committer

    committer._STORAGE_LOOK = 0.1
    return save(coordinator, link if coordinator.world.process else url)


class Unsaveable:
    pass


def save_what_cannot_be_encoded(coordinator, url):
    """A function of the program fails, on process 1 alone."""
    leaf = 3
    if coordinator.world.process == 1:
        shardckpt.register_leaf(
            Unsaveable,
            name="unsaveable",
            encode=lambda _leaf: {}["missing"],
            decode=lambda _json: Unsaveable(),
        )
        leaf = Unsaveable()
    shardckpt.save(url, {"leaf": leaf}, coordinator=coordinator)


def save_per_process(coordinator, url):
    process = coordinator.world.process
    mine = {
        "rng": shardckpt.PerProcess({"seed": process, "words": np.arange(3) + process}),
        "w": np.arange(10),
    }
    shardckpt.save(url, mine, coordinator=coordinator)
    back = shardckpt.restore(
        url,
        like={"rng": shardckpt.PerProcess(None), "w": np.zeros(10, int)},
        coordinator=coordinator,
    )
    return [back["rng"].value["seed"], back["rng"].value["words"].tolist(), back["w"].tolist()]


def save_many(coordinator, url, saves):
    """Several saves to one place, the last of which stays; how many of the processes' keys they
    took."""
    for i in range(saves):
        shardckpt.save(f"{url}/{i}", state(i), coordinator=coordinator)
    return len(list(coordinator.directory.iterdir()))


def save_without_committing(coordinator, url, options=None, shift=0, leave_out=()):
    """All hosts write, and the committer dies before it publishes; those of `leave_out` never
    write."""
    from shardckpt.writing import attempt, committer

    def die(*_arguments):
        raise KeyboardInterrupt

    attempt.publish = die
    attempt.assemble = lambda *_: die()
    committer._COMMITTING = 0.2
    if coordinator.world.process in leave_out:
        return "absent"
    try:
        shardckpt.save(
            url, state(shift), options=SaveOptions(**(options or {})), coordinator=coordinator
        )
    except (KeyboardInterrupt, shardckpt.ShardckptError) as e:
        return f"{type(e).__name__}: {e}"
    return "saved"


def commit_at_once(coordinator, url):
    """All processes commit what is there, at the same moment."""
    coordinator.share("ready", None)
    return [outcome.state for outcome in shardckpt.commit(url)]


def choose(coordinator, url):
    """Restore another process count's values, by a function over them."""
    like = {"rng": shardckpt.PerProcess(None, choose=lambda values: sum(v["seed"] for v in values))}
    return shardckpt.restore(url, like=like, only="rng", strict=False, coordinator=coordinator)[
        "rng"
    ].value


def restore_without_choice(coordinator, url):
    shardckpt.restore(
        url,
        like={"rng": shardckpt.PerProcess(None), "w": np.zeros(10, int)},
        coordinator=coordinator,
    )


def save_two(coordinator, first, second):
    save(coordinator, first)
    save(coordinator, second)


def save_then_differ(coordinator, root):
    """A save that succeeds, and one to another place that cannot: leaves differ."""
    save(coordinator, f"{root}/same")
    mine = {"leaf": coordinator.world.process}
    shardckpt.save(f"{root}/different", mine, coordinator=coordinator)


def save_and_forget(coordinator, url):
    """Two saves to each of several places; the number of places whose calls are still more than a
    number, and the names of attempts."""
    options = SaveOptions(overwrite=True)
    reports = [
        shardckpt.save(
            f"{url}/{i % 3}", {"w": np.arange(9)}, options=options, coordinator=coordinator
        )
        for i in range(6)
    ]
    counts = coordinator.notes["places"]
    return [len(counts.in_use) + len(counts.failed), [report.attempt for report in reports]]
