"""One process's share of a state, and its elements in host memory: the first stage of every save.

The second is writing (`host`).

Flatten the state. Every tensor leaf becomes a source that knows its shape, dtype, layout, the
distinct boxes that this process holds, and the other processes that hold them. Plan (`save_plan`)
each tensor's chunks, and the chunks that this process writes. Copy everything that is small. No
process communicates with another one or with the storage.

`read` then goes through the blocks in grid order: batch after batch of tensors, whose copies (if
the framework makes any) stay within a limit. A save in the foreground writes each batch as it comes
(`read_to_host`); one in the background copies them first (`staging`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardckpt import frameworks
from shardckpt.format.record import Contents
from shardckpt.frameworks.per_process import encode_values, values_file
from shardckpt.io.buffers import BufferPool, round_up
from shardckpt.io.threads import collector_paused
from shardckpt.plan.blocks import smaller
from shardckpt.plan.pieces import batches
from shardckpt.state import flatten
from shardckpt.state.flatten import StateOwner, local_names, plain_state, unused_local
from shardckpt.writing.replicas import ReplicaChecksums
from shardckpt.writing.save_plan import (
    noted_arrays,
    plans,
    skipped_names,
    small_elements,
    stored,
)

if TYPE_CHECKING:
    from collections.abc import (
        Collection,
        Container,
        Generator,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from numpy.typing import NDArray

    from shardckpt.frameworks.base import Array, Source
    from shardckpt.frameworks.cuda import Arrival, DeviceCopies
    from shardckpt.io.buffers import Lease
    from shardckpt.layout.world import World
    from shardckpt.options import SaveOptions
    from shardckpt.plan.blocks import Block
    from shardckpt.writing.kept import VersionToWrite
    from shardckpt.writing.save_plan import SavePlan


MOST_COPIES = 32 << 20
"""Bytes of copies that frameworks make at a time. An allocator reuses so little memory again and
again. More would be fresh memory each time, which the kernel has to clear: reads from torch_xla
then take four times as long."""


@dataclass(frozen=True, slots=True)
class StateShare:
    """One process's part of a state, and the plan of what it writes."""

    plan: SavePlan
    sources: Mapping[str, Source]
    """Its tensors without the skipped ones. Only the parts in `contents` have been copied so
    far."""
    contents: Contents
    values: bytes | None
    """The file of the values that this process owns by itself; None: there are none."""
    late: Collection[str] = ()
    """The small plain tensors on devices, which `contents` lacks."""
    replicas: ReplicaChecksums | None = None
    """The checksums of boxes that other processes hold, too; None: they are not compared."""
    unused_local: Sequence[str] = ()
    """Patterns for values of each process that have selected nothing on this process."""

    @property
    def is_in_place(self) -> bool:
        """Whether all elements to write are at known addresses in host memory."""
        sources = self.sources
        return all([sources[name].address for name in self.plan.blocks])  # noqa: C419  (faster than a generator)


@collector_paused()
def share_of(
    state: Any,
    options: SaveOptions,
    world: World,
    *,
    waits: bool,
    version: VersionToWrite | None = None,
) -> StateShare:
    """One process's share of a state.

    When this returns, everything is copied except the elements of large tensors.

    Args:
        state: as in `shardckpt.save`.
        options: the options of the save.
        world: this process and the others.
        waits: whether to wait for devices to copy small plain tensors; False: they are left to the
            caller, as `StateShare.late`.
        version: selects and converts tensors; None: all as they are.

    Raises:
        LeafError, ShardingError, OptionError: as in `shardckpt.save`.
    """
    flat = flatten(
        plain_state(state),
        frameworks.is_tensor,
        frameworks.identity,
        frameworks.meaning,
        composite=frameworks.composite,
        local=local_names(state),
        process=world.process,
        addresses=frameworks.ADDRESSES,
    )
    if version is not None:
        flat = version.selected(flat)
    tensors = frameworks.reduce_partial(flat.tensors) if options.reduce_partial else flat.tensors
    sources = frameworks.sources(
        tensors, world, unread=skipped_names(tensors, options.skip), local=flat.local
    )
    if version is not None:
        sources = version.converted(sources)
    if world.processes > 1:
        frameworks.check_aliases(sources, plain=options.host_tensors == "replicated")
    planned = plans.plan(sources, options, world, differences=version is not None)
    values = values_file(encode_values(flat.per_process, flat.axes)) if flat.per_process else None
    arrays = noted_arrays(tensors) if isinstance(state, StateOwner) else {}
    structure = planned.structure(flat.tree, arrays)
    metadata = json.loads(json.dumps(options.metadata))
    late = (
        frozenset()
        if waits or not planned.small
        else frozenset(planned.small).intersection(frameworks.names_on_devices(sources))
    )
    contents = Contents(structure, small_elements(planned, sources, late), metadata)
    written = (
        {name: source for name, source in sources.items() if name not in planned.skipped}
        if planned.skipped
        else sources
    )
    replicas = None
    if planned.replicated:  # empty if they are not to be compared
        replicas = ReplicaChecksums(
            planned, sources, wholly=options.check_replicas is True or options.fingerprint
        )
        if waits:
            replicas.fetch_late(sources)
    return StateShare(planned, written, contents, values, late, replicas, unused_local(state))


class BlockElements(NamedTuple):
    """A block, and its elements in the stored dtype."""

    block: Block
    elements: NDArray[np.generic]
    """An array; or a `DeviceArray`, as far as tensors are left on their devices."""
    own: bool
    """Whether the elements are in memory that they share with nothing else, or that stays as it is
    until they are written."""
    resident: bool = False
    """Whether the elements arrive later (`Source.resident`): they must not be read before they are
    written."""


