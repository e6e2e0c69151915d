"""The plan of a save: what one process writes of a state, and how every tensor is stored.

Planning is pure: it depends only on the tensors' metadata. Processes that know the same tensor plan
it the same.

1. Choose each tensor's chunks from its shape and layout alone (`tensor_storage`). A skipped tensor
   gets no chunks here.
2. Ask which processes hold each box. A plain host tensor does not say. A large one is held by all
   processes, or only by the process that has it in its state, as `host_tensors` says. Small ones
   may be on any processes, and none of their chunks is written here: their elements go into the
   host's contents document.
3. Deal out the chunks of every box among its holders (`plan.writers`), or give them all to the
   lowest holder if replicas are not compared: copies that may differ must not be mixed. Cut this
   process's share into blocks that can be copied at once (`plan.pieces`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from shardckpt import frameworks
from shardckpt.errors import LeafError, OptionError
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.layout.box import BoxArray
from shardckpt.layout.dtypes import with_plain_bools
from shardckpt.plan.blocks import Block, blocks_of
from shardckpt.plan.pieces import Piece, count_chunks
from shardckpt.plan.writers import Part, deal
from shardckpt.state.document import local_branches, parse
from shardckpt.state.names import shown
from shardckpt.state.select import matches, selector, unused_patterns
from shardckpt.writing.small_blocks import SmallBlocks, group_blocks
from shardckpt.writing.tensor_storage import tensor_records

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardckpt.frameworks.base import Source
    from shardckpt.layout.box import Box
    from shardckpt.layout.world import World
    from shardckpt.options import SaveOptions
    from shardckpt.state.document import Tree

SMALL_BYTES = 64 << 10
"""Plain tensors of fewer bytes are not written by a job of several processes: their elements go
into the host's contents."""
MOST_SMALL_BYTES = 64 << 20
"""Most total bytes of small plain tensors; the committer holds several copies of them."""


