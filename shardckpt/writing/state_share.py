"""One process's share of a state: what the first step of a save takes, before anything is written.

Flatten the state. Every tensor leaf becomes a source that knows its shape, dtype, layout, the distinct boxes that this process holds, and
the other processes that hold them. Plan (`save_plan`) each tensor's chunks, and the chunks that this process writes. Copy everything that
is small. No process communicates with another one or with the storage.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt import frameworks
from shardckpt.format.record import Contents
from shardckpt.format.structure import Structure
from shardckpt.frameworks.per_process import encode_values, values_file
from shardckpt.io.threads import collector_paused
from shardckpt.state import flatten
from shardckpt.state.flatten import StateOwner, local_names, plain_state, unused_local
from shardckpt.writing.replicas import ReplicaChecksums
from shardckpt.writing.save_plan import skipped_names, small_elements, with_arrays_noted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.frameworks.base import Source
    from shardckpt.layout.world import World
    from shardckpt.options import SaveOptions
    from shardckpt.writing.save_plan import SavePlan


@dataclass(frozen=True, slots=True)
class StateShare:
    """One process's part of a state, and the plan of what it writes."""

    plan: SavePlan
    sources: Mapping[str, Source]
    """Its tensors without the skipped ones. Only the parts in `contents` have been copied so far."""
    contents: Contents
    values: bytes | None
    """The file of the values that this process owns by itself; None: there are none."""
    late: Sequence[str] = ()
    """The small plain tensors on devices, which `contents` lacks."""
    replicas: ReplicaChecksums | None = None
    """The checksums of boxes that other processes hold, too; None: they are not compared."""
    unused_local: Sequence[str] = ()
    """Patterns for values of each process that have selected nothing on this process."""


@collector_paused()
def share_of(
    state: Any,
    options: SaveOptions,
    world: World,
    plan: Callable[[Mapping[str, Source], SaveOptions, World], SavePlan],
    *,
    waits: bool,
) -> StateShare:
    """One process's share of a state. When this returns, everything is copied except the elements of large tensors.

    Args:
        state: as in `shardckpt.save`.
        options: the options of the save.
        world: this process and the others.
        plan: makes the plan, or returns it from a cache.
        waits: whether to wait for devices to copy small plain tensors; False: they are left to the caller, as `StateShare.late`.

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
    )
    tensors = frameworks.reduce_partial(flat.tensors) if options.reduce_partial else flat.tensors
    sources = frameworks.sources(tensors, world, unread=skipped_names(tensors, options.skip), local=flat.local)
    if world.processes > 1:
        frameworks.check_aliases(sources, plain=options.host_tensors == "replicated")
    planned = plan(sources, options, world)
    values = values_file(encode_values(flat.per_process, flat.axes)) if flat.per_process else None
    records = with_arrays_noted(planned.tensors, tensors) if isinstance(state, StateOwner) else planned.tensors
    structure, metadata = Structure(flat.tree, records), json.loads(json.dumps(options.metadata))
    late = [] if waits or not planned.small else [*{*frameworks.names_on_devices(sources)}.intersection(planned.small)]
    contents = Contents(structure, small_elements(planned, sources, late), metadata)
    written = {name: source for name, source in sources.items() if name not in planned.skipped}
    replicas = None
    if planned.replicated:  # empty if they are not to be compared
        replicas = ReplicaChecksums(planned, sources, wholly=options.check_replicas is True or options.fingerprint)
        if waits:
            replicas.fetch_late()
    return StateShare(planned, written, contents, values, late, replicas, unused_local(state))
