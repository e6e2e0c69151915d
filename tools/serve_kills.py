"""Kill a service at random moments while jobs run.

The tool looks whether every job ends right and no checkpoint is harmed.

    python tools/serve_kills.py --kills 200

Each round starts some jobs, waits a moment, kills the service (sometimes also the process of a job)
with SIGKILL, and starts it again. Requests are sent again with their idempotency keys. At the end
every job must be done, what it wrote must have the right elements, every checkpoint must be intact,
and nothing else may be there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import numpy as np
from safetensors.numpy import load_file

import shardckpt
from shardckpt.serve.access.tokens import add_token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WAIT = 120.0


class ServiceProcess:
    """`shardckpt serve` in a process of its own, with a token of the scope admin."""

    def __init__(self, directory: Path, roots: Mapping[str, Path], *options: str) -> None:
        """Prepare to serve; state and tokens are kept in the directory."""
        self._token = add_token(directory / "tokens", f"admin-{os.getpid()}", "admin")
        named = [f"{name}={place}" for name, place in roots.items()]
        state = [
            "--state",
            str(directory / "state"),
            "--token-file",
            str(directory / "tokens"),
            "--port",
            "0",
        ]
        self._command = [sys.executable, "-m", "shardckpt", "serve", *named, *state, *options]
        self._log = directory / "log"

    def __enter__(self) -> Self:
        """Start."""
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        """End as a service manager would."""
        self.process.terminate()
        self._wait()

    def restart(self) -> None:
        """Start the process, and wait until it answers."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line.startswith("serving at "):
            raise RuntimeError(f"the service did not start; {self._log} says why")
        self.http = httpx.Client(
            base_url=line.split()[-1],
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=_WAIT,
        )

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self._wait()

    def _wait(self) -> None:
        self.process.wait(_WAIT)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.http.close()

    def start(self, operation: str, key: str | None = None, **arguments: Any) -> int:
        """Start a job; return its number."""
        headers = {} if key is None else {"Idempotency-Key": key}
        reply = self.http.post(f"/v1/jobs/{operation}", json=arguments, headers=headers)
        if reply.status_code not in (200, 202):
            raise RuntimeError(f"{operation} {arguments}: {reply.text}")
        return int(reply.json()["number"])

    def job(self, number: int) -> dict[str, Any]:
        """A job."""
        job: dict[str, Any] = self.http.get(f"/v1/jobs/{number}").json()
        return job

    def wait_until(
        self, number: int, holds: Callable[[dict[str, Any]], object], seconds: float = _WAIT
    ) -> dict[str, Any]:
        """A job once something holds of it."""
        end = time.monotonic() + seconds
        while not holds(job := self.job(number)):
            if time.monotonic() > end:
                raise RuntimeError(f"it never held: {job}")
            time.sleep(0.05)
        return job


def state_of(step: int) -> dict[str, Any]:
    """A state that differs for each step."""
    rng = np.random.default_rng(step)
    return {
        "model": {
            "w": rng.normal(size=(512, 1024)).astype(np.float32),
            "b": rng.integers(0, 9, 300),
        },
        "step": step,
    }


