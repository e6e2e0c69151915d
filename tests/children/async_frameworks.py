"""Saves a state of one framework in the background, and changes it at once; what was not saved as
it was. JSON on stdout.

    python async_frameworks.py <torch | DTensor | JAX | torch_xla> <directory>

Each step saves, then trains: parameters and moments are overwritten where they are. When all saves
have ended, every checkpoint is compared with what the state was, bit by bit.
"""

import json
import os
import sys
import tempfile

import numpy as np

STEPS = 3


def compare(directory, expected):
    """The names of tensors that are not what they were."""
    import shardckpt

    wrong = []
    for step, state in enumerate(expected):
        restored = shardckpt.restore(f"{directory}/{step}")
        assert set(restored) == set(state)
        wrong += [
            f"{step}/{name}"
            for name in state
            if np.asarray(restored[name]).tobytes() != state[name].tobytes()
        ]
    return wrong


def run(directory, state, train, look):
    """Save and train in turn.

    Args:
        state: by name.
        train: changes a state where it is, and returns it.
        look: a copy of one tensor, whole, on the host.
    """
    import shardckpt

    handles, expected = [], []
    for step in range(STEPS):
        expected.append({name: look(tensor) for name, tensor in state.items()})
        handles.append(
            shardckpt.save_async(
                f"{directory}/{step}", state, options=shardckpt.SaveOptions(memory_limit="256MiB")
            )
        )
        state = train(state)
    reports = [handle.wait() for handle in handles]
    changed = [
        name for name in state if look(state[name]).tobytes() != expected[-1][name].tobytes()
    ]
    return expected, {
        "changed": changed,
        "written": [report.nbytes for report in reports],
        "streamed": any(r.streamed for r in reports),
    }


def torch_case(directory):
    import torch

    generator = torch.Generator().manual_seed(1)
    weights = {
        "w": torch.nn.Parameter(torch.rand(1500, 800, generator=generator)),
        "transposed": torch.rand(300, 500, generator=generator).t(),
        "bfloat16": torch.rand(1000, 33, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(3.0),
    }
    state = {**weights, "numpy": np.random.default_rng(0).random((200, 300))}

    def train(state):
        with torch.no_grad():
            for name in state:
                state[name] *= 2.5
        return state

    def look(tensor):
        if isinstance(tensor, np.ndarray):
            return tensor.copy()
        bits = (
            tensor.detach().contiguous().view(torch.int16)
            if tensor.dtype == torch.bfloat16
            else tensor.detach()
        )
        return bits.numpy().copy()

    expected, outcome = run(directory, state, train, look)
    return {**outcome, "wrong": compare(directory, expected)}


def dtensor_case(directory):
    """Two ranks over gloo."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def rank_case(rank, store):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        wholes = {
            "rows": torch.rand(1001, 300),
            "columns": torch.rand(300, 401),
            "replicated": torch.rand(500, 200),
        }
        for whole in wholes.values():
            dist.broadcast(whole, 0)
        layouts = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
        state = {
            name: distribute_tensor(whole, mesh, [layouts[name]]) for name, whole in wholes.items()
        }

        def train(state):
            for tensor in state.values():
                tensor.to_local().mul_(2.5)
            return state

        expected, outcome = run(
            directory, state, train, lambda tensor: tensor.full_tensor().numpy().copy()
        )
        dist.barrier()
        outcome["wrong"] = compare(directory, expected)
        dist.destroy_process_group()
        return outcome

    with tempfile.NamedTemporaryFile() as store:
        pid = os.fork()
        outcome = rank_case(int(pid != 0), store.name)
        if pid == 0:
            os._exit(bool(outcome["wrong"]))
        assert os.waitpid(pid, 0)[1] == 0
    return outcome


def jax_case(directory):
    """Eight devices; training donates the state, so that XLA writes the new one where the old one
    was."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    random = np.random.default_rng(0)
    specs = {"both": ("x", "y"), "columns": (None, "x"), "replicated": ()}
    state = {
        name: jax.device_put(
            random.random((512, 640), np.float32),
            NamedSharding(mesh, PartitionSpec(*spec)),
            may_alias=False,
        )
        for name, spec in specs.items()
    }
    trained = jax.jit(
        lambda state: {name: array * 2.5 for name, array in state.items()}, donate_argnums=0
    )

    def train(state):
        new = jax.block_until_ready(trained(state))
        assert all(array.is_deleted() for array in state.values())
        return new

    expected, outcome = run(directory, state, train, np.array)
    return {**outcome, "wrong": compare(directory, expected)}


def torch_xla_case(directory):
    """Eight devices; parameters are overwritten, and torch_xla donates what they were."""
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(8), (4, 2), ("x", "y"))
    specs = {"both": ("x", "y"), "columns": (None, "x"), "replicated": (None, None)}
    state = {}
    for name, spec in specs.items():
        state[name] = torch.rand(512, 640).to("xla")
        xs.mark_sharding(state[name], mesh, spec)
    torch_xla.sync(wait=True)

    def train(state):
        for tensor in state.values():
            tensor.mul_(2.5)
        torch_xla.sync(wait=True)
        return state

    expected, outcome = run(directory, state, train, lambda tensor: tensor.cpu().numpy().copy())
    return {**outcome, "wrong": compare(directory, expected)}


CASES = {"torch": torch_case, "DTensor": dtensor_case, "JAX": jax_case, "torch_xla": torch_xla_case}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](sys.argv[2])))
