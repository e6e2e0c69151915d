"""The named roots that the service serves. Nothing outside of them can be reached.

A place has an id: the name of its root, and the names below it, as in `llama/run-7/100`. An id is
checked twice: its names (`..` and the like are refused by `Location.join`), and on a disk the path
with all links resolved. A checkpoint is refused if one of its bases, or a link below its directory,
leads out of the roots; other checkpoints may be bases if their places were allowed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.commit.base_places import base_location, base_record
from shardckpt.errors import FormatError, MissingDataError, NotFoundError, OptionError, UrlError
from shardckpt.format.documents import unfit
from shardckpt.io.failures import storage_errors
from shardckpt.io.status import is_directory, is_file
from shardckpt.io.store import kind_of
from shardckpt.io.url import parse
from shardckpt.serve.access.identity import may_read, note
from shardckpt.text import few, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardckpt.format.bases import Base
    from shardckpt.io.url import Location
    from shardckpt.reading.checkpoint import Checkpoint

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
DEPTH = 6
"""Most names in the id of a checkpoint that is looked for."""
_LONGEST_NAME, _LONGEST_PATH = 255, 3000
_RESERVED = {"api", "files", "healthz", "metrics", "raw", "readyz", "static", "ui", "v1", "zarr"}
"""First names of the service's own paths."""


