"""Measure how long a background save keeps the training loop, and what a save at once takes.

    python tools/stall.py
    python tools/stall.py --framework torch --framework JAX --width 2048 --layers 4 --saves 7

For each framework, in processes of their own: a perceptron and its Adam state, sharded over 8
devices (JAX, torch_xla) or 2 processes (DTensor), is trained and saved in turn. Medians, after the
first save, which pays for fresh memory:

- memcpy: what this process saves, copied shard by shard into arrays that have been written to
  before: from the tensors' own memory where that is the host's, else from copies;
- handing: what the framework itself takes until it has handed out all of that, in batches that are
  dropped at once, and how often memcpy that is: no save is quicker. Views cost next to nothing;
- stall: what `save_async` takes until it returns, and how often memcpy that is; planning is its
  first part;
- step: a training step, and the stall as a share of it, were every step saved;
- background: from there until the checkpoint is committed.

All are measured in turn, so that whatever else the machine does at the time concerns them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.writing.state_share import BlockElements

BATCH = 256
_RATE = 1e-3


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def copy_all(sources: list[np.ndarray], targets: list[np.ndarray]) -> None:
    """One memcpy each."""
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


def measure(
    place: str,
    state: Callable[[], Any],
    step: Callable[[], Any],
    saves: int,
    meet: Callable[[], Any] = lambda: None,
) -> dict:
    """Measurements of this process: medians in seconds, their ratios, and the size of the state.

    Args:
        place: an empty directory, on a disk that is not what is measured.
        state: the state as it is now.
        step: trains once.
        saves: how many, besides the first.
        meet: waits for the other processes, so that they measure the same at the same time.
    """
    from shardckpt import SaveOptions, frameworks
    from shardckpt.frameworks.coordination import Coordinator
    from shardckpt.options import parse_bytes
    from shardckpt.state import flatten
    from shardckpt.writing.background import Saver
    from shardckpt.writing.save_plan import plan_save
    from shardckpt.writing.state_share import MOST_COPIES, read

    saver = Saver(memory_limit=parse_bytes("4GiB", "memory_limit"))
    world = Coordinator.current().world

    def batches(room: int) -> Iterator[Iterator[BlockElements]]:
        """Batches of elements to be saved: the tensors' own memory, if that is the host's."""
        leaves = flatten(
            state(), frameworks.is_tensor, frameworks.identity, frameworks.meaning
        ).tensors
        sources = frameworks.sources(leaves, world)
        return read(plan_save(sources, SaveOptions(), world), sources, room)

    def host_arrays() -> list[np.ndarray]:
        return [elements for batch in batches(sys.maxsize) for _, elements, *_ in batch]

    def hand_out(fetched: Iterator[Iterator[BlockElements]]) -> None:
        for batch in fetched:
            for _ in batch:
                pass

    step()  # only then there are moments, too
    there = [array.copy() for array in host_arrays()]
    rows = []
    for number in range(saves + 1):
        stepping, _ = timed(step)
        meet()
        copying, _ = timed(partial(copy_all, host_arrays(), there))
        handing, _ = timed(partial(hand_out, batches(MOST_COPIES)))
        saved = state()
        meet()
        stall, handle = timed(partial(saver.begin, f"{place}/{number}", saved, SaveOptions()))
        report = handle.wait()
        assert not report.streamed
        rows.append(
            (copying, handing, stall, report.planning_s, stepping, report.total_s - report.stall_s)
        )
        meet()
        shutil.rmtree(f"{place}/{number}", ignore_errors=True)
    copying, handing, stall, planning, stepping, background = map(
        statistics.median, zip(*rows[1:], strict=True)
    )
    return {
        "bytes": report.nbytes,
        "tensors": report.tensors,
        "memcpy_s": copying,
        "handing_s": handing,
        "handing_ratio": statistics.median(row[1] / row[0] for row in rows[1:]),
        "stall_s": stall,
        "ratio": statistics.median(row[2] / row[0] for row in rows[1:]),
        "planning_s": planning,
        "first_stall_s": rows[0][2],
        "step_s": stepping,
        "share_of_step": stall / stepping,
        "background_s": background,
    }


def perceptron(width: int, layers: int) -> Any:
    """Of torch's modules."""
    import torch

    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


def of_torch(place: str, width: int, layers: int, saves: int) -> dict:
    """Plain tensors on the CPU."""
    import torch

    model = perceptron(width, layers)
    return measure(
        place,
        *torch_training(
            model, torch.rand(BATCH, width), torch.optim.Adam(model.parameters(), _RATE)
        ),
        saves,
    )


def torch_training(
    model: Any, batch: Any, optimizer: Any, after: Callable[[], Any] = lambda: None
) -> tuple[Callable, Callable]:
    """A state, and a step."""

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        after()

    return lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step


