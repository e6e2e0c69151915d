"""Checks of a place after a save there came to grief, and of later work at the place."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

import shardckpt
from shardckpt import errors
from shardckpt.io.files import LOCK_SUFFIX
from shardckpt.runs import collecting

__all__ = [
    "LAYOUTS",
    "assert_goes_on",
    "attempts",
    "contents",
    "copied",
    "prepare",
    "saved",
    "value_of",
]

LAYOUTS = ["packed", "zarr"]


def prepare(job, base, layout, processes, *, overwrite):
    """At `base`: a checkpoint `earlier` and, if one is to be overwritten, `checkpoint`; both of
    value 1."""
    saved(job, base / "earlier", 1, layout, processes)
    if overwrite:
        copied(base / "earlier", base / "checkpoint")


def saved(job, url, value, layout, processes, **options):
    """Save in peace."""
    answers = job.run(
        "save", processes, url, value, {"layout": layout, "commit_timeout": 30, **options}
    )
    assert all(isinstance(answer, list) for answer in answers), answers


def value_of(url, processes):
    """Value that a checkpoint holds, which must be whole, undamaged and of one save only; None:
    there is none."""
    try:
        restored = shardckpt.restore(url)
    except errors.NotFoundError:
        return None
    value = restored["leaf"]
    assert restored["own"] == [{"process": process, "value": value} for process in range(processes)]
    np.testing.assert_array_equal(restored["large"], np.full((160, 150), value, np.float32))
    np.testing.assert_array_equal(restored["second"], np.full((130, 70), value, np.int64))
    np.testing.assert_array_equal(restored["small"], np.arange(value, value + 5))
    assert shardckpt.open(url).verify().damage == []
    return value


def attempts(url):
    """Directories in a checkpoint's directory."""
    return sorted(p.name for p in Path(url).iterdir() if p.is_dir()) if Path(url).exists() else []


def finished(place):
    """Number of hosts that have written their record into an attempt."""
    return len(list(Path(place).glob("records/*.json")))


def contents(url):
    """All files of a directory."""
    return {p.relative_to(url): p.read_bytes() for p in Path(url).rglob("*") if p.is_file()}


def assert_goes_on(job, root, layout, processes, order, *, untouched=True):
    """Commit, collect and save again at `root`/checkpoint; each does what it should in every order.

    Args:
        job: to save with, as value 3.
        root: where `checkpoint` is and others are; of these nothing changes.
        layout: to save in.
        processes: how many save, and have saved.
        order: of "commit", "collect" and "save".
        untouched: nothing else was saved, collected or deleted there since the interrupted save
            began.

    Returns:
        What became of the interrupted attempt: `committed`, `incomplete`, … or None: nothing was
        left of it.
    """
    url = root / "checkpoint"
    others = {place: contents(place) for place in root.iterdir() if place != url}
    became = None
    for action in order:
        value = value_of(url, processes)
        if action == "commit":
            became = _commit(root, url, processes, value, untouched=untouched) or became
        elif action == "save":
            saved(job, url, 3, layout, processes, overwrite=value is not None)
            assert value_of(url, processes) == 3
        else:
            became = _collect(root, url, processes, value, untouched=untouched) or became
        untouched = False
    for place, before in others.items():
        assert contents(place) == before
    return became


def _commit(root, url, processes, value, *, untouched):
    """Commit and check: a whole attempt becomes the checkpoint, unless another did or the place was
    collected; others get a reason."""
    named = _named(url, value)
    present = {name: finished(url / name) for name in attempts(url) if name != named}
    outcomes = shardckpt.commit(root)
    assert sorted(outcome.attempt for outcome in outcomes) == sorted(present)
    committed = [outcome.attempt for outcome in outcomes if outcome.state == "committed"]
    if untouched and value != 2 and processes in present.values():
        value = 2
        assert len(committed) == 1
    else:
        assert not committed
    assert value_of(url, processes) == value
    assert _named(url, value) == (committed[0] if committed else named)
    for outcome in outcomes:
        whole = present[outcome.attempt] == processes
        assert outcome.state in (("committed", "overtaken") if whole else ("incomplete",)), outcome
        assert (outcome.reason == "") == (outcome.state == "committed")
    return (committed and "committed") or (outcomes[0].state if outcomes else None)


def _named(url, value):
    """The attempt that is the checkpoint."""
    return shardckpt.open(url).record.attempt if value is not None else None


def _collect(root, url, processes, value, *, untouched):
    """Collect and check: a whole attempt becomes the checkpoint, unless another did; everything
    else that no record names goes."""
    present = [finished(url / name) for name in attempts(url) if name != _named(url, value)]
    collected = collecting.collect(root, grace=0)
    assert {one.outcome for one in collected} <= {"removed", "published"}, collected
    published = [one for one in collected if one.outcome == "published"]
    assert len(published) == (untouched and value != 2 and processes in present)
    value = 2 if published else value
    assert value_of(url, processes) == value
    if url.exists():
        left = {p.name for p in url.iterdir() if not p.name.endswith(LOCK_SUFFIX)}
        assert left == ({"checkpoint.json", _named(url, value)} if value is not None else set())
    return "published by a collection" if published else None


def copied(base, place):
    """A copy of a directory."""
    shutil.copytree(base, place)
    return place
