"""`shardckpt reshard`: a checkpoint rewritten for another layout."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.commit import commit
from shardckpt.cli.exits import going_on_later
from shardckpt.cli.opening import suggesting_import
from shardckpt.cli.options import takes
from shardckpt.cli.screen import Json, Screen, transfer_bar, write_json
from shardckpt.cli.text import conversion_lines
from shardckpt.reshard.options import ReshardOptions
from shardckpt.text import count, file_size, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.reshard.execute import ReshardReport

COMMIT = "commit"
"""A source argument that means: commit the workers' output instead of resharding."""

_MOST_NOTICES = 3
"""Most notices that are printed."""


@takes(ReshardOptions)
def reshard(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="The checkpoint to read: a path or url. After --worker, `reshard commit DST` "
            "does the same as `commit DST`.",
        ),
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="Where the new checkpoint goes: a path or url.")
    ],
    *,
    given: dict[str, Any],
    as_json: Json = False,
) -> None:
    """Rewrite a checkpoint for another mesh.

    Elements stay the same, unless --dtype converts them. SRC does not change. After an
    interruption, the same command continues. The first rule that matches a tensor decides: first
    those of --rule, then --rules, --preset and --like.
    """
    if source == COMMIT:
        commit(destination, as_json=as_json)
        return
    # The imports take long enough to be interrupted.
    with (
        going_on_later("run the same command again to continue"),
        suggesting_import(source),
        transfer_bar("resharding") as progress,
    ):
        from shardckpt.reshard.execute import reshard as run

        report = run(source, destination, **ReshardOptions.arguments(given), progress=progress)
    if as_json:
        write_json(report.to_json())
    else:
        screen = Screen()
        screen.show(lines(screen, report, "resharded"))


def lines(screen: Screen, report: ReshardReport, done: str) -> Iterator[str]:
    """A report as text; `done` is the verb of its first line."""
    rate = (
        f", {file_size(round(report.nbytes / report.seconds))}/s"
        if report.committed and not report.done_before
        else ""
    )
    before = f", {report.done_before:,} done before" if report.done_before else ""
    share = "" if report.committed else "a worker's share of "
    what = (
        f"{share}{file_size(report.nbytes)} in {count(report.tasks, 'task')}{before}, "
        f"{report.seconds:.1f} s{rate}"
    )
    word = screen.paint(done, "bold green") if report.committed else screen.paint("written", "bold")
    yield f"{word}  {visible(report.url)}: {what}"
    yield from conversion_lines(report.conversions)
    yield from (f"note      {visible(notice)}" for notice in report.notices[:_MOST_NOTICES])
    if len(report.notices) > _MOST_NOTICES:
        yield f"note      {len(report.notices) - _MOST_NOTICES:,} more; --json has all"
    if not report.committed:
        place = visible(quote(report.url))
        yield f"when all workers are done, run `shardckpt reshard commit {place}`"