def of_dtensor(place: str, width: int, layers: int, saves: int) -> dict:
    """FSDP2 over gloo, in two processes; what the slower one found."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank = int(os.fork() != 0)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = perceptron(width, layers)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state, step = torch_training(
        model, torch.rand(BATCH, width), torch.optim.Adam(model.parameters(), _RATE)
    )
    figures = measure(f"{place}/saves", state, step, saves, dist.barrier)
    of_all: list[Any] = [None, None]
    dist.all_gather_object(of_all, figures)
    dist.destroy_process_group()
    if rank == 0:
        os._exit(0)
    os.wait()
    return max(of_all, key=lambda one: one["ratio"])


def of_jax(place: str, width: int, layers: int, saves: int) -> dict:
    """Rows over 8 devices; the state is donated to each step."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    rows = NamedSharding(Mesh(np.array(jax.devices()), ("dp",)), PartitionSpec("dp"))
    random = np.random.default_rng(0)
    zeros = np.zeros((width, width), np.float32)
    weights = [
        (random.random((width, width), np.float32) - 0.5) / width**0.5 for _ in range(layers)
    ]
    state = jax.device_put({"w": weights, "m": [zeros] * layers, "v": [zeros] * layers}, rows)
    batch = jax.device_put(random.random((BATCH, width), np.float32), rows)

    def loss(weights: Any) -> Any:
        hidden = batch
        for weight in weights:
            hidden = hidden @ weight
        return jnp.mean(jnp.square(hidden))

    def trained(state: Any) -> Any:
        gradient = jax.grad(loss)(state["w"])
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], gradient)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["v"], gradient)
        return {
            "w": jax.tree.map(
                lambda w, m, v: w - _RATE * m / (jnp.sqrt(v) + 1e-8), state["w"], m, v
            ),
            "m": m,
            "v": v,
        }

    compiled = jax.jit(trained, donate_argnums=0)

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(compiled(state))

    return measure(place, lambda: state, step, saves)


def of_torch_xla(place: str, width: int, layers: int, saves: int) -> dict:
    """Rows over 8 devices."""
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(8), (8,), ("dp",))
    model = perceptron(width, layers).to("xla")
    for parameter in model.parameters():
        xs.mark_sharding(parameter, mesh, ("dp",) + (None,) * (parameter.dim() - 1))
    batch = torch.rand(BATCH, width).to("xla")
    xs.mark_sharding(batch, mesh, ("dp", None))
    optimizer = torch.optim.Adam(model.parameters(), _RATE)
    return measure(
        place, *torch_training(model, batch, optimizer, lambda: torch_xla.sync(wait=True)), saves
    )


FRAMEWORKS = {"torch": of_torch, "DTensor": of_dtensor, "JAX": of_jax, "torch_xla": of_torch_xla}
ENVIRONMENT = {
    "JAX": {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    "torch_xla": {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"},
}


def table(figures: dict[str, dict]) -> str:
    """Table of the results for people."""
    lines = [
        f"{'':10}{'MiB':>7}{'memcpy':>10}{'handing':>11}{'ratio':>7}{'stall':>10}{'ratio':>7}{'planning':>11}{'first':>9}{'step':>10}{'share':>8}{'background':>12}"
    ]
    for name, row in figures.items():
        lines.append(
            f"{name:10}{row['bytes'] / 2**20:7.0f}{1e3 * row['memcpy_s']:7.1f} ms"
            f"{1e3 * row['handing_s']:8.1f} "
            f"ms{row['handing_ratio']:7.2f}{1e3 * row['stall_s']:7.1f} ms{row['ratio']:7.2f}"
            f"{1e3 * row['planning_s']:8.2f} ms{1e3 * row['first_stall_s']:6.0f} "
            f"ms{1e3 * row['step_s']:7.0f} ms"
            f"{100 * row['share_of_step']:7.1f}%{1e3 * row['background_s']:9.0f} ms"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure each framework in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--framework", action="append", choices=FRAMEWORKS, help="may be repeated; default: all"
    )
    parser.add_argument("--to", default="/dev/shm", help="where to save")
    parser.add_argument("--width", type=int, default=2048, help="of a layer, a multiple of 8")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--saves", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print numbers in bytes and seconds")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.framework or list(FRAMEWORKS)
    if options.here:
        with tempfile.TemporaryDirectory(dir=options.to) as place:
            figures = FRAMEWORKS[names[0]](place, options.width, options.layers, options.saves)
            sys.stdout.write(json.dumps(figures) + "\n")
        return
    answers = {}
    for name in names:
        command = [sys.executable, __file__, "--here", "--framework", name, "--to", options.to]
        command += [f"--{key}={getattr(options, key)}" for key in ("width", "layers", "saves")]
        environment = {**os.environ, **ENVIRONMENT.get(name, {})}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        answers[name] = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write((json.dumps(answers) if options.json else table(answers)) + "\n")


if __name__ == "__main__":
    main()
