"""Functions that users register for their classes: checked when they come, and called by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.errors import LeafError, OptionError, ShardckptError
from shardckpt.state.names import shown
from shardckpt.text import clip, shorten

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")


def check_registration(function: str, kind: object, **functions: object) -> None:
    """Refuse, by an OptionError, what is not a class, and functions that cannot be called."""
    if not isinstance(kind, type):
        raise OptionError(f"{function}({shorten(kind)}): the first argument is a class.")
    for option, value in functions.items():
        if not callable(value):
            raise OptionError(
                f"{function}({kind.__qualname__}, {option}={shorten(value)}): give a function."
            )


def call_registered(
    function: Callable[[Any], R], value: object, leaf: str, what: str, of: str
) -> R:
    """The result of a registered function for a leaf.

    Args:
        function: the function.
        value: its argument.
        leaf: the leaf's name.
        what: the function's kind and a preposition, for messages.
        of: the name that it is registered for.

    Raises:
        LeafError: it failed.
    """
    try:
        return function(value)
    except ShardckptError:
        raise
    except Exception as error:
        raise LeafError(
            f"{shown(leaf)}: the {what} {shorten(of)} failed "
            f"({type(error).__name__}: {clip(str(error), 300)})."
        ) from error
