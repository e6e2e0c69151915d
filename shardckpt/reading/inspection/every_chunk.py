"""The comparison of every chunk of some tensors with the chunk table, group by group.

Damage does not stop it: damaged and missing chunks are reported, each with its error. A storage
that does not answer or denies permission stops it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import CorruptionError, MissingDataError, ShardckptError
from shardckpt.io.failures import raise_unless_damage
from shardckpt.layout.records import record
from shardckpt.plan.pieces import batches, chunk_boxes
from shardckpt.reading.locate import MOST_CHUNKS, RequestedArray, RequestedChunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.layout.box import Box
    from shardckpt.reading.locate import ChunkFinder, Ints, Located, Request
    from shardckpt.reading.reader import ChunkReader
    from shardckpt.reading.runs import ReadTask

    Damaged = Callable[[str, Box, str, ShardckptError], None]
    """Called with tensor name, index range, file and error for each damaged or missing chunk."""

MOST_REPORTED = 10_000
"""Number of missing chunks of an array that are reported one by one."""
CHECKED_BYTES = 512 << 20
"""Most bytes of elements that are checked together, unless one chunk has more."""


def check(
    reader: ChunkReader,
    requests: Sequence[Request],
    damaged: Damaged,
    *,
    after: int = 0,
    most: int = CHECKED_BYTES,
) -> Iterator[int]:
    """Read every chunk of the requests' pieces and compare it with the table.

    Buffers are not used.

    The chunk table is read by this call, and chunks group by group as the iterator is consumed.

    Args:
        reader: reads them.
        requests: tensors; `boxes` and `buffers` may be empty.
        damaged: called with tensor name, index range, file and error for each damaged or
            missing chunk, by several threads.
        after: number of chunks that are left out at the begin; one that the iterator yielded.
        most: most bytes of elements that are checked at a time, unless one chunk has more.

    Returns:
        The number of chunks up to the end of each group, when that has been checked.
    """
    finder = reader.finder

    def report(chunks: Located, row: int, error: ShardckptError) -> None:
        damaged(
            chunks.requested.part_of(row).request.name,
            chunks.requested.box(row),
            chunks.file_of(row),
            error,
        )

    def check_task(task: ReadTask) -> None:
        read = task.source.place.read_versioned
        try:
            _compare(reader, task)
        except ShardckptError as e:
            raise_unless_damage(e, read)
            for one in task.alone():
                try:
                    _compare(reader, one)
                except ShardckptError as e:
                    raise_unless_damage(e, read)
                    report(one.chunks, one.begin, e)

    def check_groups(groups: Iterator[tuple[int, Located]]) -> Iterator[int]:
        for done, chunks in groups:
            impossible = finder.impossible(chunks)
            for row in impossible.tolist():
                report(chunks, row, finder.refusal(chunks, row))
            possible = chunks.take(np.setdiff1d(np.arange(len(chunks)), impossible))
            reader.do(check_task, possible)
            yield done

    return check_groups(
        _every(finder, reader.source.resolve(requests), damaged, after=after, most=most)
    )


def _compare(reader: ChunkReader, task: ReadTask) -> None:
    """Read a task, and compare the length of a chunk that is an object, and a task, of its own."""
    reader.read_task(task)
    chunks, row, place = task.chunks, task.begin, task.source.place
    if chunks.is_own_object(row) and place.is_longer(task.file, chunks.stop(row)):
        raise CorruptionError(
            f"{chunks.requested.where(row)}: {place}/{task.file} is longer than what was written."
        )


_ONLY, _ONLY_POSITION = range(1), np.zeros(1, np.int64)
"""The only chunk of an array."""


@record
class _Range:
    """Consecutive positions in the grid of an array, and those of them that the table has.

    `end` is the number of all chunks up to the end of these positions.
    """

    array: RequestedArray
    chunks: range
    held: Ints
    end: int
    nbytes: int
    """Bytes of their elements in memory."""


def _every(
    finder: ChunkFinder, requests: Sequence[Request], damaged: Damaged, *, after: int, most: int
) -> Iterator[tuple[int, Located]]:
    """Yield groups of all chunks of the requests' pieces that the table has.

    Each group comes with the number of chunks up to its end.

    The numbers count missing chunks, too; `damaged` is called for each of those when its group
    comes. This call reads the table.
    """
    tables = {
        source: source.table.whole() for source in dict.fromkeys(map(finder.source, requests))
    }

    def ranges() -> Iterator[_Range]:
        passed = 0
        for array in [
            RequestedArray(request, piece) for request in requests for piece in request.pieces
        ]:
            table, of_chunk = tables[finder.source(array.request)], array.chunk_bytes
            if passed >= after and table.has_only_chunk(array.piece):  # of small tensors nearly all
                passed += 1
                yield _Range(array, _ONLY, _ONLY_POSITION, passed, of_chunk)
                continue
            for chunks, held in table.ranges(
                array.piece, max(0, after - passed), min(most // of_chunk, MOST_CHUNKS)
            ):
                yield _Range(array, chunks, held, passed + chunks.stop, len(held) * of_chunk)
            passed += array.piece.num_chunks

    def groups() -> Iterator[tuple[int, Located]]:
        array, left = None, 0
        for group in batches(
            ranges(), lambda one: (one.nbytes, len(one.held)), (most, MOST_CHUNKS)
        ):
            for stretch in group:
                if len(stretch.held) == stretch.chunks.stop - stretch.chunks.start:
                    continue
                array, left = stretch.array, left if array is stretch.array else MOST_REPORTED
                left -= _report_missing(finder, stretch, left, damaged)
            yield (
                group[-1].end,
                finder.located(
                    RequestedChunks.of_positions(
                        [(r.array.request, r.array.piece, r.held) for r in group]
                    )
                ),
            )

    return groups()


def _report_missing(finder: ChunkFinder, stretch: _Range, most: int, damaged: Damaged) -> int:
    """Call `damaged` for the chunks that a range lacks, one by one for the first `most`.

    Return the number of those.
    """
    request, piece, chunks = stretch.array.request, stretch.array.piece, stretch.chunks
    missing = chunks.stop - chunks.start - len(stretch.held)
    # The first missing chunks lie within this range, even if the rest of the grid is missing
    # too.
    positions = np.arange(chunks.start, min(chunks.stop, chunks.start + len(stretch.held) + most))
    first = np.setdiff1d(positions, stretch.held)[:most]
    boxes = chunk_boxes(piece, first)
    for i in range(len(boxes)):
        damaged(request.name, boxes[i], piece.path, finder.lost_error(request, boxes[i]))
    if missing > len(first):
        error = MissingDataError(
            f"{request.name}: {missing - len(first)} more of its chunks are in no host's "
            "chunk table."
        )
        damaged(request.name, piece.box, piece.path, error)
    return len(first)
