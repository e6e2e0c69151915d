"""The chunks of a version that a process needs, in its memory.

The module also has the steps from one version to the next.

A follower keeps the chunks that its tensors need as elements. The next version's differences are
read and applied to them, and each chunk is compared with the checksum of its new elements. Its
tensors are then filled from this memory, by the same code as in every restore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardckpt.commit.base_places import base_location, base_record, chain_places, has_array
from shardckpt.errors import OptionError
from shardckpt.format.differences import apply
from shardckpt.format.table import ArrayChunks
from shardckpt.plan.pieces import chunk_boxes
from shardckpt.reading.fetch import ReadableChunks
from shardckpt.reading.locate import Request, RequestedChunks
from shardckpt.reading.reader import ChunkReader, open_reader
from shardckpt.reading.runs import Band, places_of
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.bases import Base
    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import Structure
    from shardckpt.io.store import Store
    from shardckpt.io.url import Location
    from shardckpt.layout.box import BoxArray
    from shardckpt.plan.pieces import Piece
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.fetch import BandOfElements, ReadStored
    from shardckpt.reading.landing import RestoreJob
    from shardckpt.reading.lookup import WholeTable
    from shardckpt.reading.runs import ReadTask

    Copy = tuple[NDArray[Any], NDArray[Any]]
    """A part of a buffer, and its elements."""


Chunks = dict[tuple[str, int], "NDArray[np.uint8]"]
"""Array path and position → the elements of a chunk."""


class Needed(NamedTuple):
    """Chunks of an array."""

    name: str
    """The tensor."""
    dtype: np.dtype[np.generic]
    """dtype of the stored elements."""
    piece: Piece
    positions: NDArray[np.int64]

    def request(self, memory: Sequence[NDArray[np.uint8]] | None = None) -> Request:
        """A request for these chunks, each into its memory.

        Without memory, only their stored bytes can be read, not their elements.
        """
        nothing = np.broadcast_to(np.zeros((), self.dtype), self.piece.chunks)
        buffers = (
            [nothing] * len(self.positions)
            if memory is None
            else [c.view(self.dtype).reshape(self.piece.chunks) for c in memory]
        )
        boxes = chunk_boxes(self.piece, self.positions)
        return Request(self.name, self.dtype, [self.piece], boxes, buffers)

    def part(self, choose: Callable[[tuple[str, int]], bool]) -> Needed:
        """Those of the chunks that are chosen by path and position."""
        return self._replace(
            positions=np.array(
                [at for at in self.positions.tolist() if choose((self.piece.path, at))], np.int64
            )
        )

    def is_alike(self, other: Needed | None) -> bool:
        """Whether chunks of the two have elements of the same boxes in the same form."""
        return other is not None and (self.piece, self.dtype) == (other.piece, other.dtype)

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Path and position of each chunk."""
        return [(self.piece.path, position) for position in self.positions.tolist()]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's elements."""
        return int(np.prod(self.piece.chunks, dtype=np.int64)) * self.dtype.itemsize


def chunks_of(requests: Iterable[Request]) -> list[Needed]:
    """The chunks that requests need, each once."""
    chunks = RequestedChunks.of_boxes([*requests])
    edges = np.searchsorted(chunks.part, np.arange(len(chunks.parts) + 1))
    needed: dict[str, Needed] = {}
    for i, array in enumerate(chunks.parts):
        positions = chunks.position[edges[i] : edges[i + 1]]
        known = needed.get(array.piece.path)
        if known is not None:
            positions = np.concatenate([known.positions, positions])
        needed[array.piece.path] = Needed(
            array.request.name, array.request.dtype, array.piece, np.unique(positions)
        )
    return [*needed.values()]


def requests_of(job: RestoreJob) -> list[Request]:
    """Requests of a restore job, for buffers without memory."""
    lent = [landing for landing in job.landings if not landing.buffers]
    for landing in lent:
        nothing = np.zeros((), landing.sink.dtype.numpy)
        landing.buffers = [np.broadcast_to(nothing, shape) for shape in landing.sink.buffer_shapes]
    requests = job.requests()
    for landing in lent:
        landing.buffers = []
    return requests


