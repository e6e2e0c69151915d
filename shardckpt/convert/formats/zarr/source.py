"""Reader of zarr: a group of arrays, or one array, of version 2 or 3.

1. A directory is recognised by its `zarr.json` (version 3), or `.zgroup` or `.zarray` (version 2).
2. The members of a group are those of its consolidated metadata; without it, the directories are
   listed, level by level.
3. The state has a dict for each group. Attributes of the root become metadata. A missing chunk
   stands for the fill value, as zarr defines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.convert.files.file_version import FileVersion, identity_below, identity_of
from shardckpt.convert.foreign import ForeignPart
from shardckpt.convert.placed import PlacedTensor, VersionedArray, place_tensors
from shardckpt.errors import FormatError, NotFoundError
from shardckpt.format.documents import check_key, document_digest
from shardckpt.io.foreign_arrays import open_arrays
from shardckpt.io.store import Store
from shardckpt.io.threads import map_on_threads
from shardckpt.state.names import natural_key
from shardckpt.text import clip, few, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.convert.files.file_version import Candidate
    from shardckpt.convert.placed import Foreign
    from shardckpt.io.foreign_arrays import ForeignArray
    from shardckpt.io.url import Location

_V3, _GROUP, _ARRAY, _ATTRIBUTES, _CONSOLIDATED = (
    "zarr.json",
    ".zgroup",
    ".zarray",
    ".zattrs",
    ".zmetadata",
)
_SIGNS = (_V3, _GROUP, _ARRAY)
_AT_ONCE = 64
"""Directories that are looked into before what they hold is counted."""
_LARGEST_DOCUMENT = 100_000_000
_MOST_MEMBERS = 100_000
"""Most groups and arrays that are looked for, so that links in a circle end."""
_DEEPEST = 64
"""Most groups around an array."""


@dataclass(slots=True)
class _Members:
    """The arrays of a group, and the files that name them."""

    place: Store
    arrays: dict[str, str] = field(default_factory=dict)
    """Path of an array ("" for the root) → TensorStore's driver."""
    files: list[FileVersion] = field(default_factory=list)
    attributes: Any = None
    """Attributes of the root."""
    notes: list[str] = field(default_factory=list)
    seen: int = 0

    def find(self) -> None:
        """Find all arrays.

        Raises:
            NotFoundError: there is no group or array.
            FormatError: metadata is malformed.
        """
        sign = next((name for name in _SIGNS if self.place.exists(name)), None)
        if sign is None:
            raise NotFoundError(
                f"{self.place}: there is no zarr group or array: {', '.join(_SIGNS)} are missing."
            )
        version = 3 if sign == _V3 else 2
        root = self.document(sign)
        if version == 2 and self.place.exists(_ATTRIBUTES):
            self.attributes = self.document(_ATTRIBUTES)
        elif version == 3:
            self.attributes = root.get("attributes")
        self.notes.append("a chunk that is missing has the fill value, as zarr defines")
        if not self.add("", root, self.place.path_of(sign), version):
            return
        listed = self.consolidated(root, version)
        if listed is not None:
            for path, document in listed.items():
                self.add(path, document, f"{self.place}: {shorten(path)}", version)
            return
        groups = [""]
        while groups:
            groups += self._inside(groups.pop())

    def _inside(self, group: str) -> list[str]:
        """Add all arrays of a group that nothing lists; return the groups in it."""
        names = self.place.list_children(f"{group}/" if group else "")
        above = f"{group}/" if group else ""
        paths = [f"{above}{name[:-1]}" for name in names if name.endswith("/")]
        groups: list[str] = []
        for first in range(0, len(paths), _AT_ONCE):
            looks = [partial(self._member, path) for path in paths[first : first + _AT_ONCE]]
            members = self.place.read_together(looks)
            groups += [one[0] for one in members if one is not None and self.add(*one)]
        return groups

    def _member(self, path: str) -> tuple[str, dict[str, Any], str, int] | None:
        """The arguments of `add` for a group or array; None: the directory is neither."""
        for sign in _SIGNS:
            if self.place.exists(key := f"{path}/{sign}"):
                return path, self.document(key), self.place.path_of(key), 3 if sign == _V3 else 2
        return None

    def versions(self) -> dict[str, FileVersion]:
        """The file with the metadata of each array, by path; MissingDataError if one is missing.

        Consolidated metadata is a copy, and TensorStore reads the array's own.
        """
        known = {file.key: file for file in self.files}

        def version(path: str) -> FileVersion:
            name = _V3 if self.arrays[path] == "zarr3" else _ARRAY
            key = f"{path}/{name}" if path else name
            if key in known:
                return known[key]
            check_key(path, self.place)
            return FileVersion(self.place, key)

        return dict(zip(self.arrays, map_on_threads(version, self.arrays), strict=True))

    def consolidated(self, root: dict[str, Any], version: int) -> dict[str, Any] | None:
        """The documents of all members by path, if the root has them.

        Documents of version 2 that are attributes are left out.
        """
        if version == 3:
            inside = root.get("consolidated_metadata")
            documents = inside.get("metadata") if isinstance(inside, dict) else None
            return documents if isinstance(documents, dict) else None
        if not self.place.exists(_CONSOLIDATED):
            return None
        documents = self.document(_CONSOLIDATED).get("metadata")
        if not isinstance(documents, dict):
            raise FormatError(
                f"{self.place}/{_CONSOLIDATED} has no metadata of members; replace it with a "
                "backup."
            )
        ends = (f"/{_ARRAY}", f"/{_GROUP}")
        return {key.rpartition("/")[0]: one for key, one in documents.items() if key.endswith(ends)}

    def document(self, key: str) -> dict[str, Any]:
        """The JSON object in a file; FormatError if it is none."""
        file = FileVersion(self.place, key)
        self.files.append(file)
        try:
            document = json.loads(file.read_whole(_LARGEST_DOCUMENT))
        except (ValueError, RecursionError) as e:
            raise FormatError(
                f"{file} is not JSON ({shorten(str(e))}); replace it with a backup."
            ) from e
        if not isinstance(document, dict):
            raise FormatError(f"{file} is not a JSON object; replace it with a backup.")
        return document

    def add(self, path: str, document: object, where: str, version: int) -> bool:
        """Add an array, or count a group; return whether it is a group.

        Raises:
            FormatError: it is neither, or there are too many.
        """
        self.seen += 1
        if self.seen > _MOST_MEMBERS or path.count("/") >= _DEEPEST:
            most = f"{_MOST_MEMBERS:,} members, or {_DEEPEST} groups in each other"
            raise FormatError(
                f"{where}: there are more than {most}; open a group below {self.place}."
            )
        if not isinstance(document, dict):
            raise FormatError(
                f"{where} does not describe a group or an array; replace it with a backup."
            )
        kind = (
            document.get("node_type")
            if version == 3
            else "array"
            if "chunks" in document
            else "group"
        )
        if kind == "group":
            return True
        if kind != "array":
            raise FormatError(
                f"{where} describes neither a group nor an array, but {shorten(kind)}; replace it "
                "with a backup."
            )
        self.arrays[path] = "zarr3" if version == 3 else "zarr"
        return False


