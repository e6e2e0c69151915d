"""Targets of the scale measurements: bounds on what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.scale.growth import exponent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FLAT", "TARGETS", "Target", "curve"]

MiB = 1 << 20
FLAT = 0.1
"""The exponent up to which a curve counts as flat: from 8 to 100,000 devices, what is 12,500 times
as much may cost 2.6 times."""


@dataclass(frozen=True, slots=True)
class Target:
    """One of them."""

    what: str
    most: float
    unit: str
    worst: Callable[[list[dict[str, Any]]], float | None]
    """The worst of what was measured, in that unit; None: nothing was."""


def curve(
    results: list[dict[str, Any]], what: str, key: str, *, tree: str, kind: str
) -> tuple[list[float], list[float]]:
    """Devices, and what was measured of jobs of 1,000 tensors; what was cut off is left out."""
    same = [
        r
        for r in results
        if (r["what"], r.get("tree"), r.get("kind")) == (what, tree, kind)
        and r.get("tensors", 1000) == 1000
    ]
    same = sorted((r for r in same if not r.get("cut")), key=lambda r: r["devices"])
    return [r["devices"] for r in same], [r[key] for r in same]


def _worst(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _of(
    what: str, key: str, **where: str | int | None
) -> Callable[[list[dict[str, Any]]], float | None]:
    return lambda results: _worst(
        r[key]
        for r in results
        if r["what"] == what and all(r.get(k) == v for k, v in where.items())
    )


def _flat(what: str, key: str) -> Callable[[list[dict[str, Any]]], float | None]:
    def worst(results: list[dict[str, Any]]) -> float | None:
        lines = dict.fromkeys((r["tree"], r["kind"]) for r in results if r["what"] == what)
        return _worst(
            exponent(*curve(results, what, key, tree=tree, kind=kind)) for tree, kind in lines
        )

    return worst


def _scaled(
    worst: Callable[[list[dict[str, Any]]], float | None], by: float
) -> Callable[[list[dict[str, Any]]], float | None]:
    return lambda results: None if (value := worst(results)) is None else value / by


TARGETS = (
    Target(
        "plan of the first save, 1,000 tensors × 100,000 devices",
        1.0,
        "s",
        _of("save", "cpu", devices=100_000),
    ),
    Target(
        "memory of that plan, with Python and numpy",
        512,
        "MiB",
        _scaled(_of("save", "peak", devices=100_000), MiB),
    ),
    Target(
        "plan of the first save, 1,024 tensors × 1,024 devices",
        0.1,
        "s",
        _of("save", "cpu", devices=1024, tensors=1024),
    ),
    Target("growth of a save's plan with devices, exponent", FLAT, "", _flat("save", "cpu")),
    Target("growth of a restore's plan with devices, exponent", FLAT, "", _flat("restore", "cpu")),
    Target(
        "growth of contents with devices, exponent", 0.01, "", _flat("metadata", "contents bytes")
    ),
    Target(
        "growth of a host record with devices, exponent",
        0.01,
        "",
        _flat("metadata", "host record bytes"),
    ),
    Target(
        "one host's requests for chunk tables (restore onto the same layout, FSDP, 100,000 "
        "devices)",
        8,
        "",
        _of("requests", "most table requests", kind="FSDP", devices=100_000, onto_devices=None),
    ),
    Target("growth of the commit record per host", 128, "bytes", _of("metadata", "bytes per host")),
)
