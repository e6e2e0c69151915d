"""Ray Train's TorchTrainer with RayTrainManager: workers are killed, Ray retries, and the losses go
on bit by bit.

Real trainings with FSDP2 over gloo, in one Ray cluster of this machine
(`tests/children/integration_ray_train.py`). `make ray` installs what Ray Train needs besides Ray,
in a folder of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import pytest
from emulators import _DIE_WITH_PARENT
from paths import CHILDREN, ROOT

import shardckpt

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        not (ROOT / ".ray-train" / ".installed").exists(),
        reason="Ray Train needs more packages than Ray: run `make ray`",
    ),
]
PYTHONPATH = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / ".ray-train")])
DEATHS = [[6, 1], [10, 0]]
"""Step after which a worker is killed, and which one, of the first two attempts of a training."""
STEPS, ALL = 13, 17
"""Of the training that is killed; with those of one worker that goes on."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The folder of all trainings, and their answers."""
    folder = tmp_path_factory.mktemp("trainings")
    killed = {"directory": str(folder / "killed"), "keep": 1, "num_to_keep": 2}
    jobs = {
        "whole": ["fit", {"directory": str(folder / "whole"), "workers": 2, "steps": ALL}],
        "killed": ["fit", {**killed, "workers": 2, "steps": STEPS, "deaths": DEATHS}],
        "alone": ["fit", {**killed, "workers": 1, "steps": ALL, "tries": True}],
        "refused": ["refused", {"directory": str(folder / "refused")}],
    }
    return folder, dict(zip(jobs, program(list(jobs.values())), strict=True))


def program(jobs):
    """The answers of a program with a Ray cluster of its own; all its processes are killed at the
    end."""
    # A short name: sockets are there.
    with tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
    ) as place:
        env = {
            "RAY_TMPDIR": place,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        env |= {"GLOO_SOCKET_IFNAME": "lo", "USE_TORCH_XLA": "0", "PYTHONPATH": PYTHONPATH}
        command = [
            sys.executable,
            "-c",
            _DIE_WITH_PARENT,
            sys.executable,
            CHILDREN / "integration_ray_train.py",
            json.dumps(jobs),
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        child = subprocess.Popen(
            command, env={**os.environ, **env}, start_new_session=True, **pipes
        )
        try:
            out, err = child.communicate(timeout=2700)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 0, out[-3000:] + err[-6000:]
    return json.loads(out.splitlines()[-1])


def losses(folder, name, rank, attempt):
    """State at the begin of an attempt, and its losses by step."""
    first, *rest = map(
        json.loads, (folder / name / f"losses-{rank}-{attempt}").read_text().splitlines()
    )
    return first, dict(rest)


def test_after_a_killed_worker_rays_retry_resumes_and_the_losses_are_equal(answers):
    folder, answer = answers
    for rank in range(2):
        _, whole = losses(folder, "whole", rank, 0)
        began, first = losses(folder, "killed", rank, 0)
        assert began == {"workers": 2, "resumed": None, "known": None}
        assert first.items() <= whole.items()
        for attempt, (died, _) in enumerate(DEATHS, 1):
            began, after = losses(folder, "killed", rank, attempt)
            # The save that was in flight was committed, or not.
            assert began["resumed"] in (died - 2, died)
            assert (began["known"] or 0) <= began["resumed"]
            assert after.items() <= whole.items()
            assert min(after) == began["resumed"] + 1
        assert max(after) == STEPS - 1
    assert answer["killed"]["latest"] == str(folder / "killed" / "run" / str(STEPS - 1))


def test_each_committed_step_is_reported_with_its_own_metrics(answers):
    folder, answer = answers
    _, whole = losses(folder, "whole", 0, 0)
    run = folder / "whole" / "run"
    assert answer["whole"]["reported"] == [
        [str(run / str(step)), {"step": step, "loss": whole[step]}] for step in range(2, ALL, 2)
    ]
    for step in range(2, ALL, 2):
        assert shardckpt.open(run / str(step)).verify().ok
    assert [metrics["loss"] for _, metrics in answer["killed"]["reported"]] == [
        whole[STEPS - 3],
        whole[STEPS - 1],
    ]


def test_ray_deletes_its_own_directories_and_the_manager_deletes_steps(answers):
    folder, answer = answers
    for name, end in (("killed", STEPS), ("alone", ALL)):
        assert [url for url, _ in answer[name]["reported"]] == [
            str(folder / "killed" / "run" / str(step)) for step in (end - 3, end - 1)
        ]
    moved = folder / "killed" / "moved"
    assert shardckpt.CheckpointManager(moved).all_steps() == [ALL - 1]
    assert shardckpt.open(moved / str(ALL - 1)).verify().ok


def test_one_worker_resumes_a_run_of_two(answers):
    folder, answer = answers
    began, alone = losses(folder, "killed", 0, len(DEATHS) + 1)
    assert began == {"workers": 1, "resumed": STEPS - 1, "known": STEPS - 1}
    pairs = [losses(folder, "whole", rank, 0)[1] for rank in range(2)]
    assert alone == {
        step: pytest.approx(sum(one[step] for one in pairs) / 2, rel=1e-5)
        for step in range(STEPS, ALL)
    }
    assert answer["alone"]["latest"] == str(folder / "killed" / "run" / str(ALL - 1))


def test_a_run_that_is_not_the_one_that_ray_knows_is_refused(answers):
    folder, _ = answers
    other, gone = json.loads((folder / "killed" / "refused").read_text())
    step = folder / "killed" / "run" / str(ALL - 1)
    assert other[0] == "OptionError"
    assert other[1].startswith(
        f"RayTrainManager('{folder / 'killed' / 'other'}'): the latest checkpoint of this "
        f"experiment of Ray Train is {step}"
    )
    assert gone == [
        "NotFoundError",
        (
            f"{step}: Ray Train's latest checkpoint is this step, and the run has no step; to "
            "start anew, give RunConfig another name."
        ),
    ]


def test_what_is_not_supported_is_refused_by_name(answers):
    _, answer = answers
    refusals = answer["refused"]
    assert {kind for kind, _ in refusals.values()} == {"OptionError"}
    parts = {
        "driver": "this is not a worker of Ray Train",
        "relative": "RayTrainManager('run'): Ray gives its workers another working directory",
        "foreign": "this checkpoint of Ray Train has no url of a step",
        "apart": "Ray Train runs 2 workers, and a process group connects 1",
        "local": "Ray Train's local mode keeps no checkpoints",
    }
    assert {name: part in refusals[name][1] for name, part in parts.items()} == dict.fromkeys(
        refusals, True
    )


def test_a_step_that_could_not_be_saved_is_not_reported(answers):
    folder, _ = answers
    urls = json.loads((folder / "refused" / "found").read_text())
    assert urls == [str(folder / "refused" / "failing" / step) for step in "13"]


def test_version_1_of_ray_train_is_refused(tmp_path):
    code = (
        "import sys; from shardckpt.training.integrations.ray_train import RayTrainManager as m; "
        "m(sys.argv[1])"
    )
    env = {**os.environ, "RAY_TRAIN_V2_ENABLED": "0", "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path],
        env=env,
        capture_output=True,
        text=True,
    )
    assert "OptionError: RayTrainManager: needs version 2 of Ray Train" in done.stderr
