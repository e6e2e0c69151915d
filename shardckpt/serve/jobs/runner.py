"""The runner: starts the processes of jobs, follows them, and writes down how they end.

Jobs run in the order of their numbers, quick ones beside the others. No two jobs that write one
place run at a time. A job whose process dies, or whose storage fails, is started again: a few
times, with growing pauses. Then the job has failed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardckpt.errors import ShardckptError, StorageError
from shardckpt.io.failures import child_command, process_advice
from shardckpt.serve.access.audit import AuditLog
from shardckpt.serve.jobs.background import BackgroundWork
from shardckpt.serve.jobs.database import DEADLY
from shardckpt.serve.jobs.operations import OPERATIONS
from shardckpt.serve.jobs.rows import DAMAGED_ROW
from shardckpt.serve.jobs.verification import CANCELLED, VerificationNotes
from shardckpt.serve.jobs.worker import BUSY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from shardckpt.serve.jobs.journal import Journal
    from shardckpt.serve.jobs.rows import JobRow
    from shardckpt.serve.roots import Roots
    from shardckpt.serve.vanished import RootWatch

_log = logging.getLogger("shardckpt.serve.jobs")
_QUICK = 2
"""Quick jobs at a time."""
_PAUSES = (2.0, 10.0, 60.0, 300.0)
"""Pauses before each new start, in seconds; after the last one the job fails."""
_AGAIN = frozenset({"storage", "coordination"})
"""Codes of errors that may pass."""
_POLL, _BUSY_SECONDS = 0.5, 2.0
_END_SECONDS = 10.0
_LONGEST_LINE = 4 << 20
_STILL_RUNS = "the process of an earlier service still runs it"
_WORKER = "from shardckpt.serve.jobs.worker import main; sys.exit(main(sys.argv[1]))"


@dataclass(slots=True)
class JobEnd:
    """End of a job's process: its result or its error."""

    result: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    again: bool = False
    """Whether it may succeed when it is started again."""
    busy: bool = False
    """Whether another process has the job's lock, so that it was not started."""


