"""Rebuilding a nested state from a flat one, by the keys that led to each leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import FormatError
from shardckpt.state.document import MAX_DEPTH
from shardckpt.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Path = tuple[str | int, ...]

MOST_GAPS = 10_000
"""Most missing items of lists, in addition to one for each leaf."""


def nested(
    leaves: Mapping[str, Any], paths: Mapping[str, Path] | None, absent: Iterable[str], where: str
) -> Any:
    """Rebuild the containers around leaves: dicts for text keys, lists for int keys.

    DCP skips empty dicts, and stores everything else. So an item that is missing in a list, before
    others, was an empty dict.

    Args:
        leaves: leaves by name in the flat state.
        paths: name → keys that lead to it. A name without an entry is its own key; None: every name
            is its own key.
        absent: names without a leaf. In lists None takes their place.
        where: the file, for messages.

    Raises:
        FormatError: a leaf lies too deep, one leaf lies in another, a container's keys are of both
            kinds, or lists have too many gaps.
    """
    known = paths or {}
    root: dict[str | int, Any] = {}
    for name, leaf in leaves.items():
        _put(root, known.get(name, (name,)), leaf, where)
    for name in absent:
        path = known.get(name, (name,))
        if any(type(key) is int for key in path):
            _put(root, path, _ABSENT, where)
    return _Builder(where, MOST_GAPS + len(leaves)).container(root)


class _Absent:
    """Marks a place without a leaf."""


_ABSENT = _Absent()


class _Branch(dict[str | int, Any]):
    """Children by key, before the kind of container is known.

    Its own class, because a leaf may be a dict.
    """


def _put(root: dict[str | int, Any], path: Path, leaf: Any, where: str) -> None:
    if len(path) > MAX_DEPTH:
        raise FormatError(
            f"{where}: {shorten(path)} lies in more than {MAX_DEPTH} containers; flatten that "
            "part of the state."
        )
    node = root
    for key in path[:-1]:
        node = node.setdefault(key, _Branch())
        if type(node) is not _Branch:
            raise FormatError(
                f"{where}: {shorten(path)} leads through a leaf; the file is damaged, or was not "
                "written by DCP."
            )
    if node.setdefault(path[-1], leaf) is not leaf:
        raise FormatError(
            f"{where}: two leaves have the path {shorten(path)}; the file is damaged, or was not "
            "written by DCP."
        )


@dataclass(slots=True)
class _Builder:
    """Builds containers from branches."""

    where: str
    gaps: int
    """Number of gaps still allowed: a short file could name the last item of a very long list."""

    def container(self, branch: dict[str | int, Any]) -> Any:
        children = {
            key: self.container(child) if type(child) is _Branch else child
            for key, child in branch.items()
        }
        kinds = {type(key) for key in children}
        if kinds == {int}:
            return self._list(children)
        if kinds > {int}:
            raise FormatError(
                f"{self.where}: the keys {shorten(list(children))} are those of a list and of a "
                "dict at once."
            )
        return {key: child for key, child in children.items() if type(child) is not _Absent}

    def _list(self, children: dict[Any, Any]) -> list[Any]:
        length = max(children) + 1
        self.gaps -= length - len(children)
        if min(children) < 0 or self.gaps < 0:
            raise FormatError(
                f"{self.where}: a list has only the indices {shorten(sorted(children))}; the file "
                "is damaged, or was not written by DCP."
            )
        items = (children.get(i, {}) for i in range(length))
        return [None if type(item) is _Absent else item for item in items]
