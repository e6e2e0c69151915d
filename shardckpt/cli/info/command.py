"""`shardckpt info`: the contents of a checkpoint, or one of its tensors in detail."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt.cli.screen import Json, Screen, write_json


def info(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A checkpoint of any format: a path or url.")
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A tensor, a container, or another value of the state."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="PATTERN", help="Show only names that match, as in model/**/bias."
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(
            "--depth", min=1, metavar="N", help="Show at most N levels of nested containers."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a checkpoint, or one of its tensors.

    For a tensor, a picture shows which part of it each device held.
    """
    from shardckpt.cli.info import contents, tensor
    from shardckpt.cli.opening import open_checkpoint
    from shardckpt.errors import NamesMismatchError
    from shardckpt.reading import documents
    from shardckpt.state.document import Tensor, Tied, ends
    from shardckpt.state.names import shown
    from shardckpt.state.select import selector, unused_patterns
    from shardckpt.text import Message, given

    checkpoint = open_checkpoint(url)
    node = documents.find_node(checkpoint, name)
    if isinstance(node, Tensor | Tied) and node.name == name:
        if as_json:
            write_json(documents.tensor_json(checkpoint, name))
        else:
            screen = Screen()
            screen.show(tensor.lines(screen, checkpoint, name))
        return
    chosen = documents.choose_nodes(node, selector(only))
    unused = unused_patterns(only, [end.name for end in ends(node)])
    if chosen is None or unused is not None:
        below = "" if name is None else f" below {shown(name)}"
        advice = f" selects none of its names{below}; leave it out to list all."
        raise NamesMismatchError(Message(f"{checkpoint.location}: ", given(only=unused), advice))
    if as_json:
        write_json(documents.checkpoint_json(checkpoint, chosen))
    else:
        screen = Screen()
        screen.show(contents.lines(screen, checkpoint, chosen, depth=depth, heading=name is None))
