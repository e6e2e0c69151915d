"""Lines of text that several commands print. Pure, and fast to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.reshard.dtype_rules import ConvertedSubtree

_MOST_SUBTREES = 8


def time_text(text: str) -> str:
    """A time of a record, as commands print it."""
    return visible(text.replace("T", " ").removesuffix("+00:00"))


def conversion_lines(conversions: Sequence[ConvertedSubtree]) -> Iterator[str]:
    """The subtrees that `--dtype` converts or leaves, one line each."""
    for one in conversions[:_MOST_SUBTREES]:
        yield f"dtype     {visible(str(one))}"
    if len(conversions) > _MOST_SUBTREES:
        yield f"dtype     {len(conversions) - _MOST_SUBTREES:,} more subtrees; --json has all"