def read_chunks(checkpoint: Checkpoint, needed: Sequence[Needed]) -> Chunks:
    """Read chunks with all of their elements, by path and position."""
    chunks = Chunks()
    for one in needed:
        chunks |= zip(
            one.keys, np.zeros((len(one.positions), one.chunk_bytes), np.uint8), strict=True
        )
    read_into(checkpoint, needed, chunks)
    return chunks


def read_into(checkpoint: Checkpoint, needed: Iterable[Needed], chunks: Chunks) -> None:
    """Read all elements of some chunks, each into its memory in `chunks`."""
    with checkpoint.reading():
        checkpoint.reader.read(
            [one.request([chunks[key] for key in one.keys]) for one in needed if len(one.positions)]
        )


class ChunkCache:
    """The elements of the chunks that a process needs of one version."""

    def __init__(self) -> None:
        """Nothing is known."""
        self.contents = ""
        """The version, as `Base.contents`; "": not known, or an update has failed."""
        self.attempt = ""
        """The version's attempt; "": none, or an update has failed."""
        self.read_bytes = 0
        """Stored bytes that updates have read."""
        self._needed: dict[str, Needed] = {}
        """Array path → its chunks that are here."""
        self._memory: dict[str, NDArray[np.uint8]] = {}
        """Array path → (chunks, bytes) the elements of these chunks, in the order of the grid.
        Neighbours are copied at once."""
        self._chunks: Chunks = {}
        """The rows of that memory."""
        self.unapplied = set[tuple[str, int]]()
        """Array path and position of the chunks whose elements have changed since somebody last
        emptied this."""

    def forget(self) -> None:
        """Free the memory."""
        self.contents = self.attempt = ""
        self._needed.clear()
        self._memory.clear()
        self._chunks.clear()

    def update(
        self,
        checkpoint: Checkpoint,
        path: Sequence[tuple[Store, CheckpointRecord]] | None,
        needed: Sequence[Needed],
        memory: int,
    ) -> set[str]:
        """Make these chunks those of a version; after an error the next update reads all of them.

        Args:
            checkpoint: the version.
            path: the versions from the present one, which is not among them, to this one: attempts
                and records. None: there is no path, and all chunks are read.
            needed: the chunks to have; others are dropped.
            memory: bytes of reads in flight.

        Returns:
            The tensors of which a chunk has changed, or is new.
        """
        self.contents = self.attempt = ""
        changed = set[str]()
        lacking = self._make_room(needed, path is not None)
        for place, record in path or ():
            changed |= self._apply(
                place, record, needed, lacking, checkpoint.record.structure, memory
            )
        changed |= self._read(checkpoint, [one.part(lacking.__contains__) for one in needed])
        if checkpoint.record.fingerprint is not None:
            self.contents = checkpoint.record.fingerprint.sha256
        self.attempt = checkpoint.record.attempt
        return changed

    def _make_room(self, needed: Sequence[Needed], keep: bool) -> set[tuple[str, int]]:
        """Make room for chunks; return those that must be read.

        `keep` is False if all of them must be.
        """
        before, self._needed = self._needed, {one.piece.path: one for one in needed}
        alike = {
            one.piece.path: one
            for one in before.values()
            if keep and one.is_alike(self._needed.get(one.piece.path))
        }
        same = {
            path
            for path, one in alike.items()
            if np.array_equal(one.positions, self._needed[path].positions)
        }
        moved = alike.keys() - same
        here = {key: chunk for key, chunk in self._chunks.items() if key[0] in moved}
        self._memory = {path: self._memory[path] for path in same}
        self._chunks, lacking = {}, set[tuple[str, int]]()
        for path, one in self._needed.items():
            if path not in same:
                self._memory[path] = np.zeros((len(one.positions), one.chunk_bytes), np.uint8)
            self._chunks |= zip(one.keys, self._memory[path], strict=True)
            for key in one.keys if path not in same else ():
                if key in here:
                    self._chunks[key][:] = here[key]
                else:
                    lacking.add(key)
        return lacking

    def _apply(
        self,
        place: Store,
        record: CheckpointRecord,
        needed: Sequence[Needed],
        lacking: set[tuple[str, int]],
        last: Structure,
        memory: int,
    ) -> set[str]:
        """Apply the differences of one version to chunks that are not lacking.

        `last` is the structure of the last one.
        """
        changed = set[str]()
        requests = []
        for one in needed:
            tensor = last.tensors.get(one.name)
            fits = tensor is not None and has_array(record.structure, tensor, one.piece)
            have = one.part(lambda key: key not in lacking)
            if fits and len(have.positions):
                requests.append(have.request())
            else:
                lacking.update(have.keys)  # read at the end

        def take(request: Request, position: int, stored: NDArray[np.uint8]) -> None:
            (piece,) = request.pieces
            if len(stored):
                where = f"{request.name}, chunk {position} of {piece.path} in {place}"
                apply(stored, self._chunks[piece.path, position], request.dtype.itemsize, where)
                changed.add(request.name)
                self.unapplied.add((piece.path, position))

        reader = open_reader(place, record, memory=memory)
        reader.read_stored(requests, take)
        self.read_bytes += reader.stats.bytes_read
        return changed

    def _read(self, checkpoint: Checkpoint, lacking: Sequence[Needed]) -> set[str]:
        """Read chunks with all of their elements."""
        before = checkpoint.stats.bytes_read
        read_into(checkpoint, lacking, self._chunks)
        self.read_bytes += checkpoint.stats.bytes_read - before
        self.unapplied.update(key for one in lacking for key in one.keys)
        return {one.name for one in lacking if len(one.positions)}

    def reader(self, checkpoint: Checkpoint) -> ChunkReader:
        """A reader of the chunks that are here."""
        return ChunkReader(_Cached(checkpoint.place, self._needed, self._memory))

    def copies(
        self, checkpoint: Checkpoint, requests: Sequence[Request], *, changed: bool
    ) -> list[Copy]:
        """The parts of the requests' buffers, and the elements that belong there.

        Buffers have the stored dtype.

        Args:
            checkpoint: the version.
            requests: boxes of tensors.
            changed: only the parts whose chunks are in `unapplied`.

        Raises:
            OptionError: a chunk is not here.
        """
        copies: list[Copy] = []
        source = _Copies(
            checkpoint.place,
            self._needed,
            self._memory,
            self.unapplied if changed else None,
            copies,
        )
        ChunkReader(source).read(requests)
        return copies