def looks_like(candidate: Candidate) -> str | None:
    """The signs of a zarr group or array, in words; None: there are none."""
    place = Store.open(candidate.location)
    names = candidate.names if place.lists else list(filter(place.exists, _SIGNS))
    sign = next((name for name in _SIGNS if name in names), None)
    return None if sign is None else f"{sign} in the directory"


def open_foreign(location: Location, *, trust_pickle: bool = False) -> Foreign:  # noqa: ARG001  # there is none
    """Open all arrays of a group, or one array.

    Raises:
        NotFoundError: there is no group or array.
        FormatError: metadata is malformed, two members have one place, or no array can be read.
        CorruptionError, MissingDataError: metadata of an array is damaged or missing.
        StorageError: the storage failed or refused, or does not list members.
    """
    members = _Members(Store.open(location))
    members.find()
    versions = members.versions()
    arrays: dict[str, ForeignArray] = {}
    unread: dict[str, str] = {}
    for driver in ("zarr", "zarr3"):
        names = [name for name, used in members.arrays.items() if used == driver]
        parent = location.parent if names == [""] else None
        opened = open_arrays(
            members.place if parent is None else Store.open(parent),
            names if parent is None else [location.name],
            driver,
            ocdbt=False,
            fill_missing=True,
            unread=unread,
        )
        if parent is not None and opened:
            opened = {"": opened[location.name]}
        arrays |= opened
    left = [
        f"left behind: {name}, which is not read: {clip(reason)}" for name, reason in unread.items()
    ]
    if left and not arrays:
        raise FormatError(f"{location}: no array of it can be read; {few(left)}.")
    members.notes.extend(left)
    members.arrays = {name: members.arrays[name] for name in arrays}
    metadata = {"attributes": members.attributes} if members.attributes else {}
    documents = identity_of(location, members.files)

    def identify() -> str:
        if not members.place.lists:
            return documents
        return document_digest([documents, identity_below(members.place, members.arrays)])

    if not members.place.lists:
        members.notes.append("its chunks are not listed here, so a change of them goes unnoticed")
    return place_tensors(
        _nest(arrays, versions, str(location)),
        "zarr",
        location,
        identify(),
        members.notes,
        metadata,
        identify,
    )


def _nest(
    arrays: Mapping[str, ForeignArray], versions: Mapping[str, FileVersion], where: str
) -> object:
    """The state: a dict for each group; FormatError if an array lies in an array."""
    root: dict[str, Any] = {}
    for path in sorted(arrays, key=natural_key):
        array = arrays[path]
        part = ForeignPart.whole(array.shape, array.chunks)
        place = VersionedArray(array, versions[path])
        tensor = PlacedTensor(array.shape, array.dtype, (part,), places=(place,))
        if not path:
            return tensor
        *groups, last = path.split("/")
        at: Any = root
        for group in groups:
            at = at.setdefault(group, {})
            if not isinstance(at, dict):
                raise FormatError(
                    f"{where}: {shorten(path)} lies in an array, not in a group; replace its "
                    "metadata with a backup."
                )
        if last in at:
            raise FormatError(
                f"{where}: {shorten(path)} is an array and a group; replace its metadata with a "
                "backup."
            )
        at[last] = tensor
    return root
