"""The plan of `FollowedVersion.apply`, made before the pause.

`prepare` finds the memory of the tensors and the parts of it to copy.

`apply` then compares the tensors with those that were planned for, and copies. If one of them was
replaced, or has other memory, it plans anew, and copies all of them.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardckpt import frameworks
from shardckpt.io.copying import copy_all
from shardckpt.reading.read_list import MadeTensor
from shardckpt.reading.restore import read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.landing import RestoreJob
    from shardckpt.reading.restore import Restoring
    from shardckpt.versions.cache import ChunkCache

    Memory = list[object]
    """Identity of the containers and the tensors of a state, and of the tensors' memory."""

_VALUES = (type(None), bool, int, float, complex, str, bytes)


class Applying(NamedTuple):
    """A planned `apply`."""

    memory: Memory | None
    """The memory of the tensors; None: not known, so that a later `apply` plans anew."""
    before: Memory | None
    """The follower's `memory` when this was planned."""
    steps: Restoring
    jobs: list[RestoreJob]
    """All tensors of the version."""
    direct: list[RestoreJob]
    """Those that `pairs` fill."""
    others: list[RestoreJob]
    """Those that are read, converted or placed one by one."""
    pairs: list[tuple[NDArray[Any], NDArray[Any]]]
    """Parts of the tensors, and the elements to copy there."""

    def holds(self, like: object, before: Memory | None) -> bool:
        """Whether this was planned for these tensors and for what the follower filled last."""
        return (
            self.memory is not None
            and self.before is before
            and self.memory == memory_of(like, self.jobs)
        )

    def run(self, checkpoint: Checkpoint, limit: int, *, in_place: bool) -> dict[str, object]:
        """Fill the tensors; return their leaves by name.

        Args:
            checkpoint: the version; it reads from the kept chunks.
            limit: see `read_all`.
            in_place: whether the filled memory belongs to the caller.
        """
        beside = () if in_place else None
        restored = read_all(checkpoint, limit, self.others, beside) if self.others else {}
        copy_all(self.pairs)
        for landing in chain.from_iterable(job.landings for job in self.direct):
            landing.complete()
            restored |= dict.fromkeys(landing.names, landing.sink.place(landing.buffers))
        return restored


def plan_apply(
    checkpoint: Checkpoint,
    like: object,
    before: Memory | None,
    steps: Restoring,
    cache: ChunkCache,
    lacks: Callable[[RestoreJob], bool],
) -> Applying:
    """Plan to fill tensors with a version; nothing is changed.

    Args:
        checkpoint: the version.
        like: the tensors; None: each version gives new arrays.
        before: memory of the tensors that were filled last.
        steps: the restore of the version into `like`.
        cache: has the version's chunks, and knows which have changed since the tensors were filled.
        lacks: whether the leaves of a tensor may lack the newest elements.

    Raises:
        MismatchError: the tensors are not those of the version.
        OptionError: they need chunks that were not prepared.
    """
    jobs, _ = next(steps)
    memory = None if like is None else memory_of(like, jobs)
    is_new = memory is not None and memory != before
    due = [job for job in jobs if is_new or like is None or lacks(job)]
    direct = [job for job in due if memory is not None and _is_copied(job)]
    others = [job for job in due if memory is None or not _is_copied(job)]
    pairs = cache.copies(
        checkpoint, [request for job in direct for request in job.requests()], changed=not is_new
    )
    return Applying(memory, before, steps, jobs, direct, others, pairs)


def _is_copied(job: RestoreJob) -> bool:
    """Whether elements are copied as they are, straight into the memory of tensors."""
    return (
        job.is_in_place
        and job.tensor.dtype.numpy != np.bool_
        and not any(landing.converts for landing in job.landings)
    )


def memory_of(state: object, jobs: Sequence[RestoreJob]) -> Memory | None:
    """Identity of the memory of a state's tensors, as long as they are alive.

    None: it has other objects than plain containers.

    Args:
        state: the state.
        jobs: the restore into it. A storage of torch may be freed, shrunk or moved while its
            tensors stay the same objects.
    """
    memory = [*_memory_of(state)]
    if None in memory:
        return None
    landings = (
        landing for job in jobs for landing in job.landings if landing.destinations is not None
    )
    views = chain.from_iterable(getattr(landing.sink, "views", ()) for landing in landings)
    return [*memory, *((view.data_ptr(), view.untyped_storage().nbytes()) for view in views)]


def _memory_of(state: object) -> Iterator[object]:
    kind = type(state)
    if kind is dict:
        yield kind, *state  # type: ignore[misc]
        for value in state.values():  # type: ignore[attr-defined]
            yield from _memory_of(value)
    elif kind is list or kind is tuple:
        yield kind, len(state)  # type: ignore[arg-type]
        for value in state:  # type: ignore[attr-defined]
            yield from _memory_of(value)
    elif kind in _VALUES:
        yield kind, state
    else:
        memory = frameworks.identity(state)
        yield None if memory is None else (id(state), memory)


def leaves_as_stored(jobs: Sequence[RestoreJob], leaves: Mapping[str, object]) -> dict[str, object]:
    """The leaves that have the elements of a stored tensor unchanged, by its name.

    Args:
        jobs: all tensors of the version that was applied.
        leaves: the leaves by their own names.
    """
    return {
        job.tensor.name: leaves[job.landings[0].names[0]]
        for job in jobs
        if not isinstance(job.tensor, MadeTensor)
        and job.landings[0].sink.shape == job.tensor.shape
        and not job.landings[0].converts
    }