def is_array(elements: object) -> bool:
    """Whether the elements of a block are in host memory, and not left on their device."""
    return isinstance(elements, np.ndarray)


def are_own(blocks: Sequence[Block], source: Source) -> list[bool]:
    """For each block of a source, whether it will be fetched into memory of its own.

    A complete box of a source that makes copies is fetched into memory of its own.

    So are all blocks of a source that keeps its elements itself until they are written.
    """
    if source.resident:
        return [True] * len(blocks)
    if not source.private:
        return [False] * len(blocks)
    sizes = source.boxes.sizes().tolist()
    return [block.box.size == sizes[block.held] for block in blocks]


def only_kept(plan: SavePlan, sources: Mapping[str, Source]) -> set[str]:
    """The tensors whose fetched arrays are all kept, if blocks in memory of their own are kept.

    Fetching these tensors takes no other memory.
    """
    return {
        name
        for name, blocks in plan.blocks.items()
        if sources[name].private
        and all(are_own(blocks, sources[name]))
        and sum(b.nbytes for b in blocks) >= sources[name].staged_bytes
    }


def read(
    plan: SavePlan,
    sources: Mapping[str, Source],
    room: int,
    *,
    most: int = sys.maxsize,
    kept: Container[str] = (),
    only: Sequence[str] | None = None,
) -> Generator[Iterable[BlockElements]]:
    """All blocks of this process, in batches.

    Elements that are not in memory of their own may be views of the tensors. Use them up before you
    request the next batch.

    Args:
        plan: the plan of this process's writes.
        sources: its tensors.
        room: bytes of copies that may exist at a time; a tensor that needs more is a batch of its
            own.
        most: most bytes of a block, unless one chunk has more.
        kept: tensors whose copies are counted elsewhere, see `only_kept`.
        only: the tensors; None: all.
    """
    for names in batches(
        plan.blocks if only is None else only,
        lambda name: (0 if name in kept else sources[name].staged_bytes,),
        (room,),
    ):
        # This frame keeps no reference to the batch: when it is used up, its memory is free for the
        # next one.
        yield _fetched(plan, {name: sources[name] for name in names}, most)


def read_to_host(
    plan: SavePlan, sources: Mapping[str, Source], room: int
) -> Generator[Iterable[BlockElements]]:
    """Like `read`, with all elements in host memory; close it if it is not used up."""
    left, copies = frameworks.on_devices(sources, overlap=False)
    return read(plan, sources, room) if copies is None else _arrived(plan, left, copies, room // 2)


def _arrived(
    plan: SavePlan, sources: Mapping[str, Source], copies: DeviceCopies, room: int
) -> Generator[Iterable[BlockElements]]:
    """Like `read`, for tensors some of which are on devices.

    Each batch is copied to pinned memory while the one before is in use.

    Args:
        plan: as for `read`.
        sources: as for `read`; elements on devices are left there.
        copies: copies those.
        room: bytes of pinned memory of a batch; there are two.
    """
    room = max(
        (
            room,
            *(round_up(block.chunk_bytes) for blocks in plan.blocks.values() for block in blocks),
        )
    )
    pool = BufferPool(2 * room, copies.pin)
    blocks = chain.from_iterable(read(plan, sources, room, most=room))
    before: tuple[Lease, Arrival, list[BlockElements]] | None = None
    try:
        for batch in batches(blocks, lambda item: (round_up(item.elements.nbytes),), (room,)):
            lease, landed = pool.take(room), list[BlockElements]()
            pairs: list[tuple[Array, Any]] = []
            for block, elements, own, _ in batch:
                array: Array = elements
                if not is_array(elements):
                    array = lease.array(elements.shape, elements.dtype)
                    pairs.append((array, elements))
                landed.append(BlockElements(block, array, own))
            ahead = lease, copies.copy(pairs), landed
            if before is not None:
                yield from _landed(*before)
            before = ahead
        if before is not None:
            yield from _landed(*before)
    finally:
        copies.drain()


def _landed(
    lease: Lease, arrival: Arrival, batch: list[BlockElements]
) -> Iterator[list[BlockElements]]:
    with lease:
        arrival.wait()
        yield batch


def _fetched(plan: SavePlan, sources: Mapping[str, Source], most: int) -> Iterator[BlockElements]:
    """Fetch a batch before returning.

    The reason is that frameworks have streams and settings of the thread that saves.
    """
    boxes = [_boxes(plan.blocks[name]) for name in sources]
    return _cut(plan, sources, boxes, frameworks.fetch([*sources.values()], boxes), most)


def _boxes(blocks: Sequence[Block]) -> list[int]:
    """The held boxes of a tensor's blocks."""
    return [blocks[0].held] if len(blocks) == 1 else sorted({block.held for block in blocks})


def _cut(
    plan: SavePlan,
    sources: Mapping[str, Source],
    boxes: list[list[int]],
    fetched: list[list[Array]],
    most: int,
) -> Iterator[BlockElements]:
    for (name, source), of_boxes, arrays in zip(sources.items(), boxes, fetched, strict=True):
        blocks, tensor = plan.blocks[name], plan.tensors[name]
        # Nearly all of a state of many small tensors.
        if len(blocks) == 1 and not source.private and not source.resident:
            array, block = stored(arrays[0], tensor), blocks[0]
            if block.nbytes == array.nbytes <= most:
                yield BlockElements(block, array, own=False)
                continue
        of_box = {i: stored(array, tensor) for i, array in zip(of_boxes, arrays, strict=True)}
        for block, own in zip(blocks, are_own(blocks, source), strict=True):
            array = of_box[block.held]
            if block.nbytes == array.nbytes <= most:  # the complete box, which needs no index
                yield BlockElements(block, array, own, source.resident)
                continue
            for part in smaller(block, most):
                yield BlockElements(part, array[part.inside], own, source.resident)
