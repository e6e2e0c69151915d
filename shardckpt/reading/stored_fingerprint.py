"""The fingerprint of a checkpoint: as it was recorded, or of the elements that lie there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.commit.fingerprints import recorded_fingerprint
from shardckpt.format.fingerprint import Fingerprint, StateSums
from shardckpt.reading.compare_values import (
    DEFAULT_MEMORY_LIMIT,
    Pair,
    block_batches,
    read_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.reading.checkpoint import Checkpoint


def stored_fingerprint(
    checkpoint: Checkpoint, *, recorded: bool, progress: Callable[[int, int], None] | None = None
) -> Fingerprint:
    """The fingerprint of all tensors of a checkpoint.

    Args:
        checkpoint: the checkpoint.
        recorded: take what was recorded, and read only tensors of which nothing was. False: read
            all.
        progress: called with bytes read so far, and in all.
    """
    tensors = checkpoint.record.structure.tensors
    with checkpoint.reading():
        known = (
            recorded_fingerprint(checkpoint.place, checkpoint.record)
            if recorded and checkpoint.native
            else {}
        )
        missing = [tensor for name, tensor in tensors.items() if name not in known]
        checkpoint.open_bases(missing)
    sums, done, total = StateSums(missing), 0, sum(tensor.nbytes for tensor in missing)
    pairs = [Pair(tensor.name, tensor, tensor) for tensor in missing]
    for batch in block_batches(pairs, DEFAULT_MEMORY_LIMIT // 2):
        if progress is not None:
            progress(done, total)
        with checkpoint.reading():
            arrays = read_blocks(checkpoint.reader, batch, "a")
        for block, elements in zip(batch, arrays, strict=True):
            sums.add(block.pair.name, block.box.start, elements)
            done += block.nbytes
    if progress is not None:
        progress(done, total)
    digests = {**known, **sums.fingerprint().tensors}
    return Fingerprint({name: digests[name] for name in tensors})
