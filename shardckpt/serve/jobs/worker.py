"""The process of a job, which calls `main` with the path of its lock file, LOCK.

1. The lease of the job: it locks the file LOCK until it ends, so no other process runs the job at
   the same time, even after the service that started it has died. The kernel ends the lease
   together with the process; no clock is involved.
2. The first line of its standard input is the request. When that input ends, the service is gone.
   Then the process ends at once, and so do the processes that it has started.
3. Its standard output has one JSON object a line: `progress`, `note`, and at the end `result` or
   `error`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardckpt.errors import ShardckptError

if TYPE_CHECKING:
    from collections.abc import Callable

BUSY = 75
"""Exit status where another process has the lock."""
_PROGRESS_SECONDS = 0.2


def main(lock: str) -> int:
    """Run one job; return the exit status."""
    # Output of libraries, and of the programs that they start, is not a message.
    # The descriptor of messages stays open to the very end: its end is that of the process.
    out, sys.stdout = os.fdopen(os.dup(1), "w", closefd=False), sys.stderr
    os.dup2(2, 1)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 1
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return BUSY
    os.ftruncate(held, 0)
    os.write(held, str(os.getpid()).encode())
    threading.Thread(target=_end_with_the_service, daemon=True).start()
    request = json.loads(line)
    _log_as_json(request["job"])
    sending = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with sending:
            out.write(json.dumps({kind: value}) + "\n")
            out.flush()

    try:
        send("result", _run(request, send))
    except ShardckptError as e:
        from shardckpt.serve.problems import text_of

        send("error", {"code": e.code, "message": text_of(e)})
    except Exception as e:
        logging.getLogger("shardckpt.serve.jobs").exception("a job failed")
        send(
            "error", {"code": "internal", "message": f"{type(e).__name__}: {e}; the log has more."}
        )
    return 0


def _run(request: dict[str, Any], send: Callable[[str, Any], None]) -> dict[str, Any]:
    from shardckpt.serve.access.identity import WHO, Identity
    from shardckpt.serve.jobs.operations import OPERATIONS
    from shardckpt.serve.jobs.work import Work
    from shardckpt.serve.roots import Roots

    if request.get("readable") is not None:
        WHO.set(Identity(request["who"], dict.fromkeys(request["readable"], "admin")))
    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() >= last + _PROGRESS_SECONDS:
            last = time.monotonic()
            send("progress", [done, total])

    work = Work(
        roots=Roots(request["roots"], request["bases"]),
        who=request["who"],
        again=request["again"],
        options=request["options"],
        progress=progress,
        note=lambda value: send("note", value),
        resume=request["resume"],
    )
    return OPERATIONS[request["operation"]].run(work, **request["arguments"])


def _end_with_the_service() -> None:
    """Wait for the end of standard input, then end this process and those that it has started."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    if os.getpgrp() == os.getpid():  # the service has given it a group of its own
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _log_as_json(job: int | None) -> None:
    """Write the library's log as the service writes its own."""
    from shardckpt.serve.logs import JsonFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(job=job))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
