"""Does a training that is killed over and over always resume from what it saved?

    python tools/soak.py --saves 300 [--seed 0] [--root DIR] [--json]

1. A job of 1 to 4 processes, forked from this one, trains with a `CheckpointManager`: each step it
   makes a state that follows from the run's number, the step and the run's size alone, writes the
   digests of all parts of it into a log, saves it, and overwrites its tensors as soon as `save` has
   returned.
2. At a random moment the job is killed (SIGKILL: all of it, or one process, of which the others
   learn), or told to stop (SIGTERM).
3. The next job has another number of processes and a state of another size. It restores the latest
   step, without a `like` or into tensors of its own by turns, and every process compares each part
   with the log, bit by bit.
4. That goes on until enough steps were committed. At last every step that is left is verified and
   compared, orphaned attempts are collected, and nothing else may be there.

Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore  # noqa: F401  (imported before the forks)
from fork_server import DirectoryCoordinator

import shardckpt
from shardckpt.runs import collecting, retention
from shardckpt.training import events, policies
from shardckpt.writing import (
    background,  # noqa: F401
    committer,
)

PROCESSES = (1, 2, 3, 4)
ELEMENTS = (0, 1, 700, 20_000, 300_000)
"""Of the large tensor; smaller ones are told of, larger ones dealt out."""
LONGEST_RUN = 0.6
"""Seconds until a job is killed, at most."""
COMING = 8.0
"""Seconds for which processes wait for each other at the start."""
PATIENCE = 60.0
"""Seconds that a job may take to end once it was told to."""
committer._COMMITTING = COMING
"""Seconds for which those wait for the committer's word whose process 0 was killed."""


