"""torch_xla SPMD tensors on 8 virtual devices: shardckpt beside placing shards on them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tools.bench.measure import Run, Subject

if TYPE_CHECKING:
    from pathlib import Path

    from tools.bench.states import State

__all__ = ["GROUP", "subjects"]

GROUP = "torch_xla tensors on 8 devices, one process"
DEVICES = 8
PLACING = "host shards to devices"


def subjects(state: State, directory: Path, operation: str) -> list[Subject]:
    """Ours, and the floors.

    Torch_xla's own checkpoints drop tensors whose replicas share a host (pytorch/xla#7919).
    """
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES)}
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    import shardckpt
    from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding, Target
    from tools.bench.floors import floors
    from tools.bench.states import elements

    xr.use_spmd()
    xla_mesh = xs.Mesh(np.arange(DEVICES), (DEVICES,), ("x",))
    rows, both = Mesh((DEVICES,), ("x",)), Mesh((2, 4), ("x", "y"))
    dtype = getattr(torch, state.dtype)
    arrays = elements(state)
    into = (
        {name: np.ones_like(array) for name, array in arrays.items()}
        if operation == "stall"
        else arrays
    )
    values = {}
    for name, array in arrays.items():
        value = torch.from_numpy(array).view(dtype).to("xla")
        values[name] = xs.mark_sharding(value, xla_mesh, ("x", None) if array.ndim > 1 else (None,))
    torch_xla.sync(wait=True)

    def targets(mesh: Mesh, *spec: Any) -> dict[str, Target]:
        return {
            n: Target(
                Sharding(mesh, PartitionSpec(*spec) if a.ndim > 1 else PartitionSpec()),
                shape=a.shape,
                dtype=state.dtype,
            )
            for n, a in arrays.items()
        }

    options = SaveOptions(memory_limit="4GiB")
    out, kept = directory / "ours-out", directory / "ours"

    def there() -> None:
        if not kept.exists():
            shardckpt.save(kept, values, options=options)

    def ready(restored: dict[str, Any]) -> dict[str, Any]:
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()
        return restored

    def same(restored: dict[str, Any]) -> None:
        name = next(iter(values))
        restored_bytes = restored[name].cpu().view(torch.uint8)
        if not np.array_equal(restored_bytes.numpy(), arrays[name].view(np.uint8)):
            raise AssertionError(f"{name} came back as something else")

    split = {
        n: (
            list(torch.from_numpy(a).view(dtype).chunk(DEVICES))
            if a.ndim > 1
            else [torch.from_numpy(a).view(dtype)] * DEVICES
        )
        for n, a in arrays.items()
    }
    shardings = {
        n: xla_mesh.get_op_sharding(("x", None) if a.ndim > 1 else (None,))
        for n, a in arrays.items()
    }

    def place() -> dict[str, Any]:
        tensors = {
            n: torch_xla._XLAC._global_tensor_from_cpu_shards(split[n], shardings[n], list(a.shape))
            for n, a in arrays.items()
        }
        return ready(tensors)

    nbytes = state.nbytes
    like, other = targets(rows, "x"), targets(both, "y", "x")
    return [
        *floors(arrays, into, directory, devices=DEVICES),
        Subject(PLACING, {"restore": Run(place, nbytes)}, "no file is read", floor=True),
        Subject(
            "shardckpt",
            {
                "save": Run(
                    lambda: shardckpt.save(out, values, options=options), nbytes, writes=out
                ),
                "stall": Run(
                    lambda: shardckpt.save_async(out, values, options=options),
                    nbytes,
                    after=lambda h: h.wait(),
                    writes=out,
                ),
                "restore": Run(
                    lambda: ready(shardckpt.restore(kept, like)), nbytes, before=there, after=same
                ),
                "other": Run(
                    lambda: ready(shardckpt.restore(kept, other)), nbytes, before=there, after=same
                ),
            },
            "memory_limit=4GiB",
            checksums=True,
        ),
    ]
