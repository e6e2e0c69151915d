"""The page about health, and what verifications have found in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.reading.inspection.markup import Html, Part, data, el
from shardckpt.serve.pages.actions import job_form
from shardckpt.serve.pages.frame import Viewer, facts, frame, link, section, table, when
from shardckpt.serve.pages.jobs import damage_table
from shardckpt.text import count, duration_text, file_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.serve.jobs.rows import Verification


def health_page(doc: Mapping[str, Any], viewer: Viewer) -> str:
    """Page of damage, progress of the scrub, and latest verifications.

    Args:
        doc: see `serve.health.health`.
        viewer: whom it is for.
    """
    checkpoints, never, wrong = (
        doc["checkpoints"],
        doc["never_verified"],
        len(doc["damaged"]) + len(doc["unreadable"]),
    )
    shown: list[tuple[str, Part]] = [
        ("Damaged", data("damaged", wrong, f"{wrong:,}")),
        ("Checkpoints", f"{checkpoints:,}"),
        ("Not verified yet", data("never_verified", never, f"{never:,}")),
    ]
    latest = (
        verifications_table(doc["latest"], whose=True)
        if doc["latest"]
        else el("p", "Nothing was verified yet.")
    )
    main = el(
        "main",
        el("h1", "Health"),
        section("Damaged checkpoints", facts(shown), _damage_section(doc)),
        section("Scrub", *_scrub(doc["scrub"])),
        section("Latest verifications", latest),
        id="main",
    )
    return frame("Health", main, here="/ui/health", viewer=viewer)


def verification_section(
    ident: str, attempt: str, history: Sequence[Verification], viewer: Viewer
) -> Html:
    """Section with the results of a checkpoint's verifications.

    Args:
        ident: id of the checkpoint.
        attempt: the attempt that is there now.
        history: its verifications, the latest first.
        viewer: whom it is for.
    """
    last = next((one for one in history if one.ended is not None and one.attempt == attempt), None)
    parts: list[Html | None] = []
    if last is None:
        parts.append(el("p", "Not verified yet."))
    else:
        outcome = el("span", _outcome(last), class_=f"state {_mark(last)}")
        parts.append(el("p", outcome, "verified ", when(last.ended), " by ", _by(last.job)))
        parts.append(damage_table(last.damage, last.damaged) if last.damaged else None)
    parts.append(
        job_form("verify", {"checkpoint": ident}, "Verify now")
        if viewer.may("operate", ident)
        else None
    )
    if history:
        parts.append(
            el(
                "details",
                el("summary", "History"),
                verifications_table(history, whose=False, attempt=attempt),
            )
        )
    return section("Verification", *parts)


def verifications_table(
    history: Sequence[Verification], *, whose: bool, attempt: str | None = None
) -> Html:
    """Verifications as a table, with their checkpoints if there are several."""
    heads = [("Checkpoint", False)] if whose else []
    heads += [
        ("Found", False),
        ("Begun", False),
        ("Ended", False),
        ("By", False),
        ("Chunks", True),
        ("Read", True),
    ]
    rows = []
    for one in history:
        state = el("span", _outcome(one), class_=f"state {_mark(one)}")
        earlier = (
            el("small", "of an earlier attempt")
            if attempt is not None and one.attempt != attempt
            else None
        )
        cells: list[Part] = [link("checkpoint", one.id, one.id)] if whose else []
        cells += [el("span", state, earlier), when(one.begun), when(one.ended), _by(one.job)]
        cells += [
            data("chunks", one.chunks, f"{one.chunks:,}"),
            data("bytes", one.bytes, file_size(one.bytes)),
        ]
        rows.append(cells)
    return table(heads, rows, caption=count(len(rows), "verification"), ident="verifications")


def _outcome(one: Verification) -> str:
    if one.damaged:
        return f"{count(one.damaged, 'damaged part')}" + ("" if one.ended else " so far")
    if one.error is not None:
        return f"not verified: {one.error}"
    if one.ended is None:
        return "at work" + (f": {100 * one.chunks // one.total} %" if one.total else "")
    return "ok"


def _mark(one: Verification) -> str:
    return (
        "mark-failed"
        if one.damaged
        else "mark-cancelled"
        if one.error
        else "mark-running"
        if one.ended is None
        else "mark-done"
    )


def _by(job: int | None) -> Html:
    return el("span", "scrub") if job is None else el("a", f"job {job}", href=f"/ui/job/{job}")


def _damage_section(doc: Mapping[str, Any]) -> Html:
    rows: list[Sequence[Part]] = []
    for one in doc["damaged"]:
        verification = one["verification"]
        parts = (
            f"{count(verification['damaged'], 'damaged part')} of "
            f"{count(verification['chunks'], 'chunk')}"
        )
        summary = el("span", parts, class_="state mark-unreadable")
        rows.append(
            (
                link("checkpoint", one["id"], one["id"]),
                summary,
                when(verification["ended"]),
                _by(verification["job"]),
            )
        )
    for one in doc["unreadable"]:
        reason = el(
            "span",
            el("span", "unreadable", class_="state mark-unreadable"),
            el("small", one["reason"] or ""),
        )
        rows.append((link("checkpoint", one["id"], one["id"]), reason, "–", el("span", "scan")))
    if not rows:
        return el("p", "No damaged checkpoint is known.")
    heads = (("Checkpoint", False), ("Damage", False), ("Found", False), ("By", False))
    return table(heads, rows, caption=count(len(rows), "damaged checkpoint"), ident="damaged")


def _scrub(doc: Mapping[str, Any] | None) -> list[Html]:
    if doc is None:
        return [
            el(
                "p",
                "This service does not scrub; with ",
                el("code", "--scrub 30d"),
                " it reads every chunk once in 30 days.",
            )
        ]
    nbytes, left = doc["bytes"], doc["due_bytes"]
    share = 1 - left / nbytes if nbytes else 1.0
    bar = el(
        "progress",
        f"{share:.0%}",
        value=f"{share:.4f}",
        max=1,
        aria_label="Share of bytes that were verified in this period",
    )
    verified = f"{doc['checkpoints'] - doc['due']:,} of {count(doc['checkpoints'], 'checkpoint')}"
    shown: list[tuple[str, Part]] = [
        ("Period", duration_text(doc["period"])),
        ("At most", f"{file_size(doc['rate'])}/s"),
        ("Verified in this period", el("span", f"{share:.0%}", el("small", verified))),
        (
            "At work",
            "–" if doc["at_work"] is None else link("checkpoint", doc["at_work"], doc["at_work"]),
        ),
    ]
    parts = [facts(shown), el("p", bar)]
    if not doc["keeps_up"]:
        needed = f"{file_size(round(nbytes / doc['period']))}/s"
        text = (
            f"The scrub does not keep up: {file_size(nbytes)} in each period take {needed}. Raise "
            "--scrub-rate or --scrub."
        )
        parts.append(el("p", text, class_="bad", role="alert"))
    return parts