class Needs(dict[frozenset[str], str]):
    """Message for users who may read none of some roots, by the names of these roots."""


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
                raise OptionError(
                    f"{shorten(text)}: write NAME=ROOT; a name has letters, digits, dots, dashes "
                    "and underscores."
                )
            if name in self.places:
                raise OptionError(f"{name}= is given twice; give each root a name of its own.")
            place = parse(url)
            if not kind_of(place).lists:
                raise OptionError(
                    f"{text}: a web server does not list what it has; give a disk or a bucket."
                )
            if is_file(place.local_path):
                raise OptionError(f"{name}: {place} is a file; give a directory of runs.")
            self.places[name] = place
        if not self.places:
            raise OptionError("there is nothing to serve; give NAME=ROOT.")
        self._bases = [*map(parse, bases)]
        texts = {
            (str(place).rstrip("/") or "/", name)
            for name, root in self.places.items()
            for place in (root, root.resolved)
        }
        self._written = sorted(texts, key=lambda one: (-len(one[0]), one))
        """Locations as messages have them, also with links resolved, with the names of their roots;
        the longest first."""

    def root(self, ident: str) -> Location:
        """The root that an id begins with.

        Raises:
            NotFoundError: there is none, or the user may not read it.
        """
        name = ident.partition("/")[0]
        root = self.places.get(name)
        if root is None or not may_read(name):
            if root is not None:
                note(refused=ident)
            known = few([one for one in self.places if may_read(one)])
            raise NotFoundError(
                f"there is no root {shorten(name)}{known and '; there are '}{known}."
            )
        return root

    def locate(self, ident: str) -> Location:
        """The location of an id.

        Raises:
            NotFoundError: it names no root, is not a valid place, or leads out of its root.
        """
        root = self.root(ident)
        name, slash, below = ident.partition("/")
        why = unfit(below) if slash else ""
        if why:
            raise NotFoundError(f"{shorten(ident)} is no place below {name}: {why}.")
        if kind_of(root).has_paths and (
            len(below) > _LONGEST_PATH
            or any(
                len(part.encode("utf-8", "replace")) > _LONGEST_NAME for part in below.split("/")
            )
        ):
            raise NotFoundError(f"{shorten(ident)} is no place below {name}: a name is too long.")
        try:
            place = root.join(below) if slash else root
            inside = place.is_within(root)
        except (OSError, ValueError) as e:  # a name that the system refuses
            raise NotFoundError(f"{shorten(ident)} is no place below {name}: {e}.") from None
        if not inside:
            raise NotFoundError(f"{shorten(ident)} is no place below {name}: it leads out of it.")
        return place

    def ident(self, place: Location) -> str | None:
        """The id of a location; None if it is in no root."""
        for name, root in self.places.items():
            if (
                f"{place.path}/".startswith(f"{root.path.rstrip('/')}/")
                and place.scheme == root.scheme
            ):
                below = place.path[len(root.path.rstrip("/")) :].strip("/")
                return f"{name}/{below}" if below else name
        return None

    def only_ident(self, ident: str) -> None:
        """Check that a place has one id, so that what applies to an id applies to the place.

        Raises:
            NotFoundError: it lies in no root. OptionError: a link, or another root, gives it
                another id.
        """
        place = self.locate(ident).resolved
        for name, root in self.places.items():
            if place.is_within(root):
                below = place.path[len(root.resolved.path.rstrip("/")) :].strip("/")
                other = f"{name}/{below}" if below else name
                if other != ident:
                    shown = shorten(other) if may_read(other) else "a place in another root"
                    raise OptionError(
                        f"{shorten(ident)} is also {shown}; rules apply only to a run with one id."
                    )

    def check(self, checkpoint: Checkpoint) -> Needs:
        """Check that all that a checkpoint needs lies below the roots and the allowed bases.

        Return where, for `check_needs`. Records that can be read only later, or are replaced later,
        are not checked.

        Raises:
            FormatError: a base or a link leads elsewhere.
        """
        needs = Needs()
        self._check_bases(checkpoint.location, checkpoint.record.structure.bases, needs)
        self._check_links(checkpoint.location, needs, based=True)
        self.check_needs(needs)
        return needs

    def _check_bases(self, here: Location, bases: Iterable[Base], needs: Needs) -> None:
        """Note the roots that bases lie in, and those of a base's own chain."""
        for base in bases:
            place = base_location(here, base)
            message = (
                f"{here}: its base {place} lies outside of the roots; serve it, or allow it with "
                "--allow-base."
            )
            self._need(needs, place, message, based=True)
            self._check_links(place, needs, based=True)
            if base.compression == "difference" and not base.contents:
                try:
                    _, record = base_record(here, base, "a tensor")
                except (MissingDataError, FormatError):
                    continue  # a read names the tensor, and reads no other
                self._check_bases(place, record.structure.chain, needs)

    def check_needs(self, needs: Needs) -> None:
        """Check that the user may read all that a checkpoint needs from other roots.

        Raises:
            FormatError: as if it lay outside of the roots.
        """
        for names, message in needs.items():
            if not any(map(may_read, names)):
                note(refused=next(iter(names)))
                raise FormatError(message)

    def check_links(self, place: Location) -> None:
        """Check that no link below a directory leads out of the roots that the user may read.

        Raises:
            FormatError: a link does.
        """
        if is_directory(place.local_path):  # only there are links
            needs = Needs()
            self._check_links(place, needs, based=False)
            self.check_needs(needs)

    def hides(self, url: str) -> bool:
        """Whether a place lies only in roots that the user may not read."""
        try:
            place = parse(url)
        except UrlError:
            return False
        names = [name for name, root in self.places.items() if place.is_within(root)]
        return bool(names) and not any(map(may_read, names))

    def without_places(self, text: str) -> str:
        """A message with names of roots in place of their locations.

        Locations in roots that the user may not read are left out.
        """
        for written, name in self._written:
            place = re.escape(written) + r"(?![\w.-])"
            if may_read(name):
                text = re.sub(place, lambda _, name=name: name, text)  # type: ignore[misc]
            else:
                # Names may have any characters: their end is not known.
                text = re.sub(
                    rf"{place}.*", "another place, which you may not read", text, flags=re.DOTALL
                )
        return text

    def _need(self, needs: Needs, place: Location, message: str, *, based: bool) -> None:
        """Note the roots in which a place lies; `based`: it may also lie below an allowed base.

        Raises FormatError.
        """
        names = frozenset(name for name, root in self.places.items() if place.is_within(root))
        if names:
            needs.setdefault(names, message)
        elif not (based and any(place.is_within(allowed) for allowed in self._bases)):
            raise FormatError(message)

    def _check_links(self, place: Location, needs: Needs, *, based: bool) -> None:
        """Check the links below a directory on a disk; `based`: they may lead to allowed bases."""
        top = place.local_path
        stack = [] if top is None else [top]
        while stack:
            below = stack.pop()
            with storage_errors("list", below), os.scandir(below) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        message = (
                            f"{place}: the link {shorten(entry.name)} in it leads out of the roots."
                        )
                        self._need(needs, parse(os.path.realpath(entry.path)), message, based=based)
                    elif entry.is_dir(follow_symlinks=False):
                        stack.append(Path(entry.path))
