"""The chart of a run: one panel per operation and group, a bar of GB/s for everybody. SVG, readable on light and dark pages."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import Any

from tools.bench.floors import MEMCPY, READ, WRITE
from tools.bench.measure import OPERATIONS

__all__ = ["chart"]

WIDTH, LABEL, BAR, GAP, PANEL = 860, 230, 18, 6, 34
OURS, FLOOR, PEER = "#2f6feb", "#9aa4b2", "#d98c3f"


def chart(found: dict[str, Any]) -> str:
    """The Llama-like state on tmpfs."""
    results = [r for r in found["results"] if (r["storage"], r["state"]) == ("tmpfs", "llama")]
    parts, y = [], 10
    for group, of_group in groupby(results, key=lambda r: r["group"]):
        y += 30
        parts.append(_text(12, y, group, size=16, weight="bold"))
        y += 8
        for operation, same in groupby(of_group, key=lambda r: r["operation"]):
            bars = list(same)
            rates = [r["nbytes"] / r["median"] / 1e9 for r in bars]
            y += 24
            parts.append(_text(12, y, OPERATIONS[operation].title, size=13, weight="600"))
            y += 8
            for result, rate in zip(bars, rates, strict=True):
                name = result["subject"]
                colour = OURS if name == "shardckpt" else FLOOR if name in (WRITE, READ, MEMCPY) or name.startswith("placing") else PEER
                length = max(1.0, rate / max(rates) * (WIDTH - LABEL - 110))
                parts.append(_text(LABEL - 8, y + BAR - 5, name, anchor="end"))
                parts.append(f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
                parts.append(_text(LABEL + length + 6, y + BAR - 5, f"{rate:.2f} GB/s"))
                y += BAR + GAP
        y += PANEL - 20
    title = f"GB/s, median of {found['rounds']} rounds; Llama-like state on tmpfs; blue: shardckpt, grey: floors, orange: peers"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 30}" font-family="system-ui, sans-serif" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + f"\n{_text(12, y + 20, title, size=11)}\n</svg>\n"
    )


def _text(x: float, y: float, text: str, *, size: int = 12, weight: str = "normal", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="#1f2328">{escape(text)}</text>'
    )
