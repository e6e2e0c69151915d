"""Runs functions in several processes at once, over and over, without paying for imports each time.

    python fork_server.py <module file> …

Everything is imported first, also what shardckpt imports with its first use, and nothing used, so
that forks are clean. Each line on stdin asks for one run, as JSON: {"function": "module:name",
"processes": n, "arguments": […], "timeout": seconds}. Each of n forks calls function(coordinator,
*arguments), with a coordinator over a directory. The answer is one line: per process what it
returned, or the error that it raised as {"error": type, "message": …}, or {"signal": n} of what
ended it.
"""

import importlib.util
import json
import os
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numcodecs  # noqa: F401
import numpy as np  # noqa: F401
import tensorstore as ts  # noqa: F401

import shardckpt
from shardckpt.frameworks.coordination import Coordinator

PACKAGES = "commit", "io", "plan", "reading", "runs", "state", "writing"
MODULES = {
    "shardckpt": ("convert.opening", "frameworks.numpy", "training.manager"),
    "torch": ("frameworks.composites", "frameworks.torch"),
    "torch.distributed.tensor": ("frameworks.coordination.torch_store", "frameworks.dtensor"),
    "jax": ("frameworks.coordination.jax_client", "frameworks.jax"),
}
"""A module → modules of shardckpt that are imported with their first use, where that one is."""


class DirectoryCoordinator(Coordinator):
    """Keys are files of a directory."""

    def __init__(self, directory, process, processes, **options):
        self.directory = Path(directory)
        super().__init__(process, processes, **options)

    def _set(self, key, value):
        path = self.directory / key.replace("/", "!")
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_bytes(value)
        new.replace(path)

    def _get(self, key):
        try:
            return (self.directory / key.replace("/", "!")).read_bytes()
        except FileNotFoundError:
            return None


def load(file):
    name = Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def preload():
    """Import what saves and restores import with their first use: each fork would do so again."""
    for name in PACKAGES:
        folder = f"{shardckpt.__path__[0]}/{name}"
        for module in pkgutil.walk_packages([folder], f"shardckpt.{name}."):
            if module.name != "shardckpt.reading.zarr_store":  # imports zarr
                importlib.import_module(module.name)
    for needed, names in MODULES.items():
        for name in names if needed in sys.modules else ():
            importlib.import_module(f"shardckpt.{name}")


def act(function, directory, process, request, answer):
    """In a fork: do it, and write the answer."""
    try:
        coordinator = DirectoryCoordinator(
            directory, process, request["processes"], timeout=request["timeout"]
        )
        result = function(coordinator, *request["arguments"])
    except BaseException as error:
        result = {
            "error": type(error).__name__,
            "message": str(error),
            "trace": traceback.format_exc(),
        }
    os.write(answer, json.dumps(result).encode())
    os._exit(0)


def run(function, request):
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for process in range(request["processes"]):
            file = os.open(f"{directory}/answer{process}", os.O_RDWR | os.O_CREAT)
            pid = os.fork()
            if pid == 0:
                Path(directory, "keys").mkdir(exist_ok=True)
                act(function, f"{directory}/keys", process, request, file)
            children.append((pid, file))
        deadline = time.monotonic() + request["timeout"]
        answers = []
        for pid, file in children:
            while (status := os.waitpid(pid, os.WNOHANG))[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.002)
            answers.append(
                {"signal": os.WTERMSIG(status[1])}
                if os.WIFSIGNALED(status[1])
                else json.loads(os.pread(file, 1 << 24, 0))
            )
            os.close(file)
        return answers


def main():
    modules = {Path(file).stem: load(file) for file in sys.argv[1:]}
    preload()
    for line in sys.stdin:
        request = json.loads(line)
        module, name = request["function"].split(":")
        print(json.dumps(run(getattr(modules[module], name), request)), flush=True)


if __name__ == "__main__":
    main()
