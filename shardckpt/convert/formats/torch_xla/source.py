"""Reader of a directory of torch_xla's `CheckpointManager`.

    <base>/<step>/.metadata, *.distcp  a directory of torch.distributed.checkpoint, by torch_xla's
                                       `SPMDSavePlanner`
    <base>/<step>/.manager_metadata    written last: marks the step as complete

If several devices hold the same part of a sharded tensor, the planner (torch_xla 2.9,
experimental/distributed_checkpoint) silently stores nothing of this tensor
(https://github.com/pytorch/xla/issues/7919). The state's paths still name it, so the loss is
detected here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardckpt.convert.files.file_version import identity_of
from shardckpt.convert.formats.dcp.source import METADATA, children, read_state
from shardckpt.convert.placed import place_tensors
from shardckpt.errors import NotFoundError, OptionError
from shardckpt.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.convert.files.file_version import Candidate
    from shardckpt.convert.placed import Foreign
    from shardckpt.io.url import Location

WRITTEN_LAST = ".manager_metadata"


def looks_like(candidate: Candidate) -> str | None:
    """The signs of such a directory, in words; None: it is not one."""
    names = candidate.names
    if {METADATA, WRITTEN_LAST} <= set(names):
        return f"a step of torch_xla's CheckpointManager: {METADATA} and {WRITTEN_LAST}"
    steps = _steps(candidate.location, names)
    return (
        f"steps of torch_xla's CheckpointManager: {', '.join(map(str, steps))}" if steps else None
    )


def open_foreign(location: Location, *, trust_pickle: bool = False) -> Foreign:
    """Open a step, or a directory with a single step.

    Args:
        location: the step's directory, or the base directory of the `CheckpointManager`.
        trust_pickle: whether `.metadata`, a pickle, may be read.

    Raises:
        OptionError: `trust_pickle` is needed, or there are several steps.
        NotFoundError: there is no complete step.
        FormatError, MissingDataError, CorruptionError: as for a directory of DCP.
    """
    names = children(location)
    if METADATA not in names:
        steps = _steps(location, names)
        if not steps:
            raise NotFoundError(
                f"{location}: torch_xla's CheckpointManager has no complete step here (a "
                f"directory with {WRITTEN_LAST})."
            )
        if len(steps) > 1:
            raise OptionError(
                f"{location} has the steps {', '.join(map(str, steps))}; name one: "
                f"{location.join(str(steps[-1]))}."
            )
        location = location.join(str(steps[0]))
    state = read_state(Store.open(location), trust_pickle=trust_pickle)
    notes = [*state.notes]
    if state.absent:
        notes.append(
            "torch_xla's CheckpointManager silently drops a sharded tensor if several devices of "
            "one host hold the same part (pytorch/xla#7919). The tensors named above are not in "
            "this checkpoint."
        )
    return place_tensors(
        state.nested(), "torch_xla", location, identity_of(location, state.files), notes
    )


def _steps(location: Location, names: Sequence[str]) -> list[int]:
    """The complete steps below a directory, ascending."""
    steps = sorted(
        int(name[:-1])
        for name in names
        if name.endswith("/") and name[:-1].isdecimal() and name.isascii()
    )
    looks = [partial(children, location.join(str(step))) for step in steps]
    inside = Store.open(location).read_together(looks)
    return [
        step
        for step, there in zip(steps, inside, strict=True)
        if {METADATA, WRITTEN_LAST} <= set(there)
    ]
