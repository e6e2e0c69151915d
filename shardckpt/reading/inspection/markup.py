"""HTML from texts and elements; everything is escaped except elements."""

from __future__ import annotations

from contextvars import ContextVar
from html import escape
from typing import TYPE_CHECKING, TypeAlias

from shardckpt.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

_EMPTY = frozenset({"meta", "input", "link", "br"})
"""Elements without an end tag. This does not apply to drawings, which are XML."""
_ADDRESSES = frozenset({"href", "src", "action", "data_events"})
PREFIX: ContextVar[str] = ContextVar("shardckpt-prefix", default="")
"""Beginning of all paths, where a proxy has the service below a path of its own."""
_DRAWN = frozenset({"path", "rect", "line", "circle", "polyline"})


class Html(str):
    """A string that is HTML: made by `el`, or written in this package."""

    __slots__ = ()


Part: TypeAlias = "str | Html | Iterable[str | Html | None] | None"


def el(name: str, /, *parts: Part, **attributes: object) -> Html:
    """An element.

    Args:
        name: the name of the element.
        parts: its contents: elements, text (which is escaped), or iterables of both; None is
            nothing.
        attributes: underscores become hyphens, and a final one is dropped; attributes with None or
            False are left out.

    >>> el("p", "a < b", class_="note", data_n=1)
    '<p class="note" data-n="1">a &lt; b</p>'
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{escape(visible(_address(key, str(value))))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inside = "".join(map(_html, parts))
    if name in _EMPTY:
        return Html(f"<{name}{given}>")
    return Html(
        f"<{name}{given}/>"
        if name in _DRAWN and not inside
        else f"<{name}{given}>{inside}</{name}>"
    )


def _address(key: str, value: str) -> str:
    return PREFIX.get() + value if key in _ADDRESSES and value.startswith("/") else value


def data(key: str, value: object, text: str) -> Html:
    """A number as readable text with its exact value; `key` is its path in the JSON document."""
    return el("data", text, value="" if value is None else value, data_key=key)


def _html(part: Part) -> str:
    if part is None:
        return ""
    if isinstance(part, Html):
        return part
    return escape(visible(part)) if isinstance(part, str) else "".join(map(_html, part))
