"""`fingerprint`: what identifies the tensors of a state, computed where they are."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from shardckpt import frameworks
from shardckpt.errors import StructureMismatchError
from shardckpt.format.fingerprint import Fingerprint, StateSums
from shardckpt.format.replicas import as_text, difference
from shardckpt.frameworks.coordination import Coordinator, check_coordinator
from shardckpt.options import SaveOptions
from shardckpt.state.flatten import flatten, local_names, plain_state
from shardckpt.state.names import shown
from shardckpt.writing.committer import COMMITTER
from shardckpt.writing.replicas import ReplicaChecksums
from shardckpt.writing.save_plan import plan_save, small_elements
from shardckpt.writing.state_share import MOST_COPIES, read_to_host

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


def fingerprint(state: Any, *, coordinator: Coordinator | None = None) -> Fingerprint:
    """The fingerprint of a state's tensors: the same on any mesh and in any framework.

    If a single bit differs, the fingerprint is another one.

    In a job of several processes all of them call it, each with its own view of the state, and all
    get the same result. Small leaves such as step numbers are not part of it.

    Args:
        state: as in `save`.
        coordinator: connects the processes of the job; by default detected once.

    Raises:
        LeafError, ShardingError: as in `save`.
        StructureMismatchError: processes have different tensors under one name, or different copies
            of one tensor.
        CoordinationError: another process did not call it in time.
    """
    check_coordinator(coordinator)
    coordinator = Coordinator.current() if coordinator is None else coordinator
    world = coordinator.world
    flat = flatten(
        plain_state(state),
        frameworks.is_tensor,
        frameworks.identity,
        composite=frameworks.composite,
        local=local_names(state),
        process=world.process,
    )
    return fingerprint_of(flat.tensors, coordinator, local=flat.local)


def fingerprint_of(
    tensors: Mapping[str, Any], coordinator: Coordinator, *, local: Container[str] = ()
) -> Fingerprint:
    """The fingerprint of tensors by name; see `fingerprint`.

    `local`: names of the tensors that this process alone has.
    """
    world = coordinator.world
    sources = frameworks.sources(tensors, world, local=local)
    # It deals out all elements, so that each is added once.
    plan = plan_save(sources, SaveOptions(), world)
    sums = StateSums(plan.tensors.values())
    with closing(read_to_host(plan, sources, MOST_COPIES)) as batches:
        for batch in batches:
            for block, elements, *_ in batch:
                sums.add_box(block.piece, block.box.start, elements)
    if world.process == COMMITTER:
        for name, data in small_elements(plan, sources).items():
            sums.add_stored(name, data)
    if world.processes == 1:
        return sums.fingerprint()
    replicas = ReplicaChecksums(plan, sources, wholly=True).complete()
    own = {
        "sums": sums.to_json(),
        "replicas": {as_text(group): of_group for group, of_group in replicas.items()},
    }
    together, groups = StateSums(), dict[str, list[tuple[list[int], dict[str, int]]]]()
    for process, share in enumerate(coordinator.share("fingerprint", own)):
        together.merge(StateSums.from_json(share["sums"], f"process {process}"))
        for group, of_group in share["replicas"].items():
            groups.setdefault(group, []).append(([process], of_group))
    for checksums in groups.values():
        differs = difference(checksums)
        if differs is not None:
            kind = "plain" if plan.tensors[differs[0]].layout is None else "replicated"
            raise StructureMismatchError(
                f"{shown(differs[0])}: this {kind} tensor {differs[1]}; make them equal."
            )
    return together.fingerprint()
