"""Counts for one host of tools/scale: its plans and documents do not grow with the job.
docs/scale.md has the times."""

from __future__ import annotations

import gc

import pytest
from counting import steps

from tools.scale.host import MEASURED, Job
from tools.scale.layouts import KINDS
from tools.scale.targets import TARGETS

pytestmark = pytest.mark.slow


SMALL, LARGE = 1024, 100_000
TENSORS = 60
"""Some layers of it: all shapes that there are."""


def measured(what, kind, devices, tensors=TENSORS):
    return MEASURED[what](tree="405B", kind=kind, devices=devices, tensors=tensors)()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["save", "restore"])
def test_a_plan_has_no_more_rows_and_takes_no_more_steps_on_a_hundred_thousand_devices(what, kind):
    few, many = (measured(what, kind, devices) for devices in (SMALL, LARGE))
    for key in ("boxes", "blocks", "rows", "chunks"):
        # By how unevenly 100,000 devices cut a tensor it may be a few more chunks, of smaller
        # tiles; and they make groups of 200 for HSDP, in place of 256.
        assert many.get(key, 0) <= 1.35 * few.get(key, 0) + TENSORS
    steps_of = {}
    for devices in (SMALL, LARGE):
        prepared = [
            MEASURED[what](tree="405B", kind=kind, devices=devices, tensors=TENSORS)
            for _ in range(2)
        ]
        prepared[0]()  # chunk shapes are chosen once
        steps_of[devices] = steps(prepared[1])
    assert steps_of[LARGE] <= 1.1 * steps_of[SMALL] + TENSORS


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_a_plan_are_few_per_tensor(kind):
    """Work once per shape and layout, not per tensor: whatever the boxes of 8 devices and pieces
    have in common."""
    tensors = 600
    prepared = [
        MEASURED["save"](tree="405B", kind=kind, devices=SMALL, tensors=tensors) for _ in range(2)
    ]
    prepared[0]()
    assert steps(prepared[1]) <= 180 * tensors


def test_a_plan_keeps_no_more_objects_for_more_devices():
    def kept(devices):
        job = Job("405B", "HSDP", devices, TENSORS)
        job.planned()  # what is kept for every plan
        gc.collect()
        before = len(gc.get_objects())
        plan = job.planned()
        gc.collect()
        assert plan.tensors
        return len(gc.get_objects()) - before

    assert kept(LARGE) <= 1.1 * kept(SMALL) + TENSORS


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_are_flat_but_for_a_line_per_host(kind):
    few, many = (measured("metadata", kind, devices) for devices in (SMALL, LARGE))
    assert many["contents bytes"] <= 1.05 * few["contents bytes"] + 500
    assert many["host record bytes"] <= few["host record bytes"] + 16
    assert few["bytes per host"] <= 128
    assert many["bytes per host"] <= 128


def test_a_target_that_nothing_was_measured_of_is_not_told():
    assert all(target.worst([]) is None for target in TARGETS)
