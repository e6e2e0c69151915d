"""A pin or a tag and a deletion at once, each interrupted by the other at every operation:
protection that was put in place holds."""

import itertools
from functools import partial

import numpy as np
import pytest
from interleaving import Stage

import shardckpt
from shardckpt import SaveOptions
from shardckpt.errors import NotFoundError, OptionError
from shardckpt.runs import collecting, pinning


def race(protect, first_steps, second_steps, *, pin_first):
    """One of both does some operations, then the other some, then the first all that is left, then
    the other; whether the pin holds."""
    with Stage.set() as stage:
        stage.begin(
            lambda: shardckpt.save(
                stage.url, {"w": np.arange(4)}, options=SaveOptions(layout="zarr")
            )
        ).finish()
        pin = stage.begin(lambda: protect(stage.url))
        delete = stage.begin(lambda: collecting.delete(stage.url))
        first, second = (pin, delete) if pin_first else (delete, pin)
        for actor, steps in ((first, first_steps), (second, second_steps)):
            for _ in range(steps):
                actor.step()
        for actor in (first, second):
            actor.finish()
        if pin.outcome is None:
            assert isinstance(delete.outcome, OptionError)
            assert shardckpt.restore(stage.url)["w"].tolist() == [0, 1, 2, 3]
        else:
            assert isinstance(pin.outcome, NotFoundError)
            assert delete.outcome == []
            assert stage.named is None
            stage.check_end()
        return pin.outcome is None


@pytest.mark.long
@pytest.mark.parametrize("protect", [pinning.pin, partial(pinning.tag, name="best")])
def test_one_of_both_comes_too_late_and_is_told_so(protect):
    schedules = itertools.product(range(16), range(16), (True, False))
    assert {
        race(protect, first, second, pin_first=pin_first) for first, second, pin_first in schedules
    } == {True, False}
