"""The part of a run's page about its versions: what each has cost, and who has which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.reading.inspection.markup import Html, data, el
from shardckpt.serve.pages.frame import link, section, span, table
from shardckpt.serve.rhythm import time_of
from shardckpt.text import count, file_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.runs.leases import HeldLease

MOST_SHOWN = 20
_HEADS = (
    *(
        ("Version", False),
        ("Differs from", False),
        ("Changed", True),
        ("Stored", True),
        ("Of all bytes", True),
        ("Time to publish", True),
    ),
    ("Followed by", False),
)


def versions_section(
    entries: Sequence[dict[str, Any]], readers: Sequence[HeldLease]
) -> Html | None:
    """The newest versions; None of a run that has no differences and no readers.

    Args:
        entries: checkpoints of the run, the newest first, as lists have them.
        readers: the leases of its readers.
    """
    shown = [one for one in entries if not one["superseded"]]
    if not readers and not any(one.get("began") for one in entries):
        return None
    rows = [_row(one, readers) for one in shown]
    have = {one["step"] for one in shown}
    others = sum(one.version not in have for one in readers)
    note = f"{count(others, 'reader')} with an older version, or with none yet." if others else ""
    listed = table(_HEADS, rows, caption=count(len(rows), "version"), ident="versions")
    explanation = el(
        "p",
        "A reader is there while its lease lasts: until it closes, or for ten minutes after it "
        "died. ",
        note,
        class_="quiet",
    )
    return section("Versions", listed, explanation)


def _row(one: dict[str, Any], readers: Sequence[HeldLease]) -> list[Any]:
    stored, nbytes, changed_bytes = one["stored_bytes"], one["bytes"], one["changed_bytes"]
    changed = changed_bytes / nbytes if changed_bytes is not None and nbytes else None
    share = stored / nbytes if stored is not None and nbytes else None
    seconds = publishing_seconds(one.get("began"), one["created"])
    holders: dict[str, int] = {}
    for reader in readers:
        if reader.version == one["step"]:
            holders[reader.holder] = holders.get(reader.holder, 0) + 1
    return [
        link("checkpoint", one["id"], one["name"]),
        one["bases"][0].rstrip("/").rpartition("/")[2] if one["bases"] else "– (all elements)",
        "–" if changed is None else data("changed", f"{changed:.6f}", f"{changed:.2%}"),
        "–" if stored is None else data("stored_bytes", stored, file_size(stored)),
        "–" if share is None else data("share", f"{share:.6f}", f"{share:.2%}"),
        "–" if seconds is None else data("seconds", f"{seconds:g}", span(seconds)),
        ", ".join(name if n == 1 else f"{name} ×{n}" for name, n in sorted(holders.items())) or "–",
    ]


def publishing_seconds(began: str | None, committed: str | None) -> float | None:
    """Seconds from one time to the other; None: one of them is not known.

    >>> publishing_seconds("2026-01-01T00:00:00+00:00", "2026-01-01T00:00:07+00:00")
    7.0
    """
    first, last = time_of(began), time_of(committed)
    return None if first is None or last is None else max(0.0, (last - first).total_seconds())
