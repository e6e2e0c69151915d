"""A process of a save that falls asleep (SIGSTOP) while the others end."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

PROCESSES = 3
PATIENCE = 60
"""Seconds for which a test waits for what must happen."""


class Sleeper:
    """A save of value 2 of which one process sleeps, and all others have ended."""

    def __init__(self, running, diary):
        self._running, self._diary = running, diary

    @property
    def asleep(self):
        """Whether it still is a process, and stopped."""
        met = self.diary("fate")
        with suppress(FileNotFoundError, TypeError):
            return Path(f"/proc/{met['pid']}/stat").read_text().rpartition(") ")[2].startswith("T")
        return False

    def diary(self, name):
        """A process's note of that name; None until it is written."""
        with suppress(FileNotFoundError, json.JSONDecodeError):
            return json.loads((self._diary / name).read_text())
        return None

    def wait(self, processes, sleeper):
        """Until it sleeps and the others have ended; whether it does."""
        deadline = time.monotonic() + PATIENCE
        others = [process for process in range(processes) if process != sleeper]
        while not (self.asleep and all(self.diary(f"outcome{process}") for process in others)):
            if self._running.done():
                return False  # an operation fewer than usual
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return True

    def wake(self):
        """Let it go on; what became of all processes."""
        os.kill(self.diary("fate")["pid"], signal.SIGCONT)
        return self._running.result()

    def end(self):
        """Wake the process if it still sleeps, even after an error."""
        if not self._running.done() and self.asleep:
            os.kill(self.diary("fate")["pid"], signal.SIGCONT)


@contextmanager
def asleep(job, root, options, fate):
    """A save of value 2 at `root`/checkpoint by a job of which one process falls asleep; None if it
    does not."""
    diary = root.with_name(f"{root.name}-diary")
    diary.mkdir()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            job.run,
            "save",
            PROCESSES,
            root / "checkpoint",
            2,
            options,
            {"act": "stop", **fate},
            diary,
        )
        sleeper = Sleeper(running, diary)
        try:
            yield sleeper if sleeper.wait(PROCESSES, fate["process"]) else None
        finally:
            sleeper.end()
