"""What does a host say that the checkpoint holds, and what do all of them say together?

Every process describes its own state: the tree, how each tensor is stored, the elements of small plain tensors, and
the user's metadata. The description goes into a file that is named by its digest, so processes with the same
state share one file, however many they are. Whoever commits takes the union, and refuses what contradicts itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.errors import CommitError
from shardckpt.excerpt import excerpt, numbered
from shardckpt.format.fields import Fields
from shardckpt.format.record import BASES_VERSION, FORMAT_VERSION, FileReference, seal
from shardckpt.format.structure import Structure
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Contents"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contents:
    """One host's description, or all hosts'."""

    structure: Structure
    small: Mapping[str, bytes]
    """Elements of the small plain tensors of a job of several processes, as they are stored, in C order. Nobody knows
    which processes have them, so each says what it has, and the one who commits writes them."""
    metadata: Mapping[str, Any]
    """What the user gave to `SaveOptions(metadata=…)`; each member by some processes or all."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """A checksum of some elements of each large plain tensor that all processes write together: they rely on having the same."""
    processes: int | None = None
    """How many processes saved the state, where hosts are something else; None: every host is one."""

    @classmethod
    def union(cls, parts: Sequence[tuple[Sequence[int], Contents]]) -> Contents:
        """All hosts' contents as one.

        Args:
            parts: distinct contents, each with the processes that say so, ascending; by lowest process.

        Raises:
            CommitError: processes contradict each other; names what about, and which ones.
        """
        said = {part.processes for _, part in parts}
        if len(said) > 1:
            raise CommitError(f"The hosts disagree on how many processes saved the state: {said}. Nothing was published.")
        metadata = _agreed(
            [(processes, part.metadata) for processes, part in parts],
            lambda key, one, other: (
                f"SaveOptions(metadata=…): {excerpt(key)} differs between {one} and {other}; give all the same, or one of "
                f"them alone, and put what differs into the state as shardckpt.PerProcess."
            ),
        )
        small = _agreed(
            [(processes, part.small) for processes, part in parts],
            lambda name, one, other: (
                f"{shown(name)}: this small plain tensor has other elements on {one} than on {other}; make them equal "
                f"(a BatchNorm's statistics are, with SyncBatchNorm), or wrap it in shardckpt.PerProcess."
            ),
        )
        samples = _agreed(
            [(processes, part.samples) for processes, part in parts],
            lambda name, one, other: (
                f"{shown(name)}: this plain tensor has other elements on {one} than on {other}, and all write a part of "
                f'it; make them equal, or give each its own name and SaveOptions(host_tensors="local").'
            ),
        )
        structure = Structure.union([(processes, part.structure) for processes, part in parts])
        return cls(structure, small, metadata, samples, *said)

    def seal(self) -> tuple[FileReference, bytes]:
        """The file that says so, and the reference to it."""
        small = {name: base64.b64encode(elements).decode() for name, elements in self.small.items()}
        samples = {"samples": self.samples} if self.samples else {}
        processes = {} if self.processes is None else {"processes": self.processes}
        version = BASES_VERSION if self.structure.bases else FORMAT_VERSION
        doc = {"metadata": self.metadata, "small": small, **samples, **processes, "structure": self.structure.to_json()}
        data = seal(doc, version)
        return FileReference.of(f"contents/{hashlib.sha256(data).hexdigest()}.json", data), data

    @classmethod
    def from_json(cls, doc: Any, where: str) -> Contents:
        """Read what `seal` wrote."""
        read = Fields(doc, where)
        structure = Structure.from_json(read.value("structure"), where, allow_partial=True)
        small = {}
        for name, text in read.mapping("small").items():
            try:
                small[name] = base64.b64decode(text, validate=True)
            except (TypeError, ValueError, binascii.Error):
                read.fail(f"the elements of {shown(name)} are no base64")
            tensor = structure.tensors.get(name)
            if tensor is None or len(small[name]) != tensor.nbytes:
                read.fail(f"there are {len(small[name])} bytes of elements of {shown(name)}, which no tensor of that name has")
            if any(c > max(n, 1) for piece in tensor.pieces for c, n in zip(piece.chunks, piece.shape, strict=True)):
                read.fail(f"chunks of {shown(name)} are larger than the tensor")  # the committer would have to fill them up
        samples = Fields(read.mapping("samples") if "samples" in read.doc else {}, where)
        processes = read.integer("processes") if "processes" in read.doc else None
        return cls(structure, small, read.metadata(), {name: samples.integer(name) for name in samples.doc}, processes)


def _agreed(parts: Sequence[tuple[Sequence[int], Mapping[str, T]]], contradiction: Callable[[str, str, str], str]) -> dict[str, T]:
    """All that any process says; `contradiction` says what is wrong where two say different things: the name, and who they are."""
    found: dict[str, T] = {}
    said_by: dict[str, Sequence[int]] = {}
    for processes, part in parts:
        for name, value in part.items():
            if found.setdefault(name, value) != value:
                raise CommitError(
                    f"{contradiction(name, numbered('process', said_by[name]), numbered('process', processes))} Nothing was published."
                )
            said_by.setdefault(name, processes)
    return found
