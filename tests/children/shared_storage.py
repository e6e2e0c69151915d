"""Processes of a job whose hosts may have a storage each at the place that they save to."""

import os
import signal

import numpy as np

import shardckpt
from shardckpt import SaveOptions
from shardckpt.writing import shared_storage

shared_storage._VISIBLE = 0.5


def _state():
    return {"w": np.arange(600_000, dtype=np.float32), "b": np.arange(3)}


def save(coordinator, urls, how="save", timeout=60, replaces=(), moment=shared_storage._MOMENT):
    """Each process saves to its own url of `urls`; it waits `moment` for what process 0 says."""
    shared_storage._MOMENT = moment
    url = urls[coordinator.world.process]
    if how == "save":
        shardckpt.save(
            url,
            _state(),
            options=SaveOptions(commit_timeout=timeout, overwrite=bool(replaces)),
            coordinator=coordinator,
        )
    elif how == "save_async":
        shardckpt.save_async(
            url, _state(), options=SaveOptions(commit_timeout=timeout), coordinator=coordinator
        ).wait()
    else:
        options = SaveOptions(commit_timeout=timeout)
        with shardckpt.CheckpointManager(
            url, every=1, keep=None, options=options, coordinator=coordinator
        ) as manager:
            manager.save(1, _state())
    return "saved"


def save_one_by_one(coordinator, urls):
    """Several saves; for each, the number of times that this process spoke of shared storages."""
    spoken, ask, tell = [], coordinator.peek, coordinator.announce
    coordinator.peek = lambda key: spoken.append(key) or ask(key)
    coordinator.announce = lambda key, value: spoken.append(key) or tell(key, value)
    counts = []
    for url in urls:
        spoken.clear()
        shardckpt.save(url, _state(), coordinator=coordinator)
        counts.append(sum(key.startswith("begun/") for key in spoken))
        # Else a process may save again before another one has begun to wait for the commit.
        coordinator.share("saved", None)
    return counts


def save_with_one_that_knows(coordinator, first, second, knowing):
    """A save to a storage that only the processes of `knowing` still know after an earlier save."""
    save(coordinator, [first] * coordinator.world.processes)
    if coordinator.world.process not in knowing:
        coordinator.notes["shared roots"].clear()
    return save(coordinator, [second] * coordinator.world.processes)


def save_without_one(coordinator, url, without, how):
    """One process dies, fails, or does not call, while the others look."""
    if coordinator.world.process == without:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "is absent":
            return "absent"
        shardckpt.save(
            url,
            {**_state(), "leaf": object()},
            options=SaveOptions(commit_timeout=3),
            coordinator=coordinator,
        )
    return save(coordinator, [url] * coordinator.world.processes, timeout=3)


def save_alone(coordinator, urls):
    shardckpt.save(urls[coordinator.world.process], _state(), coordinator=shardckpt.SingleProcess())
    return "saved"


def save_again_when_shared(coordinator, urls, shared):
    """The first save fails, somebody mounts what all share, and the next save succeeds."""
    try:
        save(coordinator, urls)
    except shardckpt.errors.CommitError as e:
        save(coordinator, [shared] * coordinator.world.processes)
        return str(e)
    return "saved"


def save_over(coordinator, url):
    """Replace a checkpoint of an earlier job."""
    coordinator.notes.pop("shared roots", None)
    shardckpt.save(
        url,
        _state(),
        options=SaveOptions(commit_timeout=60, overwrite=True),
        coordinator=coordinator,
    )
    return "saved"
