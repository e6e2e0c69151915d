"""Branches and values that belong to each process alone, as this process restores them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import MismatchError
from shardckpt.frameworks.coordination import Coordinator
from shardckpt.frameworks.per_process import choose_value, decode_value, recorded_axis
from shardckpt.state.document import Branch, leaves_of, of_process
from shardckpt.state.names import shown
from shardckpt.state.select import selector

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.state.document import Node
    from shardckpt.state.per_process import PerProcess
    from shardckpt.state.select import Only


def own_tree(
    checkpoint: Checkpoint,
    tree: Node,
    local: Sequence[Branch],
    only: Only | None,
    coordinator: Coordinator | None,
) -> Node:
    """The stored state as this process has it.

    `local` are its branches that belong to each process alone.

    Raises:
        MismatchError: another number of processes saved a requested value that belongs to each of
            them.
    """
    world = (Coordinator.current() if coordinator is None else coordinator).world
    saved, selects = checkpoint.record.processes, selector(only)
    asked = next(
        (node.name for node in local if any(selects(leaf.name) for leaf in leaves_of(node))), None
    )
    if asked is not None and saved != world.processes:
        raise MismatchError(
            f"{checkpoint.location}: {shown(asked)} belongs to each process alone; {saved} "
            f"process{'es' if saved > 1 else ''} saved it, and {world.processes} restore. Restore "
            "in as many processes, or leave it out with only=."
        )
    return of_process(tree, world.process) or Branch("", "dict", [], [])


def chosen_values(
    checkpoint: Checkpoint, leaves: Mapping[str, PerProcess], coordinator: Coordinator | None
) -> dict[str, object]:
    """This process's value for each per-process name."""
    if not leaves:
        return {}
    world = (Coordinator.current() if coordinator is None else coordinator).world
    saved = checkpoint.record.processes
    same = saved == world.processes
    stored = {p: checkpoint.process_values(p) for p in ([world.process] if same else range(saved))}
    chosen = {}
    for name, leaf in leaves.items():
        own = stored.get(world.process, {}).get(name)
        by_axis = leaf.axis is not None or (
            own is not None and recorded_axis(own, name) is not None
        )
        if len(stored) < saved and (by_axis or (leaf.choose is not None and own is None)):
            stored = {p: checkpoint.process_values(p) for p in range(saved)}
        axes = {
            p: axis
            for p, documents in stored.items()
            if name in documents and (axis := recorded_axis(documents[name], name))
        }
        values = {
            p: decode_value(documents[name], name)
            for p, documents in stored.items()
            if name in documents
        }
        chosen[name] = choose_value(values, leaf, name, saved=saved, world=world, axes=axes)
    return chosen
