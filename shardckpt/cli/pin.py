"""`shardckpt pin` and `shardckpt unpin`: protection of checkpoints from deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt.cli.screen import Screen, write_json
from shardckpt.cli.text import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

Urls = Annotated[list[str], typer.Argument(metavar="URL…", help="Checkpoints: paths or urls.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def pin(urls: Urls, as_json: Json = False) -> None:
    """Keep checkpoints from being deleted.

    Neither the training that saved them nor rm deletes a pinned checkpoint; unpin ends this.
    """
    from shardckpt.commit import pinning

    for url in urls:
        pinning.pin(url)
    _tell(urls, "pinned", as_json=as_json)


def unpin(urls: Urls, as_json: Json = False) -> None:
    """Let checkpoints be deleted again."""
    from shardckpt.commit import pinning

    for url in urls:
        pinning.unpin(url)
    _tell(urls, "unpinned", as_json=as_json)


def _tell(urls: Sequence[str], done: str, *, as_json: bool) -> None:
    from shardckpt.io.url import parse

    places = [str(parse(url)) for url in urls]
    if as_json:
        write_json({done: places})
    else:
        Screen().show([f"{done}  {visible(place)}" for place in places])
