"""The health of checkpoints: what the catalogue and the journal of verifications say together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardckpt.serve.access.identity import WHO
from shardckpt.serve.catalogue.catalogue import MOST_ROWS
from shardckpt.serve.catalogue.query import CheckpointQuery

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardckpt.serve.jobs.rows import Verification
    from shardckpt.serve.service import Service

_MOST_LATEST = 50
_KEPT = (
    "number",
    "attempt",
    "begun",
    "ended",
    "job",
    "chunks",
    "total",
    "bytes",
    "damaged",
    "error",
    "ok",
)


def with_verifications(service: Service, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries with their `verification`: the latest one of the same attempt, or None.

    Only a verification that has ended counts. The entries do not have its list of damage.

    `vanished` says whether their root has vanished.
    """
    idents = [one["id"] for one in entries]
    latest = (
        {}
        if service.upkeep is None or not idents
        else service.upkeep.journal.latest_verifications(idents)
    )
    gone, sees_all = service.scanner.watch.vanished, WHO.get().roots is None
    return [
        one
        | {
            "verification": _of_attempt(latest.get(one["id"]), one["attempt"]),
            "vanished": one["id"].partition("/")[0] in gone,
            "bases": one["bases"]
            if sees_all
            else [url for url in one["bases"] if not service.roots.hides(url)],
            "reason": one["reason"] and service.roots.without_places(one["reason"]),
        }
        for one in entries
    ]


def verifications(service: Service, ident: str | None, *, limit: int) -> list[Verification]:
    """Verifications of a checkpoint, or of all, the latest first, without the places of roots."""
    assert service.upkeep is not None, "they are only asked for where there is a journal"
    without_places = service.roots.without_places
    return [
        replace(
            one,
            damage=damage_without_places(service, one.damage),
            error=one.error and without_places(one.error),
        )
        for one in service.upkeep.journal.verifications(ident, limit=limit)
    ]


def damage_without_places(
    service: Service, damage: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Damaged parts with names in place of the locations of roots."""
    without_places = service.roots.without_places
    return [
        {
            **one,
            "file": one["file"] and without_places(one["file"]),
            "reason": without_places(one["reason"]),
        }
        for one in damage
    ]


def damaged_checkpoints(service: Service) -> list[dict[str, Any]]:
    """Entries of damaged committed checkpoints, with their verification.

    The latest verification of the same attempt found damage in these checkpoints.
    """
    if service.upkeep is None:
        return []
    latest = service.upkeep.journal.damaged_verifications()
    idents, entries = sorted(latest), []
    for first in range(0, len(idents), MOST_ROWS):
        for one in service.catalogue.find(idents[first : first + MOST_ROWS]):
            verification = _of_attempt(latest[one["id"]], one["attempt"])
            if one["state"] == "committed" and verification is not None:
                entries.append(one | {"verification": verification})
    return sorted(entries, key=lambda one: str(one["id"]))


def with_damaged(service: Service, runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs with `damaged`, the number of their damaged checkpoints, and with `vanished`.

    A checkpoint counts as damaged if its latest verification found damage.
    """
    counts = Counter(one["run"] for one in damaged_checkpoints(service))
    gone = service.scanner.watch.vanished
    return [
        run | {"damaged": counts[run["run"]], "vanished": run["run"].partition("/")[0] in gone}
        for run in runs
    ]


def health(service: Service) -> dict[str, Any]:
    """Content of the page about health.

    It has `damaged`, `unreadable`, `latest`, `scrub`, and the numbers of `checkpoints` and
    `never_verified`.
    """
    assert service.upkeep is not None, "the page is only asked for where there is a journal"
    scrubber = service.upkeep.scrubber
    counts = service.upkeep.tally.get()
    unreadable, _ = service.catalogue.checkpoints(
        CheckpointQuery(state="unreadable", limit=MOST_ROWS)
    )
    return {
        "checkpoints": counts.checkpoints,
        "never_verified": counts.never_verified,
        "damaged": damaged_checkpoints(service),
        "unreadable": with_verifications(service, unreadable),
        "latest": verifications(service, None, limit=_MOST_LATEST),
        "scrub": None if scrubber is None else scrubber.status(),
    }


def _of_attempt(verification: Verification | None, attempt: str | None) -> dict[str, Any] | None:
    if verification is None or verification.attempt != attempt:
        return None
    document = verification.to_json()
    return {name: document[name] for name in _KEPT}
