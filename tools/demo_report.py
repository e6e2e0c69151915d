"""Output of the demo: at most 100 columns, on a terminal or into a file."""

from __future__ import annotations

import time
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from shardckpt import Checkpoint, Sharding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from demo_layouts import Layout

__all__ = ["Report"]

WIDTH = 100
SHOWN = (
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.down_proj",
    "model.norm",
    "lm_head",
)
"""Modules whose weights are in the table of layouts."""
LEGEND = " –: not cut   a·b: cut by both axes   (×2): two devices hold each shard"
DRAWN = "lm_head"
"""The module whose weight is drawn, device by device."""


class Report:
    """Prints the demo as it goes, and keeps the proofs."""

    def __init__(self) -> None:
        """Begin, with the time running."""
        console = Console(highlight=False, emoji=False)
        self.console = Console(
            highlight=False,
            emoji=False,
            width=min(console.width, WIDTH) if console.is_terminal else WIDTH,
        )
        self.began = time.monotonic()
        self.proofs: list[bool] = []

    def part(self, title: str, layout: Layout | None = None) -> None:
        """A new part begins."""
        if layout is not None:
            title += f": mesh {layout.mesh.shape} of {', '.join(layout.mesh.axis_names)}"
        self.console.print()
        self.console.print(Rule(Text(title, "bold"), align="left", characters="─", style="cyan"))

    def say(self, text: str, style: str = "") -> None:
        """A line with the time."""
        self.console.print(
            Text(f"{time.monotonic() - self.began:6.1f} s  ", "dim") + Text(text, style)
        )

    def loss(self, step: int, loss: float) -> None:
        """A step's loss, with a bar."""
        self.say(f"step {step:3}  loss {loss:.4f}  " + "▪" * round(8 * loss))

    def saved(self, step: int, checkpoint: Checkpoint, seconds: float) -> None:
        """A checkpoint is committed."""
        tensors = checkpoint.record.structure.tensors.values()
        megabytes = sum(t.nbytes for t in tensors) / 1e6
        self.say(
            f"step {step} is committed: {len(tensors)} tensors, {megabytes:.1f} MB, in "
            f"{seconds:.2f} s",
            style="bold green",
        )

    def proof(self, claim: str, holds: bool, exceptions: Sequence[str] = ()) -> None:
        """A claim, and whether it holds."""
        self.proofs.append(holds)
        self.say(
            f"✓ {claim}" if holds else f"✗ NOT: {claim}", style="green" if holds else "bold red"
        )
        for name in exceptions[:10]:
            self.say(f"    {name}", style="red")

    def layouts(self, checkpoint: Checkpoint, after: Layout) -> None:
        """The layouts of some tensors before and after.

        For one of them, this also shows from which devices' shards each shard is made.
        """
        table = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, 2, 0, 0),
            header_style="bold",
            caption=LEGEND,
            caption_justify="left",
        )
        for heading in ("weight of", "shape", "was saved as", "shard", "is restored as", "shard"):
            table.add_column(heading, no_wrap=True)
        for module in SHOWN:
            shape, old, new = weight(checkpoint, module, after)
            table.add_row(
                module.removeprefix("model."),
                by(shape),
                spec_text(old),
                shard_text(old, shape),
                spec_text(new),
                shard_text(new, shape),
            )
        shape, old, new = weight(checkpoint, DRAWN, after)
        pictures = Table.grid(padding=(0, 4, 0, 0))
        pictures.add_row(
            Text(f"{DRAWN.removeprefix('model.')}: the devices that saved it", "bold"),
            Text("new device ← devices that saved its part", "bold"),
        )
        pictures.add_row(picture(old, shape), picture(new, shape, old))
        self.console.print(table, Padding(pictures, (1, 0, 1, 1)))

    def losses(
        self, before: Mapping[int, float], after: Mapping[int, float], off: Mapping[int, float]
    ) -> None:
        """Losses of both processes for the same steps, and what only one has."""
        table = Table(box=box.SIMPLE_HEAD, header_style="bold")
        for heading in (
            "step",
            "before the kill, (4, 2)",
            "after the restore, (2, 4)",
            "relative difference",
        ):
            table.add_column(heading, justify="right")
        for step in sorted(after):
            computed = (
                f"{before[step]:.7f}" if step in before else "killed" if step - 1 in before else ""
            )
            table.add_row(
                str(step), computed, f"{after[step]:.7f}", f"{off[step]:.1e}" if step in off else ""
            )
        self.console.print(table)

    def failed(self, reason: str) -> None:
        """The demo cannot go on."""
        self.say(f"✗ {reason}", style="bold red")

    def verdict(self) -> int:
        """The last line; the exit status."""
        self.console.print()
        if all(self.proofs):
            self.say(f"All {len(self.proofs)} proofs hold.", style="bold green")
            return 0
        self.say(
            f"{self.proofs.count(False)} of {len(self.proofs)} proofs do not hold.",
            style="bold red",
        )
        return 1


def weight(
    checkpoint: Checkpoint, module: str, after: Layout
) -> tuple[tuple[int, ...], Sharding, Sharding]:
    """Of a module's weight: the shape, the sharding it was saved with, and the one it gets."""
    info = checkpoint.info(f"model/{module}.weight")
    assert isinstance(info.layout, Sharding)
    return info.shape, info.layout, after.sharding(f"{module}.weight")


def spec_text(sharding: Sharding) -> str:
    """A partition spec, short."""
    return (
        ", ".join("·".join(map(str, axes)) or "–" for axes in sharding.spec.axes)
        if any(sharding.spec.axes)
        else "replicated"
    )


def shard_text(sharding: Sharding, shape: tuple[int, ...]) -> str:
    """The shape of a shard, and on how many devices each is, where not on one."""
    copies = sharding.num_devices // prod(sharding.parts(len(shape)))
    return by(sharding.tile(shape)) + (f" (×{copies})" if copies > 1 else "")


def by(shape: tuple[int, ...]) -> str:
    """A shape."""
    return "×".join(map(str, shape))


def picture(layout: Sharding, shape: tuple[int, ...], old: Sharding | None = None) -> Table:
    """A matrix cut into its shards, with the devices of each.

    Each shard names the device that holds it, and the devices whose old shards overlap it.
    """
    here = layout.device_boxes(shape)
    there = here if old is None else old.device_boxes(shape)
    starts = [np.unique(here.boxes.start[:, d]).tolist() for d in (0, 1)]
    stops = [np.unique(here.boxes.stop[:, d]).tolist() for d in (0, 1)]
    table = Table(box=box.SQUARE, show_lines=True, padding=(0, 1), header_style="dim")
    table.add_column("")
    for start, stop in zip(starts[1], stops[1], strict=True):
        table.add_column(f"{start}–{stop}", justify="center")
    for row, row_stop in zip(starts[0], stops[0], strict=True):
        cells = []
        for column, column_stop in zip(starts[1], stops[1], strict=True):
            low, high = np.array([row, column]), np.array([row_stop, column_stop])
            holders = here.device_ids[(here.boxes.start == low).all(1)]
            sources = there.device_ids[
                (np.maximum(there.boxes.start, low) < np.minimum(there.boxes.stop, high)).all(1)
            ]
            cell = " ".join(map(str, holders))
            cells.append(cell if old is None else f"{cell} ← {' '.join(map(str, sources))}")
        table.add_row(Text(f"{row}–{row_stop}", "dim"), *cells)
    return table
