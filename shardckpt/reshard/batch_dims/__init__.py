"""The batch dimension of each tensor of a program, and its layout under data parallelism.

    program = torch.export.export(model, inputs, dynamic_shapes=…)
    inferred = shardckpt.reshard.batch_dims.batch_dims(program)
    inferred.states["cache.k"]   # Shard(0), Replicate, Partial(sum) or Unknown
    inferred.explain("cache.k")  # why

`inference` has the public functions. `shardings` turns their result into layouts for saving and
resharding. `rules` has one table per family of operators. Nothing here imports torch: a graph
carries all the necessary data. Begin with `inference`.
"""

from __future__ import annotations

from shardckpt.reshard.batch_dims.inference import BatchDims, batch_dims
from shardckpt.reshard.batch_dims.layouts import (
    Layout,
    Numbered,
    Partial,
    Replicate,
    Shard,
    Unknown,
)
from shardckpt.reshard.batch_dims.shardings import batch_shardings

__all__ = [
    "BatchDims",
    "Layout",
    "Numbered",
    "Partial",
    "Replicate",
    "Shard",
    "Unknown",
    "batch_dims",
    "batch_shardings",
]
