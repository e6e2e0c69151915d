"""Assumptions about a program that its graph does not show: see `batch_dims`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Assumptions"]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """All off: only what follows from the graph."""

    even_counts: bool = False
    """Masks have as many true elements in every part of the batch."""
    local_batch_norm: bool = False
    """Batch normalisation by the statistics of each process's own part is what is meant."""
