"""Charts of a run and of a tensor, as SVG with words for screen readers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardckpt.reading.inspection.figures import svg
from shardckpt.reading.inspection.markup import Html, el
from shardckpt.serve.pages.frame import address
from shardckpt.text import count, file_size

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH, _HEIGHT = 640.0, 150.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 80.0, 14.0, 14.0, 26.0
MOST_POINTS = 600


def metric_chart(name: str, entries: Sequence[dict[str, Any]]) -> Html:
    """A metric over the steps of a run; each point leads to its checkpoint."""
    known = [
        (one["step"], float(one["metrics"][name]), one)
        for one in entries
        if one["step"] is not None and name in one["metrics"]
    ]
    points = thinned([point for point in known if math.isfinite(point[1])])
    if not points:
        return el("p", f"{name}: no finite values.", class_="quiet")
    x = _scale([step for step, _, _ in points], _LEFT, _WIDTH - _RIGHT)
    y = _scale([value for _, value, _ in points], _HEIGHT - _BOTTOM, _TOP)
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value, _ in points)
    low, high = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    dots = [
        el(
            "a",
            _dot(x(step), y(value), one, f"step {step}: {name} {value:.6g}{words(one)}"),
            href=address("checkpoint", one["id"]),
            aria_label=f"step {step}, {name} {value:.6g}",
        )
        for step, value, one in points
    ]
    span = (
        f"from {points[0][1]:.6g} to {points[-1][1]:.6g}; least {low[1]:.6g} at step {low[0]}, "
        f"most {high[1]:.6g} at step {high[0]}"
    )
    sentence = f"{count(len(points), 'step')}, {span}."
    parts = [
        *_axes(points[0][0], points[-1][0], low[1], high[1]),
        el("polyline", points=line, class_="line"),
        *dots,
    ]
    return el(
        "figure",
        el("figcaption", name),
        svg(name, sentence, _WIDTH, _HEIGHT, parts, class_="chart"),
    )


def time_line(entries: Sequence[dict[str, Any]]) -> Html:
    """The steps of a run: their states, and their sizes as bars."""
    known = thinned(
        [(one["step"], one["stored_bytes"] or 0, one) for one in entries if one["step"] is not None]
    )
    if not known:
        return el("p", "No checkpoint here has a step in its name.", class_="quiet")
    height = 84.0
    x = _scale([step for step, _, _ in known], _LEFT, _WIDTH - _RIGHT)
    sizes = [size for _, size, _ in known if size]
    most, least = max(sizes, default=1), min(sizes, default=0)
    floor = least - (most - least) / 4 if 0 < most - least < least else 0
    marks: list[Html] = []
    for step, size, one in known:
        tall = max(2.0, (size - floor) / (most - floor) * (height - _TOP - _BOTTOM - 12))
        title = el("title", f"step {step}: {file_size(size)}{words(one)}")
        mark = el(
            "circle",
            title,
            cx=f"{x(step):.1f}",
            cy=f"{height - _BOTTOM:.1f}",
            r=4,
            class_=kind(one),
        )
        bar = el(
            "rect",
            x=f"{x(step) - 2:.1f}",
            y=f"{height - _BOTTOM - 6 - tall:.1f}",
            width=4,
            height=f"{tall:.1f}",
            class_="size",
        )
        marks.append(
            el(
                "a",
                bar,
                mark,
                href=address("checkpoint", one["id"]),
                aria_label=f"step {step}, {file_size(size)}{words(one)}",
            )
        )
    sentence = (
        f"{count(len(known), 'step')} from {known[0][0]} to {known[-1][0]}; sizes from "
        f"{file_size(least)} to {file_size(most)}."
    )
    axis = [
        el(
            "line",
            x1=_LEFT,
            x2=_WIDTH - _RIGHT,
            y1=height - _BOTTOM,
            y2=height - _BOTTOM,
            class_="axis",
        ),
        el("text", f"{known[0][0]:,}", x=_LEFT, y=height - 4, class_="tick"),
        el("text", f"{known[-1][0]:,}", x=_WIDTH - _RIGHT, y=height - 4, class_="tick end"),
        el("text", file_size(most), x=_LEFT - 8, y=_TOP + 8, class_="tick end"),
        el("text", file_size(round(floor)), x=_LEFT - 8, y=height - _BOTTOM - 2, class_="tick end"),
    ]
    return el(
        "figure",
        el("figcaption", "steps and sizes"),
        svg("Steps and sizes", sentence, _WIDTH, height, axis, marks, class_="chart"),
    )


def curve(points: Sequence[tuple[int, float]], name: str) -> Html:
    """A metric over the last steps, as small as a word."""
    x, y = (
        _scale([step for step, _ in points], 1, 79),
        _scale([value for _, value in points], 19, 1),
    )
    line = el(
        "polyline",
        points=" ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points),
        class_="line",
    )
    sentence = f"{count(len(points), 'step')}, from {points[0][1]:.4g} to {points[-1][1]:.4g}."
    return svg(name, sentence, 80, 20, line, class_="chart curve")


def histogram(statistics: dict[str, Any]) -> Html:
    """The histogram of a tensor's elements."""
    counts, edges = statistics["histogram"], statistics["edges"]
    if not counts:
        return el("p", "There are no finite elements.", class_="quiet")
    most, width = max(counts), (_WIDTH - _LEFT - _RIGHT) / len(counts)
    bars = []
    for i, n in enumerate(counts):
        tall = n / most * (_HEIGHT - _TOP - _BOTTOM)
        title = el("title", f"{edges[i]:.4g} to {edges[i + 1]:.4g}: {n:,}")
        place = {
            "x": f"{_LEFT + i * width:.1f}",
            "y": f"{_HEIGHT - _BOTTOM - tall:.1f}",
            "height": f"{tall:.1f}",
        }
        bars.append(el("rect", title, **place, width=f"{width - 1:.1f}", class_="bar"))
    at = counts.index(most)
    peak = f"most, {most:,}, lie between {edges[at]:.4g} and {edges[at + 1]:.4g}"
    sentence = f"{sum(counts):,} elements from {edges[0]:.4g} to {edges[-1]:.4g}; {peak}."
    return svg(
        "Histogram of values",
        sentence,
        _WIDTH,
        _HEIGHT,
        *_axes(edges[0], edges[-1], 0, most),
        bars,
        class_="chart",
    )


