"""JAX's part of `python -m tools.bench --cuda`, in a process of its own.

The command is `python -m tools.bench.on_cuda_jax BYTES DIRECTORY`.

Prints a line of JSON: seconds of the stall and of all of each save, seconds of restores, and of the
floor, which is `jax.device_put` to pinned host memory when its pool has what it needs. The third
save is the first that counts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 3
_ROWS = 4096


def seconds(do: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and what it returned."""
    began = time.perf_counter()
    result = do()
    return time.perf_counter() - began, result


def measure(nbytes: int, directory: Path) -> dict[str, Any]:
    """Measure floors, saves and restores of float32 matrices of 64 MiB on the first device."""
    import jax
    import jax.numpy as jnp

    from shardckpt import SaveOptions, restore
    from shardckpt.writing.background import Saver

    device = jax.devices()[0]
    rows = min(_ROWS, max(8, int((nbytes / 8) ** 0.5)))
    count = max(1, nbytes // (rows * rows * 4))
    with jax.default_device(device):
        state = {f"layers.{i}.weight": jnp.full((rows, rows), i, jnp.float32) for i in range(count)}
    jax.block_until_ready(state)
    total = sum(array.nbytes for array in state.values())
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    arrays = [*state.values()]
    floor = [
        seconds(lambda: jax.block_until_ready(jax.device_put(arrays, [pinned] * len(arrays))))[0]
        for _ in range(ROUNDS)
    ]
    saver, options = Saver(memory_limit=total + (256 << 20)), SaveOptions()
    stalls, saves = [], []
    for _ in range(2 + ROUNDS):
        rmtree(directory / "jax", ignore_errors=True)  # deleting what is replaced would count, too
        stall, handle = seconds(lambda: saver.begin(directory / "jax", state, options))
        rest, _ = seconds(handle.wait)
        stalls.append(stall)
        saves.append(stall + rest)
    saver.close()
    restores = [
        seconds(lambda: jax.block_until_ready(restore(directory / "jax", state)))[0]
        for _ in range(ROUNDS)
    ]
    return {
        "device": device.device_kind,
        "bytes": total,
        "floor": min(floor),
        "first stall": stalls[0],
        "stall": statistics.median(stalls[2:]),
        "save": statistics.median(saves[2:]),
        "restore": statistics.median(restores),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), Path(sys.argv[2]))))
