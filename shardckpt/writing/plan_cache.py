"""Plans of earlier saves, for states that look the same.

A plan follows from what the tensors say of themselves, from the options that it goes by, and from the world. That is the
key, as one tuple with a row per tensor, compared with those of the last few saves: equal rows mostly are the very same
objects, so the comparison costs little, and nothing has to be hashed. No counter, no identity of a tensor is in it.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, Any

from shardckpt.writing.save_plan import SavePlan, plan_save

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.frameworks.base import Source
    from shardckpt.layout.world import World
    from shardckpt.options import SaveOptions

__all__ = ["PlanCache"]

_REMEMBERED = 4
"""Plans: a job that saves different things in turn has few of them."""


class PlanCache:
    """Plans saves. Safe to use from several threads."""

    def __init__(self) -> None:
        """Empty."""
        self._plans: deque[tuple[Any, SavePlan]] = deque(maxlen=_REMEMBERED)
        self._changing = Lock()

    def plan(self, sources: Mapping[str, Source], options: SaveOptions, world: World) -> SavePlan:
        """What `plan_save` returns; not to be changed."""
        key = _key(sources, options, world)
        with self._changing:
            for i, (known, plan) in enumerate(self._plans):
                if known == key:
                    del self._plans[i]
                    self._plans.append((known, plan))
                    return plan
        plan = plan_save(sources, options, world)
        with self._changing:
            self._plans.append((key, plan))
        return plan


def _key(sources: Mapping[str, Source], options: SaveOptions, world: World) -> tuple[Any, ...]:
    rows = []
    for name, source in sources.items():
        boxes = source.boxes
        rows.append((name, source.shape, source.dtype, source.layout, source.own_pieces, source.holders, *_bytes_of(boxes)))
    return (world.process, world.processes, options.host_tensors, options.layout, [*options.shardings.items()], options.skip, rows)


def _bytes_of(boxes: Any) -> tuple[bytes, bytes]:
    return boxes.start.tobytes(), boxes.stop.tobytes()
