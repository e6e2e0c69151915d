"""Publishers and followers that are killed: every version that is there has the elements of its
step, and training goes on."""

from __future__ import annotations

import itertools
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
from interrupting import interrupted

import shardckpt
from shardckpt.errors import CommitError
from shardckpt.runs.catalog import catalog
from shardckpt.versions import publisher as publisher_module
from shardckpt.writing import background

PROGRAM = """
import sys, numpy as np, shardckpt
from shardckpt.runs.catalog import catalog
url = sys.argv[1]

def weights(step):
    w = np.random.default_rng(0).random((512, 512)).astype(np.float32)
    for s in range(step + 1):
        w.reshape(-1)[np.random.default_rng(s).integers(0, w.size, 500)] += 1
    return {"w": w, "step": np.array(step)}

if sys.argv[2] == "publish":
    first = max([int(entry.name) for entry in catalog(url)], default=-1) + 1
    publisher = shardckpt.Publisher(url, anchor_every=5, keep=6)
    for step in range(first, first + 1000):
        publisher.publish(step, weights(step))
else:
    like = {"w": np.zeros((512, 512), np.float32), "step": np.array(0)}
    for version in shardckpt.follow(url, like):
        version.prepare()
        version.apply()
        version.prove()
        print(version.step, flush=True)
        assert all((like[name] == weights(version.step)[name]).all() for name in like)
"""


def start(url, what):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, url, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def weights(step):
    names: dict = {}
    exec(PROGRAM.split("if sys.argv", maxsplit=1)[0].replace("url = sys.argv[1]", ""), names)
    return names["weights"](step)


def killed(process):
    process.send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert "Error" not in err, err
    return out


@pytest.mark.long
def test_publisher_and_follower_are_killed_at_random_and_nothing_is_torn_or_lost(tmp_path):
    url, rng, followed, newest = tmp_path / "p", random.Random(7), [], -1
    url.mkdir()
    for number in range(6):
        publisher, follower = start(url, "publish"), start(url, "follow")
        deadline = time.monotonic() + 60
        while (
            max([int(entry.name) for entry in catalog(url)], default=-1) < newest + 3
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 0.5))
        if number == 5 and not any(followed):  # on a machine that starts followers slowly
            assert select.select([follower.stdout], [], [], 60)[0]
        first, second = rng.sample([publisher, follower], 2)
        outputs = {first: killed(first), second: killed(second)}
        followed.append([int(line) for line in outputs[follower].split()])
        steps = [int(entry.name) for entry in catalog(url)]
        assert max(steps, default=-1) >= newest
        newest = max(steps, default=-1)
        for step in steps:
            expected = weights(step)
            like = {name: np.zeros_like(array) for name, array in expected.items()}
            shardckpt.restore(url / str(step), like)
            assert all((like[name] == expected[name]).all() for name in like), step
    assert newest >= 15
    assert sum(map(len, followed)) > 0
    assert all(steps == sorted(set(steps)) for steps in followed)


THOUSAND = """
import sys, time, numpy as np, shardckpt
from shardckpt.runs.catalog import catalog
from shardckpt.runs.collecting import collect
from shardckpt.versions.folding import fold
url, what = sys.argv[1:]

def weights(step):
    w = np.arange(128 * 128, dtype=np.float32).reshape(128, 128)
    for s in range(max(0, step - 40), step + 1):
        w.reshape(-1)[s * 7919 % w.size::997] += s
    return {"w": w, "step": np.array(step)}

if what == "publish":
    first = max([int(entry.name) for entry in catalog(url)], default=-1) + 1
    publisher = shardckpt.Publisher(url, anchor_every=20, keep=None)
    for step in range(first, 2000):
        publisher.publish(step, weights(step))
        publisher.wait()
elif what == "tidy":
    while True:
        fold(url)
        collect(url, grace=5)
        time.sleep(0.5)
else:
    like = {"w": np.zeros((128, 128), np.float32), "step": np.array(0)}
    for version in shardckpt.follow(url, like, mode="each"):
        version.prepare()
        version.apply()
        version.prove()
        assert all((like[name] == weights(version.step)[name]).all() for name in like), version.step
        assert not version.went_back
        print(version.step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_versions_with_kills_of_every_process_are_all_there_and_none_is_skipped(
    tmp_path,
):
    url, rng, followed = tmp_path / "p", random.Random(3), set()
    url.mkdir()

    def begin(what):
        with (tmp_path / f"out{next(number)}").open("w") as out:
            command = [sys.executable, "-c", THOUSAND, str(url), what]
            return what, subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True)

    number, lives = itertools.count(), 0
    running = [begin("publish")]
    while not catalog(url):
        time.sleep(0.1)
    running += [begin(what) for what in ("follow", "follow", "tidy")]
    while max([int(entry.name) for entry in catalog(url)], default=-1) < 1000:
        time.sleep(rng.uniform(3, 12))
        what, victim = running.pop(rng.randrange(len(running)))
        assert victim.poll() is None, victim.stderr.read()
        killed(victim)
        running.append(begin(what))
        lives += 1
    for _, process in running:
        assert process.poll() is None, process.stderr.read()
        killed(process)
    for out in tmp_path.glob("out*"):
        steps = [int(line) for line in out.read_text().split("\n")[:-1]]
        assert steps == list(range(len(steps)))
        followed.update(steps)
    there = sorted(int(entry.name) for entry in catalog(url))
    assert there == list(range(len(there)))
    assert len(there) > 1000
    assert len(followed) > 100
    assert lives > 5
    names: dict = {}
    exec(THOUSAND.split("if what", maxsplit=1)[0].replace("url, what = sys.argv[1:]", ""), names)
    for step in there:
        assert (shardckpt.restore(url / str(step))["w"] == names["weights"](step)["w"]).all(), step


@pytest.mark.long
def test_ctrl_c_at_any_instant_of_publish_leaves_no_version_at_work_unknown(tmp_path):
    """`wait` waits for all that the interrupted call has begun, and later versions know it."""
    w = np.zeros(100_000)
    for at in itertools.count():
        url, w[:] = tmp_path / str(at), 0
        with shardckpt.Publisher(url) as publisher:
            publisher.publish(0, {"w": w})
            publisher.wait()
            w[1] += 1
            instant = interrupted(
                at,
                publisher_module.__file__,
                lambda code: code.co_filename == background.__file__,
                lambda publisher=publisher: publisher.publish(1, {"w": w}),
                lambda: True,
            )
            with suppress(KeyboardInterrupt, CommitError):
                publisher.wait()
            # The thread itself may live a moment longer than its save.
            assert all(save.outcome.ended for save in [*background._in_flight])
            for step in (2, 3):
                w[step] += 1
                publisher.publish(step, {"w": w})
                publisher.wait()
        steps = {int(entry.name) for entry in catalog(url)}
        assert steps - {1} == {0, 2, 3}
        for step in steps:
            assert np.flatnonzero(shardckpt.restore(url / str(step))["w"]).tolist() == [
                *range(1, step + 1)
            ]
        if instant is None:
            break
    assert at > 40
