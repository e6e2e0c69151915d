"""`shardckpt doctor`: what works at a place, and which promises hold there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt.cli.screen import Json, Screen, write_json
from shardckpt.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.io.doctor import Diagnosis

_STYLES = {"works": "green", "lacks": "yellow", "fails": "bold red", "skipped": "dim"}


def doctor(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="A directory for checkpoints: a path or url. It need not exist."
        ),
    ],
    *,
    as_json: Json = False,
) -> None:
    """Try whether a place can hold checkpoints.

    Small objects are written below it, by two processes, and removed again. The exit status is 1 if
    a promise does not hold that checkpoints cannot do without.
    """
    from shardckpt.io.doctor import PROMISES, examine

    diagnosis = examine(url)
    if as_json:
        write_json(
            {
                "url": str(diagnosis.location),
                "ok": diagnosis.ok,
                "trials": [
                    {"name": one.name, "outcome": one.outcome, "detail": one.detail}
                    for one in diagnosis.trials
                ],
                "promises": [
                    {
                        "name": one.name,
                        "holds": diagnosis.holds(one),
                        "needed": one.needed,
                        "text": one.text,
                        "trials": list(one.needs),
                    }
                    for one in PROMISES
                ],
                "left": diagnosis.left,
            }
        )
    else:
        screen = Screen()
        screen.show(_lines(screen, diagnosis))
    if not diagnosis.ok:
        raise typer.Exit(1)


def _lines(screen: Screen, diagnosis: Diagnosis) -> Iterator[str]:
    from shardckpt.io.doctor import PROMISES

    for trial in diagnosis.trials:
        yield (
            f"{screen.paint(f'{trial.outcome:7}', _STYLES[trial.outcome])}  {trial.name:9}  "
            f"{visible(trial.detail)}"
        )
    yield ""
    for promise in PROMISES:
        outcome = "works" if diagnosis.holds(promise) else "fails" if promise.needed else "lacks"
        answer = "holds" if outcome == "works" else "does not hold"
        yield f"{screen.paint(f'{answer:13}', _STYLES[outcome])}  {promise.name:8}  {promise.text}"
    yield ""
    if diagnosis.left is not None:
        yield (
            f"{screen.paint('left', 'bold red')}  {visible(diagnosis.left)}: the objects of the "
            "trials could not be deleted; delete them."
        )
    verdict = (
        screen.paint("ok", "bold green") if diagnosis.ok else screen.paint("not ok", "bold red")
    )
    yield f"{verdict}  {visible(str(diagnosis.location))}"
