"""Lookup of tensors in a checkpoint's bases, and of chunks that its own are differences from.

The bases are other checkpoints, in which the checkpoint has left tensors.

Each request gets the attempt that holds its tensor, and the names of the tensor's arrays there.
Everything else reads all requests alike. An attempt is opened when the first of its tensors is
needed, and stays open.

`Differences` is the codec of an attempt whose chunks are differences. It reads the same chunk of
the checkpoint before, whose codec may be another one of this kind, and applies the difference. So a
reader of any box need not know of it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardckpt.commit.base_places import base_record, chain_places, holder, piece_before
from shardckpt.errors import FormatError
from shardckpt.format.differences import apply, needs_older
from shardckpt.plan.pieces import batches, chunk_boxes
from shardckpt.reading.locate import ChunkFinder, Request, RequestedChunks
from shardckpt.reading.runs import Band, RunLimits, places_of, tasks
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.bases import Base
    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import TensorRecord
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.fetch import BandOfElements, ReadableChunks, ReadStored
    from shardckpt.reading.runs import ReadTask

AT_A_TIME = 4 << 20
"""Bytes of elements that a thread makes of differences at a time, unless one chunk has more."""


class Bases:
    """The attempts that hold the tensors of a checkpoint: its own and its bases'. A `Resolver`."""

    def __init__(
        self,
        place: Store,
        record: CheckpointRecord,
        open_one: Callable[[Store, CheckpointRecord], ReadableChunks],
    ) -> None:
        """Nothing is read yet.

        Args:
            place: the checkpoint's own attempt.
            record: the checkpoint's commit record.
            open_one: opens the chunks that an attempt itself holds.
        """
        parent = place.location.parent
        assert parent is not None
        self._checkpoint = parent
        self.place = place
        self._record = record
        self._open_one = open_one
        self._open_older: dict[Base | None, tuple[ReadableChunks, CheckpointRecord]] = {}
        self._opening = Lock()

    def resolve(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with the attempts that hold their tensors, and the arrays there.

        These attempts are opened.
        """
        resolved = []
        for request in requests:
            tensor = self._record.structure.tensors[request.name]
            source, held = self._holder(tensor)
            pieces = request.pieces
            if held is not tensor:
                whole = pieces is tensor.pieces
                pieces = (
                    held.pieces
                    if whole
                    else [held.pieces[tensor.pieces.index(piece)] for piece in pieces]
                )
            resolved.append(replace(request, pieces=pieces, source=source))
        return resolved

    def check_places(self, requests: Sequence[Request]) -> None:
        """See `Resolver`."""
        tensors = {
            _base(tensor): tensor
            for tensor in (self._record.structure.tensors[request.name] for request in requests)
        }
        for base, tensor in tensors.items():
            if base is not None:
                base_record(self._checkpoint, base, shown(tensor.name))

    def _holder(self, tensor: TensorRecord) -> tuple[ReadableChunks, TensorRecord]:
        """The attempt that holds a tensor, and the tensor's record there.

        Opens the attempt if necessary.
        """
        base = _base(tensor)
        with self._opening:
            if base not in self._open_older:
                at = (
                    (self.place, self._record)
                    if base is None
                    else base_record(self._checkpoint, base, shown(tensor.name))
                )
                self._open_older[base] = self._open_one(*at), at[1]
            source, record = self._open_older[base]
        if tensor.base is None:
            return source, tensor
        return source, holder(self._checkpoint, tensor, tensor.base.base, tensor.base.name, record)


def _base(tensor: TensorRecord) -> Base | None:
    return None if tensor.base is None else tensor.base.base


class _Chunk(NamedTuple):
    """A chunk whose elements are made."""

    request: Request
    piece: Piece
    position: int
    elements: NDArray[np.uint8]
    """(bytes,) memory for them."""


class Differences:
    """Codec of an attempt whose chunks are differences. Safe to use from several threads.

    Each thread makes the elements of some chunks at a time in one memory, whatever the length of
    the chain: those of the oldest checkpoint first, to which the differences of the others are
    applied.
    """

    def __init__(
        self,
        place: Store,
        record: CheckpointRecord,
        open_one: Callable[[Store, CheckpointRecord], ReadableChunks],
    ) -> None:
        """Nothing is read yet; for the arguments see `Bases`."""
        parent = place.location.parent
        assert parent is not None
        self._checkpoint = parent
        self._record = record
        self._open_one = open_one
        self._older: tuple[ReadableChunks, CheckpointRecord] | None = None
        self.places: frozenset[Location] | None = None
        """The places that the reader may visit: those of the newest record's chain. None: this one
        is the newest, or a base that a checkpoint names by its attempt. Then its record counts as
        it is when it is read, which may be later than the check of the service."""
        self._opening = Lock()
        self._of_path = {
            piece.path: (tensor, i)
            for tensor in record.structure.tensors.values()
            for i, piece in enumerate(tensor.pieces)
        }

    def __call__(self, task: ReadTask, read: ReadStored) -> Iterator[BandOfElements]:
        """See `Codec`."""
        requested, stored = task.chunks.requested, _payloads(task, read)
        rows = zip(range(task.begin, task.end), stored, strict=True)
        for group in batches(
            rows, lambda row: (requested.part_of(row[0]).chunk_bytes,), (AT_A_TIME,)
        ):
            chunks = []
            for row, payload in group:
                array = requested.part_of(row)
                elements = np.zeros(array.chunk_bytes, np.uint8)
                chunks.append(
                    (
                        _Chunk(array.request, array.piece, int(requested.position[row]), elements),
                        payload,
                    )
                )
            self.fill(chunks, read)
            for (row, _), (chunk, _) in zip(group, chunks, strict=True):
                alone = Band(task.chunks, row, row + 1)
                yield alone, places_of([alone])[0], chunk.elements[np.newaxis]

    def fill(self, chunks: Sequence[tuple[_Chunk, NDArray[np.uint8]]], read: ReadStored) -> None:
        """Make the elements of chunks from their stored bytes."""
        older = [chunk for chunk, stored in chunks if needs_older(stored)]
        if older:
            self._read_older(older, read)
        for chunk, stored in chunks:
            where = (
                f"{chunk.request.name}, chunk {chunk.position} of {chunk.piece.path} in "
                f"{self._checkpoint}"
            )
            apply(stored, chunk.elements, chunk.request.dtype.itemsize, where)

    def _read_older(self, chunks: Sequence[_Chunk], read: ReadStored) -> None:
        """Read the elements that chunks differ from, each into its memory."""
        older: dict[tuple[int, int], _Chunk] = {}
        requests = []
        for (_, path), group in groupby(
            chunks, key=lambda chunk: (id(chunk.request), chunk.piece.path)
        ):
            of_array = [*group]
            source, piece = self._open_older(path)
            dtype = of_array[0].request.dtype
            boxes = chunk_boxes(piece, np.array([chunk.position for chunk in of_array]))
            buffers = [chunk.elements.view(dtype).reshape(piece.chunks) for chunk in of_array]
            request = Request(
                of_array[0].request.name, dtype, [piece], boxes, buffers, source=source
            )
            requests.append(request)
            older |= {
                (id(request), chunk.position): _Chunk(
                    request, piece, chunk.position, chunk.elements
                )
                for chunk in of_array
            }
        finder = ChunkFinder(source)
        finder.prepare(requests)
        located = finder.located(RequestedChunks.of_boxes(requests))
        for row in finder.impossible(located)[:1].tolist():
            raise finder.refusal(located, row)
        stored = []
        for task in tasks(located, RunLimits(AT_A_TIME, gap=0, chunks=len(located))):
            if not isinstance(source.codec, Differences):
                for band, places, elements in source.codec(task, read):
                    band.scatter(elements, places)
                continue
            requested = task.chunks.requested
            for row, payload in zip(
                range(task.begin, task.end), _payloads(task, read), strict=True
            ):
                stored.append(
                    (
                        older[id(requested.part_of(row).request), int(requested.position[row])],
                        payload,
                    )
                )
        if isinstance(source.codec, Differences):
            source.codec.fill(sorted(stored, key=lambda one: id(one[0].request)), read)

    def _open_older(self, path: str) -> tuple[ReadableChunks, Piece]:
        """The attempt that holds what an array's chunks differ from, and the array there.

        The attempt is opened if necessary.

        Raises:
            MissingDataError, FormatError: the checkpoint is gone, has other contents, or does not
                hold the tensor.
        """
        tensor, i = self._of_path[path]
        base = self._record.structure.chain[0]
        if not tensor.difference:
            raise FormatError(
                f"{shown(tensor.name)}: by the record of {self._checkpoint}, none of its chunks "
                "is a difference, and one is."
            )
        with self._opening:
            if self._older is None:
                place, record = base_record(self._checkpoint, base, shown(tensor.name))
                if len(record.structure.chain) >= len(self._record.structure.chain):
                    raise FormatError(
                        f"{self._checkpoint}: its base {base.url} needs as many checkpoints as "
                        "itself; one of the two records was not written by shardckpt."
                    )
                if self.places is None:
                    self.places = chain_places(self._checkpoint, self._record.structure.chain)
                if place.location.parent not in self.places:
                    raise FormatError(
                        f"{self._checkpoint}: it was replaced since the version that is read "
                        f"named it: its base {base.url} is not in the chain of that version. Read "
                        "the newest version; if that is the one, begin a new Publisher, whose "
                        "first version has all elements."
                    )
                source = self._open_one(place, record)
                if isinstance(source.codec, Differences):
                    source.codec.places = self.places
                self._older = source, record
            source, record = self._older
        return source, piece_before(self._checkpoint, tensor, tensor.pieces[i], record)


def _payloads(task: ReadTask, read: ReadStored) -> list[NDArray[np.uint8]]:
    """Copies of the stored bytes of a task's chunks.

    They are needed because the next read takes the thread's memory.
    """
    return [
        np.frombuffer(bytes(payload), np.uint8) for payload in read(task, direct=False).payloads
    ]
