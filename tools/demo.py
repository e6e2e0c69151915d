"""Train a Llama on one mesh, kill it, and go on with another mesh; prove that nothing was lost.

    python tools/demo.py            about a minute on 2 cores, no network
    python tools/demo.py --small    a smaller model and fewer steps

1. A process trains on a (4, 2) mesh and saves a checkpoint. Once that is committed it trains on,
   and in the middle of a later step it is killed with SIGKILL.
2. Another process restores the checkpoint onto a (2, 4) mesh with other axes and other specs, and
   trains on.
3. Every bit of the restored state is compared with what was saved, and every loss with the one that
   the first process had computed for the same step.

The exit status is 0 if all of it holds and 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from demo_layouts import LAYOUTS, Layout
from demo_report import Report

import shardckpt

if TYPE_CHECKING:
    from collections.abc import Iterator

Event = dict[str, Any]
Losses = dict[int, float]
"""Step → loss."""

FIRST_TOLERANCE = 2e-6
"""Relative difference allowed for the loss of the first step after the restore: one sum, taken in
another order."""
TOLERANCE = 1e-4
"""The same for later steps, whose parameters carry the rounding of the earlier ones."""
MOST_READ = 1.02
"""Bytes read per byte needed, by a process with all devices: checksums, and the padding of chunks
at the edges."""
MOST_READ_ALONE = 1.5
"""The same by a host with one device, whose boxes cut through chunks."""
TIME_LIMIT = 240.0
"""Seconds that a training process may take."""


class DemoError(Exception):
    """A training process did not do what it ought to."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """After which steps something happens."""

    save: int
    kill: int
    """In the middle of the step after this one."""
    end: int


class TrainingProcess:
    """A process of demo_train.py, as a context: it does not outlive that."""

    def __init__(self, layout: str, directory: Path, *options: str) -> None:
        """Start it."""
        self.log = directory / f"{layout}.log"
        paths = [
            f"--checkpoint={directory / 'checkpoint'}",
            f"--digests={directory / 'digests.json'}",
        ]
        command = [
            sys.executable,
            str(Path(__file__).with_name("demo_train.py")),
            f"--layout={layout}",
            *paths,
            *options,
        ]
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.watchdog = threading.Timer(TIME_LIMIT, self.popen.kill)
        self.watchdog.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.watchdog.cancel()
        self.kill()

    def events(self) -> Iterator[Event]:
        """Events of the process, as they come.

        Raises:
            DemoError: it ended with an error.
        """
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            yield json.loads(line)
        if (status := self.popen.wait()) != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise DemoError(
                f"the training process on layout {self.log.stem!r} ended with status {status}. "
                "The end of its log:\n"
                f"{tail}"
            )

    def kill(self) -> int:
        """Send SIGKILL; its exit status."""
        self.popen.kill()
        return self.popen.wait()


def train_and_kill(
    report: Report, directory: Path, schedule: Schedule, options: list[str]
) -> Losses:
    """The first process, from its start to its end; the losses it computed."""
    losses: Losses = {}
    options = [f"--save-at={schedule.save}", f"--steps={schedule.end + 1000}", *options]
    with TrainingProcess("before", directory, *options) as process:
        report.say(f"process {process.popen.pid} starts: PyTorch/XLA SPMD on 8 virtual devices")
        for event in process.events():
            match event:
                case {"event": "ready"}:
                    report.say(
                        f"a LlamaForCausalLM of {event['parameters']:,} parameters in "
                        f"{event['layers']} layers, with AdamW"
                    )
                case {"event": "loss", "step": step, "loss": loss}:
                    losses[step] = loss
                    report.loss(step, loss)
                case {"event": "saved", "step": step}:
                    # The parent's own look: this raises unless the checkpoint is committed.
                    report.saved(step, shardckpt.open(directory / "checkpoint"), event["seconds"])
            if max(losses, default=0) == schedule.kill:
                status = process.kill()
                report.say(
                    f"SIGKILL to process {process.popen.pid} in the middle of step "
                    f"{schedule.kill + 1}: exit status {status}",
                    style="bold red",
                )
                return losses
    raise DemoError(
        f"the first process ended before step {schedule.kill}; its log is {process.log}."
    )


def restore_and_train(
    report: Report, directory: Path, schedule: Schedule, options: list[str]
) -> Losses:
    """The second process; the losses it computed."""
    losses: Losses = {}
    checkpoint = shardckpt.open(directory / "checkpoint")
    verified = checkpoint.verify()
    report.proof(
        f"the checkpoint survived the kill: all {verified.chunks} chunks match their checksums",
        verified.ok,
    )
    report.layouts(checkpoint, LAYOUTS["after"])
    alone = reads_of_single_devices(checkpoint, LAYOUTS["after"])
    report.proof(
        f"a host with one device reads {min(alone):.2f} to {max(alone):.2f} times the bytes that "
        "it needs",
        max(alone) <= MOST_READ_ALONE,
    )
    with TrainingProcess(
        "after", directory, "--resume", f"--steps={schedule.end}", *options
    ) as process:
        report.say(f"process {process.popen.pid} starts: a model on the meta device, no memory yet")
        for event in process.events():
            match event:
                case {"event": "restored"}:
                    read, needed, compiles = event["read"], event["needed"], event["compiles"]
                    report.say(
                        f"model built and step {event['step']} restored onto the devices in "
                        f"{event['seconds']:.2f} s"
                    )
                    report.proof(
                        f"a host with all devices reads {read:,} bytes and needs {needed:,}",
                        read <= MOST_READ * needed,
                    )
                    report.proof(
                        f"restoring straight onto the devices compiled {compiles} XLA programs",
                        compiles == 0,
                    )
                case {"event": "layouts", "wrong": wrong}:
                    report.proof(
                        f"all {event['tensors']} sharded tensors have the requested layouts",
                        not wrong,
                        wrong,
                    )
                case {"event": "digests", "different": different}:
                    report.proof(
                        f"{event['tensors']} tensors and {event['values']} other values are equal "
                        "to what was saved, bit by bit (SHA-256)",
                        not different,
                        different,
                    )
                case {"event": "loss", "step": step, "loss": loss}:
                    losses[step] = loss
                    report.loss(step, loss)
    return losses


def reads_of_single_devices(checkpoint: shardckpt.Checkpoint, layout: Layout) -> list[float]:
    """Bytes read per byte needed, for every device as if it were a host of its own.

    All tensors of the model are counted.
    """
    names = [name for name in checkpoint.names() if name.startswith("model/")]
    stats = checkpoint.stats
    ratios = []
    for device in layout.mesh.device_ids.tolist():
        read, needed = stats.bytes_read, stats.bytes_needed
        for name in names:
            sharding = layout.sharding(name.removeprefix("model/"))
            checkpoint.read(
                name, sharding.device_boxes(checkpoint.info(name).shape, [device]).boxes[0]
            )
        ratios.append((stats.bytes_read - read) / (stats.bytes_needed - needed))
    return ratios


def compare(report: Report, before: Losses, after: Losses, schedule: Schedule) -> None:
    """The losses of both processes, side by side."""
    first, *later = range(schedule.save + 1, schedule.kill + 1)
    off = {step: abs(after[step] - before[step]) / abs(before[step]) for step in (first, *later)}
    report.losses(before, after, off)
    report.proof(
        f"the first loss after the restore differs by {off[first]:.1e} (at most "
        f"{FIRST_TOLERANCE:.0e})",
        off[first] <= FIRST_TOLERANCE,
    )
    worst = max(off[step] for step in later)
    report.proof(
        f"the {len(later)} losses after that differ by up to {worst:.1e} (at most {TOLERANCE:.0e})",
        worst <= TOLERANCE,
    )


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave checkpoint and logs in this new directory"
    )
    args = parser.parse_args()
    if args.keep is not None and args.keep.exists():
        parser.error(f"--keep={args.keep}: it exists; name a new directory")
    schedule = Schedule(save=3, kill=6, end=7) if args.small else Schedule(save=10, kill=16, end=18)
    options = ["--small"] if args.small else []
    report = Report()
    with contextlib.ExitStack() as stack:
        directory = args.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="shardckpt-demo-"))
        )
        directory.mkdir(parents=True, exist_ok=True)
        try:
            report.part("1  Train, save, be killed", LAYOUTS["before"])
            before = train_and_kill(report, directory, schedule, options)
            report.part("2  Restore onto another mesh, train on", LAYOUTS["after"])
            after = restore_and_train(report, directory, schedule, options)
            report.part("3  Is it the same training run?")
            compare(report, before, after, schedule)
        except (DemoError, shardckpt.ShardckptError) as error:
            report.failed(str(error))
            return 1
    return report.verdict()


if __name__ == "__main__":
    sys.exit(main())
