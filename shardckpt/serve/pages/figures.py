"""Drawings of a plan, as SVG: bytes from host to host, and the balance between hosts.

Colours are classes of the stylesheet, so that drawings follow light and dark mode. Every drawing
has a title and a sentence for screen readers. The size of a drawing does not depend on the job: if
there are too many tiles or hosts, they are joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardckpt.reading.inspection.figures import COLORS, svg
from shardckpt.reading.inspection.markup import Html, el
from shardckpt.reshard.forecast.hosts import joined
from shardckpt.reshard.forecast.words import hosts_text
from shardckpt.text import count, file_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

LEVELS = 9
"""Number of classes of a heat map, h0 to h8; h0 is for 0 bytes."""
MOST_RIBBON_ENDS = 12


# --- bytes from host to host ----------------------------------------------------------------------


def heat_map(
    nbytes: Ints, writers: Sequence[Sequence[int]], readers: Sequence[Sequence[int]]
) -> Html:
    """Bytes by the hosts that wrote them (down) and the hosts that read them (across).

    Each level is one path, so that 4,096 cells stay small.
    """
    rows, columns = nbytes.shape
    most = max(1, int(nbytes.max(initial=0)))
    level = np.where(nbytes > 0, 1 + np.minimum((nbytes * (LEVELS - 1) - 1) // most, LEVELS - 2), 0)
    paths = [el("rect", width=columns, height=rows, class_="h0")]
    for k in range(1, LEVELS):
        cells = []
        for i in range(rows):
            # Neighbours of one level are one rectangle.
            on = np.flatnonzero(np.diff(np.r_[0, level[i] == k, 0].astype(np.int8)))
            cells += [
                f"M{a} {i}h{b - a}v1h{a - b}z"
                for a, b in zip(on[::2].tolist(), on[1::2].tolist(), strict=True)
            ]
        if cells:
            paths.append(el("path", d="".join(cells), class_=f"h{k}"))
    at = np.unravel_index(int(np.argmax(nbytes)), nbytes.shape)
    sentence = (
        f"{count(rows, 'row')} of hosts that wrote, {count(columns, 'column')} of hosts that "
        f"would read; the most is {file_size(most)}, from {hosts_text(writers[int(at[0])])} to "
        f"{hosts_text(readers[int(at[1])])}."
    )
    cursor = el("rect", width=1, height=1, class_="cursor", visibility="hidden")
    return svg(
        "Bytes by source and target host", sentence, columns, rows, paths, cursor,
        id="heat", class_="heat", preserveAspectRatio="none", tabindex="0",
    )  # fmt: skip


def ribbons(
    nbytes: Ints, writers: Sequence[Sequence[int]], readers: Sequence[Sequence[int]]
) -> Html:
    """The same bytes as bands from writing hosts, on the left, to reading hosts."""
    nbytes, writers = joined(nbytes, writers, MOST_RIBBON_ENDS)
    across, readers = joined(nbytes.T, readers, MOST_RIBBON_ENDS)
    nbytes = across.T
    total = max(1, int(nbytes.sum()))
    ends = max(len(writers), len(readers))
    height, gap = max(120.0, 26.0 * ends), 4.0
    left, right = 118.0, 312.0
    tops = []
    for sums in (nbytes.sum(axis=1), nbytes.sum(axis=0)):
        room = height - gap * (len(sums) - 1)
        tops.append(np.r_[0, np.cumsum(sums / total * room + gap)][:-1])
    scales = [(height - gap * (n - 1)) / total for n in (len(writers), len(readers))]
    parts: list[Html] = []
    used_left, used_right = tops[0].copy(), tops[1].copy()
    for i in range(len(writers)):
        for j in range(len(readers)):
            if not nbytes[i, j]:
                continue
            a, b = used_left[i], used_right[j]
            used_left[i] += nbytes[i, j] * scales[0]
            used_right[j] += nbytes[i, j] * scales[1]
            c, d = used_left[i], used_right[j]
            middle = (left + right) / 2
            shape = (
                f"M{left + 8:g} {a:.1f}C{middle:g} {a:.1f} {middle:g} {b:.1f} {right - 8:g} "
                f"{b:.1f}V{d:.1f}C{middle:g} {d:.1f} {middle:g} {c:.1f} {left + 8:g} {c:.1f}z"
            )
            ends_text = f"{hosts_text(writers[i])} → {hosts_text(readers[j])}"
            title = el("title", f"{ends_text}: {file_size(int(nbytes[i, j]))}")
            parts.append(el("path", title, d=shape, class_=f"ribbon c{i % COLORS}"))
    for side, spans, sums, top, scale in (
        (left, writers, nbytes.sum(axis=1), tops[0], scales[0]),
        (right, readers, nbytes.sum(axis=0), tops[1], scales[1]),
    ):
        for i, span in enumerate(spans):
            h = max(1.0, float(sums[i]) * scale)
            is_left = side == left
            bar = el(
                "rect", x=f"{side if is_left else side - 8:g}", y=f"{top[i]:.1f}",
                width=8, height=f"{h:.1f}", class_=f"tile c{i % COLORS}" if is_left else "tile cn",
            )  # fmt: skip
            parts.append(bar)
            anchor = "end" if is_left else "start"
            x = side - 6 if is_left else side + 6
            parts.append(
                el(
                    "text",
                    hosts_text(span),
                    x=f"{x:g}",
                    y=f"{top[i] + h / 2:.1f}",
                    class_="label",
                    text_anchor=anchor,
                )
            )
    sentence = (
        f"{count(len(writers), 'group')} of hosts that wrote on the left, "
        f"{count(len(readers), 'group')} that would read on the right; "
    )
    sentence += f"{file_size(total)} together. The heat map below has the numbers."
    return svg(
        "Flow from source hosts to target hosts", sentence, 430, height + 2, parts, class_="ribbons"
    )


# --- balance --------------------------------------------------------------------------------------


def balance(before: Ints, after: Ints, spans: Sequence[Sequence[int]]) -> Html:
    """Bars of the bytes that each host reads as stored, with marks for after the reshard.

    Joined hosts show their maximum.
    """
    most = max(1, int(before.max(initial=0)), int(after.max(initial=0)))
    height, step = 110.0, 400 / len(spans)
    parts: list[Html] = [el("line", x1=0, x2=400, y1=height, y2=height, class_="axis")]
    marks = []
    for i, (first, stop) in enumerate(spans):
        reads = int(before[first:stop].max(initial=0))
        tall = reads / most * (height - 6)
        bar = el(
            "rect", el("title", f"{hosts_text((first, stop))}: {file_size(reads)}"),
            x=f"{i * step + step * 0.1:.1f}", y=f"{height - tall:.1f}",
            width=f"{step * 0.8:.1f}", height=f"{tall:.1f}", class_="bar",
        )  # fmt: skip
        parts.append(bar)
        mark = height - float(after[first:stop].max(initial=0)) / most * (height - 6)
        marks.append(f"M{i * step:.1f} {mark:.1f}h{step:.1f}")
    parts.append(el("path", d="".join(marks), class_="mark"))
    highest = [file_size(int(each.max(initial=0))) for each in (before, after)]
    sentence = (
        f"As it is stored, {highest[0]} for the host with most; after the reshard {highest[1]}."
    )
    return svg(
        "Bytes that each target host reads",
        sentence,
        400,
        height + 2,
        parts,
        class_="balance",
        preserveAspectRatio="none",
    )