def _dot(x: float, y: float, one: dict[str, Any], text: str) -> Html:
    return el("circle", el("title", text), cx=f"{x:.1f}", cy=f"{y:.1f}", r=4, class_=kind(one))


def kind(one: dict[str, Any]) -> str:
    """The class of a checkpoint's mark."""
    if one["state"] != "committed":
        return f"mark-{one['state']}"
    if is_damaged(one) or one.get("vanished"):
        return "mark-unreadable"
    return (
        "mark-pinned"
        if one["pinned"] or one["tags"]
        else "mark-superseded"
        if one["superseded"]
        else "mark-committed"
    )


def words(one: dict[str, Any]) -> str:
    """Words about a checkpoint beside its step, such as its state and tags."""
    labels = [one["state"]] if one["state"] != "committed" else []
    labels += ["damaged"] if is_damaged(one) else []
    labels += ["in a root that has vanished"] if one.get("vanished") else []
    labels += [word for word in ("pinned", "superseded") if one[word]]
    labels += [f"tagged {' '.join(one['tags'])}"] if one["tags"] else []
    return "".join(f", {word}" for word in labels)


def is_damaged(one: dict[str, Any]) -> bool:
    """Whether the latest verification of a checkpoint found damage."""
    verification = one.get("verification")
    return verification is not None and verification["damaged"] > 0


def thinned(points: list[Any]) -> list[Any]:
    """At most `MOST_POINTS`, evenly chosen, with the first and the last."""
    if len(points) <= MOST_POINTS:
        return points
    last = len(points) - 1
    return [points[i * last // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]


def _scale(values: Sequence[float], begin: float, end: float) -> Any:
    low, high = min(values), max(values)
    span = high - low
    return (
        (lambda value: begin + (value - low) / span * (end - begin))
        if span and math.isfinite(span)
        else (lambda _: (begin + end) / 2)
    )


def _axes(first: float, last: float, low: float, high: float) -> list[Html]:
    base, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    return [
        el("line", x1=_LEFT, x2=right, y1=base, y2=base, class_="axis"),
        el("line", x1=_LEFT, x2=_LEFT, y1=_TOP, y2=base, class_="axis"),
        el("text", f"{first:,.6g}", x=_LEFT, y=_HEIGHT - 4, class_="tick"),
        el("text", f"{last:,.6g}", x=right, y=_HEIGHT - 4, class_="tick end"),
        el("text", f"{high:,.4g}", x=_LEFT - 8, y=_TOP + 8, class_="tick end"),
        el("text", f"{low:,.4g}", x=_LEFT - 8, y=base, class_="tick end"),
    ]
