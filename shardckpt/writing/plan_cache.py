"""Cache of plans of earlier saves, for states with the same description.

A plan depends on the tensors' metadata, on some options, and on the world. These are the
key, as one tuple with a row per tensor. It is compared with the keys of the last few saves. Equal rows mostly are the same
objects, so the comparison is cheap, and nothing has to be hashed. The key has no counter and no tensor identity.
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

_REMEMBERED = 4
"""Most cached plans: a job that saves different states in turn has few of them."""


class PlanCache:
    """Plans saves. Safe to use from several threads."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._plans: deque[tuple[Any, SavePlan]] = deque(maxlen=_REMEMBERED)
        self._changing = Lock()

    def plan(self, sources: Mapping[str, Source], options: SaveOptions, world: World) -> SavePlan:
        """The result of `plan_save`, which must not be modified."""
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
    dealt = options.host_tensors, options.check_replicas is False
    return (world.process, world.processes, *dealt, options.layout, [*options.shardings.items()], options.skip, rows)


def _bytes_of(boxes: Any) -> tuple[bytes, bytes]:
    return boxes.start.tobytes(), boxes.stop.tobytes()
