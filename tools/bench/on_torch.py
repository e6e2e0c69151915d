"""Tensors on the CPU, one process: shardckpt, DCP, safetensors, torch.save.

In a bucket shardckpt and DCP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.bench.bucket import Folder
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
"""Among which columns are shared out, of which one reads its own."""


def subjects(state: State, directory: Path | Folder, operation: str) -> list[Subject]:
    """All subjects, with the same tensors and the same memory to restore into.

    The memory is the tensors' own where this makes no difference.
    """
    import torch

    from tools.bench.states import elements

    dtype = getattr(torch, state.dtype)
    arrays = elements(state)
    filled = operation in ("stall", "restore", "columns")
    targets = {name: np.ones_like(array) for name, array in arrays.items()} if filled else arrays
    tensors = {name: torch.from_numpy(array).view(dtype) for name, array in arrays.items()}
    places = {name: torch.from_numpy(array).view(dtype) for name, array in targets.items()}
    columns = {name: place if place.ndim == 1 else _eighth(place) for name, place in places.items()}

    def same(_result: object = None) -> None:
        for name in (next(iter(tensors)), list(tensors)[-1]):
            if not np.array_equal(arrays[name], targets[name]):
                raise AssertionError(f"{name} came back as something else")
        for array in targets.values():
            array.reshape(-1)[:1] = 0  # so that the next one has to write it

    given = _Given(state.nbytes, tensors, places, columns, directory, same)
    programs = [*floors(arrays, targets, directory), _ours(given)]
    if isinstance(directory, Folder):
        return [
            *programs,
            *(_dcp_in_bucket(given, best=best) for best in (False, True) if directory.server.peers),
        ]
    dcp = [_dcp(given, best=best) for best in (False, True)]
    return [*programs, _ours_not_read_back(given), *dcp, *_safetensors(given), *_torch_save(given)]


def _eighth(place: torch.Tensor) -> torch.Tensor:
    """Memory for an eighth of the columns: contiguous, and touched."""
    return place.reshape(-1)[: place.numel() // DEVICES].reshape(place.shape[0], -1)


@dataclass(frozen=True, slots=True)
class _Given:
    """Tensors, memory and directory for all subjects."""

    nbytes: int
    """Of all tensors."""
    tensors: dict[str, torch.Tensor]
    places: dict[str, torch.Tensor]
    """Memory to restore them into."""
    columns: dict[str, torch.Tensor]
    """Memory for an eighth of their columns."""
    directory: Path | Folder
    same: Callable[[Any], None]
    """Checks that the tensors are in their places."""

    @property
    def moved(self) -> int:
        """Bytes of the columns."""
        return sum(c.numel() * c.element_size() for c in self.columns.values())

    def parts(self) -> dict[str, torch.Tensor]:
        """Those columns, as parts of the whole matrices."""
        from tools.bench.columns import Columns

        return {
            name: Columns(place, self.tensors[name].shape) if place.ndim > 1 else place
            for name, place in self.columns.items()
        }

    def there(self, name: str, save: Callable[[Any], Any]) -> Callable[[], None]:
        """A function that makes a checkpoint if it is not there yet.

        The checkpoint is read again and again.
        """
        path = self.directory / name

        def make() -> None:
            if not path.exists():
                save(path)

        return make


def _ours(given: _Given) -> Subject:
    import shardckpt
    from shardckpt import SaveOptions

    room = SaveOptions(memory_limit="4GiB")
    out, kept, file = (
        given.directory / "ours-out",
        given.directory / "ours",
        given.directory / "ours.safetensors",
    )
    there = given.there("ours", lambda path: shardckpt.save(path, given.tensors))

    parts = given.parts()

    def verify() -> None:
        if not shardckpt.open(kept).verify().ok:
            raise AssertionError("it is damaged")

    runs = {
        "save": Run(lambda: shardckpt.save(out, given.tensors), given.nbytes, writes=out),
        "stall": Run(
            lambda: shardckpt.save_async(out, given.tensors, options=room),
            given.nbytes,
            after=lambda h: h.wait(),
            writes=out,
        ),
        "restore": Run(
            lambda: shardckpt.restore(kept, given.places),
            given.nbytes,
            before=there,
            after=given.same,
        ),
        "columns": Run(lambda: shardckpt.restore(kept, parts), given.moved, before=there),
        "verify": Run(verify, given.nbytes, before=there),
        "export": Run(
            lambda: shardckpt.export_safetensors(kept, file),
            given.nbytes,
            before=there,
            writes=file,
        ),
    }
    settings = (
        "defaults; in the background: memory_limit=4GiB, more than the state; "
        "exports: every chunk is compared with its checksum, and the file is read back"
    )
    return Subject("shardckpt", runs, settings, checksums=True)


def _ours_not_read_back(given: _Given) -> Subject:
    import shardckpt

    kept, file = given.directory / "ours", given.directory / "ours.safetensors"
    there = given.there("ours", lambda path: shardckpt.save(path, given.tensors))
    export = Run(
        lambda: shardckpt.export_safetensors(kept, file, verify=False),
        given.nbytes,
        before=there,
        writes=file,
    )
    return Subject(
        "shardckpt, not read back",
        {"export": export},
        "verify=False, like the peers",
        checksums=True,
    )


def _dcp(given: _Given, *, best: bool) -> Subject:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    name = "DCP, at its best" if best else "DCP"
    choices: dict[str, Any] = {"thread_count": 2, "sync_files": False} if best else {}
    # Its stager keeps its memory from save to save where it is kept. All that it can be told takes
    # a GPU.
    staging: dict[str, Any] = (
        {"async_stager": DefaultStager(StagingOptions(*(False,) * 4))} if best else {}
    )
    out, kept, shards, file = (
        given.directory / f"{name}{end}" for end in ("-out", "", "-shards", "-file")
    )

    def writer(path: Path) -> Any:
        return dcp.FileSystemWriter(path, **choices)

    there = given.there(
        name, lambda path: dcp.save(dict(given.tensors), storage_writer=writer(path), no_dist=True)
    )
    runs = {
        "save": Run(
            lambda: dcp.save(dict(given.tensors), storage_writer=writer(out), no_dist=True),
            given.nbytes,
            writes=out,
        ),
        "stall": Run(
            lambda: dcp.async_save(
                dict(given.tensors), storage_writer=writer(out), no_dist=True, **staging
            ),
            given.nbytes,
            after=lambda future: future.result(),
            writes=out,
        ),
    }
    if best:
        made = given.there(shards.name, lambda path: _save_for_consolidation(path, given.tensors))
        runs["export"] = Run(
            lambda: _consolidate(shards, file, given.tensors),
            given.nbytes,
            before=made,
            writes=file,
        )
    else:
        parts = given.parts()
        runs |= {
            "restore": Run(
                lambda: dcp.load(dict(given.places), checkpoint_id=kept, no_dist=True),
                given.nbytes,
                before=there,
                after=given.same,
            ),
            "columns": Run(
                lambda: dcp.load(dict(parts), checkpoint_id=kept, no_dist=True),
                given.moved,
                before=there,
            ),
            "export": Run(
                lambda: dcp_to_torch_save(kept, file), given.nbytes, before=there, writes=file
            ),
        }
    best_settings = (
        "thread_count=2, sync_files=False; in the background: one DefaultStager, reused; "
        "exports: consolidate_safetensors_files with 2 threads, which copies whole tensors from "
        "the one file that HuggingFaceStorageWriter saved, this rank being the only one, "
        "compares no checksums and reads nothing back"
    )
    return Subject(name, runs, best_settings if best else "defaults; exports: dcp_to_torch_save")


def _dcp_in_bucket(given: _Given, *, best: bool) -> Subject:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    name = "DCP, at its best" if best else "DCP"
    choices: dict[str, Any] = {"thread_count": 4, "sync_files": False} if best else {}
    out, kept = given.directory / f"{name}-out", given.directory / "DCP"

    def save(path: Folder) -> None:
        dcp.save(
            dict(given.tensors), storage_writer=FsspecWriter(str(path), **choices), no_dist=True
        )

    def load() -> None:
        dcp.load(dict(given.places), storage_reader=FsspecReader(str(kept)), no_dist=True)

    there = given.there("DCP", save)
    runs = {"save": Run(lambda: save(out), given.nbytes, writes=out)}
    if not best:
        runs["restore"] = Run(load, given.nbytes, before=there, after=given.same)
    return Subject(
        name,
        runs,
        f"FsspecWriter{' with thread_count=4, sync_files=False' if best else ', FsspecReader'}, "
        "through gcsfs",
    )


def _save_for_consolidation(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True, thread_count=2)
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)


def _consolidate(shards: Path, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    directory.mkdir()
    consolidate_safetensors_files(
        str(shards), str(directory), dict.fromkeys(tensors, 1), num_threads=2
    )


def _safetensors(given: _Given) -> list[Subject]:
    from safetensors import safe_open
    from safetensors.torch import save_file

    out, kept = given.directory / "out.safetensors", given.directory / "kept.safetensors"
    there = given.there("kept.safetensors", lambda path: save_file(given.tensors, path))

    def restore() -> None:
        with safe_open(kept, "pt") as file:
            for name, place in given.places.items():
                place.copy_(file.get_tensor(name))

    def read_columns() -> None:
        with safe_open(kept, "pt") as file:
            for name, place in given.columns.items():
                part = file.get_slice(name)
                place.copy_(part[:, : place.shape[1]] if place.ndim > 1 else part[:])

    write = Run(lambda: save_file(given.tensors, out), given.nbytes, writes=out)
    runs = {
        "save": write,
        "restore": Run(restore, given.nbytes, before=there, after=given.same),
        "columns": Run(read_columns, given.moved, before=there),
    }
    return [
        Subject("safetensors", runs, "save_file, never made durable; safe_open, copied into place"),
        Subject("save_file, from memory", {"export": write}, "nothing is read", floor=True),
    ]


def _torch_save(given: _Given) -> list[Subject]:
    import torch

    out, kept = given.directory / "out.pt", given.directory / "kept.pt"
    there = given.there("kept.pt", lambda path: torch.save(given.tensors, path))

    def restore() -> None:
        tensors = torch.load(kept, weights_only=True, mmap=True)
        for name, place in given.places.items():
            place.copy_(tensors[name])

    write = Run(lambda: torch.save(given.tensors, out), given.nbytes, writes=out)
    runs = {"save": write, "restore": Run(restore, given.nbytes, before=there, after=given.same)}
    return [
        Subject(
            "torch.save",
            runs,
            "never made durable; loaded with mmap=True, weights_only=True, copied into place",
        ),
        Subject("torch.save, from memory", {"export": write}, "nothing is read", floor=True),
    ]
