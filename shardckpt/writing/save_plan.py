"""The plan of a save: what one process writes of a state, and how every tensor is stored.

Planning is pure: it depends only on the tensors' metadata. Processes that know the same tensor plan
it the same.

1. Choose each tensor's chunks from its shape and layout alone. A skipped tensor gets no chunks
   here.
2. Ask which processes hold each box. A plain host tensor does not say. A large one is held by all
   processes, or only by the process that has it in its state, as `host_tensors` says. Small ones
   may be on any processes, and none of their chunks is written here: their elements go into the
   host's contents document.
3. Deal out the chunks of every box among its holders (`plan.writers`), or give them all to the
   lowest holder if replicas are not compared: copies that may differ must not be mixed. Cut this
   process's share into blocks that can be copied at once (`plan.pieces`).
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain, product
from math import prod
from operator import add
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardckpt import frameworks
from shardckpt.errors import LeafError, OptionError, ShardingError
from shardckpt.format.documents import LARGEST_DIMENSION, MOST_DIMENSIONS
from shardckpt.format.structure import StoredLayout, Structure, TensorRecord
from shardckpt.layout.box import BoxArray
from shardckpt.layout.dtypes import with_plain_bools
from shardckpt.layout.placements import Placements
from shardckpt.plan.blocks import Block, blocks_of
from shardckpt.plan.chunks import Floor, chunking, even_runs, smallest_chunk
from shardckpt.plan.pieces import Piece, count_chunks
from shardckpt.plan.writers import Part, deal
from shardckpt.state.document import local_branches, parse
from shardckpt.state.glob import is_glob
from shardckpt.state.names import array_path, piece_path, shown
from shardckpt.state.select import matches, selector, unused_patterns

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.frameworks.base import Source
    from shardckpt.layout.box import Box
    from shardckpt.layout.dtypes import DType
    from shardckpt.layout.sharding import Layout
    from shardckpt.layout.world import World
    from shardckpt.options import SaveOptions
    from shardckpt.state.document import Tree

SMALL_BYTES = 64 << 10
"""Plain tensors of fewer bytes are not written by a job of several processes: their elements go
into the host's contents."""
MOST_SMALL_BYTES = 64 << 20
"""Most total bytes of small plain tensors; the committer holds several copies of them."""
LONGEST_PATH = 60_000
"""Most bytes of a tensor's stored name: OCDBT keys have fewer than 2^16 bytes, and a key also
contains the chunk's grid position."""


@dataclass(frozen=True, slots=True)
class Write:
    """Some chunks of a piece, all in one box that this process holds."""

    box: int
    """Index of the source's box."""
    piece: Piece
    chunks: range
    """The piece's chunks in that box, counted in grid order."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """One process's share of a save."""

    tensors: dict[str, TensorRecord]
    """Storage of every tensor of this process: its array or pieces."""
    writes: dict[str, list[Write]]
    """Runs of chunks that this process writes, by tensor, in the order of the tensors; tensors
    without any are left out."""
    small: list[str]
    """Small plain tensors; their elements go into the host's contents."""
    replicated: dict[str, list[tuple[int, ...]]]
    """For tensors of which other processes write a part of a box of this process, too: the holders
    of each box."""
    blocks: dict[str, list[Block]]
    """The same chunks as `writes`, cut into blocks that are copied at once."""
    skipped: frozenset[str] = frozenset()
    """Tensors that stay in the base; their records get the base's pieces later."""
    nbytes: int = field(init=False)
    """Bytes of the elements that this process writes."""
    largest_chunk: int = field(init=False)
    """Bytes of the largest chunk."""

    _structure: Structure = field(init=False, repr=False, compare=False)
    """The tensors without a tree."""

    def __post_init__(self) -> None:
        """Count bytes once: a plan is used for many saves."""
        object.__setattr__(self, "_structure", Structure({}, self.tensors))
        blocks = [*chain.from_iterable(self.blocks.values())]
        object.__setattr__(self, "nbytes", sum([block.nbytes for block in blocks]))
        object.__setattr__(
            self, "largest_chunk", max([block.chunk_bytes for block in blocks], default=0)
        )

    def structure(self, tree: Tree, tensors: dict[str, TensorRecord]) -> Structure:
        """The structure of a state with these tensors, the plan's own or changed ones.

        Its own are encoded once for all saves.
        """
        return (
            self._structure.with_tree(tree) if tensors is self.tensors else Structure(tree, tensors)
        )


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
    writes: dict[str, list[Write]] = {}
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
            writes.setdefault(name, []).append(Write(part.held, piece, share))
            cut, itemsize = blocks.setdefault(name, []), tensor.dtype.storage.itemsize
            if len(share) == part.chunks:
                cut.append(Block(part.held, part.corner, piece, part.box, itemsize))
            else:
                cut.extend(blocks_of(part.held, part.corner, piece, part.box, share, itemsize))
    return SavePlan(tensors, writes, small, replicated, blocks, skipped)


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


