"""Measure the memory and the rate of exporting and importing a large checkpoint.

The same run measures what the peers have for it.

    python tools/convert_memory.py --directory /disk/there  16 GiB, the largest tensor 4 GiB, 512
                                                            MiB allowed
    python tools/convert_memory.py --gib 1 --directory /dev/shm

1. A checkpoint is saved, cut by rows over 12 devices (`reshard_memory`), and exported by `shardckpt
   export` to one safetensors file; plain write(2) writes as many bytes, in pieces of 8 MiB, before
   and after; once more the checkpoint is exported without reading back what was written, as the
   peers do. `shardckpt import` imports the file.
2. The peers start from the same file and write what they then export: `load_file` and
   `torch.distributed.checkpoint.save`, then `dcp_to_torch_save`; `load_file` and DCP's
   `HuggingFaceStorageWriter`, then `consolidate_safetensors_files`; `load_file` and Orbax, then
   Orbax's restore and `save_file`.
3. Everything runs in processes of its own, one after another, of which the high-water marks of
   resident memory are read. It includes pages of files that are mapped, as `load_file` does. What
   was written is made durable within the time. A peer that fails, as by having not enough memory,
   is told as such, and the others go on.

Needs room on the disk for three times the size. Of memory shardckpt needs what it is allowed and
some 128 MiB for each process; the peers hold the state in memory once, or twice: 16 GiB do not go
through all of them with less than 40 GiB of memory. In /dev/shm the disk's room is memory, too.
`--no-peers` leaves them out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from reshard_memory import high_water, processes, save

from shardckpt.options import parse_bytes
from shardckpt.streaming.memory import PROCESS_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE = 8 << 20
"""Bytes that plain write(2) is given at once."""
MODEL = "model.safetensors"


def write_plainly(file: Path, nbytes: int) -> float:
    """Seconds for so many bytes to be durable."""
    piece = np.random.default_rng(0).integers(0, 256, PIECE, np.uint8).data
    began = time.monotonic()
    with file.open("wb", buffering=0) as out:
        for at in range(0, nbytes, PIECE):
            out.write(piece[: min(PIECE, nbytes - at)])
        os.fdatasync(out.fileno())
    return time.monotonic() - began


def dcp_save(directory: Path) -> None:
    """`load_file`, and DCP's way to save."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    dcp.save(load_file(directory / MODEL), checkpoint_id=directory / "dcp", no_dist=True)


def dcp_export(directory: Path) -> None:
    """To one file of `torch.save`."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(directory / "dcp", directory / "dcp.pt")


def hf_save(directory: Path) -> None:
    """`load_file`, and DCP's way to save in safetensors files."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    writer = dcp.HuggingFaceStorageWriter(
        str(directory / "hf"), save_distributed=True, thread_count=2
    )
    dcp.save(load_file(directory / MODEL), storage_writer=writer, no_dist=True)


def hf_export(directory: Path) -> None:
    """To one safetensors file."""
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    with safe_open(directory / MODEL, "np") as file:
        names = list(file.keys())
    (directory / "hf.out").mkdir()
    consolidate_safetensors_files(
        str(directory / "hf"), str(directory / "hf.out"), dict.fromkeys(names, 1), num_threads=2
    )


def orbax_save(directory: Path) -> None:
    """`load_file`, and Orbax's way to save."""
    import orbax.checkpoint as ocp
    from safetensors.numpy import load_file

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((directory / "orbax").resolve(), load_file(directory / MODEL))


def orbax_export(directory: Path) -> None:
    """Orbax's restore, as numpy arrays, and `save_file`."""
    import jax
    import orbax.checkpoint as ocp
    from safetensors.numpy import save_file

    with ocp.PyTreeCheckpointer() as checkpointer:
        place = (directory / "orbax").resolve()
        tree = checkpointer.metadata(place).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = checkpointer.restore(place, restore_args=as_numpy)
    save_file(
        {name: np.asarray(value) for name, value in state.items()}, directory / "orbax.safetensors"
    )


PEERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "dcp-save": ("import: load_file, dcp.save", dcp_save),
    "dcp-export": ("export: dcp_to_torch_save", dcp_export),
    "hf-save": ("import: load_file, HuggingFaceStorageWriter", hf_save),
    "hf-export": ("export: consolidate_safetensors_files", hf_export),
    "orbax-save": ("import: load_file, Orbax", orbax_save),
    "orbax-export": ("export: Orbax restore, save_file", orbax_export),
}
"""By the word that a process of its own is told: what it is, and what does it. A save and the
export of what it has written follow each other; what they wrote begins with the same word."""


