"""Cache of plans of earlier saves, for states with the same description.

A plan depends on the tensors' metadata, on some options, and on the world. These are the
key, as one tuple with a row per tensor. It is compared with the keys of the last few saves. Equal rows mostly are the same
objects, so the comparison is cheap, and nothing has to be hashed. The key has no counter and no tensor identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.writing.save_plan import SavePlan, plan_save

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.frameworks.base import Source
    from shardckpt.layout.world import World
    from shardckpt.options import SaveOptions

_REMEMBERED = 4
"""Most cached plans: a job that saves different states in turn has few of them."""


class PlanCache:
    """Plans saves. Safe to use from several threads, and from a signal handler: nothing is locked during the comparison."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._plans: tuple[tuple[Any, SavePlan], ...] = ()
        """Keys and plans, the last used one last. Replaced as a whole: of two saves at once, one may be forgotten."""

    def plan(self, sources: Mapping[str, Source], options: SaveOptions, world: World) -> SavePlan:
        """The result of `plan_save`, which must not be modified."""
        key, plans = _key(sources, options, world), self._plans
        found = next((plan for known, plan in plans if known == key), None)
        plan = plan_save(sources, options, world) if found is None else found
        others = [pair for pair in self._plans if pair[1] is not plan]
        self._plans = (*others[1 - _REMEMBERED :], (key, plan))
        return plan


def _key(sources: Mapping[str, Source], options: SaveOptions, world: World) -> tuple[Any, ...]:
    rows = []
    for name, source in sources.items():
        boxes = source.boxes
        rows.append((name, source.shape, source.dtype, source.layout, source.own_pieces, source.holders, *_bytes_of(boxes)))
    dealt = options.host_tensors, options.check_replicas is False
    return (world.process, world.processes, *dealt, options.layout, [*options.shardings.items()], options.skip, rows)


def _bytes_of(boxes: Any) -> tuple[bytes, bytes]:
    return boxes.start.tobytes(), boxes.stop.tobytes()


plans = PlanCache()
"""The plans of this process's saves."""
