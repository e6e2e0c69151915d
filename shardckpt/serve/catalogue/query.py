"""Queries of the catalogue: filters, order and pages, and their SQL."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import OptionError
from shardckpt.serve.access.identity import readable
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_STEP = -1
"""Step of a checkpoint that has none, in the database."""
_COMPARISONS = {"<=": "<=", ">=": ">=", "<": "<", ">": ">", "=": "="}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuery:
    """Filters, order and page of a list of checkpoints."""

    run: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    state: str | None = None
    tag: str | None = None
    """A tag, or "pinned" or "superseded", which no tag is called."""
    metric: tuple[str, str, float] | None = None
    """Name, comparison ("<", "<=", "=", ">=", ">") and number."""
    text: str | None = None
    """A part of the id, in any case."""
    since: str | None = None
    """Times of the first and the last commit, in ISO 8601 and UTC."""
    until: str | None = None
    larger: int | None = None
    """Least number of stored bytes."""
    sort: str | None = None
    """"created", "size", or "metric:NAME", which leaves out those without the metric; None: run and
    step."""
    descending: bool = False
    limit: int = 100
    cursor: str | None = None
    """End of the last page."""

    def sql(self) -> tuple[str, tuple[Any, ...]]:
        """SQL that selects the page and one more row, and its values.

        Each row has the run, the entry, the values of the order, and the id.

        Raises:
            OptionError: the cursor is invalid.
        """
        sign, order = ("<", "DESC") if self.descending else (">", "ASC")
        mine, names = readable("id")
        terms: list[str] = [mine]
        values: list[Any] = [*names]
        for term, value in (
            ("run = ?", self.run),
            ("step >= ?", self.first_step),
            ("step <= ?", self.last_step),
            ("state = ?", self.state),
            ("id LIKE ? ESCAPE '\\'", None if self.text is None else like(self.text)),
            ("created >= ?", self.since),
            ("created <= ?", self.until),
            ("stored_bytes >= ?", self.larger),
        ):
            if value is not None:
                terms.append(term)
                values.append(value)
        if self.tag in ("pinned", "superseded"):
            terms.append(self.tag)
        elif self.tag is not None:
            terms.append("id IN (SELECT id FROM tags WHERE tag = ?)")
            values.append(self.tag)
        if self.metric is not None:
            name, comparison, number = self.metric
            terms.append(
                "id IN (SELECT id FROM metrics WHERE name = ? AND value "  # noqa: S608
                f"{_COMPARISONS[comparison]} ?)"
            )
            values += [name, number]
        kind, _, metric = (self.sort or "").partition(":")
        key = {
            "": "run, step",
            "created": "coalesce(created, '')",
            "size": "coalesce(stored_bytes, 0)",
            "metric": "sorted.value",
        }[kind]
        joined = "JOIN metrics AS sorted USING (id) " if kind == "metric" else ""
        if kind == "metric":
            terms.append("sorted.name = ?")
            values.append(metric)
        after = position_of(
            self.cursor,
            {
                "": (str, int, str),
                "created": (str, str),
                "size": (int, str),
                "metric": (float, str),
            }[kind],
        )
        if after is not None:
            terms.append(f"({key}, id) {sign} ({', '.join('?' * len(after))})")
            values += after
        in_order = (
            f"run {order}, step {order}, id {order}" if not kind else f"{key} {order}, id {order}"
        )
        sql = (
            f"SELECT run, entry, {key}, id FROM checkpoints {joined}WHERE {' AND '.join(terms)} "  # noqa: S608
            f"ORDER BY {in_order} LIMIT ?"
        )
        return sql, (*values, self.limit + 1)


def has_encoding(text: str) -> bool:
    """Whether a text has no lone surrogates."""
    return all(not "\ud800" <= c <= "\udfff" for c in text)


def like(text: str | None) -> str:
    """A pattern of LIKE for names that contain a text."""
    return (
        "%" if text is None else "%" + "".join(f"\\{c}" if c in "%_\\" else c for c in text) + "%"
    )


def cursor_of(values: Sequence[Any]) -> str:
    """The cursor of the page after a row with these values of the order."""
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")


def position_of(cursor: str | None, kinds: tuple[type, ...]) -> list[Any] | None:
    """The values in a cursor, which are of these types; None: there is no cursor.

    Raises:
        OptionError: the cursor is invalid.
    """
    if cursor is None:
        return None
    try:
        values = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        values = None
    sound = (
        type(values) is list
        and tuple(map(type, values)) == kinds
        and all(has_encoding(str(one)) for one in values)
    )
    if not sound or any(type(one) is int and not NO_STEP <= one < 1 << 63 for one in values):
        raise OptionError(f"cursor={shorten(cursor)}: give the `next` of the last page.")
    position: list[Any] = values
    return position
