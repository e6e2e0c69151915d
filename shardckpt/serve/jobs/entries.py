"""Jobs and verifications as the service describes them, in JSON."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class VerificationEntry(TypedDict):
    """A verification that has ended.

    `job` is None for the scrub. `error` is the reason if it could not finish.
    """

    number: int
    attempt: str
    begun: str
    ended: str
    job: int | None
    chunks: int
    total: int | None
    bytes: int
    damaged: int
    error: str | None
    ok: bool


class JobEntry(TypedDict):
    """A job.

    `done` and `total` are its progress; `result` is set when it has succeeded, `error` (`code`,
    `message`) when it has failed.
    """

    number: int
    operation: str
    arguments: dict[str, Any]
    subject: str
    destination: str | None
    who: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    cancelling: bool
    tries: int
    done: int | None
    total: int | None
    created: str
    started: str | None
    ended: str | None
    result: dict[str, Any] | None
    error: dict[str, str] | None
    waits_for: str | None
