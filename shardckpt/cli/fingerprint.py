"""`shardckpt fingerprint`: a hash of the tensors of a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt.cli.screen import Json, Screen, progress_bar, write_json
from shardckpt.text import count, visible


def fingerprint(
    url: Annotated[str, typer.Argument(metavar="URL", help="A checkpoint: a path or url.")],
    *,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Also print the hash of each tensor.")
    ] = False,
    read: Annotated[
        bool,
        typer.Option("--read", help="Read all elements, even if the save has recorded the hash."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print a hash of all tensors of a checkpoint.

    Equal names, dtypes, shapes and elements have the same hash of 32 digits; mesh, chunks and
    compression do not matter. If the save has recorded the hash (SaveOptions(fingerprint=True)), no
    tensor is read.
    """
    from shardckpt.cli.opening import open_checkpoint

    checkpoint = open_checkpoint(url)
    with progress_bar("reading") as progress:
        digests = checkpoint.fingerprint(recorded=not read, progress=progress)
    if as_json:
        write_json(
            {
                "url": str(checkpoint.location),
                "fingerprint": digests.total,
                "tensors": dict(digests.tensors),
            }
        )
        return
    screen = Screen()
    lines = [
        (
            f"{screen.paint(digests.total, 'bold')}  {visible(str(checkpoint.location))}: "
            f"{count(len(digests.tensors), 'tensor')}"
        )
    ]
    screen.show(
        [
            *lines,
            *(f"{digest}  {visible(name)}" for name, digest in digests.tensors.items() if tensors),
        ]
    )
