"""Jobs of gloo processes that save with torch.distributed.checkpoint's own writer, as
test_from_dcp.py asks, and what DCP itself reads."""

import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from e2e_torch import connect, leave
from integration_dcp import state_of
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

DTYPES = (
    *(
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "bfloat16",
    ),
    *(
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ),
)


def noise(shape, dtype):
    """Any bits at all, but for bools."""
    size = torch.empty((), dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.from_numpy(np.random.default_rng(1).integers(0, 2, shape).astype(bool))
    raw = np.random.default_rng(1).integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8)
    return torch.from_numpy(raw).view(dtype)


def plain_state(_ranks):
    """Tensors of every dtype and stride, and values that DCP keeps as bytes."""
    whole = torch.arange(6000.0)
    return {
        "dtypes": {name: noise((3, 5), getattr(torch, name)) for name in DTYPES},
        "transposed": torch.arange(600_000, dtype=torch.int32).reshape(600, 1000).t(),
        "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        "channels_last": torch.arange(2 * 3 * 4 * 5.0)
        .reshape(2, 3, 4, 5)
        .to(memory_format=torch.channels_last),
        "part": whole[1000:1007],
        "every other": whole[::2],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "rows": torch.arange(700_000.0).reshape(700, 1000),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "values": {
            "none": None,
            "text": "naïve",
            "list": [1, [2.5, None]],
            "pair": (True, 1 << 80),
            "bytes": b"\x00\xff",
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(4.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}],
        },
        "in a leaf": (torch.arange(4), {"deep": torch.arange(3.0)}),
        "numpy": {
            "array": np.arange(6).reshape(2, 3),
            "order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "number": np.float32(2.5),
        },
        "dtype": torch.bfloat16,
    }


def sharded_state(ranks):
    """DTensors: even, uneven with processes that have none, in two dimensions, and replicated."""
    line = init_device_mesh("cpu", (ranks,))
    state = {
        "even": distribute_tensor(torch.arange(48.0).reshape(8, 6), line, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(48.0).reshape(8, 6), line, [Shard(1)]),
        "uneven": distribute_tensor(torch.arange(5, dtype=torch.int32), line, [Shard(0)]),
        "few": distribute_tensor(torch.arange(6.0).reshape(2, 3), line, [Shard(0)]),
        "replicated": distribute_tensor(torch.arange(7.0), line, [Replicate()]),
    }
    if ranks == 4:
        square = init_device_mesh("cpu", (2, 2))
        state["square"] = distribute_tensor(
            torch.arange(35.0).reshape(7, 5), square, [Shard(0), Shard(1)]
        )
        state["half"] = distribute_tensor(
            torch.arange(35.0).reshape(7, 5), square, [Replicate(), Shard(0)]
        )
    return state


def trained_state(ranks):
    """FSDP2's parameters and optimizer, by torch's `get_state_dict`."""
    return state_of((2, 2) if ranks == 4 else (ranks,), 1)


STATES = {"plain": plain_state, "sharded": sharded_state, "trained": trained_state}
WRITERS = {
    "one file": {},
    "two threads": {"thread_count": 2},
    "a file an item": {"single_file_per_rank": False},
    "safetensors": {"serialization_format": SerializationFormat.SAFETENSORS},
}


def save(coordinator, directory, what, writer="one file", how="save"):
    """Save a state; the first process has DCP write it once more, as one file of torch.save."""
    warnings.simplefilter("ignore")
    connect(coordinator)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = STATES[what](dist.get_world_size())
    if writer == "hugging face":
        storage = HuggingFaceStorageWriter(directory, save_distributed=True)
    else:
        storage = dcp.FileSystemWriter(directory, **WRITERS[writer], sync_files=False)
    if how == "async":
        dcp.async_save(state, storage_writer=storage).result()
    else:
        dcp.save(state, storage_writer=storage, use_collectives=how != "without collectives")
    leave(coordinator)
    if (
        coordinator.world.process == 0
        and how == "save"
        and writer not in ("safetensors", "hugging face")
    ):
        dcp_to_torch_save(directory, f"{directory}.pt")
