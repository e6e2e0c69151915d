"""`python -m tools.bench --cuda`: shardckpt and its peers on one GPU, in one run.

Nothing but torch and shardckpt is needed; safetensors is measured where it is installed. Files are
in /dev/shm, so reads come from memory. Times of copies and steps are those of CUDA events; the
blocking time of a call is wall-clock time. All figures are of this run.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import shardckpt
from shardckpt import SaveOptions
from shardckpt.writing.background import Saver

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 1e9
ROUNDS = 3
_ROWS = 4096


class Bench:
    """A state on the device, files for it, and what was measured."""

    def __init__(self, nbytes: int, directory: Path, device: str = "cuda") -> None:
        """Make the state: matrices of 64 MiB, and a vector for each."""
        self.device, self.directory = torch.device(device), directory
        count = max(1, nbytes // (_ROWS * _ROWS * 4))
        self.state = {
            f"layers.{i}.weight": torch.randn(_ROWS, _ROWS, device=device) for i in range(count)
        }
        self.state |= {f"layers.{i}.norm": torch.randn(_ROWS, device=device) for i in range(count)}
        self.nbytes = sum(tensor.nbytes for tensor in self.state.values())
        self.limit = self.nbytes + (256 << 20)
        self.figures: dict[str, Any] = {"bytes": self.nbytes}
        self.optimizer = torch.optim.SGD(
            [torch.nn.Parameter(tensor) for tensor in self.state.values()], lr=0.0
        )
        self.a, self.b = (
            torch.randn(8192 if self.on_cuda else 256, 8192 if self.on_cuda else 256, device=device)
            for _ in range(2)
        )

    @property
    def on_cuda(self) -> bool:
        """Whether it is a GPU; tests of this program have none."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def timed(self, do: Callable[[], Any]) -> tuple[float, float, Any]:
        """Seconds until a call returns and until the stream has finished it, and its result.

        The stream is the current one.
        """
        self.wait()
        begin, end = (
            (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if self.on_cuda
            else (None, None)
        )
        if begin is not None:
            begin.record()
        began = time.perf_counter()
        result = do()
        returned = time.perf_counter() - began
        if begin is None or end is None:
            return returned, returned, result
        end.record()
        self.wait()
        return returned, begin.elapsed_time(end) / 1e3, result

    def tell(self, key: str, value: float, unit: str, note: str = "") -> None:
        """Note a figure and print it."""
        self.figures[key] = value
        print(f"{key:58}{value:10.3f} {unit:6}{note}", flush=True)

    # --- floors

    def floors(self) -> None:
        """Plain pinned copies of the same bytes, and plain reads of them."""
        largest = max(self.state.values(), key=torch.numel)
        host = torch.empty(largest.shape, pin_memory=self.on_cuda)
        count = self.nbytes // largest.nbytes

        def down() -> None:
            for _ in range(count):
                host.copy_(largest, non_blocking=True)

        def up() -> None:
            for _ in range(count):
                largest.copy_(host, non_blocking=True)

        for key, copy in (
            ("pinned copy, device to host", down),
            ("pinned copy, host to device", up),
        ):
            seconds = min(self.timed(copy)[1] for _ in range(ROUNDS))
            self.tell(key, count * largest.nbytes / seconds / GB, "GB/s")
        path = self.directory / "plain"
        path.write_bytes(bytes(largest.nbytes))
        buffer = np.empty(largest.nbytes, np.uint8)
        buffer[:] = 0
        seconds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            with path.open("rb", buffering=0) as file:
                os.readv(file.fileno(), [buffer.data])
            seconds.append(time.perf_counter() - began)
        self.tell("readv, one thread, from page cache", largest.nbytes / min(seconds) / GB, "GB/s")
        path.unlink()

    # --- saves

    def step(self) -> None:
        """Work of a training step: multiplications, and an update."""
        for _ in range(20):
            torch.mm(self.a, self.b)
        self.optimizer.step()

    def saves(self) -> None:
        """Blocking time, copies, and the step after a save, for both modes."""
        alone = statistics.median(self.timed(self.step)[1] for _ in range(3 * ROUNDS))
        self.tell("a step without a save", alone * 1e3, "ms")
        for mode in ("wait", "overlap"):
            saver, options = (
                Saver(memory_limit=self.limit),
                SaveOptions(device_copy=mode, overwrite=True),
            )
            returned, copied, after = [], [], []

            def save(saver: Saver = saver, options: SaveOptions = options) -> Any:
                return saver.begin(self.directory / "ours", self.state, options)

            for number in range(ROUNDS + 1):
                seconds, on_stream, handle = self.timed(save)
                if number == 0:
                    self.tell(
                        f"{mode}: blocking time, pool cold",
                        seconds * 1e3,
                        "ms",
                        "target 700 for 11 GB",
                    )
                    handle.wait()
                    continue
                returned.append(seconds)
                copied.append(on_stream)
                handle.wait()
                _, seconds, handle = self.timed(lambda save=save: (save(), self.step())[0])
                after.append(seconds)
                handle.wait()
            self.tell(
                f"{mode}: blocking time, pool warm",
                statistics.median(returned) * 1e3,
                "ms",
                "target 50",
            )
            if mode == "wait":  # the current stream goes on after the copies
                self.tell(
                    "wait: device to host",
                    self.nbytes / statistics.median(copied) / GB,
                    "GB/s",
                    "target 0.85 of the pinned copy",
                )
            self.tell(
                f"{mode}: a save and the step after it, against a step",
                statistics.median(after) / alone,
                "×",
                "target 1.05 (overlap)",
            )
            saver.close()
        self.overlap()

    def first_save(self) -> None:
        """Blocking time of a manager's first save after `warm`, and of `warm` itself."""
        with shardckpt.CheckpointManager(
            self.directory / "run",
            every=1,
            keep=1,
            options=SaveOptions(memory_limit=self.limit),
            progress=False,
        ) as manager:
            seconds, _, _ = self.timed(lambda: manager.warm(self.state))
            self.tell("warm: blocking time of the call", seconds * 1e3, "ms")
            began = time.perf_counter()
            manager._background._saver._settle()
            self.tell("warm: in the background", (time.perf_counter() - began) * 1e3, "ms")
            seconds, _, _ = self.timed(lambda: manager.save(1, self.state))
            self.tell(
                "wait: blocking time of the first save after warm",
                seconds * 1e3,
                "ms",
                "target 300 for 11 GB",
            )
        shutil.rmtree(self.directory / "run")

    def beside(self) -> None:
        """Background saves beside a loop busy in Python, and beside one that launches kernels.

        The rate that is left of each loop is measured, too.
        """
        for name, turn in (
            ("in Python", lambda: sum(range(10_000))),
            ("in kernels", lambda: (self.step(), self.wait())),
        ):
            saver, options = Saver(memory_limit=self.limit), SaveOptions()
            saver.begin(self.directory / "warm", self.state, options).wait()
            shutil.rmtree(self.directory / "warm")  # deleting what is replaced would count, too
            alone, _ = self._turns(turn, lambda: False, least=2.0)
            began = time.perf_counter()
            handle = saver.begin(self.directory / "beside", self.state, options)
            rate, _ = self._turns(turn, lambda handle=handle: not handle.done())
            handle.wait()
            seconds = time.perf_counter() - began
            saver.close()
            shutil.rmtree(self.directory / "beside")
            self.tell(
                f"background save beside a loop {name}",
                self.nbytes / seconds / GB,
                "GB/s",
                "target 8",
            )
            self.tell(
                f"rate of a loop {name} beside it, against alone", rate / alone, "×", "target 0.97"
            )

    def _turns(
        self, turn: Callable[[], Any], goes_on: Callable[[], bool], least: float = 0.0
    ) -> tuple[float, int]:
        """Turns of a loop per second, and their number.

        The loop runs until it need not go on, and for at least `least` seconds.
        """
        self.wait()
        began, turns = time.perf_counter(), 0
        while turns == 0 or goes_on() or time.perf_counter() - began < least:
            turn()
            turns += 1
        self.wait()
        return turns / (time.perf_counter() - began), turns

    def overlap(self) -> None:
        """Tell by CUDA events whether a save's copies and multiplications beside them overlap.

        The events tell when both end.
        """
        if not self.on_cuda:
            return
        saver = Saver(memory_limit=self.limit)
        options = SaveOptions(device_copy="overlap", overwrite=True)
        saver.begin(self.directory / "ours", self.state, options).wait()
        from shardckpt.frameworks import cuda_runtime

        side = cuda_runtime.runtime.side_stream(
            self.device if self.device.index is not None else torch.device("cuda", 0)
        )
        marks = {
            name: torch.cuda.Event(enable_timing=True) for name in ("begin", "computed", "copied")
        }
        self.wait()
        marks["begin"].record()
        handle = saver.begin(self.directory / "ours", self.state, options)
        for _ in range(20):
            torch.mm(self.a, self.b)
        marks["computed"].record()
        marks["copied"].record(side)
        self.wait()
        handle.wait()
        saver.close()
        for name in ("computed", "copied"):
            self.tell(
                f"overlap: {name} after the save began",
                marks["begin"].elapsed_time(marks[name]),
                "ms",
            )

    # --- restores

    def restores(self) -> None:
        """Onto the tensors that are there."""
        shardckpt.save(self.directory / "kept", self.state, options=SaveOptions(overwrite=True))
        seconds = [
            self.timed(lambda: shardckpt.restore(self.directory / "kept", dict(self.state)))[0]
            for _ in range(ROUNDS)
        ]
        self.tell(
            "restore in place", self.nbytes / statistics.median(seconds) / GB, "GB/s", "target 20"
        )
        shutil.rmtree(self.directory / "kept")
        self.train_state()
        shutil.rmtree(self.directory / "ours", ignore_errors=True)

    def train_state(self) -> None:
        """A model of matrices and vectors with the moments of AdamW.

        The model and each of its two moments have a third of the state's size.
        """
        layers = max(1, len(self.state) // 6)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(_ROWS, _ROWS, device=self.device) for _ in range(layers))
        )
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        state = shardckpt.train_state(model=model, optimizer=optimizer, step=1)
        path = self.directory / "trained"
        report = shardckpt.save(path, state)
        seconds = [self.timed(lambda: shardckpt.restore(path, state))[0] for _ in range(ROUNDS)]
        self.tell(
            "restore of a train_state",
            report.nbytes / statistics.median(seconds) / GB,
            "GB/s",
            "target 15",
        )
        shutil.rmtree(path)

    # --- versions

    def versions(self) -> None:
        """Versions of bfloat16 matrices with 2 % of their elements changed, and their follower.

        The follower is on the same device.
        """
        count = max(1, min(self.nbytes, 2_000_000_000) // (_ROWS * _ROWS * 2))
        state = {
            f"layers.{i}": torch.randn(_ROWS, _ROWS, device=self.device, dtype=torch.bfloat16)
            for i in range(count)
        }
        nbytes = sum(tensor.nbytes for tensor in state.values())
        like = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        root = self.directory / "versions"
        saver, stalls = Saver(memory_limit=nbytes + (256 << 20)), []
        for _ in range(ROUNDS):
            seconds, _, handle = self.timed(
                lambda: saver.begin(self.directory / "full", state, SaveOptions(overwrite=True))
            )
            handle.wait()
            stalls.append(seconds)
        saver.close()
        shutil.rmtree(self.directory / "full")
        host = torch.empty_like(state["layers.0"], device="cpu", pin_memory=self.on_cuda)
        copy = min(
            self.timed(lambda: [tensor.copy_(host, non_blocking=True) for tensor in like.values()])[
                1
            ]
            for _ in range(ROUNDS)
        )
        returned, durable, written, prepared, applied = [], [], [], [], []
        with (
            shardckpt.Publisher(
                root, snapshot="device", catch_up=None, memory_limit=nbytes + (256 << 20)
            ) as publisher,
            shardckpt.follow(root, like) as follower,
        ):
            for step in range(ROUNDS + 1):
                if step:
                    self.change(state)
                began = time.perf_counter()
                seconds, _, _ = self.timed(lambda step=step: publisher.publish(step, state))
                publisher.wait()
                ended = time.perf_counter()
                version = follower.poll()
                preparing, _, _ = self.timed(version.prepare)
                applying = self.timed(version.apply)[1]
                if step == 0:
                    self.tell("versions: until publish of the anchor returns", seconds * 1e3, "ms")
                    continue
                returned.append(seconds)
                durable.append(ended - began)
                prepared.append(preparing)
                applied.append(applying)
                written.append(
                    sum(
                        file.stat().st_size
                        for file in (root / str(step)).rglob("*")
                        if file.is_file()
                    )
                )
            version.prove()
            if not all(
                torch.equal(like[name].view(torch.int16), tensor.view(torch.int16))
                for name, tensor in state.items()
            ):
                raise RuntimeError("the follower's tensors are not the publisher's")
        shutil.rmtree(root)
        size = f"of {nbytes / GB:.2f} GB"
        stall, publishing = statistics.median(stalls), statistics.median(returned)
        self.tell("versions: until publish returns", publishing * 1e3, "ms", size)
        self.tell(
            "versions: until publish returns, against a save's blocking time",
            publishing / stall,
            "×",
            "target 1.1",
        )
        self.tell("versions: until a version is durable", statistics.median(durable) * 1e3, "ms")
        self.tell(
            "versions: bytes of a version, against the state's",
            100 * statistics.median(written) / nbytes,
            "%",
            "2 % changed",
        )
        self.tell("versions: prepare", statistics.median(prepared) * 1e3, "ms")
        self.tell("versions: apply", statistics.median(applied) * 1e3, "ms")
        self.tell(
            "versions: apply, against a pinned copy of all of it",
            statistics.median(applied) / copy,
            "×",
            "target 1.2",
        )

    def change(self, state: dict[str, torch.Tensor]) -> None:
        """Move 2 % of the elements of bfloat16 tensors, scattered, by a unit in the last place."""
        for tensor in state.values():
            draw = torch.rand(tensor.shape, device=self.device)
            tensor.view(torch.int16).add_(
                (draw < 0.01).to(torch.int16) - (draw > 0.99).to(torch.int16)
            )
        self.wait()

    # --- JAX

    def jax(self) -> None:
        """Saves and restores of JAX arrays, in a process of its own: `on_cuda_jax`."""
        if find_spec("jax") is None:
            print("JAX is not installed")
            return
        nbytes = min(self.nbytes, 4 << 30)
        if self.on_cuda:
            torch.cuda.empty_cache()
        command = [
            sys.executable,
            "-m",
            "tools.bench.on_cuda_jax",
            str(nbytes),
            str(self.directory),
        ]
        env = {
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **({} if self.on_cuda else {"JAX_PLATFORMS": "cpu"}),
        }
        run = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=200, check=False
        )
        if run.returncode:
            raise RuntimeError(run.stderr[-2000:])
        figures = json.loads(run.stdout.splitlines()[-1])
        print(f"JAX on {figures['device']}")
        self.tell(
            "JAX: pinned copy, device to host", figures["bytes"] / figures["floor"] / GB, "GB/s"
        )
        self.tell("JAX: blocking time of the first save", figures["first stall"] * 1e3, "ms")
        self.tell(
            "JAX: blocking time from the third save on, against the copy",
            figures["stall"] / figures["floor"],
            "×",
            "target 1.3",
        )
        self.tell(
            "JAX: whole save from the third on",
            figures["bytes"] / figures["save"] / GB,
            "GB/s",
            "target 5",
        )
        self.tell("JAX: restore", figures["bytes"] / figures["restore"] / GB, "GB/s", "target 10")
        shutil.rmtree(self.directory / "jax")

    # --- peers

    def dcp(self) -> None:
        """torch.distributed.checkpoint: its asynchronous save with pinned memory, and its load."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        path = self.directory / "dcp"
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=self.on_cuda,
                use_async_staging=False,
                use_non_blocking_copy=self.on_cuda,
            )
        )
        returned = []
        for number in range(ROUNDS):
            writer = dcp.FileSystemWriter(path, overwrite=True, sync_files=False, thread_count=4)
            seconds, _, future = self.timed(
                lambda writer=writer: dcp.async_save(
                    dict(self.state), storage_writer=writer, no_dist=True, async_stager=stager
                )
            )
            getattr(future, "upload_completion", future).result()
            if number:
                returned.append(seconds)
        self.tell("DCP: blocking time, pinned, warm", statistics.median(returned) * 1e3, "ms")
        seconds = [
            self.timed(lambda: dcp.load(dict(self.state), checkpoint_id=path, no_dist=True))[0]
            for _ in range(ROUNDS)
        ]
        self.tell("DCP: load", self.nbytes / statistics.median(seconds) / GB, "GB/s")
        shutil.rmtree(path)

    def safetensors(self) -> None:
        """safetensors: its own loading to the device."""
        if find_spec("safetensors") is None:
            print("safetensors is not installed")
            return
        from safetensors.torch import load_file, save_file

        path = self.directory / "one.safetensors"
        save_file({name: tensor.cpu() for name, tensor in self.state.items()}, path)
        seconds = []
        for _ in range(ROUNDS):
            elapsed, _, loaded = self.timed(lambda: load_file(path, device=str(self.device)))
            seconds.append(elapsed)
            del loaded
        self.tell(
            "safetensors: load_file to the device",
            self.nbytes / statistics.median(seconds) / GB,
            "GB/s",
        )
        path.unlink()


def measure(gigabytes: float, written: Path | None, device: str = "cuda") -> int:
    """Measure everything; 1 if there is no GPU, or a part failed.

    Args:
        gigabytes: 10⁹ bytes of the state.
        written: a file for the figures, as JSON; None: none is written.
        device: where the state is.
    """
    if device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here; nothing was measured")
        return 1
    if device == "cuda":
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
        )
    shared = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
    failed = 0
    try:
        bench = Bench(int(gigabytes * GB), directory, device)
        saves = (bench.floors, bench.saves, bench.first_save, bench.beside, bench.restores)
        for part in (*saves, bench.versions, bench.jax, bench.dcp, bench.safetensors):
            try:
                part()
            except Exception as e:  # noqa: BLE001 - the other parts are measured all the same
                failed = 1
                print(f"{part.__name__} FAILED: {type(e).__name__}: {e}", flush=True)
            gc.collect()
        if written is not None:
            written.write_text(json.dumps(bench.figures, indent=1) + "\n")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return failed
