"""`fingerprint`: what identifies the tensors of a state, computed where they are."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from shardckpt import frameworks
from shardckpt.errors import StructureMismatchError
from shardckpt.format.documents import document_digest
from shardckpt.format.fingerprint import Fingerprint, StateSums
from shardckpt.format.replicas import as_text, difference
from shardckpt.frameworks.coordination import (
    Coordinator,
    check_answered,
    check_coordinator,
    check_outcomes,
    heard_by_all,
)
from shardckpt.options import SaveOptions
from shardckpt.state.flatten import flatten, local_names, plain_state
from shardckpt.state.names import shown
from shardckpt.writing.replicas import ReplicaChecksums
from shardckpt.writing.save_plan import plan_save, small_elements
from shardckpt.writing.state_share import MOST_COPIES, read_to_host

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from shardckpt.writing.save_plan import SavePlan

_KEY = "fingerprint"
_SMALL = "small"
"""The group of the processes that have a small plain tensor: which they are, none of them knows."""


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
        CoordinationError: another process did not call it in time, or was interrupted.
    """
    check_coordinator(coordinator)
    coordinator = Coordinator.current() if coordinator is None else coordinator
    world = coordinator.world
    with heard_by_all(coordinator, _KEY):
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
    with heard_by_all(coordinator, _KEY):
        plan, sums, own, small = _own(tensors, coordinator, local)
    if coordinator.world.processes == 1:
        return sums.fingerprint()
    shares = coordinator.share(_KEY, own)
    check_outcomes(shares, "failed with")
    of_small = [small]
    if len({share["small"] for share in shares}) > 1:
        of_small = coordinator.share(f"{_KEY}: small tensors", small)
        check_answered(of_small)
    together = _merge(shares, of_small)
    _check_replicas(shares, of_small, plan)
    return together.fingerprint()


def _own(
    tensors: Mapping[str, Any], coordinator: Coordinator, local: Container[str]
) -> tuple[SavePlan, StateSums, dict[str, Any], dict[str, Any]]:
    """The plan, the sums of this process's share, and in a job what it tells the others.

    The last is about the small tensors: the others need it only if theirs has another digest.
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
    if world.processes == 1:
        return plan, sums, {}, {}
    replicas = ReplicaChecksums(plan, sources, wholly=True).complete()
    # Any processes may have these.
    small, checksums = StateSums(plan.tensors[name] for name in plan.small), dict[str, int]()
    for name, data in small_elements(plan, sources).items():
        small.add_stored(name, data)
        checksums[name] = crc32c(data)
    of_small = {"sums": small.to_json(), "checksums": checksums}
    own = {
        "sums": sums.to_json(),
        "small": document_digest(of_small),
        "replicas": {as_text(group): of_group for group, of_group in replicas.items()},
    }
    return plan, sums, own, of_small


def _merge(shares: Sequence[Mapping[str, Any]], of_small: Sequence[Mapping[str, Any]]) -> StateSums:
    """The sums of all processes; a small tensor counts once, for the lowest of its processes."""
    together, small = StateSums(), dict[str, Any]()
    for process, share in enumerate(shares):
        together.merge(StateSums.from_json(share["sums"], f"process {process}"))
    for one in of_small:
        small = one["sums"] | small
    together.merge(StateSums.from_json(small, "small tensors"))
    return together


def _check_replicas(
    shares: Sequence[Mapping[str, Any]], of_small: Sequence[Mapping[str, Any]], plan: SavePlan
) -> None:
    """Refuse copies that differ.

    Raises:
        StructureMismatchError: names the tensor, and processes on both sides.
    """
    groups = dict[str, list[tuple[list[int], dict[str, int]]]]()
    for process, share in enumerate(shares):
        for group, of_group in share["replicas"].items():
            groups.setdefault(group, []).append(([process], of_group))
    groups[_SMALL] = [([process], one["checksums"]) for process, one in enumerate(of_small)]
    for group, checksums in groups.items():
        differs = difference(checksums)
        if differs is not None:
            name, how = differs
            tensor = plan.tensors.get(name)  # this process may not have it
            is_plain = group == _SMALL or (tensor is not None and tensor.layout is None)
            kind = "plain" if is_plain else "replicated"
            raise StructureMismatchError(
                f"{shown(name)}: this {kind} tensor {how}; make them equal."
            )