@dataclass(slots=True)
class JobProcess:
    """A process that runs an operation."""

    directory: Path
    """Directory of the lock files of jobs."""
    roots: Roots
    options: Mapping[str, Any]
    _process: subprocess.Popen[bytes] | None = None
    _ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(
        self,
        name: str,
        request: Mapping[str, Any],
        *,
        progress: Callable[[int, int], None],
        note: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> JobEnd:
        """Run an operation to its end.

        Args:
            name: name of the lock; one process at a time holds it.
            request: `operation`, `arguments`, `job`, `who`, `again` and `resume`.
            progress: called with what is done, and all.
            note: called with what the operation wants written down.
        """
        asked = {
            **request,
            "roots": self.roots.given,
            "bases": self.roots.given_bases,
            "options": dict(self.options),
        }
        self.directory.mkdir(exist_ok=True)
        lock = self.directory / f"{name}.lock"
        with self._lock:
            if self._ended:
                return JobEnd(again=True)
            try:
                process = self._process = subprocess.Popen(  # noqa: S603  (this interpreter, and a path of the service's own)
                    child_command(_WORKER, str(lock)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as e:
                message = f"it cannot be run now ({e}). {process_advice(e)}"
                return JobEnd(error={"code": "storage", "message": message}, again=True)
        assert process.stdin is not None
        assert process.stdout is not None
        end = JobEnd()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
            while line := process.stdout.readline(_LONGEST_LINE):
                message = json.loads(line)
                if "progress" in message:
                    progress(*message["progress"])
                elif "note" in message:
                    note(message["note"])
                else:
                    end = JobEnd(message.get("result"), message.get("error"))
        finally:
            self._kill(process)
            status = process.wait()
            process.stdout.close()
        if end.error is not None:
            end.again = end.error["code"] in _AGAIN
        if end.result is None and end.error is None:
            end.busy = status == BUSY
            how = f"signal {-status}" if status < 0 else f"status {status}"
            reason = _STILL_RUNS if end.busy else f"its process ended with {how}; the log has more"
            end = JobEnd(
                error={"code": "storage", "message": f"{reason}."}, again=True, busy=end.busy
            )
        elif not end.busy:
            lock.unlink(missing_ok=True)
        return end

    def end(self) -> None:
        """End the process now; `run` returns."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._kill(self._process)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """Kill the process and those that it has started."""
        if process.returncode is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()


def audited(job: JobRow) -> dict[str, Any]:
    """Fields of the audit log about a job."""
    return {
        "who": job.who,
        "what": job.operation,
        "where": [job.subject, job.destination],
        "job": job.number,
    }


class JobRunner(BackgroundWork):
    """Runs the jobs of a journal in the background."""

    def __init__(
        self,
        journal: Journal,
        directory: Path,
        roots: Roots,
        *,
        at_once: int,
        options: Mapping[str, Any],
        on_end: Callable[[JobRow], object] = lambda _: None,
        watch: RootWatch | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            journal: has the jobs.
            directory: for the files by which processes lock jobs.
            roots: where sources and destinations lie.
            at_once: jobs at a time, besides quick ones.
            options: see `Work.options`.
            on_end: called with each job that has ended.
            watch: knows which roots have vanished.
            audit: is told of jobs before they start; they wait while it cannot be written.
        """
        super().__init__("jobs", _log, "jobs could not be started", again=_POLL)
        self._audit = audit or AuditLog(None)
        self._journal, self._directory, self._roots = journal, directory, roots
        self._at_once, self._options, self._on_end, self._watch = at_once, options, on_end, watch
        self._running: dict[int, tuple[JobRow, JobProcess, threading.Thread]] = {}
        self._not_before: dict[int, float] = {}
        self._failures: Counter[int] = Counter()
        self.waits_for: dict[int, str] = {}
        """Reason for which a queued job has not been started, by its number."""

    def stop(self) -> None:
        """End all processes; their jobs go on when the service is started again."""
        self._stopped.set()
        with self._journal.changed:
            self._journal.changed.notify_all()
        super().stop()
        running = list(self._running.values())
        for _, process, _ in running:
            process.end()
        for job, _, thread in running:
            thread.join(_END_SECONDS)
            with suppress(StorageError):  # then it counts as one that the service died of
                if self._journal.job(job.number).state == "running":
                    self._journal.end(job.number, "queued")

    def look(self) -> float:
        """End and start what is to be, and wait for a change of a job. Raises StorageError."""
        self._end_cancelled()
        self._start_queued()
        with self._journal.changed:
            self._journal.changed.wait(_POLL)
        return 0.0

    def _end_cancelled(self) -> None:
        for number, (_, process, _) in list(self._running.items()):
            if self._journal.job(number).cancelling:
                process.end()

    def _start_queued(self) -> None:
        self._running = {number: one for number, one in self._running.items() if one[2].is_alive()}
        waits: dict[int, str] = {}
        for job in self._journal.queued():
            if (
                job.cancelling
                or job.operation not in OPERATIONS
                or job.error in (DAMAGED_ROW, DEADLY)
            ):
                why = self._why_locked(job)
                if why is None:
                    self._give_up(job)
                else:
                    waits[job.number] = why
                continue
            why = self._why_not(job)
            if why is not None:
                waits[job.number] = why
            elif not self._may_write(job):
                waits[job.number] = "the audit log cannot be written"
            elif not self._stopped.is_set() and self._journal.begin(job.number):
                process = JobProcess(self._directory, self._roots, self._options)
                thread = threading.Thread(
                    target=self._follow,
                    args=(job, process),
                    name=f"shardckpt-job-{job.number}",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError as e:  # too many threads, or no memory for one
                    self._journal.end(job.number, "queued")
                    waits[job.number] = f"no thread can be started ({e})"
                else:
                    self._running[job.number] = job, process, thread
        self.waits_for = waits

    def _why_locked(self, job: JobRow) -> str | None:
        """Reason to think that a process of an earlier service runs a job; None if none does."""
        try:
            lock = os.open(self._directory / f"{job.number}.lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(lock)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return _STILL_RUNS
        except OSError as e:
            return f"its lock cannot be read ({e.strerror})"
        return None

    def _give_up(self, job: JobRow) -> None:
        """End a queued job that cannot be started."""
        error = job.error or {"code": "option", "message": "this version has no such operation."}
        self._write_down(job, JobEnd(error=error))

    def _why_not(self, job: JobRow) -> str | None:
        """Reason for not starting a job now; None if it can start."""
        if job.number in self._running:
            return "it is about to be started again"
        running = [one for one, _, _ in self._running.values()]
        quick = OPERATIONS[job.operation].quick
        full = sum(OPERATIONS[one.operation].quick == quick for one in running) >= (
            _QUICK if quick else self._at_once
        )
        # A job that there is no room for is not worth a look at the storage.
        same = next((one for one in running if self._clash(one, job, look=not full)), None)
        if same is not None:
            return f"job {same.number} writes to the same place"
        if full:
            return "other jobs run"
        left = self._not_before.get(job.number, 0.0) - time.monotonic()
        if left > 0:
            return f"it failed, and is started again in {left:.0f} s"
        return None

    def _may_write(self, job: JobRow) -> bool:
        """Tell the audit log that a job is about to be started; return whether that succeeded."""
        try:
            if OPERATIONS[job.operation].writes(job.arguments):
                self._audit.write(**audited(job), result="started")
        except StorageError as e:
            _log.error("audit", extra={"fields": {"job": job.number, "reason": str(e)}})
            return False
        return True

    def _clash(self, one: JobRow, other: JobRow, *, look: bool) -> bool:
        """Whether two jobs write to one place, or one of them below the place of the other.

        `look`: also if links give the place another id.
        """
        if one.destination is None or other.destination is None:
            return False
        if not look:
            ids = sorted([f"{one.destination}/", f"{other.destination}/"])
            return ids[1].startswith(ids[0])
        try:
            a, b = self._roots.locate(one.destination), self._roots.locate(other.destination)
        except ShardckptError:  # the process will say why
            return False
        return a.is_within(b) or b.is_within(a)

    def _follow(self, job: JobRow, process: JobProcess) -> None:
        """Run a job, and write down its end.

        Tries that as long as the journal cannot be written.
        """
        number = job.number
        verification = None
        request: dict[str, Any] = {
            "operation": job.operation,
            "arguments": job.arguments,
            "job": number,
            "who": job.who,
            "readable": job.roots,
            "again": job.tries > 0,
            "resume": {},
        }
        try:
            self._check_roots(job)
            if job.operation == "verify":
                verification = VerificationNotes(self._journal, self._roots, job.subject, number)
                request["resume"] = verification.resume
            end = process.run(
                str(number),
                request,
                progress=lambda done, total: self._journal.note_progress(number, done, total),
                note=verification.note if verification is not None else lambda _: None,
            )
        except (OSError, ValueError, StorageError) as e:
            # The process's output is not a valid message, or the journal failed.
            process.end()
            end = JobEnd(
                error={"code": "storage", "message": f"it cannot be run now ({e})."}, again=True
            )
        except Exception as e:  # noqa: BLE001  (a bug must not leave the job running for ever)
            process.end()
            _log.exception("a job failed")
            end = JobEnd(
                error={"code": "internal", "message": f"{type(e).__name__}; the log has more."}
            )
        while not self._stopped.is_set():
            try:
                self._write_down(job, end)
                break
            except StorageError as e:
                _log.warning("%s", e)
                time.sleep(_POLL)

    def _check_roots(self, job: JobRow) -> None:
        """Check that no root of a job has vanished, and leave the marker in the one that it writes.

        Raises StorageError.
        """
        if self._watch is None:
            return
        read, written = (
            job.subject.partition("/")[0],
            (job.destination or job.subject).partition("/")[0],
        )
        writes = OPERATIONS[job.operation].writes(job.arguments)
        for name in sorted({read, written} & self._roots.places.keys()):
            self._watch.prepare(name, writes=writes and name == written)

    def _end_verification(self, job: JobRow, error: Mapping[str, str]) -> None:
        """End what a job has begun to verify, before the job ends: nobody would end it later."""
        if job.operation == "verify":
            VerificationNotes(self._journal, self._roots, job.subject, job.number).end(error)

    def _write_down(self, job: JobRow, end: JobEnd) -> None:
        number = job.number
        if end.result is not None:
            self._journal.end(number, "done", result=end.result)
        elif self._journal.job(number).cancelling and not end.busy:
            self._end_verification(job, CANCELLED)
            self._journal.end(number, "cancelled")
        elif end.busy or (end.again and self._failures[number] < len(_PAUSES)):
            pause = _BUSY_SECONDS if end.busy else _PAUSES[self._failures[number]]
            self._not_before[number] = time.monotonic() + pause
            self._journal.end(number, "queued", error=end.error)
            self._failures[
                number
            ] += not end.busy  # a journal that cannot be written is no failure of the job
        else:
            error = end.error or CANCELLED
            self._end_verification(job, error)
            fields_of_job = {
                name: getattr(job, name) for name in ("operation", "subject", "destination", "who")
            }
            message = self._roots.without_places(error["message"])
            self._journal.end(
                number,
                "failed",
                error=error,
                notice={"event": "failed", "job": number, **fields_of_job, "message": message},
            )
        ended = self._journal.job(number)
        log = _log.warning if ended.state == "failed" else _log.info
        fields = {
            "job": number,
            "operation": ended.operation,
            "state": ended.state,
            "who": ended.who,
            "error": ended.error,
        }
        log("job", extra={"fields": fields})
        if ended.is_over:
            self._not_before.pop(number, None)
            self._failures.pop(number, None)
            self._on_end(ended)