def requests_of_round(number: int, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """The jobs of a round: operation and arguments."""
    source = f"lab/base/{rng.randrange(4)}"
    first = f"lab/out/{number}"
    made: list[tuple[str, dict[str, Any]]] = [
        ("copy", {"checkpoint": source, "to": f"{first}-copy"}),
        (
            "reshard",
            {"checkpoint": source, "to": f"{first}-reshard", "mesh": "x=4", "rule": ["**/w=(x,)"]},
        ),
        ("export", {"checkpoint": source, "to": f"{first}-export", "include": ["model/**"]}),
        ("import", {"from": "lab/files", "to": f"{first}-import"}),
        ("verify", {"checkpoint": source}),
        ("tag", {"checkpoint": source, "tag": f"round-{number}".replace("-", ".")}),
        ("delete", {"checkpoint": f"lab/old/{number}"}),
    ]
    return rng.sample(made, 3)


def check(
    top: Path, operation: str, arguments: Mapping[str, Any], job: Mapping[str, Any]
) -> str | None:
    """Error in the outcome of a job; None if there is none."""
    if job["state"] != "done":
        return f"it is {job['state']}: {job['error']}"
    place = top / str(arguments.get("to", arguments.get("checkpoint"))).removeprefix("lab/")
    expected = state_of(
        int(arguments["checkpoint"].rpartition("/")[2])
        if "base" in arguments.get("checkpoint", "")
        else 0
    )["model"]
    if operation == "delete":
        return f"{place} is still there" if place.exists() else None
    if operation == "verify":
        return None if job["result"]["ok"] else f"damage: {job['result']}"
    if operation == "tag":
        return None
    if operation == "export":
        tensors = {
            name.removeprefix("model."): value
            for name, value in load_file(place / "model.safetensors").items()
        }
    else:
        restored = shardckpt.restore(place)
        tensors = restored.get("model", restored)
        if not shardckpt.open(place).verify().ok:
            return f"{place} is damaged"
    tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    wrong = [
        name for name, value in expected.items() if not np.array_equal(tensors.get(name), value)
    ]
    return f"{place}: {wrong} differ" if wrong else None


def main() -> None:
    """Run the rounds, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    rng, begun = random.Random(chosen.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardckpt-kills-") as directory:
        top = Path(directory) / "runs"
        for step in range(4):
            shardckpt.save(top / "base" / str(step), state_of(step))
        shardckpt.export_safetensors(
            top / "base" / "0", top / "files", include=["model/**"], strip_prefix="model."
        )
        for number in range(chosen.kills):
            shardckpt.save(top / "old" / str(number), {"w": np.ones(9)})
        asked: dict[str, tuple[str, dict[str, Any]]] = {}
        jobs: dict[str, int] = {}
        with ServiceProcess(
            Path(directory), {"lab": top}, "--jobs", "2", "--scrub", "1min", "--scrub-rate", "16MiB"
        ) as service:
            killed: Counter[str] = Counter()
            for number in range(chosen.kills):
                for operation, arguments in requests_of_round(number, rng):
                    key = f"{number}-{operation}"
                    asked[key] = operation, arguments
                    jobs[key] = service.start(operation, key, **arguments)
                time.sleep(rng.random() * 2.5)
                if rng.random() < 0.3:
                    for lock in (Path(directory) / "state" / "jobs").glob("*.lock"):
                        with suppress(OSError, ValueError):
                            os.kill(int(lock.read_text()), signal.SIGKILL)
                            killed["processes of jobs"] += 1
                service.kill()
                killed["services"] += 1
                service.restart()
                for key in rng.sample(sorted(jobs), min(len(jobs), 3)):
                    operation, arguments = asked[key]
                    if service.start(operation, key, **arguments) != jobs[key]:
                        raise RuntimeError(f"{key} was started twice")
            ends = {
                key: service.wait_until(
                    job, lambda one: one["state"] in ("done", "failed", "cancelled"), 1800
                )
                for key, job in jobs.items()
            }
            damaged = [
                one
                for one in service.http.get("/v1/verifications?limit=1000").json()["verifications"]
                if one["damaged"]
            ]
        wrong = {
            key: error
            for key, job in ends.items()
            if (error := check(top, *asked[key], job)) is not None
        }
        unsound = [
            str(place)
            for place in sorted((top / "base").iterdir())
            if not shardckpt.open(place).verify().ok
        ]
        expected = {
            str(arguments["to"]).rpartition("/")[2]
            for _, arguments in asked.values()
            if "to" in arguments
        }
        strangers = sorted({one.name for one in (top / "out").iterdir()} - expected)
        report = {
            "killed": dict(killed),
            "jobs": len(jobs),
            "started again": sum(job["tries"] > 1 for job in ends.values()),
            "ended": Counter(job["state"] for job in ends.values()),
            "wrong": wrong,
            "harmed": unsound,
            "strangers": strangers,
            "false alarms": damaged,
            "seconds": round(time.monotonic() - begun),
        }
        print(json.dumps(report, indent=1))
        if wrong or unsound or strangers or damaged:
            sys.exit(1)


if __name__ == "__main__":
    main()
