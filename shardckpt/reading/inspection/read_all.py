"""Reading everything of a checkpoint to find out whether it is complete and readable.

This is for formats that have no checksums of their own.

Elements are read block by block in bounded memory, and dropped. An error is reported as damage of
its block, and reading continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import ShardckptError
from shardckpt.io.failures import raise_unless_damage
from shardckpt.reading.compare_values import Pair, block_batches, read_blocks
from shardckpt.reading.verification import Damage, VerifyReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.reading.compare_values import BlockOfPair
    from shardckpt.reading.reader import ChunkReader

BLOCK_BYTES = 64 << 20
"""Most bytes of elements that are read at a time."""


def read_all(
    reader: ChunkReader,
    record: CheckpointRecord,
    where: str,
    progress: Callable[[int, int], None] | None = None,
    *,
    compared: Sequence[str] = (),
) -> VerifyReport:
    """Read all tensors, and report what cannot be read.

    Args:
        reader: reads them.
        record: describes them.
        where: the checkpoint's place, for the report.
        progress: called with chunks read so far and in all.
        compared: names of tensors that were compared with checksums already; they count as read.

    Returns:
        The report, with `checked` False.
    """
    known = frozenset(compared)
    tensors = [t for name, t in record.structure.tensors.items() if t.nbytes and name not in known]
    total = sum(t.num_chunks for t in record.structure.tensors.values())
    report = VerifyReport(chunks=total, checked=False, compared=len(known))
    done = total - sum(t.num_chunks for t in tensors)
    for batch in block_batches([Pair(t.name, t, t) for t in tensors], BLOCK_BYTES):
        if progress is not None:
            progress(done, total)
        _read(reader, batch, where, report)
        done += sum(block.pair.a.num_chunks for block in batch if block.last)
    if progress is not None:
        progress(total, total)
    report.bytes_read = reader.stats.bytes_read + sum(
        record.structure.tensors[name].nbytes for name in known
    )
    return report


def _read(
    reader: ChunkReader, batch: Sequence[BlockOfPair], where: str, report: VerifyReport
) -> None:
    """Read some blocks; where that fails, read each alone, and report those that cannot be read."""
    try:
        read_blocks(reader, batch, "a")
    except ShardckptError as e:
        raise_unless_damage(e, reader.source.place.read_versioned)
        if len(batch) == 1:
            report.damage.append(Damage(batch[0].pair.name, batch[0].box, where, str(e)))
            return
        for block in batch:
            _read(reader, [block], where, report)
