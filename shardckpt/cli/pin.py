"""`shardckpt pin`, `unpin`, `tag` and `untag`: protection of checkpoints from deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt.cli.screen import Screen, write_json
from shardckpt.text import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

Urls = Annotated[list[str], typer.Argument(metavar="URL…", help="Checkpoints: paths or urls.")]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The tag: 1 to 64 letters, digits, dots, dashes and underscores."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def pin(urls: Urls, as_json: Json = False) -> None:
    """Protect checkpoints from deletion.

    Neither a CheckpointManager nor `shardckpt rm` deletes a pinned checkpoint, until `shardckpt
    unpin` removes the pin. A checkpoint that replaces it is not pinned.
    """
    from shardckpt.runs import pinning

    for url in urls:
        pinning.pin(url)
    _report(urls, "pinned", ["pinned"] * len(urls), as_json=as_json)


def unpin(urls: Urls, as_json: Json = False) -> None:
    """Remove the pins of checkpoints; tags stay."""
    from shardckpt.runs import pinning

    outcomes = ["unpinned" if pinning.unpin(url) else "was not pinned" for url in urls]
    _report(urls, "unpinned", outcomes, as_json=as_json)


def tag(name: Name, urls: Urls, as_json: Json = False) -> None:
    """Give checkpoints a tag, such as best.

    A tag protects a checkpoint from deletion, as a pin does. A checkpoint has at most 32 tags.
    Names with another meaning are refused: main, pinned, superseded, steps (100, step-100), and 40
    hex digits (the hash of a commit in Git).
    """
    from shardckpt.runs import pinning

    for url in urls:
        pinning.tag(url, name)
    _report(urls, "tagged", [f"tagged {name}"] * len(urls), as_json=as_json)


def untag(name: Name, urls: Urls, as_json: Json = False) -> None:
    """Remove a tag from checkpoints; pins stay."""
    from shardckpt.runs import pinning

    outcomes = [
        f"untagged {name}" if pinning.untag(url, name) else f"was not tagged {name}" for url in urls
    ]
    _report(urls, "untagged", outcomes, as_json=as_json)


def _report(urls: Sequence[str], key: str, outcomes: Sequence[str], *, as_json: bool) -> None:
    """Print what was done with each checkpoint, or one JSON document with the urls under `key`."""
    from shardckpt.io.url import parse

    places = [str(parse(url)) for url in urls]
    if as_json:
        write_json({key: places})
    else:
        Screen().show(
            [f"{word}  {visible(place)}" for word, place in zip(outcomes, places, strict=True)]
        )