def tensor_records(
    sources: Mapping[str, Source],
    options: SaveOptions,
    world: World,
    skipped: frozenset[str] = frozenset(),
    *,
    differences: bool = False,
) -> dict[str, TensorRecord]:
    """Storage of each tensor: its array or pieces. Skipped tensors have no pieces yet."""
    smallest = _smallest_chunks(
        {name: source for name, source in sources.items() if name not in skipped},
        world,
        files=options.layout == "zarr",
        differences=differences,
    )
    records: dict[str, TensorRecord] = {}
    known: dict[Hashable, TensorRecord] = {}
    for (name, source), layout in zip(
        sources.items(), _layouts(sources, options.shardings), strict=True
    ):
        if name in skipped:
            shape = source.shape
            _check_storable(name, shape, source.dtype)
            if layout is not None:
                with _naming(name):
                    layout.parts(
                        len(shape)
                    )  # readers refuse a layout that does not fit; the result is not needed here
            records[name] = TensorRecord(name, shape, source.dtype, layout, ())
        else:
            own_boxes = source.boxes if source.own_pieces else None
            shape = source.shape
            key = (shape, source.dtype.name, id(layout), smallest[name])
            if key in known and own_boxes is None:
                _check_storable(name, shape, source.dtype)
                records[name] = known[key].called(name)
                continue
            tensor = records[name] = tensor_record(
                name, shape, source.dtype, layout, smallest[name], own_boxes=own_boxes
            )
            if tensor.is_one_array:
                known[key] = tensor
    return records


def tensor_record(
    name: str,
    shape: tuple[int, ...],
    dtype: DType,
    layout: StoredLayout | None,
    smallest: Floor,
    *,
    own_boxes: BoxArray | None = None,
) -> TensorRecord:
    """Storage of one tensor: its array or pieces.

    Args:
        name: its name.
        shape: in elements.
        dtype: of its elements.
        layout: how it is laid out over devices; None: a plain host tensor.
        smallest: lower limit for the size of its chunks.
        own_boxes: boxes that are stored as one array each, for a tensor of which this process knows
            nothing else.

    Raises:
        LeafError, ShardingError: the tensor cannot be stored; the message names it.
    """
    _check_storable(name, shape, dtype)
    with _naming(name):
        blocks = _blocks(shape, layout, own_boxes)
        pieces = _pieces(
            name, shape, dtype.storage.itemsize, blocks, smallest, apart=own_boxes is not None
        )
    return TensorRecord(name, shape, dtype, layout, pieces, partial=own_boxes is not None)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the tensor's name to a ShardingError about its layout."""
    try:
        yield
    except ShardingError as e:
        raise ShardingError(f"{shown(name)}: {e}") from e


def _check_storable(name: str, shape: tuple[int, ...], dtype: DType) -> None:
    if len(shape) > MOST_DIMENSIONS:
        raise LeafError(
            f"{shown(name)} has {len(shape)} dimensions, and at most {MOST_DIMENSIONS} can be "
            "stored; reshape it."
        )
    if len(array_path(name)) > LONGEST_PATH:
        raise LeafError(
            f"{shown(name)} has a name of {len(name):,} characters, too long to be stored; use "
            "shorter keys."
        )
    # A tensor with elements fits in some process's memory. Readers would refuse this one, and with
    # it the complete checkpoint.
    if 0 in shape and prod([max(n, 1) for n in shape]) * dtype.itemsize > LARGEST_DIMENSION:
        raise LeafError(
            f"{shown(name)} has no elements, and with its shape {shape} more bytes than can be "
            "addressed; reshape it."
        )


def _smallest_chunks(
    sources: Mapping[str, Source], world: World, *, files: bool, differences: bool
) -> dict[str, Floor]:
    """The lower limit of the chunk size by tensor.

    For `files` and `differences` see `smallest_chunk`.

    Processes that know a tensor must cut it the same. A tensor on some devices is known to all
    processes of those devices, and so are all other tensors on exactly the same devices. No process
    can know which other tensors the other processes have.
    """
    groups = {
        name: None if world.processes == 1 else _known_with(source)
        for name, source in sources.items()
    }
    sizes: Counter[bytes | None] = Counter()
    for name, source in sources.items():
        sizes[groups[name]] += prod(source.shape) * source.dtype.storage.itemsize
    return {
        name: smallest_chunk(
            0 if group == _PLAIN else sizes[group], files=files, differences=differences
        )
        for name, group in groups.items()
    }


_PLAIN = b""


def _known_with(source: Source) -> bytes:
    """A key that is equal for tensors that are certain to be known to the same processes.

    `_PLAIN` where nothing is certain.
    """
    return (
        _PLAIN
        if source.holders is None or source.layout is None
        else _devices(source.layout, len(source.shape))
    )


