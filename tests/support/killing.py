"""One try: kill processes on their way through a save, and see that nothing is lost, nothing is
mixed and all goes on."""

from __future__ import annotations

import re
import shutil
import signal

from aftermath import LAYOUTS, assert_goes_on, contents, copied, prepare, value_of

__all__ = ["CASES", "CASE_IDS", "ORDERS", "kill", "operations_of", "reported"]

ORDERS = [
    ("commit", "save", "commit", "collect"),
    ("save", "commit", "collect"),
    ("collect", "commit", "save"),
    ("commit", "collect", "save"),
]
CASES = [
    (layout, processes, overwrite)
    for layout in LAYOUTS
    for processes in (2, 3)
    for overwrite in (False, True)
]
CASE_IDS = [
    f"{layout}-{processes} processes-{'overwrite' if overwrite else 'first'}"
    for layout, processes, overwrite in CASES
]
KILLED = (signal.SIGKILL, signal.SIGALRM)


def operations_of(jobs, base, case):
    """Prepare a place to torture; how many operations each process does there when all goes
    well."""
    layout, processes, overwrite = case
    prepare(jobs, base, layout, processes, overwrite=overwrite)
    whole = copied(base, base.parent / "whole")
    options = {"layout": layout, "overwrite": overwrite, "commit_timeout": 30}
    return [len(names) for names in jobs.run("save", processes, whole / "checkpoint", 2, options)]


def kill(job, base, case, number, fate):
    """Kill one process, or all, on its way through a save; how it went on, `got through` if none
    was killed."""
    layout, processes, overwrite = case
    root = copied(base, base.parent / f"{fate['process']}-{number}")
    options = {"layout": layout, "overwrite": overwrite}
    answers = job.run("save", processes, root / "checkpoint", 2, options, fate)
    if "signal" not in answers[fate["process"]]:
        return "got through"
    assert contents(root / "earlier") == contents(base / "earlier")
    published = _assert_all_know(root, answers, fate, overwrite=overwrite)
    became = assert_goes_on(job, root, layout, processes, ORDERS[number % len(ORDERS)])
    shutil.rmtree(root)
    return "published" if published else became or "nothing was left"


def _assert_all_know(root, answers, fate, *, overwrite):
    """Check that all survivors know whether the checkpoint is there, which it is entirely or not at
    all; returns that."""
    victim, all_killed = fate["process"], fate.get("act") == "kill all"
    value = value_of(root / "checkpoint", len(answers))
    assert value in ((1, 2) if overwrite else (None, 2))
    for process, answer in enumerate(answers):
        if "signal" in answer:
            assert answer["signal"] in KILLED
            assert all_killed or process == victim
        elif value == 2:
            assert isinstance(answer, list), answer
        else:
            assert answer["error"] == "CommitError", answer
    if value != 2 and victim and not all_killed:
        assert victim in reported(answers[0]["message"])
    return value == 2


def reported(message):
    """The hosts that a committer's message says did not finish in time."""
    match = re.search(r"hosts? ([\d, -]+) \(of \d+\) did not finish within", message)
    assert match, message
    ranges = (part.partition("-") for part in match[1].split(", "))
    return {host for first, _, last in ranges for host in range(int(first), int(last or first) + 1)}
