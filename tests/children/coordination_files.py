"""One process of a job whose store of keys and values is a directory: a Coordinator of the user's
own. JSON on stdout."""

import json
import os
import sys
from pathlib import Path
from urllib.parse import quote

import shardckpt.frameworks.coordination


class Files(shardckpt.frameworks.coordination.Coordinator):
    def __init__(self, directory, process, processes, **options):
        self._directory = directory
        super().__init__(process, processes, **options)

    def _set(self, key, value):
        new = self._directory / f".{os.getpid()}"
        new.write_bytes(value)
        new.replace(self._directory / quote(key, safe=""))

    def _get(self, key):
        try:
            return (self._directory / quote(key, safe="")).read_bytes()
        except FileNotFoundError:
            return None


def main(directory, process, processes, timeout):
    answers = {}
    try:
        ours = Files(
            directory,
            process,
            processes,
            devices={"torch_xla": [2 * process, 2 * process + 1]},
            timeout=timeout,
        )
    except shardckpt.ShardckptError as error:
        return {
            "error": f"{error.code}: {error}",
            "is a TimeoutError": isinstance(error, TimeoutError),
        }
    owners = ours.world.devices["torch_xla"]
    answers["run_id"] = ours.run_id
    answers["world"] = [
        ours.world.process,
        ours.world.processes,
        owners.of_devices(range(2 * processes)).tolist(),
    ]
    answers["left by an earlier round"] = ours.peek("step")
    answers["shared"] = ours.share("words", {"of": process, "nothing": None, "pair": (1, 2.5)})
    answers["shared again"] = ours.share("words", [None, "é"][process % 2])
    answers["agreed"] = ours.agree("resume", lambda: {"step": 100, "asked": process})
    answers["agreed again"] = ours.agree("resume", lambda: process)
    if process == 0:
        ours.announce("step", 1)
        ours.announce("step", 2)
    ours.share("announced", None)
    answers["peeked"] = ours.peek("step")
    answers["never announced"] = ours.peek("stop")
    try:
        ours.agree("impossible", lambda: 1 / 0)
    except (ZeroDivisionError, shardckpt.ShardckptError) as error:
        answers["impossible"] = f"{type(error).__name__}: {error}"
    answers["after the impossible"] = ours.agree("impossible", lambda: "possible")
    answers["imported"] = [name for name in ("torch", "jax", "tensorstore") if name in sys.modules]
    return answers


answer = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
sys.stdout.write(json.dumps(answer) + "\n")