def run(*command: str | Path) -> dict[str, Any]:
    """Seconds of a command until all was durable, its memory peaks, and its error if it failed.

    The peaks are the largest resident memory of each of its processes.
    """
    os.sync()
    began, peaks = time.monotonic(), dict[int, int]()
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as job:
        while job.poll() is None:
            for pid in processes(job.pid):
                peaks[pid] = max(peaks.get(pid, 0), high_water(pid))
            time.sleep(0.02)
        assert job.stderr is not None
        errors = job.stderr.read().strip().splitlines()
    os.sync()
    failed = (
        None if job.returncode == 0 else f"status {job.returncode}: {errors[-1] if errors else ''}"
    )
    return {"seconds": time.monotonic() - began, "peaks": sorted(peaks.values()), "failed": failed}


def ours(limit: str, *command: str | Path) -> dict[str, Any]:
    """Measurements of a command of shardckpt, its allowed memory, and whether it kept to that."""
    program = shutil.which("shardckpt", path=str(Path(sys.executable).parent)) or "shardckpt"
    took = run(program, *command, "--memory-limit", limit, "--json")
    allowed = parse_bytes(limit, "limit") + len(took["peaks"]) * PROCESS_BYTES
    return {
        **took,
        "allowed": allowed,
        "kept": took["failed"] is None and sum(took["peaks"]) <= allowed,
    }


def measure(directory: Path, gib: float, limit: str, *, peers: bool) -> dict[str, Any]:
    """Measurements of shardckpt, its peers, and plain writes before and after the first export."""
    save(directory / "source", gib, gib / 4)
    plain, file = directory / "plain", directory / MODEL
    nbytes = round(gib * (1 << 30))
    before = write_plainly(plain, nbytes)
    plain.unlink()
    exported = ours(limit, "export", directory / "source", file)
    after = write_plainly(plain, nbytes)
    plain.unlink()
    unread = ours(
        limit, "export", directory / "source", plain.with_suffix(".safetensors"), "--no-verify"
    )
    plain.with_suffix(".safetensors").unlink(missing_ok=True)
    shutil.rmtree(directory / "source")
    imported = ours(limit, "import", file, directory / "imported")
    shutil.rmtree(directory / "imported", ignore_errors=True)
    took = {
        "export: shardckpt": exported,
        "export: shardckpt, not read back": unread,
        "import: shardckpt": imported,
    }
    for word, (what, _) in PEERS.items() if peers else ():
        took[what] = run(sys.executable, __file__, "--directory", directory, "--peer", word)
        if word.endswith("export"):
            for path in directory.glob(f"{word.partition('-')[0]}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for one in took.values():
        one["bytes per second"] = None if one["failed"] else nbytes / one["seconds"]
    return {
        "bytes": nbytes,
        "plain write": {
            "seconds": [before, after],
            "bytes per second": nbytes / min(before, after),
        },
        "took": took,
    }


def table(figures: dict[str, Any]) -> str:
    """A line for each way; rates are told beside plain write(2)'s."""
    written = figures["plain write"]["bytes per second"]
    size = f"{figures['bytes'] / (1 << 30):.1f} GiB"
    lines = [f"{size:46} {'seconds':>8} {'GB/s':>6} {'of write(2)':>11} {'peak MiB':>9}"]
    lines.append(
        f"{'write(2)':46} {min(figures['plain write']['seconds']):8.1f} {written / 1e9:6.2f} "
        f"{1:11.2f} {PIECE >> 20:9}"
    )
    for what, one in sorted(figures["took"].items()):
        if one["failed"]:
            lines.append(f"{what:46} {one['failed'][:60]}")
            continue
        rate, peak = one["bytes per second"], sum(one["peaks"]) >> 20
        allowed = f" of {one['allowed'] >> 20} allowed" if "allowed" in one else ""
        lines.append(
            f"{what:46} {one['seconds']:8.1f} {rate / 1e9:6.2f} {rate / written:11.2f} "
            f"{peak:9}{allowed}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--directory",
        type=Path,
        default=None,
        help="on the disk to measure; by default the temporary directory",
    )
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--memory-limit", default="512MiB")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", choices=PEERS, default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer is not None:
        PEERS[asked.peer][1](asked.directory)
        return 0
    with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
        figures = measure(Path(directory), asked.gib, asked.memory_limit, peers=not asked.no_peers)
    print(json.dumps(figures, indent=2) if asked.json else table(figures))
    return 0 if all(one.get("kept", True) for one in figures["took"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
