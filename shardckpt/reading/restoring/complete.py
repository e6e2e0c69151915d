"""A restore without a `like`: all tensors as numpy arrays, and the values of all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.frameworks.per_process import decode_value
from shardckpt.reading.landing import restore_jobs, sinks_of
from shardckpt.reading.lazy_array import empty
from shardckpt.state import per_process_names, stored_names, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.landing import RestoreJob
    from shardckpt.reading.naming.adapt import Adaptation
    from shardckpt.state.document import Node

_ADVICE = "read a box of it, or leave it out with only="


def complete(
    checkpoint: Checkpoint,
    tree: Node,
    record: Callable[[str], TensorRecord],
    selects: Callable[[str], bool] | None,
    adaptation: Adaptation | None,
) -> Generator[tuple[list[RestoreJob], None], dict[str, object], Any]:
    """Restore all that is selected, in the two steps of `restore.restoring`.

    Args:
        checkpoint: the source.
        tree: its state's tree.
        record: the tensors, by name.
        selects: whether a name is restored; None: all are.
        adaptation: the options for names and sizes; None: everything stays as it is.
    """
    leaves: dict[str, list[tuple[str, object]]] = {
        name: [(name, empty(name, t.shape, t.dtype.numpy, _ADVICE))]
        for name, t in ((name, record(name)) for name in stored_names(tree, selects))
    }
    own = _all_values(checkpoint, per_process_names(tree, selects))
    read = yield (
        restore_jobs(checkpoint, sinks_of(leaves, record), cast=False, adaptation=adaptation),
        None,
    )
    if adaptation is not None:
        adaptation.restored(read)
    return unflatten(tree, {**read, **own}, selects)


def _all_values(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, object]:
    """All values of each per-process name, in the order of the processes."""
    if not names:
        return {}
    stored = [checkpoint.process_values(process) for process in range(checkpoint.record.processes)]
    return {
        name: [decode_value(values[name], name) for values in stored if name in values]
        for name in names
    }
