"""Restoring: from stored chunks to the leaves of a state, whatever layout they were saved in.

1. Match `like` with the stored tree and check everything: names, kinds, shapes, dtypes
   (`state.match`, `restore_jobs`). No chunk has been read yet.
2. Each leaf says which distinct boxes of its tensor this process needs. It provides memory to read
   into, or asks for staging buffers (`frameworks.target`). Buffers for CUDA devices are pinned, and
   such tensors are read in parts.
3. Batch after batch within the memory limit: read the chunks that the boxes touch, each once,
   straight into place or into staging (`Checkpoint.reader`). While one batch is placed on the
   devices the next one may be read (`read_ahead`).
4. Rebuild `like`'s containers around the leaves.

Only a `cooperative` restore communicates with other processes: reads that several of them need are
then shared.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardckpt import frameworks
from shardckpt.errors import MismatchError, OptionError, ShardckptError, extend, out_of_memory
from shardckpt.frameworks.coordination import Coordinator, check_coordinator
from shardckpt.io.buffers import BufferPool
from shardckpt.io.cores import cores
from shardckpt.io.failures import reading_takes_threads
from shardckpt.io.store import kind_of
from shardckpt.io.threads import SHORT_READ, collector_paused
from shardckpt.io.url import parse
from shardckpt.options import (
    DEFAULT_MEMORY_LIMIT,
    check_flag,
    check_function,
    leaves_out_with,
    parse_bytes,
)
from shardckpt.reading.checkpoint import Checkpoint
from shardckpt.reading.cooperative import Choice, Meeting, check_choice, exchange_bytes
from shardckpt.reading.landing import (
    COPIED,
    SLOTS,
    Beside,
    RestoreJob,
    fills_leaves,
    read_and_place,
    restore_jobs,
    sinks_of,
)
from shardckpt.reading.restoring.complete import complete
from shardckpt.reading.restoring.numbers import (
    arrays_for_numbers,
    landings_of_numbers,
    place_numbers,
)
from shardckpt.reading.restoring.process_values import chosen_values, own_tree
from shardckpt.state import match
from shardckpt.state.document import local_branches
from shardckpt.state.flatten import StateOwner
from shardckpt.state.numbers import number_like
from shardckpt.state.select import Only, check_selection, selector

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Mapping, Sequence

    from typing_extensions import TypeVar

    from shardckpt.frameworks.base import Placer
    from shardckpt.reading.naming.adapt import Adaptation, Fit
    from shardckpt.reading.naming.mapping import TensorMapping
    from shardckpt.state.document import Node
    from shardckpt.state.match import Strict

    Restoring = Generator[tuple[list[RestoreJob], Beside], dict[str, object], Any]
    """See `restoring`."""
    T = TypeVar("T", default=Any)
    """The type of `like`; Any without `like`."""

_log = logging.getLogger("shardckpt")
LARGEST_BATCH = 256 << 20
"""Most bytes of a batch without staging; smaller batches join fewer adjacent chunks. A batch of
files has more on a host of many cores, `_OF_CORE` for each: its plan takes milliseconds, in which
the threads would run out of work."""
STAGED_BATCH = 64 << 20
"""Bytes of staging for one batch that is read from files; for devices at least a quarter of
`_OF_CORE` for each core. A few such buffers are reused and stay warm, where larger ones would be
fresh memory for most of a state. From an object store many requests at a time matter more."""
_OF_CORE = 64 << 20
READ_AHEAD = 2
"""Most batches that are read at a time: a thread that finds nothing left in one goes on with the
next one."""


@leaves_out_with("only")
def restore(
    source: str | os.PathLike[str] | Checkpoint,
    like: T | None = None,
    *,
    only: Only | None = None,
    rename: str | Sequence[str] = (),
    mapping: str | os.PathLike[str] | TensorMapping | None = None,
    invert_mapping: bool = False,
    fit: Mapping[str, Fit] | None = None,
    strict: bool | Literal["like"] = True,
    cast: bool = False,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    cooperative: Choice = False,
    coordinator: Coordinator | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> T:
    """Restore a state, or a part of one.

    Args:
        source: path or url of the checkpoint, or an open `Checkpoint`.
        like: the destinations, in the structure of the state. Torch tensors, Parameters and
            DTensors on CPU and CUDA, and ndarrays are filled in place and returned as the same
            objects. Meta tensors give new CPU tensors. Torch_xla tensors (also lazy ones), JAX
            arrays, `jax.ShapeDtypeStruct`s and `shardckpt.Target`s give new device tensors with the
            same sharding. A `train_state` loads the state into its objects. None gives numpy arrays
            of all complete tensors in dicts, lists and tuples.
        only: name patterns (`"model/**"`), or a function of a name, for the leaves to restore. All
            others keep their value in `like`. The names are those of the checkpoint.
        rename: `s/regex/replacement/`, one or several: names in the checkpoint become names in
            `like`, as in `export_safetensors`. In a `train_state`, the optimizer's state follows
            the names of the parameters.
        mapping: rules that join, split or transpose tensors: a file, or the name of a built-in
            mapping (docs/mapping.md). It applies after `rename`; in a `train_state` to the names
            inside of each module (`layers.0.w`), and the optimizer's state follows.
        invert_mapping: apply the mapping from its `to` to its `from`.
        fit: pattern of names → "pad" or "slice", for tensors of another size in `like`. "pad": the
            stored tensor is restored into the first part, and the rest becomes zero. "slice": the
            first part of the stored tensor is restored. In a `train_state`, a pattern that selects
            a parameter selects its optimizer state of the same shape, too. The log names every such
            tensor.
        strict: True: it is an error if only the checkpoint or only `like` has a name, or if a
            pattern of `only` selects no stored name. "like": further names in the checkpoint are
            skipped, so that `like` may be a part of it, such as a pipeline stage. False: names and
            patterns of one side are skipped, and one warning in the log lists the names. It is an
            error if both have tensors and share none, or if no stored name is left to restore.
        cast: whether to convert tensors to the dtype of their leaf, as `numpy.astype` does: floats
            round to the nearest, integers wrap; a float becomes an integer by cutting off its
            fraction, and NaN and values out of range give an arbitrary integer. Complex to real is
            an error, and so are dtypes without a conversion. Without it, a stored Python number
            fits a tensor without dimensions whose dtype has it; a float is rounded, but not to
            infinity.
        memory_limit: limit in bytes of host staging, beside which the reader has buffers; it is
            exceeded if one tensor's shards on this process are larger.
        cooperative: whether processes that need the same bytes read a part each and send it to the
            others, so that the storage serves each byte once. All processes of the job must then
            make this call, with the same options. "auto" does so where the default `Bandwidths`
            predict a gain, and never from a path; a `Bandwidths` does so where it predicts a gain.
        coordinator: the process's number, for `PerProcess` values in `like`, and the connection to
            the others for `cooperative`. It is detected by default.
        progress: called with the bytes that this process has restored so far, and in all.

    Returns:
        `like`'s containers with the restored leaves; the stored tree's containers if `like` is
        None.

    Raises:
        NotFoundError: there is no committed checkpoint.
        MismatchError: names, structure, shape or dtype differ from `like`; nothing was read. After
            the reading: an object of a `train_state` refuses its state, or does not take all of it
            (NamesMismatchError).
        LeafError, ShardingError: a leaf of `like` is not a valid destination; the error names it.
            Nothing was read.
        OptionError: an option is invalid.
        ReplacedError: the checkpoint was replaced or deleted while it was being read.
        CorruptionError: stored bytes are damaged or missing. The contents of leaves that are filled
            in place are undefined.
        MissingDataError: a base is gone or was replaced; nothing was read.
        StorageError: the storage failed, or Python is shutting down.
        CoordinationError: with `cooperative`, another process failed or does not answer. If a
            process cannot read, all processes that share its reads raise its error.
    """
    adaptation = adaptation_of(rename, mapping, invert_mapping=invert_mapping, fit=fit)
    options: dict[str, Any] = {
        "only": only,
        "strict": strict,
        "cast": cast,
        "cooperative": cooperative,
        "coordinator": coordinator,
    }
    state: T = restore_adapted(
        source, like, adaptation, memory_limit=memory_limit, progress=progress, **options
    )
    return state


def adaptation_of(
    rename: str | Sequence[str],
    mapping: str | os.PathLike[str] | TensorMapping | None,
    *,
    invert_mapping: bool,
    fit: Mapping[str, Fit] | None,
) -> Adaptation | None:
    """The changes that options of `restore` ask for; None: the options are those by default."""
    if rename == () and mapping is None and invert_mapping is False and fit is None:
        return None
    from shardckpt.reading.naming.adapt import Adaptation

    return Adaptation(rename=rename, mapping=mapping, invert_mapping=invert_mapping, fit=fit)


@leaves_out_with("only")
def restore_adapted(
    source: str | os.PathLike[str] | Checkpoint,
    like: Any,
    adaptation: Adaptation | None,
    *,
    only: Only | None,
    strict: Strict,
    cast: bool,
    cooperative: Choice,
    coordinator: Coordinator | None,
    progress: Callable[[int, int], None] | None,
    memory_limit: int | str = DEFAULT_MEMORY_LIMIT,
    filling: Callable[[list[str]], None] | None = None,
) -> Any:
    """Restore a state; see `restore`.

    `adaptation` has its options for names and sizes, and afterwards what was done. `filling` is
    called before the first element is read, with the names of the leaves that are filled in place.
    """
    if coordinator is not None:
        # Before the meeting: without a coordinator no other process can learn of the error.
        check_coordinator(coordinator)
    place = source.location if isinstance(source, Checkpoint) else source
    meeting = None if cooperative is False else Meeting(cooperative, coordinator)
    try:
        with ExitStack() as pause, meeting or nullcontext(), reading_takes_threads(place):
            # A single pause: after each of several, the collector would visit all that is new.
            pause.enter_context(collector_paused())
            if meeting is not None:
                pause.close()
                meeting.location = parse(place)
                check_choice(cooperative)
            if not callable(strict) and not (isinstance(strict, str) and strict == "like"):
                check_flag(strict, "strict")
            check_flag(cast, "cast")
            check_function(progress, "progress")
            limit = parse_bytes(memory_limit, "memory_limit")
            if limit <= 0:
                raise OptionError(f"restore(memory_limit={limit}): must be positive.")
            checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
            if adaptation is not None:
                adaptation.begin(checkpoint, like, only)
            elif only is not None:
                check_selection(
                    only, checkpoint.parsed_tree, str(checkpoint.location), each=strict is not False
                )
            steps = restoring(
                checkpoint,
                checkpoint.parsed_tree,
                like,
                adaptation,
                only=only,
                strict=strict,
                cast=cast,
                coordinator=coordinator,
            )
            # Waits neither for others nor for a network.
            alone = cooperative is False and kind_of(checkpoint.location).near
            if not (alone and checkpoint.record.totals["bytes"] <= SHORT_READ):
                pause.close()
            read = partial(
                read_all, checkpoint, limit, meeting=meeting, progress=progress, filling=filling
            )
            state = _carried_out(steps, read)
            if adaptation is not None:
                adaptation.log_notes(checkpoint.location)
            return state
    except MemoryError as e:
        raise out_of_memory(str(place), e) from e


def _carried_out(
    steps: Restoring, read: Callable[[Sequence[RestoreJob], Beside], dict[str, object]]
) -> Any:
    """The state, after `read` has filled what the first step asks for.

    All that is made per tensor is gone when this returns.
    """
    return finished(steps, read(*next(steps)))


def finished(steps: Restoring, restored: dict[str, object]) -> Any:
    """The state, from the leaves that were read and placed by name."""
    try:
        steps.send(restored)
    except StopIteration as e:
        return e.value
    raise AssertionError("a restore yields once")


def restoring(
    checkpoint: Checkpoint,
    tree: Node,
    like: Any,
    adaptation: Adaptation | None,
    *,
    only: Only | None,
    strict: Strict,
    cast: bool,
    coordinator: Coordinator | None,
) -> Restoring:
    """Restore from an open checkpoint, in two steps.

    This generator first checks and plans everything, and then builds the state.

    It yields once: the jobs to read and place, and what is filled beside them (`read_all`). It is
    sent the leaves that these have made, and returns the state.

    Args:
        checkpoint: the source.
        tree: its state's tree, in the form that `like` has.
        like: see `restore`.
        adaptation: the options for names and sizes; None: everything stays as it is.
        only: see `restore`.
        strict: see `state.match`.
        cast: see `restore`.
        coordinator: see `restore`.
    """
    selects = None if only is None else adaptation.selects if adaptation else selector(only)
    record = checkpoint.tensor if adaptation is None else adaptation.tensor
    if adaptation is not None and not isinstance(like, StateOwner) and not adaptation.places:
        tree = tree if like is None else _own_tree(checkpoint, tree, only, coordinator)
        tree = adaptation.settle(adaptation.rearranged(tree), only, each=strict is not False)
    if like is None:
        return (yield from complete(checkpoint, tree, record, selects, adaptation))
    tree = _own_tree(checkpoint, tree, only, coordinator)
    if isinstance(like, StateOwner):
        picks = selects or selector(None)
        tree = like.arranged(tree, picks, adaptation)
        if adaptation is not None:
            adaptation.settle(tree, only, each=strict is not False)
        into = [
            like.like(
                tree,
                record,
                picks,
                lambda: (coordinator or Coordinator.current()).world,
                adaptation,
            )
        ]
        restored = yield from restoring(
            checkpoint,
            tree,
            into.pop(),
            adaptation,
            only=only,
            strict=strict,
            cast=cast,
            coordinator=coordinator,
        )
        like.load_state_dict(restored, strict=strict is not False)
        return like
    try:
        with collector_paused():
            matched = match(
                like,
                tree,
                frameworks.is_tensor,
                only=selects,
                strict=strict,
                meaning=frameworks.meaning,
                composite=frameworks.composite,
            )
        chosen = (
            chosen_values(checkpoint, matched.per_process, coordinator)
            if matched.per_process
            else {}
        )
    except MismatchError as e:
        extend(e, before=f"{checkpoint.location}: ")
        raise
    if matched.missing or matched.unexpected:
        _log.warning("%s: restore(strict=False): %s", checkpoint.location, matched.skipped())
    numbers = arrays_for_numbers(checkpoint, matched, record) if matched.numbers else {}
    filled = landings_of_numbers(checkpoint, matched, cast=cast) if matched.filled else []
    places = {
        **matched.tensors,
        **{
            stored: [*matched.tensors.get(stored, ()), *arrays]
            for stored, arrays in numbers.items()
        },
    }
    beside = [landing for landing, _ in filled]
    sinks = sinks_of(places, record)
    restored = yield (
        restore_jobs(checkpoint, sinks, cast=cast, adaptation=adaptation, beside=beside),
        beside,
    )
    if adaptation is not None:
        adaptation.restored(restored)
    for name, number in chain.from_iterable(matched.numbers.values()):
        restored[name] = number_like(np.asarray(restored[name]), number)
    return matched.build({**restored, **(place_numbers(filled) if filled else {}), **chosen})


def _own_tree(
    checkpoint: Checkpoint, tree: Node, only: Only | None, coordinator: Coordinator | None
) -> Node:
    """The stored state as this process has it."""
    local = list(local_branches(tree))
    return own_tree(checkpoint, tree, local, only, coordinator) if local else tree


def read_all(
    checkpoint: Checkpoint,
    limit: int,
    jobs: Sequence[RestoreJob],
    beside: Beside,
    *,
    meeting: Meeting | None = None,
    progress: Callable[[int, int], None] | None = None,
    filling: Callable[[list[str]], None] | None = None,
) -> dict[str, object]:
    """Read and place everything, together with other processes or alone.

    Return the restored leaves by name.

    Args:
        checkpoint: the source.
        limit: bytes of host staging.
        jobs: the tensors and their destinations.
        beside: leaves that are filled without reading; None: no memory belongs to the caller.
        meeting: where processes agree on reads to share; None: none are shared.
        progress: called with bytes placed so far and in all.
        filling: see `restore_adapted`.
    """
    done, total = 0, sum(job.nbytes for job in jobs)

    def placed(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    def read_alone(batch: Sequence[RestoreJob]) -> None:
        with checkpoint.reading():
            checkpoint.reader.read(
                [request for job in batch for request in job.requests()],
                at_once=ahead if placers else 1,
            )

    def fetch(read: Callable[[Sequence[RestoreJob]], None], batch: Sequence[RestoreJob]) -> None:
        try:
            read(batch)
        except ShardckptError as e:
            if in_place:
                extend(
                    e,
                    after=" The contents of tensors of `like` that are restored in place are "
                    "undefined now.",
                )
            raise

    near = kind_of(checkpoint.location).near
    largest = max(LARGEST_BATCH, _OF_CORE * cores()) if near else LARGEST_BATCH
    staged = STAGED_BATCH if near else LARGEST_BATCH
    checkpoint.open_bases(tensor for job in jobs for tensor in job.stored)
    in_place = fills_leaves(jobs, beside, filling)
    alone, shared = (list(jobs), []) if meeting is None else meeting.divide(checkpoint, jobs, limit)
    pool, placers = (
        (None, {})
        if all(job.is_in_place for job in jobs)
        else _staging_of(jobs, limit - exchange_bytes(limit) * bool(shared))
    )
    ahead = READ_AHEAD
    # Members of a group form equal batches, though one has more cores or other devices.
    of_group = staged if pool is None else min(staged, pool.limit // SLOTS)
    if pool is not None and placers:
        staged, ahead = min(max(staged, largest // 4), pool.limit // SLOTS), SLOTS - COPIED
        alone = [part for job in alone for part in job.divided(staged)]
    read_batches = partial(read_and_place, pool=pool, placers=placers, placed=placed)
    restored: dict[str, object] = {}
    for group in shared:  # its reads are collectives, which all members make in the same order
        read = partial(fetch, group.read)
        restored |= read_batches(group.jobs, read, largest=LARGEST_BATCH, staged=of_group, ahead=1)
    restored |= read_batches(
        alone, partial(fetch, read_alone), largest=largest, staged=staged, ahead=ahead
    )
    for placer in placers.values():
        placer.end()
    return restored


def _staging_of(
    jobs: Sequence[RestoreJob], limit: int
) -> tuple[BufferPool | None, dict[type[Placer], Placer]]:
    """The pool of the buffers, and the objects that copy from them to devices."""
    placers = frameworks.placers(landing.sink for job in jobs for landing in job.landings)
    return BufferPool(limit, frameworks.pinning(placers.values())), placers
