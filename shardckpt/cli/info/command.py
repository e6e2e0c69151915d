"""`shardckpt info`: the contents of a checkpoint, or one of its tensors in detail."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt.cli.screen import Screen, write_json

__all__ = ["info"]


def info(
    url: Annotated[str, typer.Argument(metavar="URL", help="A checkpoint: a path or url.")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A tensor, a small leaf or a container in it.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="PATTERN", help="Names that match, as in model/**/bias.")] = None,
    depth: Annotated[int | None, typer.Option("--depth", min=1, metavar="N", help="Containers to open, one in the other.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show what a checkpoint or a tensor holds.

    For a tensor there is a picture of which device held which part of it.
    """
    from shardckpt.cli.info import contents, tensor
    from shardckpt.cli.opening import open_checkpoint
    from shardckpt.errors import NamesMismatchError
    from shardckpt.excerpt import given
    from shardckpt.state.document import Tensor, Tied
    from shardckpt.state.names import shown
    from shardckpt.state.select import selector

    checkpoint = open_checkpoint(url)
    node = contents.find(checkpoint, name)
    if isinstance(node, Tensor | Tied) and node.name == name:
        if as_json:
            write_json(tensor.document(checkpoint, name))
        else:
            screen = Screen()
            screen.show(tensor.lines(screen, checkpoint, name))
        return
    wanted = contents.choose(node, selector(only))
    if wanted is None:
        below = "" if name is None else f" below {shown(name)}"
        raise NamesMismatchError(f"{checkpoint.location}: {given(only=only)} selects none of its names{below}; leave it out to list all.")
    if as_json:
        write_json(contents.document(checkpoint, wanted))
    else:
        screen = Screen()
        screen.show(contents.lines(screen, checkpoint, wanted, depth=depth, heading=name is None))
