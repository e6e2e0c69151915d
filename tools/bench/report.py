"""The page of a run, docs/performance.md: tables, and where we are not first."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from tools.bench.floors import MEMCPY, READ, WRITE
from tools.bench.measure import OPERATIONS
from tools.bench.states import STATES
from tools.bench.targets import TARGETS, held

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OURS", "page", "ratios", "summary"]

OURS = "shardckpt"
FLOORS = (WRITE, READ, MEMCPY)

Key = tuple[str, ...]


def ratios(found: dict[str, Any]) -> dict[Key, float]:
    """How fast we are beside each floor and peer: (storage, state, group, operation, other) → rate over rate."""
    rates: dict[Key, float] = {}
    for result in found["results"]:
        where = (result["storage"], result["state"], result["group"], result["operation"])
        rates[*where, result["subject"]] = result["nbytes"] / result["median"]
    return {key: rates[*key[:-1], OURS] / rate for key, rate in rates.items() if key[-1] != OURS and (*key[:-1], OURS) in rates}


def summary(found: dict[str, Any]) -> str:
    """For a terminal."""
    lines = []
    for title, results in _tables(found):
        lines.append(f"\n{title}")
        lines += [
            f"  {r['operation']:8} {r['subject']:27} {r['median']:8.3f} s  {_rate(r):6.2f} GB/s  {_ratio(found, r):>14}" for r in results
        ]
    lines += ["", *(f"  {'met ' if met else 'NOT '} {what}: {value}" for what, value, met in _targets(found))]
    return "\n".join(lines)


def page(found: dict[str, Any]) -> str:
    """docs/performance.md."""
    return "\n".join(_page(found)) + "\n"


def _page(found: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    yield "# Performance"
    yield ""
    yield (
        "<!-- Written by `make bench`: tools/bench/report.py. -->\n\n"
        f"Measured on {found['date']} with `python -m tools.bench --write`: {found['cores']} cores, {found['memory_bytes'] >> 30} GiB, "
        f"{found['system']}, Python {found['python']}, {versions}. Medians of {found['rounds']} rounds,\n"
        "in which all take turns; one more comes first. "
        "`tools/bench/measure.py` says how, and `docs/performance.json` has all figures. Absolute figures are this machine's; "
        "compare ratios."
    )
    if found["part"] != 1:
        yield f"\n**A quick run: 1/{found['part']} of the bytes. Fixed costs weigh more than they do in use.**"
    yield "\n![GB/s of each operation](performance.svg)\n"
    yield "## Targets\n"
    yield "| target | measured | met |"
    yield "|---|---|---|"
    for what, value, met in _targets(found):
        yield f"| {what} | {value} | {'yes' if met else '**no**'} |"
    yield "\n## Where we are not first\n"
    slower = [
        (key, ratio) for key, ratio in ratios(found).items() if ratio < 1 and key[-1] not in FLOORS and not key[-1].startswith("placing")
    ]
    for (storage, state, group, operation, other), ratio in slower:
        yield f"- {OPERATIONS[operation].title}, {STATES[state].what}, {group}, {storage}: {ratio:.2f} × {other}."
    if not slower:
        yield "Nowhere, in this run."
    yield "\n## All figures\n"
    yield "Ratio: our rate over theirs. Peak: resident memory at the most, above what it was before. Read: bytes read per byte needed."
    for title, results in _tables(found):
        yield f"\n### {title}\n"
        yield "| | who | s (least – most) | GB/s | ours / theirs | peak MiB | read | files | checksums |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for r in results:
            reads = f"{r['read_bytes'] / r['nbytes']:.2f}" if r["operation"] in ("restore", "other", "columns", "verify", "export") else ""
            yield (
                f"| {OPERATIONS[r['operation']].title} | {r['subject']} | {r['median']:.3f} ({r['least']:.3f} – {r['most']:.3f}) | "
                f"{_rate(r):.2f} | {_ratio(found, r)} | {r['peak_bytes'] >> 20} | {reads} | {r['files'] or ''} | "
                f"{'yes' if r['checksums'] else '' if r['subject'] in FLOORS else 'no'} |"
            )


def _tables(found: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for (storage, state, group), results in groupby(found["results"], key=lambda r: (r["storage"], r["state"], r["group"])):
        yield f"{storage}: {STATES[state].what}; {group}", list(results)


def _rate(result: dict[str, Any]) -> float:
    return float(result["nbytes"] / result["median"] / 1e9)


def _ratio(found: dict[str, Any], result: dict[str, Any]) -> str:
    key = (result["storage"], result["state"], result["group"], result["operation"], result["subject"])
    ratio = ratios(found).get(key)
    return "" if ratio is None else f"{ratio:.2f}"


def _targets(found: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    known = ratios(found)
    for target in TARGETS:
        answer = held(target, found, known)
        if answer is not None:
            yield target.what, *answer