def made(run: int, step: int, elements: int) -> dict[str, Any]:
    """The part of the state that all processes have."""
    rng = np.random.default_rng((run, step, elements))
    return {
        "large": rng.standard_normal(elements, np.float32),
        "pair": [rng.integers(0, 255, (9, elements // 64 + 1), np.uint8), np.float64(rng.random())],
        "step": step,
    }


def own(run: int, step: int, process: int) -> dict[str, Any]:
    """The part that a process has for itself."""
    return {
        "process": process,
        "draw": np.random.default_rng((run, step, process)).integers(0, 1 << 62, 5),
    }


def digest(part: Any) -> str:
    """Of a nest of arrays and numbers: bytes, dtypes, shapes and keys."""
    if isinstance(part, dict):
        return sha256(
            json.dumps([[key, digest(part[key])] for key in sorted(part)]).encode()
        ).hexdigest()
    if isinstance(part, list | tuple):
        return sha256(json.dumps([digest(one) for one in part]).encode()).hexdigest()
    array = np.asarray(part)
    return sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()


class Log:
    """A file of lines of JSON, to which processes append."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, **fields: Any) -> None:
        """One line; atomic, and there although the process is killed in the next moment."""
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(fields).encode() + b"\n")

    def lines(self) -> list[dict[str, Any]]:
        """All of them."""
        return (
            [json.loads(line) for line in self._path.read_bytes().splitlines()]
            if self._path.exists()
            else []
        )


def expected(log: Log, run: int, step: int) -> dict[str, Any]:
    """The line that a run has logged of a step, before it was saved."""
    return next(line for line in log.lines() if line.get("made") == [run, step])


def compare(log: Log, restored: shardckpt.Restored, process: int) -> None:
    """Compare a restored state with the log; AssertionError."""
    run, state = restored.metadata["run"], restored.state
    logged = expected(log, run, restored.step)
    assert digest({key: state[key] for key in ("large", "pair", "step")}) == logged["shared"], (
        run,
        restored.step,
    )
    mine = state["own"]
    owned = mine if isinstance(mine, list) else [mine.value]
    assert {digest(one) for one in owned} <= set(logged["own"]), (run, restored.step)
    assert len(owned) in (1, len(logged["own"]))
    log.add(compared=[run, restored.step], process=process)


def train(
    coordinator: Any, root: Path, log: Log, run: int, elements: int, *, in_place: bool
) -> None:
    """Restore, train and save as one process of a job, until it is killed or told to stop."""
    process = coordinator.world.process
    processes = range(coordinator.world.processes)

    def note(event: events.Event) -> None:
        if isinstance(event, events.SaveCommitted) and process == 0:
            log.add(committed=[run, event.step])

    with shardckpt.CheckpointManager(
        root,
        every=1,
        keep=retention.any_of(retention.Latest(2), retention.EveryKth(25)),
        preemption=policies.OnPreemption(),
        options=shardckpt.SaveOptions(
            metadata={"run": run}, memory_limit="64MiB", commit_timeout=COMING
        ),
        coordinator=coordinator,
        on_event=note,
        lead_time=0.02,
    ) as mgr:
        log.add(handles=run, pid=os.getpid())
        restored = mgr.restore(like_of(mgr) if in_place else None)
        if restored is not None:
            compare(log, restored, process)
        step = restored.step + 1 if restored is not None else 0
        while not mgr.reached_preemption:
            state = made(run, step, elements)
            if process == 0:
                log.add(
                    made=[run, step],
                    shared=digest(state),
                    own=[digest(own(run, step, p)) for p in processes],
                )
            tensors = [state["large"], state["pair"][0]]
            mine = own(run, step, process)
            mgr.save(step, {**state, "own": shardckpt.PerProcess(mine)})
            for tensor in [*tensors, mine["draw"]]:
                tensor.view(np.uint8)[...] = 0xA5
            step += 1


def like_of(mgr: shardckpt.CheckpointManager) -> Any:
    """Tensors of the sizes that the latest step has; None where there is none."""
    latest = mgr.latest_step()
    if latest is None:
        return None
    checkpoint = shardckpt.open(mgr.url(latest))
    arrays = {
        name: np.empty(checkpoint.info(name).shape, checkpoint.info(name).dtype.numpy)
        for name in ("large", "pair/0")
    }
    choose = shardckpt.PerProcess(None, choose=lambda values: values[0])
    return {
        "large": arrays["large"],
        "pair": [arrays["pair/0"], np.float64(0)],
        "step": 0,
        "own": choose,
    }


def job(root: Path, log: Log, run: int, rng: random.Random) -> Counter[str]:
    """One job, and how it ended."""
    processes = rng.choice(PROCESSES)
    elements, in_place = rng.choice(ELEMENTS), rng.random() < 0.5
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "keys").mkdir()
        pids = []
        for process in range(processes):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    coordinator = DirectoryCoordinator(
                        f"{directory}/keys", process, processes, timeout=COMING
                    )
                    train(coordinator, root, log, run, elements, in_place=in_place)
                    code = 0
                except shardckpt.ShardckptError as e:  # of one whose fellow was killed
                    log.add(failed=run, process=process, error=f"{type(e).__name__}: {e}")
                    code = 2
                except BaseException:  # noqa: BLE001
                    log.add(wrong=run, process=process, error=traceback.format_exc())
                finally:
                    os._exit(code)
            pids.append(pid)
        time.sleep(rng.random() * LONGEST_RUN)
        how = rng.choices(("all killed", "one killed", "one told to stop"), (6, 1, 2))[0]
        hit = [rng.choice(pids)] if how != "all killed" else pids
        for pid in hit:
            os.kill(pid, signal.SIGTERM if how == "one told to stop" else signal.SIGKILL)
        ended = Counter({how: 1})
        deadline = time.monotonic() + PATIENCE
        for pid in pids:
            while (status := os.waitpid(pid, os.WNOHANG))[0] == 0:
                if time.monotonic() > deadline:
                    log.add(
                        wrong=run,
                        error=f"a process of {processes} goes on {PATIENCE:g} s after {how}",
                    )
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)
            code = os.waitstatus_to_exitcode(status[1])
            if (
                how == "one told to stop"
                and code not in (0, 2)
                and {"handles": run, "pid": pid} in log.lines()
            ):
                log.add(wrong=run, error=f"a process that was told to stop ended with {code}")
        return ended


def look_at_what_is_left(root: Path, log: Log) -> int:
    """Verify and compare every step that is still there, and collect the rest; how many steps."""
    shardckpt.commit(root)
    with shardckpt.CheckpointManager(root) as mgr:
        steps = mgr.all_steps(superseded=True)
    for step in steps:
        checkpoint = shardckpt.open(root / str(step))
        assert checkpoint.verify().ok, step
        compare(
            log, shardckpt.Restored(shardckpt.restore(checkpoint), step, checkpoint.metadata), 0
        )
    assert all(one.outcome == "removed" for one in collecting.collect(root, grace=0))
    for step in steps:
        named = shardckpt.open(root / str(step)).record.attempt
        assert [path.name for path in (root / str(step)).iterdir() if path.is_dir()] == [named], (
            step
        )
    return len(steps)


def soak(root: Path, saves: int, seed: int) -> dict[str, Any]:
    """Jobs, one after another, until `saves` steps were committed; what happened."""
    rng, log = random.Random(seed), Log(root / "soak.jsonl")
    ended: Counter[str] = Counter()
    runs = 0
    while sum("committed" in line for line in log.lines()) < saves:
        ended += job(root / "run", log, runs, rng)
        runs += 1
        if any("wrong" in line for line in log.lines()):
            break
    left = look_at_what_is_left(root / "run", log)
    lines = log.lines()
    return {
        "jobs": runs,
        **dict(ended),
        "committed": sum("committed" in line for line in lines),
        "compared": sum("compared" in line for line in lines),
        "left": left,
        "typed errors": sum("failed" in line for line in lines),
        "wrong": [line["error"] for line in lines if "wrong" in line],
    }


def main() -> None:
    """Run, and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--saves", type=int, default=300, help="steps to be committed before it ends"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--root", type=Path, help="an empty directory to work in; by default a temporary one"
    )
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = asked.root or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        outcome = soak(root, asked.saves, asked.seed)
    if asked.json:
        print(json.dumps(outcome))
    else:
        for name, value in outcome.items():
            print(f"{name:16} {value if not isinstance(value, list) else len(value)}")
        for error in outcome["wrong"]:
            print(error)
    sys.exit(bool(outcome["wrong"]))


if __name__ == "__main__":
    main()
