"""The chart of a run: a panel for each framework and storage.

Each panel has a bar of GB/s for each subject of each operation.

It is SVG, for light and dark pages. Within a panel all bars have one scale. Floors are thin bars:
they mark how far a bar could reach.
"""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import Any

from tools.bench.measure import OPERATIONS
from tools.bench.ratios import OURS, is_ours

__all__ = ["chart"]

WIDTH, NAMES, BARS, RATES = 540, 230, 250, 60
"""Of the picture, of the names' column, of the longest bar, and of what stands behind it."""
ROW, THIN, GAP = 17, 7, 14
PANELS = {("tmpfs", "llama"): "", ("gs", "matrices"): ", in a bucket"}
"""Storage and state of what is drawn → what its panels' titles add."""
DRAWN = ("save", "stall", "restore")
"""The operations of the picture; the tables have all."""
STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
  .group { font-size: 15px; font-weight: 600 } .operation { font-weight: 600 } \
.ours { font-weight: 600 } .quiet { fill: #59636e }
  .page { fill: #ffffff } .rule { stroke: #d1d9e0 }
  rect.ours { fill: #0969da } rect.peer { fill: #d29922 } rect.floor { fill: #9aa4b2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .quiet { fill: #9198a1 } .page { fill: #0d1117 } \
.rule { stroke: #3d444d }
    rect.ours { fill: #4493f8 } rect.peer { fill: #d29922 } rect.floor { fill: #656c76 }
  }
"""


def chart(figures: dict[str, Any]) -> str:
    """Saves, stalls and restores of the Llama-like state on tmpfs and the matrices in a bucket."""
    results = [
        r
        for r in figures["results"]
        if (r["storage"], r["state"]) in PANELS and r["operation"] in DRAWN
    ]
    operations, panels = list(OPERATIONS), list(dict.fromkeys(_panel(r) for r in results))
    results.sort(
        key=lambda r: (
            panels.index(_panel(r)),
            operations.index(r["operation"]),
            _kind(r) != "ours",
            _kind(r) == "floor",
        )
    )
    parts, y = list(_legend()), 52
    for group, of_group in groupby(results, key=_panel):
        bars = list(of_group)
        fastest = max(map(_rate, bars))
        parts.append(f'<line class="rule" x1="16" x2="{WIDTH - 16}" y1="{y}" y2="{y}"/>')
        parts.append(_text(16, y + 24, group, "group"))
        y += 40
        for operation, same in groupby(bars, key=lambda r: r["operation"]):
            parts.append(_text(16, y + 12, OPERATIONS[operation].title, "operation"))
            y += 20
            for result in same:
                parts += _bar(result, y, _rate(result) / fastest * BARS)
                y += ROW
            y += GAP
    title = "GB/s of shardckpt, its peers and the floors, by framework, storage and operation"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'width="{WIDTH}" height="{y}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{y}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(result: dict[str, Any]) -> str:
    return f"{result['group']}{PANELS[result['storage'], result['state']]}"


def _legend() -> list[str]:
    parts, x = (
        [
            _text(
                16,
                22,
                "GB/s, longer is faster. Llama-like state on tmpfs; matrices in a bucket",
                "operation",
            )
        ],
        16,
    )
    for kind, what in (
        ("ours", OURS),
        ("peer", "peers"),
        ("floor", "floors: the bytes only moved"),
    ):
        parts.append(
            f'<rect class="{kind}" x="{x}" y="{34 - (4 if kind != "floor" else 1)}" width="14" '
            f'height="{THIN + 2}" rx="1"/>'
        )
        parts.append(_text(x + 20, 39, what, "quiet"))
        x += 40 + 7 * len(what)
    return parts


def _bar(result: dict[str, Any], y: int, length: float) -> list[str]:
    kind = _kind(result)
    height = THIN if kind == "floor" else ROW - 4
    top = y + (ROW - height) / 2
    return [
        _text(NAMES - 8, y + 13, result["subject"], "quiet" if kind == "floor" else kind, "end"),
        (
            f'<rect class="{kind}" x="{NAMES}" y="{top}" width="{max(1.0, length):.1f}" '
            f'height="{height}" rx="1"/>'
        ),
        _text(
            NAMES + length + 6,
            y + 13,
            f"{_rate(result):{'.3f' if result['storage'] == 'gs' else '.2f'}}",
            "quiet" if kind == "floor" else kind,
        ),
    ]


def _kind(result: dict[str, Any]) -> str:
    return "ours" if is_ours(result["subject"]) else "floor" if result["floor"] else "peer"


def _rate(result: dict[str, Any]) -> float:
    return float(result["nbytes"] / result["median"] / 1e9)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
