"""`shardckpt fingerprint`: what identifies the tensors of a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt.cli.screen import Screen, progress_bar, write_json
from shardckpt.excerpt import count, visible


def fingerprint(
    url: Annotated[str, typer.Argument(metavar="URL", help="A checkpoint: a path or url.")],
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print a line for each tensor, too.")] = False,
    read: Annotated[bool, typer.Option("--read", help="Read all elements, even where the save recorded a fingerprint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print what identifies a checkpoint's tensors.

    It is the same for equal names, dtypes, shapes and elements, on any mesh and however the checkpoint is cut and compressed.
    """
    from shardckpt.cli.opening import open_checkpoint

    checkpoint = open_checkpoint(url)
    with progress_bar("reading") as progress:
        found = checkpoint.fingerprint(recorded=not read, progress=progress)
    if as_json:
        write_json({"url": str(checkpoint.location), "fingerprint": found.total, "tensors": dict(found.tensors)})
        return
    screen = Screen()
    lines = [f"{screen.paint(found.total, 'bold')}  {visible(str(checkpoint.location))}: {count(len(found.tensors), 'tensor')}"]
    screen.show([*lines, *(f"{digest}  {visible(name)}" for name, digest in found.tensors.items() if tensors)])
