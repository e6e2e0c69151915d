"""DTensors of 2 processes over gloo: shardckpt and DCP.

Each process measures; the first one tells.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tools.bench.measure import Run, Subject

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tools.bench.states import State

__all__ = ["GROUP", "agree", "close", "meet", "speaks", "subjects"]

GROUP = "DTensors, 2 processes over gloo"
PROCESSES = 2


def meet() -> None:
    """Wait for the other process."""
    import torch.distributed as dist

    dist.barrier()


def agree(own: bool) -> bool:
    """The first process's `own`, in every process."""
    import torch
    import torch.distributed as dist

    answer = torch.tensor([own])
    dist.broadcast(answer, 0)
    return bool(answer)


def speaks() -> bool:
    """Whether this process is the one that tells."""
    return os.environ["RANK"] == "0"


def close() -> None:
    """Leave the other process."""
    import torch.distributed as dist

    dist.destroy_process_group()


def subjects(state: State, directory: Path, _operation: str) -> list[Subject]:
    """Everybody, with the same tensors and the same memory to restore into."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from tools.bench.states import elements

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (PROCESSES,))
    dtype = getattr(torch, state.dtype)

    def laid_out(value: torch.Tensor, dim: int) -> Any:
        return distribute_tensor(value, mesh, [Shard(dim) if value.ndim > dim else Replicate()])

    whole = {name: torch.from_numpy(array).view(dtype) for name, array in elements(state).items()}
    tensors = {name: laid_out(value, 0) for name, value in whole.items()}
    cols = {name: laid_out(torch.ones_like(value), 1) for name, value in whole.items()}
    expected = {
        name: laid_out(value, 1).to_local().clone() for name, value in list(whole.items())[:1]
    }
    rows = {
        name: DTensor.from_local(
            torch.ones_like(t.to_local()), mesh, t.placements, shape=t.shape, stride=t.stride()
        )
        for name, t in tensors.items()
    }
    whole.clear()

    def same_rows(_result: object) -> None:
        name = next(iter(tensors))
        check(torch.equal(rows[name].to_local(), tensors[name].to_local()), name)
        rows[name].to_local().zero_()

    def same_columns(_result: object) -> None:
        for name, value in expected.items():
            check(torch.equal(cols[name].to_local(), value), name)
            cols[name].to_local().zero_()

    def check(ok: bool, name: str) -> None:
        if not ok:
            raise AssertionError(f"{name} came back as something else")

    here = sum(t.to_local().numel() * t.to_local().element_size() for t in tensors.values())
    from tools.bench.floors import floors

    mine = {n: t.to_local().view(torch.uint8).numpy() for n, t in tensors.items()}
    into = {n: t.to_local().view(torch.uint8).numpy() for n, t in rows.items()}
    own = directory / f"rank{dist.get_rank()}"
    own.mkdir(exist_ok=True)
    meet()
    return [
        *floors(mine, into, own, processes=PROCESSES),
        _ours(here, tensors, rows, cols, directory, same_rows, same_columns),
        *(
            _dcp(here, tensors, rows, cols, directory, same_rows, same_columns, best=best)
            for best in (False, True)
        ),
    ]


def _save_once(path: Path, save: Callable[[Path], Any]) -> None:
    """Make a checkpoint that is read again and again, if it is missing.

    Both processes look, and meet before one makes the directory.
    """
    missing = not path.exists()
    meet()  # before one makes the directory that the other looks for
    if missing:
        save(path)
    meet()


def _ours(
    nbytes: int,
    tensors: Any,
    rows: Any,
    cols: Any,
    directory: Path,
    same_rows: Any,
    same_columns: Any,
) -> Subject:
    import shardckpt
    from shardckpt import SaveOptions

    options = SaveOptions(memory_limit="2GiB")
    out, kept = directory / "ours-out", directory / "ours"

    def there() -> None:
        _save_once(kept, lambda path: shardckpt.save(path, tensors, options=options))

    return Subject(
        "shardckpt",
        {
            "save": Run(
                lambda: shardckpt.save(out, tensors, options=options),
                nbytes,
                before=meet,
                writes=out,
            ),
            "stall": Run(
                lambda: shardckpt.save_async(out, tensors, options=options),
                nbytes,
                before=meet,
                after=lambda h: h.wait(),
                writes=out,
            ),
            "restore": Run(
                lambda: shardckpt.restore(kept, rows), nbytes, before=there, after=same_rows
            ),
            "other": Run(
                lambda: shardckpt.restore(kept, cols), nbytes, before=there, after=same_columns
            ),
        },
        "memory_limit=2GiB in each process, which its shards fit into",
        checksums=True,
    )


def _dcp(
    nbytes: int,
    tensors: Any,
    rows: Any,
    cols: Any,
    directory: Path,
    same_rows: Any,
    same_columns: Any,
    *,
    best: bool,
) -> Subject:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    name = "DCP, at its best" if best else "DCP"
    choices: dict[str, Any] = {"thread_count": 2, "sync_files": False} if best else {}
    # Its stager keeps its memory from save to save where it is kept. All that it can be told takes
    # a GPU.
    staging: dict[str, Any] = (
        {"async_stager": DefaultStager(StagingOptions(*(False,) * 4))} if best else {}
    )
    out, kept = directory / f"{name}-out", directory / "dcp"

    def save(path: Path) -> None:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path, **choices))

    def there() -> None:
        _save_once(kept, save)

    def stall() -> Any:
        return dcp.async_save(
            dict(tensors), storage_writer=dcp.FileSystemWriter(out, **choices), **staging
        )

    runs = {
        "save": Run(lambda: save(out), nbytes, before=meet, writes=out),
        "stall": Run(stall, nbytes, before=meet, after=lambda future: future.result(), writes=out),
    }
    if not best:
        runs |= {
            "restore": Run(
                lambda: dcp.load(dict(rows), checkpoint_id=kept),
                nbytes,
                before=there,
                after=same_rows,
            ),
            "other": Run(
                lambda: dcp.load(dict(cols), checkpoint_id=kept),
                nbytes,
                before=there,
                after=same_columns,
            ),
        }
    return Subject(
        name,
        runs,
        "thread_count=2, sync_files=False; in the background: one DefaultStager, reused"
        if best
        else "defaults",
    )
