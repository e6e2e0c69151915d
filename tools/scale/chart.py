"""The chart of a run: growth curves on logarithmic scales, a panel for each question.

SVG, on light and dark pages.

Lines are drawn over devices, or over hosts where the panel says so. A line's exponent stands behind
its name, where it has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

from tools.scale.growth import exponent
from tools.scale.reads import WITHOUT
from tools.scale.targets import curve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["chart"]

COLUMNS, PANEL, PLOT, LEFT, TOP = 1, (500, 316), (250, 220), 62, 44
"""Panels side by side; width and height of one, and of its plot; where the plot begins."""
COLOURS = ("#0969da", "#1a7f37", "#8250df", "#bf3989", "#d29922", "#bc4c00", "#6e7781")
LEGEND = (
    "The number after a name is the exponent of the power law that fits the line:",
    "0 is constant, 1 is linear. Dashed: DCP, or shardckpt without a feature.",
    "Plans and restores: the largest model, 1,000 tensors.",
)
DARK = ("#4493f8", "#3fb950", "#ab7df8", "#db61a2", "#d29922", "#f0883e", "#9198a1")
STYLE = (
    'text { font: 11px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 } '
    ".title { font-size: 13px; font-weight: 600 }\n"
    ".quiet { fill: #59636e } .page { fill: #ffffff } .rule { stroke: #d1d9e0; stroke-width: 1 } "
    ".line { fill: none; stroke-width: 2 }\n"
    + "\n".join(f".s{i} {{ stroke: {c} }} .f{i} {{ fill: {c} }}" for i, c in enumerate(COLOURS))
    + "\n"
    "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .quiet { fill: #9198a1 } "
    ".page { fill: #0d1117 } "
    + ".rule { stroke: #3d444d }\n"
    + "\n".join(f".s{i} {{ stroke: {c} }} .f{i} {{ fill: {c} }}" for i, c in enumerate(DARK))
    + "\n}"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int
    dashed: bool = False
    cut: tuple[float, float] | None = None
    """Point, as x and y, at which a planner was cut off; None if it was not."""


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    across: str
    up: str
    lines: Sequence[Line]


def chart(figures: dict[str, Any]) -> str:
    """All panels that there are figures for."""
    panels = [panel for panel in _panels(figures) if any(line.x for line in panel.lines)]
    width, height = PANEL
    parts = []
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate({i % COLUMNS * width} {i // COLUMNS * height})">')
        parts += _drawn(panel)
        parts.append("</g>")
    # Where the next panel would be.
    x, y = len(panels) % COLUMNS * width, len(panels) // COLUMNS * height
    parts += [
        f'<text class="quiet" x="{x + 12}" y="{y + 18 + 16 * i}">{escape(line)}</text>'
        for i, line in enumerate(LEGEND)
    ]
    across, down = COLUMNS * width, y + (height if x else 62)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" '
        f'width="{across}" height="{down}" role="img">\n'
        f"<title>Growth with devices and hosts</title>\n"
        f'<style>{STYLE}</style>\n<rect class="page" width="100%" height="100%"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panels(figures: dict[str, Any]) -> Iterator[_Panel]:
    results = figures["results"]
    tree = max(
        (r["tree"] for r in results if r["what"] == "save"),
        key=lambda name: float(name.removesuffix("B")),
    )
    kinds = list(dict.fromkeys(r["kind"] for r in results if r["what"] == "save"))
    for what, title in (("save", "A save's plan"), ("restore", "A restore's plan")):
        lines = [
            Line(kind, *curve(results, what, "cpu", tree=tree, kind=kind), i)
            for i, kind in enumerate(kinds)
        ]
        lines += _of_dcp(results, what, "cpu", tree)
        whose = (
            "one host's; DCP: the coordinator's"
            if what == "save"
            else "one host's; DCP: one rank's"
        )
        yield _Panel(f"{title}: {whose}", "devices", "seconds of processor time", lines)
    keys = {
        "data requests": "data",
        "table requests": "tables",
        f"table requests{WITHOUT}": "tables, merged table only",
    }
    yield _Panel(
        "Requests of a host that restores its own share, FSDP",
        "devices",
        "requests",
        [
            Line(name, *_own_share(results, key), (0, 1, 4)[i], dashed=key.endswith(WITHOUT))
            for i, (key, name) in enumerate(keys.items())
        ],
    )
    commits = [r for r in results if r["what"] == "commit"]
    least = min((r["chunks"] / r["hosts"] for r in commits), default=0)
    alike = sorted(
        (r for r in commits if r["chunks"] == least * r["hosts"]), key=lambda r: r["hosts"]
    )
    hosts = [r["hosts"] for r in alike]
    yield _Panel(
        f"A commit, {least:.0f} chunks per host",
        "hosts",
        "seconds",
        [
            Line("commit", hosts, [r["wall"] for r in alike], 0),
            Line("only its reads and writes", hosts, [r["floor"] for r in alike], 6),
        ],
    )
    loads = figures["bucket"]
    hosts = [load["hosts"] for load in loads]
    yield _Panel(
        "Requests when all hosts save at once",
        "hosts",
        "most in one second",
        [
            Line("writes", hosts, [load["paced"]["most_writes"] for load in loads], 0),
            Line("reads", hosts, [load["paced"]["most_reads"] for load in loads], 1),
            Line(
                "writes, no rate limit",
                hosts,
                [load["unpaced"]["most_writes"] for load in loads],
                4,
                dashed=True,
            ),
            Line(
                "reads, no rate limit",
                hosts,
                [load["unpaced"]["most_reads"] for load in loads],
                5,
                dashed=True,
            ),
        ],
    )


def _own_share(results: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Devices, and what was counted."""
    restores = [
        r
        for r in results
        if (r["what"], r.get("kind"), r.get("onto_devices")) == ("requests", "FSDP", None)
    ]
    return [r["devices"] for r in restores], [r[key] for r in restores]


