"""Names and numbers as text for people. Pure, and fast to import.

Names, metadata and messages may come from another person's checkpoint. `visible` makes them safe for the terminal: its result
cannot move the cursor, change a colour or reverse the direction of writing. No text is ever printed through rich's markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.reshard.dtype_rules import ConvertedSubtree

_MOST_SUBTREES = 8


def conversion_lines(conversions: Sequence[ConvertedSubtree]) -> Iterator[str]:
    """The subtrees that `--dtype` converts or leaves, one line each."""
    for one in conversions[:_MOST_SUBTREES]:
        yield f"dtype     {visible(str(one))}"
    if len(conversions) > _MOST_SUBTREES:
        yield f"dtype     {len(conversions) - _MOST_SUBTREES:,} more subtrees; --json has all"


def visible(text: str) -> str:
    r"""The text on one line, with unprintable characters escaped as in Python.

    >>> print(visible("größe\n\x1b[2J\u202e"))
    größe\n\x1b[2J\u202e
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count(n: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "tensor"), count(1200, "tensor")
    ('1 tensor', '1,200 tensors')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as text.

    >>> shape_text((4096, 11008)), shape_text(())
    ('4096×11008', 'scalar')
    """
    return "×".join(map(str, shape)) if shape else "scalar"


def index_range(start: int, stop: int) -> str:
    """A half-open range in numpy's notation."""
    return f"{start}:{stop}"
