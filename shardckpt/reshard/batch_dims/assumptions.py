"""Assumptions about a program that its graph does not show: see `batch_dims`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Optional assumptions; by default all are off, and only the graph counts."""

    even_counts: bool = False
    """Masks have the same number of true elements in every part of the batch."""
    local_batch_norm: bool = False
    """Batch normalisation is meant to use the statistics of each process's own part."""
