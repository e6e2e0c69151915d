"""Several processes of one job, for tests: see `fork_server.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from forks import Forked


class Processes:
    """Runs functions of a module in forks of a process that has imported everything."""

    def __init__(self, *modules: str, env: dict[str, str] | None = None) -> None:
        files = [spec.origin for spec in map(find_spec, modules) if spec and spec.origin]
        # Where a module imports torch, the server is a fork of a process that has it already.
        command = [sys.executable, Path(__file__).with_name("fork_server.py"), *files]
        self.module = modules[0]
        self.server = Forked(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )

    def run(self, function: str, processes: int, *arguments: object, timeout: float = 150) -> list:
        """Results of a function in so many processes.

        Each result is the value that the process returned, or a dict with `error` or `signal` if it
        did not return.
        """
        name = function if ":" in function else f"{self.module}:{function}"
        request = {
            "function": name,
            "processes": processes,
            "arguments": arguments,
            "timeout": timeout,
        }
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        try:
            self.server.stdin.write(json.dumps(request, default=str) + "\n")
            self.server.stdin.flush()
            answer = self.server.stdout.readline()
        except BaseException:
            # Its answer would be taken for the answer to the next request.
            self.server.kill()
            raise
        assert answer, "the fork server ended"
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.close()
        try:
            self.server.wait(60)
        finally:
            self.server.kill()
            self.server.stdout.close()
