"""The named roots that the service serves. Nothing outside of them can be reached.

A place has an id: the name of its root, and the names below it, as in `llama/run-7/100`. An id is checked twice: its names (`..` and the
like are refused by `Location.join`), and on a disk the path with all links resolved. A checkpoint is refused if one of its bases, or a
link below its directory, leads out of the roots; other checkpoints may be bases if their places were allowed.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from shardckpt.commit.base_places import base_location
from shardckpt.errors import FormatError, NotFoundError, OptionError
from shardckpt.excerpt import excerpt, few
from shardckpt.format.documents import unfit
from shardckpt.io.failures import storage_errors
from shardckpt.io.status import is_directory, is_file
from shardckpt.io.url import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from shardckpt.io.url import Location
    from shardckpt.reading.checkpoint import Checkpoint

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_RESERVED = {"api", "files", "healthz", "metrics", "raw", "readyz", "static", "ui", "v1", "zarr"}
"""First names of the service's own paths."""


class Roots:
    """Locations by name."""

    def __init__(self, roots: Sequence[str], bases: Sequence[str] = ()) -> None:
        """Parse the roots.

        Args:
            roots: `NAME=ROOT` each; ROOT is a path or url that can be listed.
            bases: paths or urls below which bases of checkpoints may lie, besides the roots.

        Raises:
            OptionError: a name is invalid or given twice, or a root is a file or on a web server.
            UrlError: a root is not a valid path or url.
        """
        self.given, self.given_bases = list(roots), list(bases)
        self.places: dict[str, Location] = {}
        for text in roots:
            name, equals, url = text.partition("=")
            if not equals or not _NAME.fullmatch(name) or name in _RESERVED:
                raise OptionError(f"{excerpt(text)}: write NAME=ROOT; a name has letters, digits, dots, dashes and underscores.")
            if name in self.places:
                raise OptionError(f"{name}= is given twice; give each root a name of its own.")
            place = parse(url)
            if place.is_web:
                raise OptionError(f"{text}: a web server does not list what it has; give a disk or a bucket.")
            if place.local is not None and is_file(place.local):
                raise OptionError(f"{name}: {place} is a file; give a directory of runs.")
            self.places[name] = place
        if not self.places:
            raise OptionError("there is nothing to serve; give NAME=ROOT.")
        self._bases = [*self.places.values(), *map(parse, bases)]

    def locate(self, ident: str) -> Location:
        """The location of an id.

        Raises:
            NotFoundError: it names no root, is not a valid place, or leads out of its root.
        """
        name, slash, below = ident.partition("/")
        root = self.places.get(name)
        if root is None:
            raise NotFoundError(f"there is no root {excerpt(name)}; there are {few(list(self.places))}.")
        why = unfit(below) if slash else ""
        if why:
            raise NotFoundError(f"{excerpt(ident)} is no place below {name}: {why}.")
        try:
            place = root.join(below) if slash else root
            inside = place.local is None or place.is_within(root)
        except (OSError, ValueError) as e:  # a name that the system refuses
            raise NotFoundError(f"{excerpt(ident)} is no place below {name}: {e}.") from None
        if not inside:
            raise NotFoundError(f"{excerpt(ident)} is no place below {name}: it leads out of it.")
        return place

    def ident(self, place: Location) -> str | None:
        """The id of a location; None if it is in no root."""
        for name, root in self.places.items():
            if f"{place.path}/".startswith(f"{root.path.rstrip('/')}/") and place.scheme == root.scheme:
                below = place.path[len(root.path.rstrip("/")) :].strip("/")
                return f"{name}/{below}" if below else name
        return None

    def only_ident(self, ident: str) -> None:
        """Check that a place has one id, so that what applies to an id applies to the place.

        Raises:
            NotFoundError: it lies in no root. OptionError: a link, or another root, gives it another id.
        """
        place = self.locate(ident).resolved
        for name, root in self.places.items():
            if place.is_within(root):
                below = place.path[len(root.resolved.path.rstrip("/")) :].strip("/")
                other = f"{name}/{below}" if below else name
                if other != ident:
                    raise OptionError(f"{excerpt(ident)} is also {excerpt(other)}; rules apply only to a run with one id.")

    def check(self, checkpoint: Checkpoint) -> None:
        """Check that all that a checkpoint needs lies below the roots and the allowed bases.

        Raises:
            FormatError: a base or a link leads elsewhere.
        """
        here = checkpoint.location
        for base in checkpoint.record.structure.bases:
            place = base_location(here, base)
            if not any(place.is_within(allowed) for allowed in self._bases):
                raise FormatError(f"{here}: its base {place} lies outside of the roots; serve it, or allow it with --allow-base.")
            _check_links(place, self._bases)
        _check_links(here, self._bases)

    def check_links(self, place: Location) -> None:
        """Check that no link below a directory leads out of the roots.

        Raises:
            FormatError: a link does.
        """
        if place.local is None or is_directory(place.local):
            _check_links(place, self.places.values())

    def without_places(self, text: str) -> str:
        """A message with names in place of the locations of roots, which clients need not know."""
        for name, root in self.places.items():
            text = text.replace(str(root), name)
        return text


def _check_links(place: Location, allowed: Iterable[Location]) -> None:
    """Check the links below a directory on a disk."""
    stack: list[Path] = [] if place.local is None else [place.local]
    while stack:
        below = stack.pop()
        with storage_errors("list", below), os.scandir(below) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = parse(os.path.realpath(entry.path))
                    if not any(target.is_within(root) for root in allowed):
                        raise FormatError(f"{place}: the link {excerpt(entry.name)} in it leads out of the roots.")
                elif entry.is_dir(follow_symlinks=False):
                    stack.append(type(place.local)(entry.path))  # type: ignore[misc]