@dataclass
class SavePlan:
    """One process's share of a save; many saves use one plan, and its cached properties."""

    tensors: dict[str, TensorRecord]
    """Storage of every tensor of this process: its array or pieces."""
    small: list[str]
    """Small plain tensors; their elements go into the host's contents."""
    replicated: dict[str, list[tuple[int, ...]]]
    """For tensors of which other processes write a part of a box of this process, too: the holders
    of each box."""
    blocks: dict[str, list[Block]]
    """The chunks that this process writes, in blocks that are copied at once: by tensor, in the
    order of the tensors; tensors without any are left out."""
    skipped: frozenset[str] = frozenset()
    """Tensors that stay in the base; their records get the base's pieces later."""
    _noted: tuple[dict[str, str], Structure] | None = field(
        init=False, repr=False, compare=False, default=None
    )
    """The last `arrays` of `structure`, and the tensors with these."""

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the elements that this process writes."""
        return sum([block.nbytes for block in chain.from_iterable(self.blocks.values())])

    @cached_property
    def largest_chunk(self) -> int:
        """Bytes of the largest chunk."""
        blocks = chain.from_iterable(self.blocks.values())
        return max([block.chunk_bytes for block in blocks], default=0)

    @cached_property
    def copy_groups(self) -> list[SmallBlocks | list[str]]:
        """The tensors with blocks in order: small ones that are copied together, and others."""
        return group_blocks(self.blocks, self.tensors)

    @cached_property
    def _structure(self) -> Structure:
        """The tensors without a tree."""
        return Structure({}, self.tensors)

    def structure(self, tree: Tree, arrays: dict[str, str]) -> Structure:
        """The structure of a state with these tensors, which are encoded once for all saves.

        Args:
            tree: the state's document.
            arrays: as `noted_arrays` returns them; {}: none are marked.
        """
        if not arrays:
            return self._structure.with_tree(tree)
        noted = self._noted
        if noted is None or noted[0] != arrays:
            marked = {
                name: replace(tensor, array=arrays[name]) if name in arrays else tensor
                for name, tensor in self.tensors.items()
            }
            noted = self._noted = arrays, Structure({}, marked)
        return noted[1].with_tree(tree)


def plan_save(
    sources: Mapping[str, Source], options: SaveOptions, world: World, *, differences: bool = False
) -> SavePlan:
    """Plan one process's share; `differences`: its chunks may be stored as differences.

    Raises:
        LeafError, ShardingError: a tensor that cannot be stored, by name.
        OptionError: a pattern in `shardings` that matches no plain tensor, or a pattern in `skip`
            that matches no tensor.
    """
    skipped = skipped_names(sources, options.skip)
    tensors = tensor_records(sources, options, world, skipped, differences=differences)
    everyone = tuple(range(world.processes))
    small: list[str] = []
    replicated: dict[str, list[tuple[int, ...]]] = {}
    parts: list[Part] = []
    places: list[tuple[str, _Parted]] = []
    known: dict[Hashable, list[_Parted]] = {}
    for name, source in ((name, source) for name, source in sources.items() if name not in skipped):
        tensor, boxes = tensors[name], source.boxes
        holders = source.holders
        if holders is None:
            if world.processes > 1 and tensor.nbytes < SMALL_BYTES:
                small.append(name)
                continue
            local = world.processes == 1 or options.host_tensors == "local"
            holders = [(world.process,) if local else everyone] * len(boxes)
        if world.processes > 1 and any(len(of_box) > 1 for of_box in holders):
            holders = _to_compare(replicated, name, holders, options)
        size = tensor.dtype.storage.itemsize
        for part in _parted(tensor.pieces, boxes, known):
            piece = tensor.pieces[part.piece]
            parts.append(
                Part(
                    name,
                    piece.path,
                    part.box.start,
                    holders[part.held],
                    part.chunks,
                    prod(piece.chunks) * size,
                )
            )
            places.append((name, part))
    small_bytes = sum(tensors[name].nbytes for name in small)
    if small_bytes > MOST_SMALL_BYTES:
        raise LeafError(
            f"{shown(small[0])} and {len(small) - 1:,} other plain tensors below "
            f"{SMALL_BYTES >> 10} KiB take {small_bytes:,} bytes, and a job of several processes "
            f"stores at most {MOST_SMALL_BYTES:,}; stack them into larger ones, or lay them out "
            "over devices."
        )
    blocks: dict[str, list[Block]] = {}
    shares = (
        deal(parts, world.process)
        if world.processes > 1
        else [range(part.chunks) for part in parts]
    )
    for (name, part), share in zip(places, shares, strict=True):
        if share:
            tensor = tensors[name]
            piece = tensor.pieces[part.piece]
            cut, itemsize = blocks.setdefault(name, []), tensor.dtype.storage.itemsize
            if len(share) == part.chunks:
                cut.append(Block(part.held, part.corner, piece, part.box, itemsize))
            else:
                cut.extend(blocks_of(part.held, part.corner, piece, part.box, share, itemsize))
    return SavePlan(tensors, small, replicated, blocks, skipped)


def _to_compare(
    replicated: dict[str, list[tuple[int, ...]]],
    name: str,
    holders: list[tuple[int, ...]],
    options: SaveOptions,
) -> list[tuple[int, ...]]:
    """The processes that write each box of a tensor.

    Where several do, they compare their copies.
    """
    if options.check_replicas is False:
        return [of_box[:1] for of_box in holders]
    replicated[name] = holders
    return holders


@dataclass(frozen=True, slots=True)
class _Parted:
    """The intersection of one box that this process holds and one piece."""

    held: int
    """Index of the box."""
    corner: tuple[int, ...]
    """First index of that box."""
    piece: int
    """Index of the tensor's piece."""
    box: Box
    """The intersection."""
    chunks: int
    """Number of the piece's chunks in the intersection."""


def _parted(
    pieces: Sequence[Piece], boxes: BoxArray, known: dict[Hashable, list[_Parted]]
) -> list[_Parted]:
    """The intersections of all held boxes with all pieces of a tensor.

    Args:
        pieces: the tensor's pieces.
        boxes: the tensor's boxes that this process holds.
        known: cache of results of other tensors; a thousand tensors are cut in only some dozen
            different patterns.
    """
    # Boxes of no dimensions have no bytes, so the key has their number: it shows whether this
    # process holds one.
    key = (
        tuple([(p.start, p.shape, p.chunks) for p in pieces]),
        len(boxes),
        boxes.start.tobytes(),
        boxes.stop.tobytes(),
    )
    parts = known.get(key)
    if parts is None:
        parts = known[key] = []
        # A tensor may have as many pieces as shards: for each box the Python loop visits only the
        # pieces that it overlaps.
        every = BoxArray.of([piece.box for piece in pieces], boxes.start.shape[1])
        for i in range(len(boxes)):
            box = boxes[i]
            for k in every.overlapping(box).tolist():
                common = box.overlap(pieces[k].box)
                assert common is not None
                parts.append(_Parted(i, box.start, k, common, count_chunks(pieces[k], common)))
    return parts


def skipped_names(names: Iterable[str], patterns: Iterable[str]) -> frozenset[str]:
    """The names that match a pattern; those tensors are skipped.

    Raises:
        OptionError: a pattern that matches no tensor.
    """
    if not (patterns := [*patterns]):
        return frozenset()
    names = [*names]
    unused = unused_patterns(patterns, names)
    if isinstance(unused, list) and unused:
        raise OptionError(
            f"skip: {unused[0]!r} matches no tensor; patterns are matched with whole names."
        )
    return frozenset(filter(selector(patterns), names))


