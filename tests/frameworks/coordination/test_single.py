"""A process without torch.distributed and without jax.distributed is alone."""

import math
from functools import partial
from threading import TIMEOUT_MAX

import pytest

import shardckpt
from shardckpt import Coordinator
from shardckpt.errors import OptionError

SCRIPT = "coordination_single.py"


def test_a_process_alone_agrees_with_itself(run_job):
    (answer,) = run_job(SCRIPT, [()])
    assert answer["world"] == [0, 1, {}]
    assert answer["shared"] == [["a", None]]
    assert answer["agreed"] == 7
    assert answer["peeked"] == 2
    assert answer["never announced"] is None
    assert answer["imported"] == []
    # All its threads get the same one, told once.
    assert answer["same object"]
    assert answer["told too late"].startswith(
        "this process owns the devices that its frameworks show, as agreed when the job"
    )
    # A forked process is another one.
    assert answer["fork"] == {
        "run_id": answer["fork"]["run_id"],
        "peeked": None,
        "same object": False,
        "cached": True,
        "in handlers": [
            "this thread is joining the job; let a signal handler set a flag, no more.",
            answer["fork"]["run_id"],
        ],
    }
    assert answer["fork"]["run_id"] != answer["run_id"]
    assert answer["after the fork"]


def test_every_start_of_a_process_has_a_run_id_of_its_own(run_job):
    assert len({answer["run_id"] for answer in run_job(SCRIPT, [(), (), ()])}) == 3


@pytest.mark.parametrize(
    ("given", "named"), [(3, "a int"), (Coordinator, "the class Coordinator"), ("gloo", "a str")]
)
def test_what_is_no_coordinator_is_refused_by_kind(given, named):
    for call in (
        lambda: shardckpt.save("memory://x", {"w": 1}, coordinator=given),
        lambda: shardckpt.restore("memory://x", coordinator=given),
    ):
        with pytest.raises(
            OptionError, match=f"coordinator=…: {named} is not a coordinator; give an instance"
        ):
            call()


@pytest.mark.parametrize("seconds", [math.inf, -1, 0, "x", True])
def test_a_time_limit_of_one_call_that_cannot_be_waited_for_is_refused_by_name(seconds):
    alone = shardckpt.SingleProcess()
    for name, call in (
        ("share", partial(alone.share, "key", 1)),
        ("agree", partial(alone.agree, "key", lambda: 1)),
        ("listen", partial(alone.listen, "key", [])),
    ):
        with pytest.raises(OptionError) as refused:
            call(timeout=seconds)
        assert str(refused.value).startswith(f"Coordinator.{name}(timeout={seconds!r}): give a ")


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e12, -5, -1, 0, "x", True])
def test_a_time_limit_that_cannot_be_waited_for_is_refused_by_name(seconds):
    for name, call in (
        ("Coordinator.current(timeout", lambda: Coordinator.current(timeout=seconds)),
        ("SingleProcess(timeout", lambda: shardckpt.SingleProcess(timeout=seconds)),
        (
            "SaveOptions(commit_timeout",
            lambda: shardckpt.SaveOptions(commit_timeout=seconds),
        ),
    ):
        with pytest.raises(OptionError) as refused:
            call()
        assert str(refused.value).startswith(f"{name}={seconds!r}): give a positive number")


def test_the_longest_time_limit_is_that_of_python(tmp_path):
    assert Coordinator.current(timeout=TIMEOUT_MAX).world.processes == 1
    options = shardckpt.SaveOptions(commit_timeout=TIMEOUT_MAX)
    shardckpt.save_async(tmp_path / "c", {"a": 1}, options=options).wait()
    assert shardckpt.restore(tmp_path / "c") == {"a": 1}
