"""The context of a running operation of the service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardckpt.reading.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardckpt.serve.roots import Roots


@dataclass(frozen=True, slots=True)
class Work:
    """The context of a running operation."""

    roots: Roots
    who: str
    again: bool
    """Whether it was started before, and interrupted."""
    options: Mapping[str, Any]
    """`writing`: `engine`, `workers` and `memory_limit` of reshards and imports; `keep`: the file
    of rules; `rate`: bytes per second."""
    progress: Callable[[int, int], None]
    """Called with the units done and the total."""
    note: Callable[[dict[str, Any]], None]
    """Called with what the service is to write down at once."""
    resume: dict[str, Any] = field(default_factory=dict)
    """Notes of earlier tries."""

    def open(self, ident: str) -> Checkpoint:
        """A checkpoint all of whose files lie below the roots."""
        checkpoint = Checkpoint(self.roots.locate(ident))
        self.roots.check(checkpoint)
        return checkpoint