def stored(array: NDArray[np.generic], tensor: TensorRecord) -> NDArray[np.generic]:
    """Elements viewed in the dtype in which they are stored, without a copy."""
    return array.view(tensor.dtype.storage) if array.dtype != tensor.dtype.storage else array


def small_elements(
    plan: SavePlan, sources: Mapping[str, Source], without: Collection[str] = ()
) -> dict[str, bytes]:
    """The elements of small plain tensors, as stored."""
    names = [name for name in plan.small if name not in without] if without else plan.small
    fetched = frameworks.fetch([sources[name] for name in names])
    elements = {}
    for name, arrays in zip(names, fetched, strict=True):
        elements[name] = b"".join(
            with_plain_bools(stored(array, plan.tensors[name])).tobytes() for array in arrays
        )
    return elements


def noted_arrays(leaves: Mapping[str, object]) -> dict[str, str]:
    """The frameworks of the arrays of numpy and JAX, which their records mark.

    A new object of a training may not say what it had there.
    """
    return {
        name: framework
        for name, leaf in leaves.items()
        if (framework := frameworks.framework_of(leaf)) in ("numpy", "jax")
    }


def check_local(unused: Sequence[str], tree: Tree, where: object) -> None:
    """Refuse patterns for values of each process that have selected nothing.

    They have selected nothing on this process, and nothing in the union of the states.

    Args:
        unused: the patterns that have selected nothing on this process.
        tree: the document of the union; {} if there is no other process.
        where: the checkpoint, for the message.

    Raises:
        OptionError: a pattern selects nothing; names it.
    """
    if unused:
        names = [branch.name for branch in local_branches(parse(tree))]
        unknown = [
            pattern for pattern in unused if not any(matches(pattern, name) for name in names)
        ]
        if unknown:
            raise OptionError(
                f"{where}: train_state(local=…): the pattern {unknown[0]!r} selects no value of "
                "this state on any process. Correct it, or leave it out; `shardckpt info` lists "
                "the names of a checkpoint."
            )


# --- plans of earlier saves -----------------------------------------------------------------------

_REMEMBERED = 4
"""Most cached plans: a job that saves different states in turn has few of them."""


class PlanCache:
    """Plans saves, and remembers the last few plans.

    A plan depends on the tensors' metadata, on some options, and on the world. These are its key,
    as one tuple with a row per tensor, which is compared with the keys of the last few saves. Equal
    rows mostly are the same objects, so the comparison is cheap, and nothing has to be hashed. The
    key has no counter and no tensor identity.

    Safe to use from several threads, and from a signal handler: nothing is locked during the
    comparison.
    """

    def __init__(self) -> None:
        """Create an empty cache."""
        self._plans: tuple[tuple[Any, SavePlan], ...] = ()
        """Keys and plans, the last used one last. Replaced as a whole: of two saves at once, one
        may be forgotten."""

    def plan(
        self,
        sources: Mapping[str, Source],
        options: SaveOptions,
        world: World,
        *,
        differences: bool = False,
    ) -> SavePlan:
        """The result of `plan_save`, which must not be modified."""
        key, plans = (differences, *_key(sources, options, world)), self._plans
        known_plan = next((plan for known, plan in plans if known == key), None)
        plan = (
            plan_save(sources, options, world, differences=differences)
            if known_plan is None
            else known_plan
        )
        others = [pair for pair in self._plans if pair[1] is not plan]
        self._plans = (*others[1 - _REMEMBERED :], (key, plan))
        return plan


def _key(sources: Mapping[str, Source], options: SaveOptions, world: World) -> tuple[Any, ...]:
    rows = []
    known: dict[
        int, tuple[BoxArray, bytes, bytes]
    ] = {}  # tensors of one shape mostly share their boxes
    for name, source in sources.items():
        boxes = source.boxes
        if (held := known.get(id(boxes))) is None:
            held = known[id(boxes)] = boxes, boxes.start.tobytes(), boxes.stop.tobytes()
        rows.append(
            (
                name,
                source.shape,
                source.dtype,
                source.layout,
                source.own_pieces,
                source.holders,
                held[1],
                held[2],
            )
        )
    dealt = options.host_tensors, options.check_replicas is False
    return (
        world.process,
        world.processes,
        *dealt,
        options.layout,
        [*options.shardings.items()],
        options.skip,
        rows,
    )


plans = PlanCache()
"""The plans of this process's saves."""
