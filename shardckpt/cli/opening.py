"""Opening of a command's checkpoint: of any format, or of shardckpt alone.

In the second case, a hint follows if the checkpoint is of another format.
"""

from __future__ import annotations

from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.reading.checkpoint import Checkpoint


def open_checkpoint(url: str) -> Checkpoint:
    """Open a checkpoint of any format, for a command that only looks at it.

    Raises:
        NotFoundError: there is none.
    """
    from shardckpt.cli.server import located
    from shardckpt.convert.opening import open as opened
    from shardckpt.errors import NotFoundError

    place = located(url)
    try:
        return opened(place)
    except NotFoundError as e:
        if place != url:
            raise NotFoundError(
                f"{url}: the service has no such checkpoint, or your token may not read its root."
            ) from e
        raise


@contextmanager
def suggesting_import(url: str) -> Iterator[None]:
    """Suggest `shardckpt import` if the block finds no checkpoint.

    This is done only if a checkpoint of another format is there.

    Raises:
        NotFoundError: replaces the block's error.
    """
    from shardckpt.convert.detect import detect
    from shardckpt.errors import NotFoundError, ShardckptError, StorageError
    from shardckpt.io.url import parse

    try:
        yield
    except (NotFoundError, StorageError) as e:
        try:
            location = parse(url)
            detected = detect(location)
        except ShardckptError:  # nothing known is there: the block's error is more helpful
            raise e from None
        command = f"shardckpt import {quote(url)} DST"
        raise NotFoundError(
            f"{location}: not a shardckpt checkpoint, but {detected.format} ({detected.seen}); "
            f"convert it with `{command}`."
        ) from e
