"""The layouts of a job with 8 devices per host: FSDP, FSDP+TP, HSDP and expert parallelism.

FSDP+TP is FSDP with tensor parallelism.

| layout | mesh | matrix | stack of experts | vector |
|---|---|---|---|---|
| FSDP | one axis of all devices | rows split over all | | split over all |
| FSDP+TP | tensor-parallel groups of 8 adjacent devices | one dimension split in the group, the other over the groups | | replicated |
| HSDP | groups of at most 256 devices, complete hosts | rows split in the group, replicated in all groups | | split in the group |
| EP | groups of at most 64 adjacent devices | rows split over all | experts split in the group, rows over the groups | replicated |
"""  # noqa: E501  (a table, which docs/lab/scale-tables.md shows)

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from shardckpt import Mesh, PartitionSpec, Sharding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tools.scale.trees import Tensor

__all__ = ["DEVICES_PER_HOST", "KINDS", "laid_out", "spec_of"]

DEVICES_PER_HOST = 8
TENSOR_PARALLEL = 8
GROUP = 256
"""Devices of an HSDP group, at most."""
OWNERS = 64
"""Devices that share a layer's experts, at most."""
KINDS = ("FSDP", "FSDP+TP", "HSDP", "EP")
"""EP is of trees with experts."""


def laid_out(kind: str, tensors: Iterable[Tensor], devices: int) -> dict[str, Sharding]:
    """The layout of each tensor, by name, over devices 0 … devices - 1."""
    mesh = _mesh(kind, devices)
    known: dict[PartitionSpec, Sharding] = {}
    layouts = {}
    for tensor in tensors:
        spec = spec_of(kind, tensor)
        layouts[tensor.name] = known.setdefault(spec, Sharding(mesh, spec))
    return layouts


def _mesh(kind: str, devices: int) -> Mesh:
    if kind == "FSDP":
        return Mesh((devices,), ("fsdp",))
    if kind == "HSDP":
        group = next(n for n in range(GROUP, 0, -DEVICES_PER_HOST) if devices % n == 0)
        return Mesh((devices // group, group), ("replica", "fsdp"))
    inner = gcd(devices, TENSOR_PARALLEL if kind == "FSDP+TP" else OWNERS)
    return Mesh((devices // inner, inner), ("fsdp", "tensor" if kind == "FSDP+TP" else "expert"))


def spec_of(kind: str, tensor: Tensor) -> PartitionSpec:
    """Mesh axes that cut each dimension of a tensor."""
    if kind in ("FSDP", "HSDP"):
        return PartitionSpec("fsdp")
    if len(tensor.shape) == 1:
        return PartitionSpec()
    if kind == "EP":
        return (
            PartitionSpec("expert", "fsdp")
            if len(tensor.shape) == 3
            else PartitionSpec(("fsdp", "expert"))
        )
    along_rows = "o_proj" in tensor.name or "down_proj" in tensor.name
    return PartitionSpec("fsdp", "tensor") if along_rows else PartitionSpec("tensor", "fsdp")