@lru_cache(maxsize=64)
def _devices(layout: StoredLayout, ndim: int) -> bytes:
    ids = (
        layout.mesh.device_ids if isinstance(layout, Placements) else layout.tiling(ndim).device_ids
    )
    return sha256(
        np.sort(ids).tobytes()
    ).digest()  # a short key: thousands of tensors may share a mesh of a hundred thousand devices


def _layouts(
    sources: Mapping[str, Source], shardings: Mapping[str, Layout]
) -> list[StoredLayout | None]:
    """Each tensor's layout, for a plain tensor from the first pattern that matches it.

    Any other tensor has its own layout over devices.
    """
    layouts: list[StoredLayout | None] = []
    used: set[str] = set()
    shadowed: dict[str, str] = {}
    order = {pattern: number for number, pattern in enumerate(shardings)}
    globs = {pattern: selector(pattern) for pattern in shardings if is_glob(pattern)}
    for name, source in sources.items():
        fitting = (
            [pattern for pattern, selects in globs.items() if selects(name)]
            if source.layout is None
            else []
        )
        if name in order and name not in globs and source.layout is None:
            fitting = sorted([*fitting, name], key=order.__getitem__)
        used.update(fitting[:1])
        for pattern in fitting[1:]:
            shadowed[pattern] = fitting[0]
        layouts.append(shardings[fitting[0]] if fitting else source.layout)
    for pattern in shardings:
        if pattern not in used:
            raise OptionError(
                f"SaveOptions(shardings=…): {pattern!r} is shadowed by {shadowed[pattern]!r}, "
                "which comes first; put it before that."
                if pattern in shadowed
                else f"SaveOptions(shardings=…): {pattern!r} matches no plain tensor; patterns are "
                "matched with whole names."
            )
    return layouts


_Block: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]"
"""A box of a tensor that is cut into equal tiles: its first index, its shape, and the number of
tiles per dimension."""


def _pieces(
    name: str,
    shape: tuple[int, ...],
    itemsize: int,
    blocks: Iterable[_Block],
    smallest: Floor,
    *,
    apart: bool,
) -> tuple[Piece, ...]:
    """One array for the complete tensor, or several arrays.

    There are several if no useful common grid exists or `apart` is set.
    """
    pieces = []
    for start, extent, parts in blocks:
        cut = chunking(extent, itemsize, parts, smallest=smallest)
        if cut.piece == shape and not apart:
            return (Piece(array_path(name), start, shape, cut.chunks),)
        for corner in product(*map(range, start, map(add, start, extent), cut.piece)):
            # The last piece of a dimension may be short, even shorter than a chunk.
            sides = tuple(
                min(side, a + n - i)
                for side, a, n, i in zip(cut.piece, start, extent, corner, strict=True)
            )
            pieces.append(
                Piece(
                    piece_path(name, shape, corner),
                    corner,
                    sides,
                    tuple(map(min, cut.chunks, sides)),
                )
            )
    return tuple(pieces)


def _blocks(
    shape: tuple[int, ...], layout: StoredLayout | None, own_boxes: BoxArray | None
) -> Iterator[_Block]:
    """A tensor, or the part that this process knows, as boxes that have one common grid each."""
    undivided = (1,) * len(shape)
    if own_boxes is not None:
        for i in range(len(own_boxes)):
            yield own_boxes[i].start, own_boxes[i].shape, undivided
    elif isinstance(layout, Placements):
        for runs in product(*map(even_runs, layout.cuts(shape))):
            starts, lengths, parts = zip(*runs, strict=True)
            yield starts, lengths, parts
    else:
        yield (0,) * len(shape), shape, undivided if layout is None else layout.parts(len(shape))


def stored(array: NDArray[np.generic], tensor: TensorRecord) -> NDArray[np.generic]:
    """Elements viewed in the dtype in which they are stored, without a copy."""
    return array.view(tensor.dtype.storage) if array.dtype != tensor.dtype.storage else array


def small_elements(
    plan: SavePlan, sources: Mapping[str, Source], without: Sequence[str] = ()
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


def with_arrays_noted(
    tensors: dict[str, TensorRecord], leaves: Mapping[str, object]
) -> dict[str, TensorRecord]:
    """The records, where arrays of numpy and JAX are marked.

    A new object of a training may not say what it had there.
    """
    frameworks_of = {
        name: framework
        for name, leaf in leaves.items()
        if (framework := frameworks.framework_of(leaf)) in ("numpy", "jax")
    }
    return (
        {
            name: replace(tensor, array=frameworks_of[name]) if name in frameworks_of else tensor
            for name, tensor in tensors.items()
        }
        if frameworks_of
        else tensors
    )


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
