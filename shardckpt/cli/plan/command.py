"""`shardckpt plan`: the effects and costs of a reshard, without doing it."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (typer reads the annotation)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.options import takes
from shardckpt.cli.screen import Json, Screen, write_json
from shardckpt.errors import OptionError
from shardckpt.reshard.options import ReshardOptions

if TYPE_CHECKING:
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.places import Places
    from shardckpt.reshard.forecast.rates import Rates


@takes(ReshardOptions, without=("engine", "worker", "overwrite", "verify"))
def plan(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint of any format: a path or url.")
    ],
    destination: Annotated[
        str | None,
        typer.Argument(
            metavar="DST",
            help="The place of the new checkpoint, if the speed of writing there is to be "
            "measured.",
        ),
    ] = None,
    *,
    given: dict[str, Any],
    devices_per_host: Annotated[
        int | None,
        typer.Option(
            "--devices-per-host",
            min=1,
            metavar="N",
            help="Devices of each host that will restore; default: 8, or all if there are fewer.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            metavar="READ[,WRITE]",
            help="Bytes per second instead of a measurement, as in 2GiB,800MiB.",
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain",
            metavar="NAME",
            help="Show only the rule that decides on this tensor, and why.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write the plan to an HTML page."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a reshard would do and cost.

    SRC and DST do not change. A SRC of another format would be imported (`shardckpt import`), with
    the same options. To measure rates, at most 64 MiB of SRC are read, and 32 MiB are written and
    deleted in DST, or above it if it does not exist.
    """
    if explain is not None and html is not None:
        raise OptionError("--explain is of one tensor, and --html of all; give one of them.")
    from shardckpt.cli.opening import open_checkpoint
    from shardckpt.cli.plan import lines as plan_lines
    from shardckpt.cli.server import located
    from shardckpt.io.url import parse
    from shardckpt.reshard.forecast.document import document
    from shardckpt.reshard.forecast.forecast import forecast, known_places
    from shardckpt.reshard.job import check_destination
    from shardckpt.reshard.plan import plan_reshard

    if given["like"] is not None:
        given["like"] = located(given["like"])
    options = ReshardOptions(**ReshardOptions.arguments(given))
    checkpoint, place = open_checkpoint(source), None if destination is None else parse(destination)
    if place is not None:
        check_destination(place)
    planned = plan_reshard(checkpoint, options, place)
    if explain is not None:
        explained = plan_lines.explained(planned, checkpoint, explain)
        write_json(explained) if as_json else Screen().show(
            plan_lines.explanation(planned, options, explained)
        )
        return
    places = known_places(checkpoint)
    prediction = forecast(
        checkpoint,
        planned,
        _rates(rate, checkpoint, places, destination),
        options=options,
        destination=destination,
        devices_per_host=devices_per_host,
        places=places,
    )
    doc = document(prediction)
    if html is not None:
        from shardckpt.serve.pages.plan import page

        _write(html, page(prediction, doc))
    if as_json:
        write_json(doc)
    else:
        screen = Screen()
        screen.show(plan_lines.lines(screen, prediction, doc))


def _rates(
    given: str | None, checkpoint: Checkpoint, places: Places | None, destination: str | None
) -> Rates:
    from shardckpt.errors import CorruptionError, StorageError, extend
    from shardckpt.reshard.forecast.rates import Rates, given_rates, measure_read, measure_write

    if given is not None:
        return given_rates(given)
    try:
        written = None if destination is None else measure_write(destination)
        return Rates(measure_read(checkpoint, places), written)
    except (CorruptionError, StorageError) as e:
        extend(e, after=" To plan without a measurement, give --rate.")
        raise


def _write(path: Path, text: str) -> None:
    from shardckpt.errors import StorageError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise StorageError(
            f"cannot write the page to {path} ({e.strerror}); give --html another path."
        ) from e
