"""Tensors on the CPU, one process: shardckpt, DCP, safetensors, torch.save."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.bench.floors import floors
from tools.bench.measure import Run, Subject

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from tools.bench.states import State

__all__ = ["GROUP", "subjects"]

GROUP = "torch tensors on the CPU, one process"
DEVICES = 8
"""Over which shardckpt is told that the tensors are laid out, by rows: it cuts its chunks for them."""


def subjects(state: State, directory: Path) -> list[Subject]:
    """Everybody, with the same tensors and the same memory to restore into."""
    import torch

    from tools.bench.states import elements

    dtype = getattr(torch, state.dtype)
    arrays = elements(state)
    targets = {name: np.ones_like(array) for name, array in arrays.items()}
    tensors = {name: torch.from_numpy(array).view(dtype) for name, array in arrays.items()}
    places = {name: torch.from_numpy(array).view(dtype) for name, array in targets.items()}
    # Of one more, everything that matters is the same, so that what comes first is not the one that touches memory.
    columns = {name: place if place.ndim == 1 else _eighth(place) for name, place in places.items()}

    def same(_result: object = None) -> None:
        for name in (next(iter(tensors)), list(tensors)[-1]):
            if not np.array_equal(arrays[name], targets[name]):
                raise AssertionError(f"{name} came back as something else")
        for array in targets.values():
            array.reshape(-1)[:1] = 0  # so that the next one has to write it

    make = _Kept(directory)
    return [
        *floors(arrays, targets, directory),
        _ours(state, tensors, places, columns, make, same),
        _dcp(state, tensors, places, columns, make, same, best=False),
        _dcp(state, tensors, places, columns, make, same, best=True),
        _safetensors(state, tensors, places, columns, make, same),
        _torch_save(state, tensors, places, make, same),
    ]


def _eighth(place: torch.Tensor) -> torch.Tensor:
    """Memory for an eighth of the columns: contiguous, and touched."""
    return place.reshape(-1)[: place.numel() // DEVICES].reshape(place.shape[0], -1)


class _Kept:
    """Checkpoints that are read again and again, made when first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def there(self, name: str, save: Callable[[Path], Any]) -> Callable[[], None]:
        path = self.directory / name

        def make() -> None:
            if not path.exists():
                save(path)

        return make


def _moved(columns: dict[str, torch.Tensor]) -> int:
    """Bytes of the columns."""
    return sum(c.numel() * c.element_size() for c in columns.values())


def _parts(tensors: dict[str, torch.Tensor], columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those columns, as parts of the whole matrices."""
    from tools.bench.columns import Columns

    return {name: Columns(place, tensors[name].shape) if place.ndim > 1 else place for name, place in columns.items()}


def _ours(
    state: State,
    tensors: dict[str, torch.Tensor],
    places: dict[str, torch.Tensor],
    columns: dict[str, torch.Tensor],
    make: _Kept,
    same: Callable[[Any], None],
) -> Subject:
    import shardckpt
    from shardckpt import Mesh, PartitionSpec, SaveOptions, Sharding

    rows = Sharding(Mesh((DEVICES,), ("x",)), PartitionSpec("x"))
    options = SaveOptions(shardings={"**": rows}, memory_limit="4GiB")
    out, kept, file = make.directory / "ours-out", make.directory / "ours", make.directory / "ours.safetensors"
    there = make.there("ours", lambda path: shardckpt.save(path, tensors, options=options))

    parts = _parts(tensors, columns)

    def verify() -> None:
        if not shardckpt.open(kept).verify().ok:
            raise AssertionError("it is damaged")

    runs = {
        "save": Run(lambda: shardckpt.save(out, tensors, options=options), state.nbytes, writes=out),
        "stall": Run(
            lambda: shardckpt.save_async(out, tensors, options=options), state.nbytes, after=lambda handle: handle.wait(), writes=out
        ),
        "restore": Run(lambda: shardckpt.restore(kept, places), state.nbytes, before=there, after=same),
        "columns": Run(lambda: shardckpt.restore(kept, parts), _moved(columns), before=there),
        "verify": Run(verify, state.nbytes, before=there),
        "export": Run(lambda: shardckpt.export_safetensors(kept, file), state.nbytes, before=there, writes=file),
    }
    return Subject("shardckpt", runs, checksums=True)


def _dcp(
    state: State,
    tensors: dict[str, torch.Tensor],
    places: dict[str, torch.Tensor],
    columns: dict[str, torch.Tensor],
    make: _Kept,
    same: Callable[[Any], None],
    *,
    best: bool,
) -> Subject:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    name = "DCP, at its best" if best else "DCP"
    choices: dict[str, Any] = {"thread_count": 2, "sync_files": False} if best else {}
    out, kept, file = make.directory / f"{name}-out", make.directory / "dcp", make.directory / f"{name}.pt"

    def save(path: Path) -> None:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path, **choices), no_dist=True)

    there = make.there("dcp", save)
    runs = {"save": Run(lambda: save(out), state.nbytes, writes=out)}
    if not best:
        parts = _parts(tensors, columns)
        runs |= {
            "restore": Run(lambda: dcp.load(dict(places), checkpoint_id=kept, no_dist=True), state.nbytes, before=there, after=same),
            "columns": Run(lambda: dcp.load(dict(parts), checkpoint_id=kept, no_dist=True), _moved(columns), before=there),
            "export": Run(lambda: dcp_to_torch_save(kept, file), state.nbytes, before=there, writes=file),
        }
    return Subject(name, runs)


def _safetensors(
    state: State,
    tensors: dict[str, torch.Tensor],
    places: dict[str, torch.Tensor],
    columns: dict[str, torch.Tensor],
    make: _Kept,
    same: Callable[[Any], None],
) -> Subject:
    from safetensors import safe_open
    from safetensors.torch import save_file

    out, kept = make.directory / "out.safetensors", make.directory / "kept.safetensors"
    there = make.there("kept.safetensors", lambda path: save_file(tensors, path))

    def restore() -> None:
        with safe_open(kept, "pt") as file:
            for name, place in places.items():
                place.copy_(file.get_tensor(name))

    def read_columns() -> None:
        with safe_open(kept, "pt") as file:
            for name, place in columns.items():
                part = file.get_slice(name)
                place.copy_(part[:, : place.shape[1]] if place.ndim > 1 else part[:])

    return Subject(
        "safetensors",
        {
            "save": Run(lambda: save_file(tensors, out), state.nbytes, writes=out),
            "restore": Run(restore, state.nbytes, before=there, after=same),
            "columns": Run(read_columns, _moved(columns), before=there),
        },
    )


def _torch_save(
    state: State, tensors: dict[str, torch.Tensor], places: dict[str, torch.Tensor], make: _Kept, same: Callable[[Any], None]
) -> Subject:
    import torch

    out, kept = make.directory / "out.pt", make.directory / "kept.pt"
    there = make.there("kept.pt", lambda path: torch.save(tensors, path))

    def restore() -> None:
        found = torch.load(kept, weights_only=True, mmap=True)
        for name, place in places.items():
            place.copy_(found[name])

    def remove() -> None:
        shutil.rmtree(out, ignore_errors=True)

    return Subject(
        "torch.save",
        {
            "save": Run(lambda: torch.save(tensors, out), state.nbytes, before=remove, writes=out),
            "restore": Run(restore, state.nbytes, before=there, after=same),
        },
    )
