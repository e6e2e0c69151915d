"""Checksums of the boxes that several processes hold, as files and in host records.

A host's file has, for every group of processes that hold the same boxes, a checksum per tensor. Its
record has one digest per group, so that a committer reads files only where digests differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardckpt.format.documents import Fields, FileReference, document_digest, seal
from shardckpt.text import numbered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Checksums: TypeAlias = "dict[tuple[int, ...], dict[str, int]]"
"""Group of processes, ascending → tensor → checksum of the boxes that all of them hold."""


@dataclass(frozen=True, slots=True)
class ReplicasReference:
    """A reference to a host's file of checksums."""

    file: FileReference
    digests: Mapping[str, str]
    """For each group, as text, the digest of its checksums."""

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {**self.file.to_json(), "digests": dict(self.digests)}

    @classmethod
    def from_fields(cls, read: Fields, name: str) -> ReplicasReference:
        """Inverse of `to_json`."""
        digests = Fields(Fields(read.mapping(name), read.where).mapping("digests"), read.where)
        return cls(
            FileReference.from_fields(read, name),
            {group: digests.string(group) for group in digests.doc},
        )


def seal_checksums(checksums: Checksums) -> tuple[dict[str, str], bytes]:
    """The digest of each group, and the file's bytes."""
    groups = {
        as_text(group): dict(sorted(of_group.items()))
        for group, of_group in sorted(checksums.items())
    }
    digests = {group: document_digest(of_group)[:32] for group, of_group in groups.items()}
    return digests, seal({"replicas": groups})


def open_checksums(
    data: bytes, reference: ReplicasReference, where: str
) -> dict[str, dict[str, int]]:
    """The checksums in a file, by group as text and tensor.

    Raises:
        FormatError: the file is damaged.
    """
    document = reference.file.open(data, where)
    groups = Fields(document.mapping("replicas"), document.where)
    read = {group: Fields(groups.mapping(group), document.where) for group in groups.doc}
    return {
        group: {name: of_group.integer(name) for name in of_group.doc}
        for group, of_group in read.items()
    }


def as_text(group: Sequence[int]) -> str:
    """The processes of a group, with runs joined.

    >>> as_text((0, 1, 2, 8))
    '0-2,8'
    """
    numbers = np.array(group)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def difference(
    versions: Iterable[tuple[Sequence[int], Mapping[str, int]]],
) -> tuple[str, str] | None:
    """The first tensor with different checksums, and a text that names processes on both sides.

    None if all are equal.

    Args:
        versions: the checksums of one group, each with the processes that have them.
    """
    by_name: dict[str, dict[int, list[int]]] = {}
    for processes, checksums in versions:
        for name, crc in checksums.items():
            by_name.setdefault(name, {}).setdefault(crc, []).extend(processes)
    for name, by_crc in sorted(by_name.items()):
        if len(by_crc) > 1:
            one, other, *more = sorted(sorted(processes) for processes in by_crc.values())
            yet = ", and others on further processes" if more else ""
            return (
                name,
                (
                    f"has other elements on {numbered('process', one)} than on "
                    f"{numbered('process', other)}{yet}"
                ),
            )
    return None
