"""`shardckpt verify`: comparison of all chunks with their checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt.cli.screen import Json, Screen, progress_bar, write_json
from shardckpt.text import count, file_size, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.reading.verification import Damage, VerifyReport

MOST_LINES = 100
"""Most damaged parts in the text output; --json has all."""


def verify(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A checkpoint of any format: a path or url.")
    ],
    as_json: Json = False,
) -> None:
    """Compare every chunk with its checksum.

    A checkpoint of another format is read completely: most formats have no checksums, so it is
    never "ok", only complete and readable. The exit status is 1 if anything is damaged or missing.
    """
    from shardckpt.cli.opening import open_checkpoint

    checkpoint = open_checkpoint(url)
    with progress_bar("verifying") as progress:
        report = checkpoint.verify(progress)
    if as_json:
        write_json({**_document(str(checkpoint.location), report), "notes": list(checkpoint.notes)})
    else:
        screen = Screen()
        screen.show(_lines(screen, str(checkpoint.location), report))
        screen.show(f"  {visible(note)}" for note in checkpoint.notes)
    if not report.complete:
        raise typer.Exit(1)


def _document(url: str, report: VerifyReport) -> dict[str, Any]:
    return {
        "url": url,
        "ok": report.ok,
        "checked": report.checked,
        "complete": report.complete,
        "chunks": report.chunks,
        "bytes_read": report.bytes_read,
        "damage": [
            {
                "tensor": damage.tensor,
                "start": None if damage.box is None else list(damage.box.start),
                "stop": None if damage.box is None else list(damage.box.stop),
                "file": damage.file,
                "reason": damage.reason,
            }
            for damage in report.damage
        ],
    }


def _lines(screen: Screen, url: str, report: VerifyReport) -> Iterator[str]:
    read = f"{count(report.chunks, 'chunk')}, {file_size(report.bytes_read)}"
    if report.ok:
        yield f"{screen.paint('ok', 'bold green')}  {visible(url)}: {read}, all as written"
        return
    if report.complete:
        compared = (
            f"the CRC-32 of {count(report.compared, 'tensor')} fits, other parts have no checksums"
        )
        known = compared if report.compared else "no checksums"
        yield f"{screen.paint('complete and readable', 'bold')}; {known}  {visible(url)}: {read}"
        return
    yield (
        f"{screen.paint('damaged', 'bold red')}  {visible(url)}: "
        f"{count(len(report.damage), 'damaged part')}; {read} read"
    )
    by_file: dict[str, list[Damage]] = {}
    for damage in report.damage[:MOST_LINES]:
        by_file.setdefault(damage.file, []).append(damage)
    for file, several in by_file.items():
        yield ""
        yield f"  {screen.paint(visible(file), 'bold')}"
        yield f"  {screen.paint(visible(several[0].reason), 'dim')}"
        for damage in several:
            if damage.tensor is not None:
                yield (
                    f"    {visible(damage.tensor)}{'' if damage.box is None else f' {damage.box}'}"
                )
    if len(report.damage) > MOST_LINES:
        yield ""
        yield f"… and {len(report.damage) - MOST_LINES:,} more; --json lists all"
