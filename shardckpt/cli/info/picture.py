"""A drawing, in characters, of the devices that hold each box of a tensor.

1. A layout cuts a tensor into a grid of tiles, and every tile is on one device, or on several as
   replicas. One cut dimension makes a bar; two make a grid, whatever other dimensions there are. Of
   three or more cut dimensions, the two with the most tiles make a grid for every position in the
   others; the first few grids are drawn.
2. Tiles that do not fit the terminal are joined: the tiles in the middle become one cell with the
   ids of all their devices, so that a mesh of thousands fits on one screen and shows what is
   joined.
3. A device whose tile lies beyond the tensor's end holds nothing, and is listed below the drawing.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.cli.screen import Screen, pad
from shardckpt.errors import ShardingError
from shardckpt.layout.device_list import device_list
from shardckpt.layout.tiles import Bins, Tiles, bins, tiles_of
from shardckpt.text import count, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.layout.sharding import Layout

MOST_ROWS = 16
MOST_COLUMNS = 32
LEAST_COLUMNS = 3
MOST_RULED_ROWS = 8
"""Most rows with a line between each two; more rows are clearer without lines."""
MOST_SLICES = 3
COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def picture(screen: Screen, layout: Layout, shape: Sequence[int]) -> Iterator[str]:
    """Draw the devices that hold each box.

    Args:
        screen: The screen to draw for.
        layout: The layout of the tensor.
        shape: The shape of the tensor.

    Yields:
        Painted lines.
    """
    try:
        tiles = tiles_of(layout, tuple(shape))
    except ShardingError as e:
        yield f"No picture: {visible(str(e))}"
        return
    if not prod(tiles.shape):
        yield (
            f"The tensor has no elements: none of {count(tiles.devices.size, 'device')} holds "
            "anything."
        )
        return
    by_size = sorted(tiles.cut, key=lambda d: -tiles.devices.shape[d])
    drawn = sorted(by_size[:2])
    yield from _caption(tiles, drawn)
    others = [d for d in tiles.cut if d not in drawn]
    slices = prod(tiles.used[d] for d in others)
    for k in range(min(slices, MOST_SLICES)):
        at = (
            dict(
                zip(
                    others,
                    map(int, np.unravel_index(k, [tiles.used[d] for d in others])),
                    strict=True,
                )
            )
            if others
            else {}
        )
        yield ""
        if at:
            yield "  where " + ", ".join(
                f"dimension {d} is {tiles.extent(d, (i, i + 1))}" for d, i in at.items()
            )
        yield from _grid(screen, tiles, drawn, at)
    if slices > MOST_SLICES:
        yield f"  … and {slices - MOST_SLICES:,} more such grids"
    idle = _idle(tiles)
    if len(idle):
        yield ""
        yield (
            f"  {'Device' if len(idle) == 1 else 'Devices'} {device_list(idle, most=40)} "
            f"hold{'s' if len(idle) == 1 else ''} nothing."
        )


def _caption(tiles: Tiles, drawn: Sequence[int]) -> Iterator[str]:
    """A description of the drawing."""
    replicas = tiles.devices.shape[-1]
    if not drawn:
        yield (
            "The whole tensor is on every device."
            if tiles.devices.size > 1
            else "The whole tensor is on one device."
        )
        return
    directions = ("across",) if len(drawn) == 1 and _is_bar(tiles, drawn) else ("down", "across")
    for d, direction in zip(drawn, directions, strict=False):
        parts = tiles.devices.shape[d]
        yield f"Dimension {d} {direction}: {tiles.shape[d]} in {parts} tiles of {tiles.tile[d]}"
    if replicas > 1:
        yield f"Each tile is on {replicas} devices."


def _grid(screen: Screen, tiles: Tiles, drawn: Sequence[int], at: dict[int, int]) -> Iterator[str]:
    """One grid of the drawn dimensions, at one position in the other dimensions."""
    down, across = _directions(tiles, drawn)
    rows = bins(1 if down is None else tiles.used[down], MOST_ROWS)
    labels, columns = _fitting(screen.width, tiles, (down, across), rows, at)
    heads = ["" if down is None else tiles.extent(down, row) for row in rows]
    tops = ["" if across is None else tiles.extent(across, column) for column in columns]
    margin = max(map(len, heads)) + 3
    widths = [max(len(top), *(len(line[j]) for line in labels)) + 2 for j, top in enumerate(tops)]
    if across is not None:
        yield (
            " " * (margin + 1)
            + " ".join(pad(top, width) for top, width in zip(tops, widths, strict=True))
        ).rstrip()

    def rule(corners: str) -> str:
        return (
            " " * margin
            + corners[0]
            + corners[1].join("─" * width for width in widths)
            + corners[2]
        )

    joined = {i for i, (first, last) in enumerate(rows) if last - first > 1}
    for i, (head, line) in enumerate(zip(heads, labels, strict=True)):
        if i == 0:
            yield rule("┌┬┐")
        elif len(rows) <= MOST_RULED_ROWS:
            yield rule("├┼┤")
        cells = [
            screen.paint(
                pad(text, width),
                "dim"
                if i in joined or last - first > 1
                else COLORS[(2 * rows[i][0] + first) % len(COLORS)],
            )
            for text, width, (first, last) in zip(line, widths, columns, strict=True)
        ]
        yield f"  {head:>{margin - 3}} │" + "│".join(cells) + "│"
    yield rule("└┴┘")


def _directions(tiles: Tiles, drawn: Sequence[int]) -> tuple[int | None, int | None]:
    """The dimension that goes down, and the one that goes across."""
    if len(drawn) == 2:
        return drawn[0], drawn[1]
    if not drawn:
        return None, None
    return (None, drawn[0]) if _is_bar(tiles, drawn) else (drawn[0], None)


def _is_bar(tiles: Tiles, drawn: Sequence[int]) -> bool:
    """Whether a single cut dimension goes across; many tiles have more room when they go down."""
    return tiles.used[drawn[0]] <= 8


def _fitting(
    width: int,
    tiles: Tiles,
    directions: tuple[int | None, int | None],
    rows: Bins,
    at: dict[int, int],
) -> tuple[list[list[str]], Bins]:
    """The labels of all cells, and the columns: as many as fit the width."""
    down, across = directions
    extent = 1 if across is None else tiles.used[across]
    margin = max(len(tiles.extent(down, row)) for row in rows) if down is not None else 0
    label = cache(lambda row, column: _label(tiles, {down: row, across: column}, at))

    def draw(most: int) -> tuple[list[list[str]], Bins, int]:
        columns = bins(extent, most)
        labels = [[label(row, column) for column in columns] for row in rows]
        tops = ["" if across is None else tiles.extent(across, column) for column in columns]
        return (
            labels,
            columns,
            margin
            + 4
            + sum(
                max(len(top), *(len(line[j]) for line in labels)) + 3 for j, top in enumerate(tops)
            ),
        )

    candidates = range(min(extent, LEAST_COLUMNS), min(extent, MOST_COLUMNS) + 1)
    fitting = bisect_right(candidates, width, key=lambda most: draw(most)[2])
    labels, columns, _ = draw(candidates[max(fitting - 1, 0)])
    return labels, columns


def _label(tiles: Tiles, ranges: dict[int | None, tuple[int, int]], at: dict[int, int]) -> str:
    """The devices of some tiles."""
    index = tuple(
        slice(*ranges[d]) if d in ranges else slice(at.get(d, 0), at.get(d, 0) + 1)
        for d in range(tiles.devices.ndim - 1)
    )
    several = any(last - first > 1 for d, (first, last) in ranges.items() if d is not None)
    text = device_list(tiles.devices[index], most=17)
    return f"⋯ {text} ⋯" if several else text


def _idle(tiles: Tiles) -> list[int]:
    """Devices of tiles without elements."""
    holding = np.zeros(tiles.devices.shape, bool)
    holding[tuple(slice(n) for n in tiles.used)] = True
    idle: list[int] = np.sort(tiles.devices[~holding]).tolist()
    return idle
