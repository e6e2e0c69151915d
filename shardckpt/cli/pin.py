"""`shardckpt pin`, `unpin`, `tag` and `untag`: protection of checkpoints from deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt.cli.screen import Screen, write_json
from shardckpt.excerpt import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

Urls = Annotated[list[str], typer.Argument(metavar="URL…", help="Checkpoints: paths or urls.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The tag: letters, digits, dots, dashes and underscores.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def pin(urls: Urls, as_json: Json = False) -> None:
    """Keep checkpoints from being deleted.

    Neither the training that saved them nor rm deletes a pinned checkpoint; unpin ends this.
    """
    from shardckpt.commit import pinning

    for url in urls:
        pinning.pin(url)
    _report(urls, "pinned", ["pinned"] * len(urls), as_json=as_json)


def unpin(urls: Urls, as_json: Json = False) -> None:
    """Let checkpoints be deleted again."""
    from shardckpt.commit import pinning

    said = ["unpinned" if pinning.unpin(url) else "was not pinned" for url in urls]
    _report(urls, "unpinned", said, as_json=as_json)


def tag(name: Name, urls: Urls, as_json: Json = False) -> None:
    """Put a tag, such as best, on checkpoints.

    A tag keeps a checkpoint from being deleted, as a pin does; untag ends this.
    """
    from shardckpt.commit import pinning

    for url in urls:
        pinning.tag(url, name)
    _report(urls, "tagged", [f"tagged {name}"] * len(urls), as_json=as_json)


def untag(name: Name, urls: Urls, as_json: Json = False) -> None:
    """Remove a tag from checkpoints."""
    from shardckpt.commit import pinning

    said = [f"untagged {name}" if pinning.untag(url, name) else f"was not tagged {name}" for url in urls]
    _report(urls, "untagged", said, as_json=as_json)


def _report(urls: Sequence[str], key: str, said: Sequence[str], *, as_json: bool) -> None:
    """Print what was done with each checkpoint, or one JSON document with the urls under `key`."""
    from shardckpt.io.url import parse

    places = [str(parse(url)) for url in urls]
    if as_json:
        write_json({key: places})
    else:
        Screen().show([f"{word}  {visible(place)}" for word, place in zip(said, places, strict=True)])
