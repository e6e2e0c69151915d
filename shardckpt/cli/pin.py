"""`shardckpt pin`, `unpin`, `tag` and `untag`: protection of checkpoints from deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt.cli.screen import Json, Screen, write_json
from shardckpt.text import few, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Urls = Annotated[list[str], typer.Argument(metavar="URL…", help="Checkpoints: paths or urls.")]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The tag: 1 to 64 letters, digits, dots, dashes and underscores."
    ),
]


def pin(urls: Urls, as_json: Json = False) -> None:
    """Protect checkpoints from deletion.

    Neither a CheckpointManager nor `shardckpt rm` deletes a pinned checkpoint, until `shardckpt
    unpin` removes the pin. A checkpoint that replaces it is not pinned.
    """
    from shardckpt.runs import pinning

    def change(url: str) -> str:
        pinning.pin(url)
        return "pinned"

    _change_each(urls, change, "pinned", as_json=as_json)


def unpin(urls: Urls, as_json: Json = False) -> None:
    """Remove the pins of checkpoints; tags stay."""
    from shardckpt.runs import pinning

    def change(url: str) -> str:
        return "unpinned" if pinning.unpin(url) else "was not pinned"

    _change_each(urls, change, "unpinned", as_json=as_json)


def tag(name: Name, urls: Urls, as_json: Json = False) -> None:
    """Give checkpoints a tag, such as best.

    A tag protects a checkpoint from deletion, as a pin does. A checkpoint has at most 32 tags.
    Names with another meaning are refused: main, pinned, superseded, steps (100, step-100), and 40
    hex digits (the hash of a commit in Git).
    """
    from shardckpt.runs import pinning

    def change(url: str) -> str:
        pinning.tag(url, name)
        return f"tagged {name}"

    _change_each(urls, change, "tagged", as_json=as_json)


def untag(name: Name, urls: Urls, as_json: Json = False) -> None:
    """Remove a tag from checkpoints; pins stay."""
    from shardckpt.runs import pinning

    def change(url: str) -> str:
        return f"untagged {name}" if pinning.untag(url, name) else f"was not tagged {name}"

    _change_each(urls, change, "untagged", as_json=as_json)


def _change_each(
    urls: Sequence[str], change: Callable[[str], str], key: str, *, as_json: bool
) -> None:
    """Change checkpoints one after another, and print what was done with each.

    An error names the checkpoints before it, which stay changed. As JSON, one document has the urls
    under `key`.
    """
    from shardckpt.errors import ShardckptError, extend
    from shardckpt.io.url import parse

    places = [str(parse(url)) for url in urls]
    screen, outcomes = Screen(), list[str]()
    for url, place in zip(urls, places, strict=True):
        try:
            outcomes.append(change(url))
        except ShardckptError as e:
            if outcomes:
                done = [f"{word} {of}" for word, of in zip(outcomes, places, strict=False)]
                extend(e, after=f" Before that: {few(done)}.")
            raise
        if not as_json:
            screen.show([f"{outcomes[-1]}  {visible(place)}"])
    if as_json:
        write_json({key: places})