def _of_dcp(results: list[dict[str, Any]], what: str, key: str, tree: str) -> Iterator[Line]:
    """DCP's lines."""
    theirs = [r for r in results if (r["what"], r.get("tree")) == (f"dcp {what}", tree)]
    for i, kind in enumerate(dict.fromkeys(r["kind"] for r in theirs)):
        cut = next(
            ((r["devices"], r[key]) for r in theirs if r["kind"] == kind and r.get("cut")), None
        )
        yield Line(
            f"DCP, {kind}",
            *curve(results, f"dcp {what}", key, tree=tree, kind=kind),
            4 + i,
            dashed=True,
            cut=cut,
        )


def _drawn(panel: _Panel) -> Iterator[str]:
    points = [(x, y) for line in panel.lines for x, y in zip(line.x, line.y, strict=True)]
    points += [line.cut for line in panel.lines if line.cut is not None]
    (left, right), (low, high) = (_decades([p[d] for p in points]) for d in (0, 1))
    width, height = PLOT

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (log10(x) - left) / (right - left) * width, TOP + height - (
            log10(y) - low
        ) / (high - low) * height

    yield f'<text class="title" x="12" y="18">{escape(panel.title)}</text>'
    yield f'<text class="quiet" x="12" y="34">{escape(panel.up)}</text>'
    for power in range(left, right + 1):
        x, _ = at(10.0**power, 10.0**low)
        yield f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + height}"/>'
        yield (
            f'<text class="quiet" x="{x:.1f}" y="{TOP + height + 16}" '
            f'text-anchor="middle">{_number(10.0**power)}</text>'
        )
    for power in range(low, high + 1):
        _, y = at(10.0**left, 10.0**power)
        yield f'<line class="rule" x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield (
            f'<text class="quiet" x="{LEFT - 6}" y="{y + 4:.1f}" '
            f'text-anchor="end">{_number(10.0**power)}</text>'
        )
    yield (
        f'<text class="quiet" x="{LEFT + width / 2}" y="{TOP + height + 34}" '
        f'text-anchor="middle">{panel.across}</text>'
    )
    names = []
    for line in panel.lines:
        where = [at(x, y) for x, y in zip(line.x, line.y, strict=True)]
        dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
        yield f'<polyline class="line s{line.colour}" points="{path}"{dashes}/>'
        yield from (
            f'<circle class="f{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in where
        )
        if line.cut is not None:
            x, y = at(*line.cut)
            yield (
                f'<path class="line s{line.colour}" d="M{x - 4:.1f},{y - 4:.1f} l8,8 m0,-8 l-8,8"/>'
            )
            where.append((x, y))
        if where:
            power = exponent(line.x, line.y)
            shown = (
                ""
                if power is None
                else f" {power:+.2f}".replace("+", "").replace("-0.00", "0.00").replace("-", "−")
            )
            names.append(
                (where[-1][1], line, f"{line.name}{shown}{' (cut off at ×)' if line.cut else ''}")
            )
    yield from _named(sorted(names, key=lambda name: name[0]))


def _named(names: Sequence[tuple[float, Line, str]]) -> Iterator[str]:
    """Names beside the lines' ends, pushed apart where lines end close together."""
    places = [y for y, _, _ in names]
    for _ in range(50):
        for i, j in pairwise(range(len(places))):
            overlap = 14 - (places[j] - places[i])
            if overlap > 0:
                places[i], places[j] = places[i] - overlap / 2, places[j] + overlap / 2
    lift = max(0.0, max(places, default=0.0) - (TOP + PLOT[1]))
    x = LEFT + PLOT[0] + 10
    for y, (_, line, name) in zip(places, names, strict=True):
        yield f'<circle class="f{line.colour}" cx="{x}" cy="{y - lift:.1f}" r="3.5"/>'
        yield f'<text x="{x + 8}" y="{y - lift + 4:.1f}">{escape(name)}</text>'


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = floor(log10(min(values)) + 1e-9), ceil(log10(max(values)) - 1e-9)
    return low, max(high, low + 1)


def _number(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{name}"
    return f"{value:g}"
