"""Processes of a job for the tests of object stores that fail. Their environment leads to a proxy,
or round it."""

import os

import ml_dtypes
import numpy as np

import shardckpt
import shardckpt.io.buckets.s3_client
from shardckpt import SaveOptions
from shardckpt.io.buckets.gcs import GcsBucket
from shardckpt.writing import committer, packed


def state(seed):
    """Some 300 KB that all processes write together, small tensors, and leaves."""
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((160, 150), np.float32),
        "halves": rng.integers(0, 1 << 16, (200, 256), np.uint16).view(ml_dtypes.bfloat16),
        "bytes": rng.integers(0, 256, 120_011, np.uint8),
        "small": np.arange(seed, seed + 5),
        "empty": np.zeros((0, 3)),
        "step": seed,
    }


def own(process, seed):
    """The values that one process owns by itself."""
    return {"process": process, "seed": seed}


def save(coordinator, url, seed, options=None):
    """Save; the small state has several data files."""
    packed.OBJECT_BYTES = 40_000
    # A wait for a silent committer ends so long after the timeout.
    committer._COMMITTING = 1.0
    mine = {**state(seed), "own": shardckpt.PerProcess(own(coordinator.world.process, seed))}
    options = SaveOptions(**{"commit_timeout": 20.0, **(options or {})})
    shardckpt.save(url, mine, options=options, coordinator=coordinator)
    return "saved"


def save_patiently(coordinator, url, seed):
    os.environ["SHARDCKPT_RETRY_SECONDS"] = "60"
    return save(coordinator, url, seed)


def restore(coordinator, url):
    """Restore; which state it is, to the last bit."""
    like = {**state(0), "own": shardckpt.PerProcess(None)}
    restored = shardckpt.restore(url, like=like, coordinator=coordinator)
    seed = restored["step"]
    assert restored["own"].value == own(coordinator.world.process, seed)
    for name, expected in state(seed).items():
        assert np.asarray(restored[name]).tobytes() == np.asarray(expected).tobytes(), name
    return seed


def race(coordinator, urls, preconditions=True):
    """Each process for itself saves at one url after another, all at the same moment; what became
    of its saves."""
    if not preconditions:
        put = GcsBucket._put
        GcsBucket._put = lambda bucket, name, content, generation, retry: put(
            bucket, name, content, None, retry
        )
    process, outcomes = coordinator.world.process, []
    for i, url in enumerate(urls):
        coordinator.share(f"ready {i}", None)
        try:
            shardckpt.save(
                url,
                {"winner": process, "w": np.full(10, process)},
                options=SaveOptions(layout="zarr"),
            )
            outcomes.append("saved")
        except shardckpt.ShardckptError as e:
            outcomes.append(type(e).__name__)
    return outcomes
