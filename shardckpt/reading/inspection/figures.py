"""Drawings of layouts, as SVG, for pages and notebooks: the holders of each tile of a tensor.

Colours are classes of a stylesheet, so that drawings follow light and dark mode. Every drawing has
a title and a sentence for screen readers. If there are too many tiles, they are joined.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING

import numpy as np

from shardckpt.errors import ShardingError
from shardckpt.layout.device_list import device_list
from shardckpt.layout.placements import Placements
from shardckpt.layout.tiles import bins, tiles_of
from shardckpt.reading.inspection.markup import Html, Part, el
from shardckpt.text import count, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardckpt.format.structure import StoredLayout

    Ints = NDArray[np.int64]

COLORS = 8
"""Number of classes for holders, c0 to c7; they repeat."""
MOST_TILES = 12
"""Most tiles along a side of a drawing."""
MOST_CHUNK_LINES = 64


def svg(
    title: str, sentence: str, width: float, height: float, *parts: Part, **attributes: object
) -> Html:
    """A drawing with a name and a description."""
    return el(
        "svg",
        el("title", title),
        el("desc", sentence),
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=f"{title}. {sentence}",
        **attributes,
    )


def tile_grid(
    title: str,
    layout: StoredLayout | None,
    shape: tuple[int, ...],
    host_of: Callable[[Ints], Ints] | None,
    chunks: tuple[int, ...],
    plain: str,
) -> Html:
    """The hosts (without `host_of`: the devices) of each tile, with chunks as fine lines.

    `plain` is the text for a missing layout.
    """
    width, height = _sides(shape)
    if layout is None or isinstance(layout, Placements) or not prod(shape):
        what = (
            plain
            if layout is None
            else "cut unevenly, as DTensor does"
            if prod(shape)
            else "no elements"
        )
        box = [
            el("rect", x=1, y=1, width=width, height=height, class_="tile cn"),
            label(width / 2, height / 2, what),
        ]
        return svg(
            title, f"{shape_text(shape)}: {what}.", width + 2, height + 2, box, class_="grid"
        )
    try:
        tiles = tiles_of(layout, shape)
    except ShardingError:
        box = [el("rect", x=1, y=1, width=width, height=height, class_="tile cn")]
        return svg(
            title,
            f"{shape_text(shape)}: the layout does not say where data is.",
            width + 2,
            height + 2,
            box,
            class_="grid",
        )
    drawn = sorted(sorted(tiles.cut, key=lambda d: -tiles.devices.shape[d])[:2])
    down, across = _directions(shape, drawn)
    rows = bins(1 if down is None else tiles.used[down], MOST_TILES)
    columns = bins(1 if across is None else tiles.used[across], MOST_TILES)
    parts: list[Html] = []
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            at = {down: slice(*row), across: slice(*column)}
            devices = tiles.devices[tuple(at.get(d, slice(0, 1)) for d in range(len(shape)))]
            of = _holders(host_of, devices)
            several = row[1] - row[0] > 1 or column[1] - column[0] > 1
            w, h = width / len(columns), height / len(rows)
            color = "cj" if several else f"c{int(of[0]) % COLORS}"
            cell = el(
                "rect",
                x=f"{1 + j * w:.1f}",
                y=f"{1 + i * h:.1f}",
                width=f"{w:.1f}",
                height=f"{h:.1f}",
                class_=f"tile {color}",
            )
            words = "⋯" if several else device_list(of, most=max(3, int(w / 6.5)))
            room = w >= 6.5 * len(words) + 2 and h >= 13
            parts += [
                cell,
                label(1 + (j + 0.5) * w, 1 + (i + 0.5) * h, words) if room else Html(""),
            ]
    parts += _chunk_lines(
        shape,
        chunks,
        (down, across),
        (width, height),
        joined=max(len(rows), len(columns)) >= MOST_TILES,
    )
    replicas = tiles.devices.shape[-1]
    sentence = (
        f"{shape_text(shape)} in {count(prod(tiles.devices.shape[:-1]), 'tile')} of "
        f"{shape_text(tiles.tile)}"
        + (f", each on {count(replicas, 'device')}" if replicas > 1 else "")
        + ", over "
        f"{count(len(_holders(host_of, tiles.devices)), 'device' if host_of is None else 'host')}."
    )
    return svg(title, sentence, width + 2, height + 2, parts, class_="grid")


def _holders(host_of: Callable[[Ints], Ints] | None, devices: Ints) -> Ints:
    """The distinct hosts of some devices, or the distinct devices if `host_of` is None."""
    return np.unique(devices if host_of is None else host_of(devices.reshape(-1)))


def _sides(shape: tuple[int, ...]) -> tuple[float, float]:
    """Width and height of a tensor's drawing: in proportion to its shape, but never thin."""
    rows, columns = (shape[-2], shape[-1]) if len(shape) > 1 else (1, 4)
    ratio = min(max(sqrt(max(rows, 1) / max(columns, 1)), 0.5), 1.4)
    return 200.0, 200.0 * ratio if len(shape) > 1 else 60.0


def _directions(shape: tuple[int, ...], drawn: Sequence[int]) -> tuple[int | None, int | None]:
    """The dimension that goes down, and the one that goes across."""
    if len(drawn) == 2:
        return drawn[0], drawn[1]
    if not drawn:
        return None, None
    return (None, drawn[0]) if drawn[0] == len(shape) - 1 else (drawn[0], None)


def _chunk_lines(
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    directions: tuple[int | None, int | None],
    sides: tuple[float, float],
    *,
    joined: bool,
) -> list[Html]:
    """Lines at the ends of chunks, if there are few enough chunks and no tiles are joined."""
    width, height = sides
    steps = []
    for d, vertical in zip(directions, (False, True), strict=True):
        if d is None or joined or not 1 < -(-shape[d] // chunks[d]) <= MOST_CHUNK_LINES:
            continue
        for at in range(chunks[d], shape[d], chunks[d]):
            part = at / shape[d]
            steps.append(
                f"M{1 + part * width:.1f} 1v{height:.0f}"
                if vertical
                else f"M1 {1 + part * height:.1f}h{width:.0f}"
            )
    return [el("path", d="".join(steps), class_="chunks")] if steps else []


def label(x: float, y: float, text: str) -> Html:
    """A text in a drawing, centred at a point."""
    return el("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_="label")
