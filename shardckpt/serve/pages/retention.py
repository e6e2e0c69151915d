"""Section with the steps of a run that rules of retention would delete, and the forms for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.reading.inspection.markup import Html, Part, data, el
from shardckpt.serve.pages.actions import job_form
from shardckpt.serve.pages.frame import facts, section, table, when
from shardckpt.serve.pages.jobs import steps_table
from shardckpt.text import count, file_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.serve.pages.frame import Viewer

_MOST_LEFT = 100


def retention_section(
    run: str,
    mark: Mapping[str, str] | None,
    last: Mapping[str, Any] | None,
    viewer: Viewer,
    *,
    ruled: bool,
) -> Html:
    """The part of a run's page about its end and the rules.

    Args:
        run: id of the run.
        mark: who has marked it as ended (`by`) and `when`; None: nobody.
        last: the latest job `retain` of the run that is done; None: there is none.
        viewer: for whom.
        ruled: whether a rule is for the run.
    """
    rows: list[tuple[str, Part]] = [("Run", "running" if mark is None else "ended")]
    lines: list[Html] = []
    if mark is not None:
        lines.append(
            el(
                "p",
                f"{mark['by']} has marked it as ended, ",
                when(mark["when"]),
                ".",
                class_="quiet",
            )
        )
    buttons: list[Html] = []
    parts: list[Html | None] = []
    if last is not None:
        result = last["result"]
        job = el("a", f"job {last['number']}", href=f"/ui/job/{last['number']}")
        what = "The list is that of " if result["dry"] else "The rules were applied by "
        lines.append(el("p", what, job, ", ", when(last["ended"]), ".", class_="quiet"))
        rows.append(
            (
                "Would free" if result["dry"] else "Freed",
                data("bytes", result["bytes"], file_size(result["bytes"])),
            )
        )
        stay = result.get("left_count", len(result["left"]))
        rows.append(("Steps that stay all the same", data("left_count", stay, f"{stay:,}")))
        parts.append(steps_table(result, "retention"))
        left = list(result["left"].items())[:_MOST_LEFT]
        parts.append(
            table(
                (("Step", False), ("Why", False)),
                left,
                caption="Steps that stay all the same",
                ident="left",
            )
            if left
            else None
        )
        if result["dry"] and result["steps"] and mark is not None and viewer.may("admin", run):
            text = f"Delete {count(len(result['steps']), 'step')} for ever"
            buttons.append(
                job_form("retain", {"run": run, "apply": last["number"]}, text, danger=True)
            )
    if ruled and viewer.may("operate", run):
        buttons.insert(0, job_form("retain", {"run": run}, "List what the rules would delete"))
    if viewer.may("admin", run):
        buttons.append(job_form("gc", {"run": run}, "Remove unfinished saves"))
        buttons.append(
            job_form("end", {"run": run}, "Mark as ended")
            if mark is None
            else job_form("reopen", {"run": run}, "Not ended")
        )
    hint = (
        None
        if ruled
        else el(
            "p",
            "No retention rule names this run: the service deletes none of its steps.",
            class_="quiet",
        )
    )
    return section(
        "Retention",
        facts(rows),
        *lines,
        hint,
        *parts,
        el("div", buttons, class_="buttons") if buttons else None,
    )
