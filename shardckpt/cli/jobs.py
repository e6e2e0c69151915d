"""`shardckpt jobs` and `shardckpt job`: the jobs of a service."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.exits import going_on_later
from shardckpt.cli.screen import Cell, Json, Screen, progress_bar, transfer_bar, write_json
from shardckpt.cli.server import required_server
from shardckpt.cli.text import time_text
from shardckpt.errors import OptionError
from shardckpt.text import shorten, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardckpt.serve.client import Client
    from shardckpt.serve.jobs.entries import JobEntry

_STYLES = {
    "done": "green",
    "failed": "red",
    "running": "cyan",
    "queued": "yellow",
    "cancelled": "yellow",
}
_IN_BYTES = ("reshard", "copy", "export", "import")
"""Operations with progress in bytes."""

Number = Annotated[int, typer.Argument(metavar="NUMBER", min=1, help="The number of the job.")]


def jobs(
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="List only jobs that are queued, running, done, failed or cancelled.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the jobs of a service, newest first.

    Name the service with --server.
    """
    with required_server() as client:
        listing = list(client.jobs(state))
    if as_json:
        write_json({"jobs": listing})
    elif listing:
        screen = Screen()
        screen.show(screen.table(_rows(listing), gap=3))
    else:
        typer.echo(f"no jobs{'' if state is None else f' in the state {state}'}", err=True)


def start(
    operation: Annotated[
        str,
        typer.Argument(
            metavar="OPERATION",
            help="verify, pin, unpin, tag, untag, copy, reshard, export, import or delete; for a "
            "run: end (mark it as ended), reopen (remove the mark), retain (list or delete "
            "steps by retention rules), fold (the versions of a publisher).",
        ),
    ],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE…",
            help="Arguments of the operation, as in checkpoint=lab/run-7/100; repeat NAME= for a "
            "list.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--wait", help="Wait until the job ends, as `job wait` does.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a job on the service of --server.

    The arguments of each operation: https://HOST:8470/v1/openapi.json, or the documentation of the
    service.
    """
    with required_server() as client:
        schema = client.operations().get(operation, {})
        job = client.start(operation, **_arguments(values or [], schema.get("properties", {})))
        if follow:
            _wait(client, job["number"], as_json=as_json)
        else:
            _show(job, as_json=as_json)


def show(number: Number, as_json: Json = False) -> None:
    """Show the state and report of a job."""
    with required_server() as client:
        _show(client.job(number), as_json=as_json)


def wait(
    number: Number,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="Stop waiting after this time, as in 30min; the job continues.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Wait until a job of a service ends.

    The exit status is 0 if the job is done, 1 if a verification has found damage, 7 if the job was
    cancelled or the time is over, else the status of the job's error. Ctrl-C does not end the job.
    """
    from shardckpt.options import parse_duration

    seconds = None if timeout is None else parse_duration(timeout, "--timeout")
    with required_server() as client:
        _wait(client, number, seconds, as_json=as_json)


def cancel(number: Number, as_json: Json = False) -> None:
    """Cancel a job of a service.

    A cancelled job publishes nothing; `shardckpt gc` removes its files.
    """
    with required_server() as client:
        _show(client.cancel(number), as_json=as_json)


def _wait(client: Client, number: int, timeout: float | None = None, *, as_json: bool) -> None:
    """Follow a job with a progress bar, and show it."""
    job = client.job(number)
    bar = transfer_bar if job["operation"] in _IN_BYTES else progress_bar
    later = (
        f"job {number} goes on; `shardckpt --server {client.url} job wait {number}` follows it, "
        f"and `job cancel {number}` ends it"
    )
    with going_on_later(later), bar(job["operation"]) as progress:
        job = client.wait(number, timeout, progress)
    _show(job, as_json=as_json)
    if job["result"] is not None and job["result"].get("ok") is False:
        raise typer.Exit(1)


def _show(job: JobEntry, *, as_json: bool) -> None:
    if as_json:
        write_json({**job})
        return
    screen = Screen()
    screen.show(_lines(screen, job))


def _arguments(values: Sequence[str], properties: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation, each as its JSON schema says.

    One without a schema is sent as text.

    Raises:
        OptionError: a text is not a NAME=VALUE, or is of another type than the schema says.
    """
    arguments: dict[str, Any] = {}
    for text in values:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise OptionError(f"{shorten(text)}: give NAME=VALUE, as in checkpoint=lab/run-7/100.")
        kind = properties.get(name, {}).get("type")
        if kind == "array":
            arguments.setdefault(name, []).append(value)
        elif name in arguments:
            raise OptionError(f"{name}= is given twice; give it once.")
        elif kind == "boolean" and value not in ("true", "false"):
            raise OptionError(f"{name}={shorten(value)}: give true or false.")
        elif kind == "integer" and not (value.isascii() and value.isdecimal() and len(value) <= 18):
            raise OptionError(f"{name}={shorten(value)}: give an integer.")
        else:
            arguments[name] = (
                value == "true" if kind == "boolean" else int(value) if kind == "integer" else value
            )
    return arguments


def _rows(listing: Sequence[JobEntry]) -> list[list[Cell]]:
    headings = ("job", "operation", "subject", "to", "state", "progress", "started by", "created")
    rows = [[Cell(heading, "dim", right=heading in ("job", "progress")) for heading in headings]]
    for one in listing:
        share = (
            f"{one['done'] / one['total']:.0%}" if one["done"] is not None and one["total"] else ""
        )
        rows.append(
            [
                Cell(str(one["number"]), "bold", right=True),
                Cell(visible(one["operation"])),
                Cell(visible(one["subject"])),
                Cell(visible(one["destination"] or "")),
                Cell(visible(_state(one)), _STYLES.get(one["state"], "")),
                Cell(share, right=True),
                Cell(visible(one["who"])),
                Cell(time_text(one["created"])),
            ]
        )
    return rows


def _lines(screen: Screen, job: JobEntry) -> Iterator[str]:
    state = screen.paint(visible(_state(job)), _STYLES.get(job["state"], ""))
    to = "" if job["destination"] is None else f" to {job['destination']}"
    yield (
        f"job {job['number']}  {visible(job['operation'])} {visible(job['subject'] + to)}: {state}"
    )
    for name in ("created", "started", "ended"):
        time: str | None = job[name]
        if time is not None:
            yield f"  {name:<9} {time_text(time)}"
    yield f"  {'by':<9} {visible(job['who'])}"
    if job["done"] is not None and job["total"] is not None:
        yield f"  {'progress':<9} {job['done']:,} of {job['total']:,}"
    if job["waits_for"] is not None:
        yield f"  {'waits':<9} {visible(job['waits_for'])}"
    if job["error"] is not None:
        yield f"  {'error':<9} {visible(job['error']['message'])}"
    for key, value in (job["result"] or {}).items():
        yield f"  {visible(key)}: {visible(value if isinstance(value, str) else json.dumps(value))}"


def _state(job: JobEntry) -> str:
    return (
        "cancelling"
        if job["cancelling"] and job["state"] in ("queued", "running")
        else job["state"]
    )
