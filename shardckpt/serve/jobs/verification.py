"""Resumable verification of checkpoints: the worker's part and the service's part."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardckpt.commit.publish import RECORD
from shardckpt.io.store import Store
from shardckpt.reading import verification as reading
from shardckpt.reading.missing import replaced_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.errors import ShardckptError
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.verification import Damage
    from shardckpt.serve.jobs.journal import Journal
    from shardckpt.serve.jobs.rows import Verification
    from shardckpt.serve.jobs.work import Work
    from shardckpt.serve.roots import Roots

MOST_DAMAGE = 100
"""Most damaged parts of a verification that are written down one by one; all are counted."""
_NOTE_SECONDS = 1.0
_SETTLE_SECONDS = 1.0
"""Pause before the first damage is told, in which somebody who deletes files of the checkpoint
comes to its record."""
_GROUP_SECONDS = 0.25
_LEAST_GROUP = 1 << 20
_LONGEST_REASON, _MOST_IN_NOTICE = 500, 10
CANCELLED = {"code": "cancelled", "message": "it was cancelled"}
"""Error of a verification whose job was cancelled."""
_GONE = ("replaced", "not-found")
"""Codes of errors that say that the checkpoint is not there any more."""


def verify_checkpoint(work: Work, checkpoint: Checkpoint) -> dict[str, Any]:
    """Read every chunk of a checkpoint, and note what is found.

    The rate is at most `work.options["rate"]` bytes per second.

    Returns:
        `ok`, `chunks`, `bytes`, `damaged` (their number) and `damage` (the first of them).

    Raises:
        ReplacedError: another checkpoint took its place meanwhile.
    """
    store, attempt, rate = (
        Store.open(checkpoint.location),
        checkpoint.record.attempt,
        work.options.get("rate"),
    )
    counts: dict[str, Any] = {
        "attempt": attempt,
        "chunks": 0,
        "total": None,
        "bytes": 0,
        "damaged": 0,
        "damage": [],
        "over": False,
    }
    if work.resume.get("attempt") == attempt:
        counts |= work.resume
    before, begun, noted = counts["bytes"], time.monotonic(), time.monotonic()
    known = {(one["file"], one["tensor"], one["box"]) for one in counts["damage"]}
    work.note(counts)

    def progress(done: int, total: int, nbytes: int) -> None:
        nonlocal noted
        counts.update(chunks=done, total=total, bytes=before + nbytes)
        work.progress(done, total)
        if rate is not None:
            time.sleep(max(0.0, begun + nbytes / rate - time.monotonic()))
        if time.monotonic() >= noted + _NOTE_SECONDS:
            noted = time.monotonic()
            work.note(counts)

    def damaged(one: Damage) -> None:
        part = {
            "file": one.file,
            "tensor": one.tensor,
            "box": None if one.box is None else str(one.box),
        }
        key = part["file"], part["tensor"], part["box"]
        if key in known:  # metadata is verified again after an interruption
            return
        if not known:
            time.sleep(_SETTLE_SECONDS)
        # Data of a checkpoint that is being deleted may be missing.
        replaced = replaced_error(store, checkpoint.location, attempt)
        if replaced is not None:
            raise replaced
        known.add(key)
        counts["damaged"] += 1
        if len(counts["damage"]) < MOST_DAMAGE:
            counts["damage"].append({**part, "reason": one.reason[:_LONGEST_REASON]})
        work.note(counts)

    group = {} if rate is None else {"group_bytes": max(_LEAST_GROUP, round(rate * _GROUP_SECONDS))}
    reading.verify(
        store, checkpoint.record, progress, after=counts["chunks"], on_damage=damaged, **group
    )
    work.note({**counts, "over": True})
    return {
        "ok": not counts["damaged"],
        **{name: counts[name] for name in ("chunks", "bytes", "damaged", "damage")},
    }


def verify_unreadable(work: Work, error: ShardckptError) -> dict[str, Any]:
    """Note that the commit record of a checkpoint cannot be read, which is damage."""
    damage = [{"file": RECORD, "tensor": None, "box": None, "reason": str(error)[:_LONGEST_REASON]}]
    counts: dict[str, Any] = {"chunks": 0, "bytes": 0, "damaged": 1, "damage": damage}
    work.note({"attempt": "", "total": None, **counts, "over": True})
    return {"ok": False, **counts}


class VerificationNotes:
    """Writes down what the process of a verification notes."""

    def __init__(self, journal: Journal, roots: Roots, ident: str, job: int | None) -> None:
        """Look for an unfinished verification by the same job (None: by a scrub).

        Raises:
            StorageError: the journal cannot be read.
        """
        self._journal, self._roots, self._ident, self._job = journal, roots, ident, job
        self.last: Verification | None = journal.unfinished_verification(ident, job)

    @property
    def resume(self) -> dict[str, Any]:
        """The earlier progress, from which the process resumes."""
        if self.last is None:
            return {}
        return {
            name: getattr(self.last, name)
            for name in ("attempt", "chunks", "total", "bytes", "damaged", "damage")
        }

    def note(self, state: dict[str, Any]) -> None:
        """Write down what the process says. Raises StorageError."""
        if self.last is not None and self.last.attempt != state["attempt"]:
            self.end({"code": "replaced", "message": "it was replaced"})
        if self.last is None:
            self.last = self._journal.begin_verification(self._ident, state["attempt"], self._job)
        counted = {name: state[name] for name in ("chunks", "total", "bytes", "damaged", "damage")}
        last = replace(self.last, **counted)
        self.last = self._journal.update_verification(
            last, over=state["over"], notice=self._notice(last) if state["over"] else None
        )

    def end(self, error: Mapping[str, str]) -> None:
        """Record that the verification failed. Raises StorageError."""
        if self.last is not None and self.last.ended is None:
            notice = None if error["code"] in _GONE else self._notice(self.last)
            last = replace(self.last, error=error["message"])
            self._journal.update_verification(last, over=True, notice=notice)
        self.last = None

    def _notice(self, one: Verification) -> dict[str, Any] | None:
        """The notice about the damage that a verification has found; None: it has found none."""
        if not one.damaged:
            return None
        first = [
            part | {"reason": self._roots.without_places(part["reason"])}
            for part in one.damage[:_MOST_IN_NOTICE]
        ]
        return {
            "event": "damage",
            "checkpoint": self._ident,
            "source": "scrub" if self._job is None else "job",
            "job": self._job,
            "verification": one.number,
            "damaged": one.damaged,
            "damage": first,
        }
