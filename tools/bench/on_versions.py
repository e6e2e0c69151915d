"""`python -m tools.bench --versions`: cost of publishing and following beside a full save.

One run takes a minute.

A bfloat16 state in host memory, 2 % of whose elements move by one unit in the last place before
each version. Files are in /dev/shm, objects in fake-gcs-server, which shares the cores. Medians;
nothing else should run on the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numcodecs import Zstd

import shardckpt
from shardckpt import SaveOptions
from shardckpt.writing.background import Saver
from tools.bench.bucket import Folder, serve

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 1e9
ROUNDS = 5
SHAPE = (2048, 2048)


def _change(state: dict[str, torch.Tensor], rng: np.random.Generator) -> None:
    """Move 2 % of the elements."""
    for tensor in state.values():
        bits = tensor.view(torch.int16).numpy()
        draw = rng.random(bits.shape, np.float32)
        bits += (draw < 0.01).astype(np.int16) - (draw > 0.99)


def _timed(do: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, processor seconds of all threads, and what a call returned."""
    began, used = time.perf_counter(), time.process_time()
    result = do()
    return time.perf_counter() - began, time.process_time() - used, result


class _Versions:
    """The state, and what was measured of it."""

    def __init__(self, gigabytes: float, directory: Path) -> None:
        self.rng = np.random.default_rng(0)
        count = max(1, int(gigabytes * GB / (2 * SHAPE[0] * SHAPE[1])))
        drawn = (0.02 * self.rng.standard_normal(SHAPE, np.float32) for _ in range(count))
        self.state = {
            f"layers.{i}": torch.from_numpy(part).bfloat16() for i, part in enumerate(drawn)
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.state.values())
        self.limit = self.nbytes + (64 << 20)
        self.directory = directory
        self.figures: dict[str, float] = {"bytes": self.nbytes}

    def tell(self, key: str, value: float, unit: str, target: str = "") -> None:
        """Note a figure and print it."""
        self.figures[key] = value
        print(f"{key:64}{value:10.3f} {unit:6}{target}", flush=True)

    def on_tmpfs(self) -> None:
        """Bytes, processor time and blocking time of versions.

        Preparing, applying, and reading an eighth of the rows.
        """
        root = self.directory / "versions"
        saver, stalls, saves = Saver(memory_limit=self.limit), [], []
        for _ in range(ROUNDS):
            began = time.process_time()
            seconds, _, handle = _timed(
                lambda: saver.begin(
                    self.directory / "full", self.state, SaveOptions(overwrite=True)
                )
            )
            handle.wait()
            stalls.append(seconds)
            saves.append(time.process_time() - began)
        saver.close()
        like = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        eighth = {name: torch.zeros(SHAPE[0] // 8, SHAPE[1], dtype=torch.bfloat16) for name in like}
        returned, used, ratios, prepared, applied, copies, shares = ([] for _ in range(7))
        with (
            shardckpt.Publisher(root, catch_up=None, memory_limit=self.limit) as publisher,
            shardckpt.follow(root, like) as follower,
            shardckpt.follow(root, eighth, fit=dict.fromkeys(like, "slice")) as part,
        ):
            for step in range(ROUNDS + 1):
                before = {name: tensor.clone() for name, tensor in self.state.items()}
                _change(self.state, self.rng)
                began = time.process_time()
                seconds, _, _ = _timed(lambda step=step: publisher.publish(step, self.state))
                publisher.wait()
                processor = time.process_time() - began
                version = follower.poll()
                preparing, _, _ = _timed(version.prepare)
                applying, _, _ = _timed(version.apply)
                had = part.cache.read_bytes
                part.poll().prepare()
                if step == 0:
                    continue
                returned.append(seconds)
                used.append(processor)
                prepared.append(preparing)
                applied.append(applying)
                copies.append(
                    _timed(
                        lambda before=before: [
                            like[name].copy_(self.state[name]) for name in before
                        ]
                    )[0]
                )
                ratios.append(_bytes_of(root / str(step)) / self._xor(before))
                shares.append(
                    (part.cache.read_bytes - had)
                    / (shardckpt.open(root / str(step)).record.totals["stored_bytes"] / 8)
                )
            version.prove()
        stall = statistics.median(stalls)
        self.tell(
            "bytes of a version, against whole-tensor XOR with zstd",
            statistics.median(ratios),
            "×",
            "target 0.6",
        )
        self.tell(
            "processor time of a version",
            statistics.median(used) / (self.nbytes / GB),
            "s/GB",
            "target 1.0",
        )
        self.tell("processor time of a save", statistics.median(saves) / (self.nbytes / GB), "s/GB")
        self.tell("until save_async returns", stall * 1e3, "ms")
        self.tell(
            "until publish returns, against that",
            statistics.median(returned) / stall,
            "×",
            "target 1.1",
        )
        self.tell("prepare", statistics.median(prepared) * 1e3, "ms")
        self.tell("apply", statistics.median(applied) * 1e3, "ms")
        self.tell(
            "apply, against one copy of the share",
            statistics.median(applied) / statistics.median(copies),
            "×",
            "target 1.2",
        )
        self.tell(
            "read by a follower of an eighth of the rows, against its share",
            statistics.median(shares),
            "×",
            "target 1.1",
        )

    def _xor(self, before: dict[str, torch.Tensor]) -> int:
        """Bytes of the exclusive or of whole tensors, compressed."""
        pairs = (
            (before[name].view(torch.int16).numpy(), tensor.view(torch.int16).numpy())
            for name, tensor in self.state.items()
        )
        return sum(len(Zstd(level=3).encode(old ^ new)) for old, new in pairs)

    def on_bucket(self) -> None:
        """Publishing to a bucket against a full save there."""
        with serve("gs", self.directory, []) as (server, variables):
            os.environ.update(variables)
            folder = Folder(server, "bench")
            full, published = [], []
            with shardckpt.Publisher(
                folder / "versions", catch_up=None, memory_limit=self.limit
            ) as publisher:
                for step in range(ROUNDS):
                    _change(self.state, self.rng)
                    seconds, _, _ = _timed(
                        lambda step=step: (publisher.publish(step, self.state), publisher.wait())
                    )
                    if step:
                        published.append(seconds)
                    place = folder / f"full-{step}"
                    full.append(_timed(lambda place=place: shardckpt.save(place, self.state))[0])
                    place.remove()
        self.tell("a full save to the bucket", statistics.median(full) * 1e3, "ms")
        ratio = statistics.median(published) / statistics.median(full)
        self.tell(
            "publish to the bucket until it is durable, against that", ratio, "×", "target 0.35"
        )


def _bytes_of(place: Path) -> int:
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


def measure(gigabytes: float, written: Path | None) -> int:
    """Measure versions of a state of so many 10⁹ bytes; `written` gets the figures as JSON.

    Return 0.
    """
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        bench = _Versions(gigabytes, directory)
        bench.on_tmpfs()
        bench.on_bucket()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if written is not None:
        written.write_text(json.dumps(bench.figures, indent=1) + "\n", "utf-8")
    return 0
