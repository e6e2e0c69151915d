"""Writes the checkpoint of Megatron-Core that the tests read.

The command is `python tools/megatron_fixture.py DIRECTORY`.

It needs `megatron-core` (Apache-2.0; 0.16.1 made what is in tests/golden/megatron), which nothing
else here does. Four gloo processes save what Megatron's training saves, in small: sharded tensors,
tensors with prepended layers, objects of each process, and common state. Its writer asks for a GPU
even where there is none: two functions of torch.cuda are answered here.
"""

import argparse
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4


def sharded_state(rank: int) -> dict[str, Any]:
    """Tensor parallel over two ranks, data parallel over two."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    tensor, data = rank % 2, rank // 2

    def part(key: str, whole: torch.Tensor, axis: int) -> ShardedTensor:
        local = whole.chunk(2, axis)[tensor].contiguous()
        return ShardedTensor.from_rank_offsets(key, local, (axis, tensor, 2), replica_id=data)

    weight = torch.arange(24.0).reshape(4, 6)
    layers = {
        f"layers.{layer}": ShardedTensor.from_rank_offsets(
            "decoder.layers.mlp.linear_fc1.weight",
            (weight + 100 * layer).chunk(2, 0)[tensor].contiguous(),
            (0, layer, 3),
            (1, tensor, 2),
            replica_id=data,
            prepend_axis_num=1,
        )
        for layer in range(3)
    }
    return {
        "model": {
            **layers,
            "embedding": part(
                "embedding.word_embeddings.weight", torch.arange(40.0).reshape(8, 5).bfloat16(), 0
            ),
            "output": part(
                "output_layer.weight", torch.arange(12, dtype=torch.float16).reshape(2, 6), 1
            ),
            "norm": ShardedTensor.from_rank_offsets(
                "decoder.final_layernorm.weight", torch.arange(5.0), replica_id=rank
            ),
        },
        "optimizer": {
            "exp_avg": part(
                "optimizer.state.exp_avg.output_layer.weight",
                torch.arange(12.0).reshape(2, 6) / 8,
                1,
            )
        },
        "rng_state": ShardedObject(
            "rng_state",
            [{"random": (3, (1, 2)), "torch": torch.arange(4) + rank}],
            (2, 2),
            (data, tensor),
        ),
        "iteration": 10,
        "checkpoint_version": 3.0,
        "args": argparse.Namespace(
            hidden_size=6, lr=0.25, params_dtype=torch.bfloat16, data_path=None
        ),
        "opt_param_scheduler": {"max_lr": 0.5, "num_steps": 40},
    }


def save(rank: int, directory: Path, port: int) -> None:
    """One process."""
    join(rank, RANKS, port)
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(sharded_state(rank), str(directory))
    leave()


def join(rank: int, ranks: int, port: int) -> None:
    """Make this process a rank of a job on the CPU."""
    warnings.simplefilter("ignore")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )


def leave() -> None:
    """End this process's part in the job."""
    dist.barrier()
    dist.destroy_process_group()


def main(rank: Callable[[int, Path, int], None] = save, ranks: int = RANKS) -> None:
    """Make the directory, and start the processes."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(rank, (directory, port), nprocs=ranks)


if __name__ == "__main__":
    main()
