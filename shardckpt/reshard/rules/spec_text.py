"""Parser and formatter of partition specs as text, in the notation of the command line.

    replicated              PartitionSpec()
    (None,model)            PartitionSpec(None, "model")
    ((fsdp,tensor),None)    PartitionSpec(("fsdp", "tensor"), None)
    (0,"axis with, comma")  an axis by its index; quotes where a name is not plain, or reads as a
                            number or None

Spaces are ignored, both kinds of quotes are accepted, and `P(…)` or `PartitionSpec(…)` may be
pasted from a program.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError, ShardingError
from shardckpt.layout.partition_spec import PartitionSpec
from shardckpt.text import shorten

if TYPE_CHECKING:
    from shardckpt.layout.partition_spec import Axis, SpecPart

REPLICATED = "replicated"
_PLAIN = re.compile(r"[^\W\d][\w.-]*")
_TOKEN = re.compile(
    r"""\s*(?: (?P<mark> [(),] ) | (?P<quoted> "(?:[^"\\]|\\.)*" | '[^']*' )
          | (?P<index> \d{1,9}(?![\w.-]) ) | (?P<bare> [^\W\d][\w.-]* ) )""",
    re.VERBOSE,
)
_HEAD = re.compile(r"\s*(?:(?:PartitionSpec|P)\s*)?(?=\()")
_FORM = (
    'write replicated, or one entry per dimension, as in (None,model) or (("fsdp","tensor"),None)'
)


def format_spec(spec: PartitionSpec) -> str:
    """Format a spec so that `parse_spec` reads an equal spec.

    >>> format_spec(PartitionSpec("data", None, ("fsdp", "tensor")))
    '(data,None,(fsdp,tensor))'
    """
    return f"({','.join(map(_part_text, spec))})" if len(spec) else REPLICATED


def _part_text(part: SpecPart) -> str:
    return (
        f"({','.join(map(_axis_text, part))})"
        if isinstance(part, tuple)
        else "None"
        if part is None
        else _axis_text(part)
    )


def _axis_text(axis: Axis) -> str:
    if isinstance(axis, int):
        return str(axis)
    return axis if _PLAIN.fullmatch(axis) and axis != "None" else json.dumps(axis)


def parse_spec(text: str) -> PartitionSpec:
    """Parse a spec.

    Raises:
        OptionError: the text is not a spec; the message names the character, counted from 1.

    >>> parse_spec("(None,model)"), parse_spec("replicated")
    (PartitionSpec(None, 'model'), PartitionSpec())
    """
    if text.strip() == REPLICATED:
        return PartitionSpec()
    head = _HEAD.match(text)
    if head is None:
        raise OptionError(f"{shorten(text)} is not a partition spec; {_FORM}.")
    parts, end = _parts(text, head.end(), nested=False)
    if text[end:].strip():
        raise _syntax_error(text, end)
    try:
        return PartitionSpec(*parts)
    except ShardingError as error:
        raise OptionError(f"{shorten(text)}: {error}") from error


def _parts(text: str, at: int, *, nested: bool) -> tuple[list[SpecPart], int]:
    """The entries of the bracket that opens at `at`, and the position after its end."""
    parts: list[SpecPart] = []
    at += 1
    while True:
        token = _TOKEN.match(text, at)
        if token is None:
            raise _syntax_error(text, at)
        if token["mark"] == ")":
            return parts, token.end()
        if token["mark"] == "(" and not nested:
            axes, at = _parts(text, token.end() - 1, nested=True)
            if None in axes:
                raise OptionError(
                    f"{shorten(text)}: None inside a tuple of axes, which cut one dimension "
                    "together; leave it out."
                )
            parts.append(tuple(axis for axis in axes if isinstance(axis, str | int)))
        elif token["mark"]:
            raise _syntax_error(text, token.start("mark"))
        else:
            parts.append(_entry(text, token))
            at = token.end()
        after = _TOKEN.match(text, at)
        if after is None or after["mark"] not in {",", ")"}:
            raise _syntax_error(text, at)
        if after["mark"] == ",":
            at = after.end()


def _entry(text: str, token: re.Match[str]) -> Axis | None:
    if token["index"]:
        return int(token["index"])
    if token["bare"]:
        return None if token["bare"] == "None" else token["bare"]
    quoted = token["quoted"]
    try:
        return str(json.loads(quoted)) if quoted[0] == '"' else quoted[1:-1]
    except ValueError:
        raise OptionError(
            f"{shorten(text)}: {shorten(quoted)} is not a quoted name; escapes are those of JSON."
        ) from None


def _syntax_error(text: str, at: int) -> OptionError:
    rest = text[at:].lstrip()
    actual = f"found {shorten(rest[:12])}" if rest else "it ends"
    where = len(text) - len(rest) + 1
    return OptionError(
        f"{shorten(text)}: at character {where} {actual}, where an axis, None, a comma or a "
        f"bracket is expected; {_FORM}."
    )