class _Cached(ReadableChunks):
    """Chunks in memory."""

    def __init__(
        self, place: Store, needed: Mapping[str, Needed], memory: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        """Show chunks as those of the attempt at `place`."""
        super().__init__(place, _Table(place, needed), self._elements)
        self._needed, self._memory = needed, memory

    def lengths(self, nbytes: int) -> tuple[int, int]:
        """See `ChunkSource`."""
        return nbytes, nbytes

    def _elements(self, task: ReadTask, read: ReadStored) -> Iterator[BandOfElements]:
        """See `Codec`."""
        del read
        requested = task.chunks.requested
        bands = [band for run in task.runs for band in run.bands]
        for band, places in zip(bands, places_of(bands), strict=True):
            path = requested.part_of(band.begin).piece.path
            # Its chunks follow one another in the grid, and all of them are here: so they do in
            # memory.
            first = int(
                np.searchsorted(self._needed[path].positions, requested.position[band.begin])
            )
            yield band, places, self._memory[path][first : first + band.end - band.begin]


class _Copies(_Cached):
    """Chunks in memory, whose reader notes what is to be copied where, and copies nothing."""

    def __init__(
        self,
        place: Store,
        needed: Mapping[str, Needed],
        memory: Mapping[str, NDArray[np.uint8]],
        only: Container[tuple[str, int]] | None,
        copies: list[Copy],
    ) -> None:
        """Note in `copies`.

        `only`: path and position of the chunks that are to be copied, None: all.
        """
        super().__init__(place, needed, memory)
        self._only, self._copies = only, copies

    def _elements(self, task: ReadTask, read: ReadStored) -> Iterator[BandOfElements]:
        """See `Codec`; there are no elements left to copy."""
        for band, places, elements in super()._elements(task, read):
            if self._only is None:
                self._copies += band.copies(elements, places)
                continue
            path, positions = (
                band.chunks.requested.part_of(band.begin).piece.path,
                band.chunks.requested.position[band.begin : band.end],
            )
            due = [(path, position) in self._only for position in positions.tolist()]
            edges = np.flatnonzero(np.diff([False, *due, False])).tolist()
            for begin, end in zip(edges[::2], edges[1::2], strict=True):
                stretch = Band(band.chunks, band.begin + begin, band.begin + end)
                self._copies += stretch.copies(elements[begin:end], places_of([stretch])[0])
        yield from ()


class _Table:
    """A `Lookup` of chunks in memory.

    Each array is a file of its own, so that several threads copy.
    """

    def __init__(self, place: Store, needed: Mapping[str, Needed]) -> None:
        """Look up these chunks, by the path of their array."""
        self._place, self._needed = place, needed

    def first_missing(self, path: str, num_chunks: int) -> int | None:
        """See `Lookup`; `find` refuses what is not here."""
        del path, num_chunks
        return None

    def prepare(self, boxes: Iterable[tuple[Piece, BoxArray]]) -> None:
        """See `Lookup`; nothing to do."""

    def find(
        self, paths: Sequence[str], array: NDArray[np.int64], chunks: NDArray[np.int64]
    ) -> tuple[Sequence[str], ArrayChunks]:
        """See `Lookup`.

        Raises:
            OptionError: a chunk is not here.
        """
        order = np.argsort(array, kind="stable")
        edges = np.searchsorted(array[order], np.arange(len(paths) + 1))
        nbytes = np.zeros(len(paths), np.int64)
        for i, path in enumerate(paths):
            asked, one = chunks[order[edges[i] : edges[i + 1]]], self._needed.get(path)
            nbytes[i] = 0 if one is None else one.chunk_bytes
            if len(asked) and (one is None or not np.isin(asked, one.positions).all()):
                raise OptionError(
                    f"{self._place}: a part of {shown(path if one is None else one.name)} was not "
                    "prepared; the tensors to fill are not those of prepare(). Call prepare() "
                    "again."
                )
        each = nbytes[array]
        return paths, ArrayChunks.of_columns(
            chunks, array, chunks * each, each, np.zeros(len(chunks), np.int64)
        )

    def whole(self) -> WholeTable:
        """See `Lookup`; nobody asks."""
        raise NotImplementedError


def path_between(
    contents: str, checkpoint: Checkpoint, most: int
) -> list[tuple[Store, CheckpointRecord]] | None:
    """The versions to apply, oldest first, to get from one version's elements to another's.

    Args:
        contents: identifies the version that the process has; "": none.
        checkpoint: the other version.
        most: most versions of a path.

    Returns:
        Attempts and records; None if the chain does not lead there.
    """
    own = checkpoint.record.fingerprint
    if contents and own is not None and own.sha256 == contents:
        return []
    return path_from(
        lambda base: bool(contents) and base.contents == contents,
        checkpoint.place,
        checkpoint.record,
        most,
    )


def path_from(
    is_base: Callable[[Base], bool], place: Store, record: CheckpointRecord, most: int
) -> list[tuple[Store, CheckpointRecord]] | None:
    """The versions after a base up to the one at `place`, as `path_between`.

    None if the chain does not lead there, or not by way of the places that this one names.
    """
    path = [(place, record)]
    places: frozenset[Location] = frozenset()
    while len(path) <= most and any(map(is_base, chain := path[-1][1].structure.chain)):
        if is_base(chain[0]):
            return path[::-1]
        parent = path[-1][0].location.parent
        assert parent is not None
        places = places or chain_places(parent, chain)
        if base_location(parent, chain[0]) not in places:
            return None
        path.append(base_record(parent, chain[0], "the next version"))
    return None
