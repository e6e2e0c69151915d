"""Rows of the journal: jobs and verifications."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Sequence

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
STATES: tuple[str, ...] = get_args(JobState)
_ENDED = ("done", "failed", "cancelled")
DAMAGED_ROW = {"code": "corrupt", "message": "its row in the journal is damaged; start a new job."}
"""Error of a job whose row cannot be read."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job."""

    number: int
    operation: str
    arguments: dict[str, Any]
    subject: str
    """Id of the checkpoint, run or place that it is about."""
    destination: str | None
    """Id of the place that it writes; no two jobs write one place at a time."""
    who: str
    """Name of the token that started it."""
    state: JobState
    cancelling: bool = False
    """Whether somebody has cancelled it and its process has not ended yet."""
    tries: int = 0
    """Number of starts."""
    done: int | None = None
    total: int | None = None
    """Progress, in the unit of the operation."""
    created: str = ""
    """Times are UTC, ISO 8601, by this machine's clock."""
    started: str | None = None
    ended: str | None = None
    result: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    """Code and message."""
    roots: list[str] | None = None
    """Names of the roots that it may read; None: every root."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in _ENDED

    def to_json(self) -> dict[str, Any]:
        """The job as JSON."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "roots"}


@dataclass(frozen=True, slots=True)
class Verification:
    """A verification of a checkpoint: ended, or begun."""

    number: int
    id: str
    attempt: str
    begun: str
    ended: str | None = None
    job: int | None = None
    """Number of the verify job; None for a scrub."""
    chunks: int = 0
    """Verified chunks; `total`: all chunks."""
    total: int | None = None
    bytes: int = 0
    damaged: int = 0
    """Number of damaged parts; the first of them are in `damage`."""
    damage: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    """Error that ended it early."""

    @property
    def ok(self) -> bool:
        """Whether it has ended, and found no damage."""
        return self.ended is not None and not self.damaged and self.error is None

    def to_json(self) -> dict[str, Any]:
        """The verification as JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {"ok": self.ok}


_DAMAGED = object()


def job_of(row: Sequence[Any]) -> JobRow:
    """A job of a row; a damaged row is a job with an error."""
    fields = dict(zip(JobRow.__slots__, row, strict=True))
    fields["cancelling"] = bool(fields["cancelling"])
    kinds = {"arguments": dict, "result": dict, "error": dict, "roots": list}
    for name, kind in kinds.items():
        fields[name] = _parse(fields[name], {} if name == "arguments" else None, kind)
        if fields[name] is _DAMAGED:
            damaged: dict[str, Any] = {
                "arguments": {},
                "result": None,
                "error": DAMAGED_ROW,
                "roots": [],
            }
            return JobRow(**fields | damaged)
    return JobRow(**fields)


def verification_of(row: Sequence[Any]) -> Verification:
    """A verification of a row; of a damaged row without its list of damage."""
    fields = dict(zip(Verification.__slots__, row, strict=True))
    try:
        damage = [
            {name: one[name] for name in ("file", "tensor", "box", "reason")}
            for one in json.loads(fields["damage"])
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        damage = []
    return Verification(**fields | {"damage": damage})


def _parse(text: str | None, nothing: Any, kind: type) -> Any:
    """A JSON object or array of a row; `_DAMAGED` if it is not one."""
    if text is None:
        return nothing
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _DAMAGED
    return value if isinstance(value, kind) else _DAMAGED
