"""The two layouts of the demo: which axes of which mesh cut each tensor of a Llama.

Before: 4 × 2 devices, FSDP on "data" and tensor parallelism on "model". After: 2 × 4 devices in
ring order, other axis names, and for every tensor another spec. The vocabulary has 257 rows, which
nothing divides evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardckpt import Mesh, PartitionSpec, Sharding

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LAYOUTS", "Layout"]

P = PartitionSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a model over a mesh."""

    mesh: Mesh
    batch_axis: str
    """The axis that cuts the batch."""
    rules: Mapping[str, PartitionSpec]
    """Pattern of a parameter's name → its spec; the first that matches."""

    def sharding(self, name: str) -> Sharding:
        """The sharding of a parameter, and of the optimizer's moments for it."""
        return Sharding(
            self.mesh,
            next(spec for pattern, spec in self.rules.items() if fnmatchcase(name, pattern)),
        )


LAYOUTS = {
    "before": Layout(
        Mesh((4, 2), ("data", "model")),
        "data",
        {
            # A tuple: one dimension over all 8 devices.
            "*embed_tokens*": P(("data", "model"), None),
            "*.[qkv]_proj*": P("model", "data"),
            "*.o_proj*": P("data", "model"),
            "*.gate_proj*": P("model", "data"),
            "*.up_proj*": P("model", "data"),
            "*.down_proj*": P("data", "model"),
            "lm_head*": P("model", "data"),
            "*norm*": P(None),  # replicated
        },
    ),
    "after": Layout(
        Mesh((2, 4), ("fsdp", "tensor"), [0, 1, 2, 3, 7, 6, 5, 4]),
        "fsdp",
        {
            "*embed_tokens*": P(None, ("fsdp", "tensor")),
            "*.q_proj*": P("tensor", "fsdp"),
            "*.[kv]_proj*": P("tensor", None),  # two replicas of each shard
            "*.o_proj*": P("fsdp", "tensor"),
            "*.gate_proj*": P("tensor", "fsdp"),
            "*.up_proj*": P("tensor", "fsdp"),
            "*.down_proj*": P("fsdp", "tensor"),
            "lm_head*": P("tensor", "fsdp"),
            "*norm*": P("fsdp"),
        },
    ),
}
