"""The page that compares two checkpoints."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from shardckpt.reading.inspection.markup import Html, data, el
from shardckpt.serve.pages.frame import Viewer, frame, link, section, table
from shardckpt.text import count, shape_text

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_CHANGES = 500


def diff_page(
    a: str | None, b: str | None, doc: dict[str, Any] | None, *, structure: bool, viewer: Viewer
) -> str:
    """A comparison of two checkpoints, and the form that asks for it."""
    fields = [
        el(
            "label",
            f"{what} ",
            el(
                "input",
                type="text",
                name=key,
                value=value or "",
                required=True,
                id=f"field-{key}",
                size=40,
            ),
        )
        for key, what, value in (("a", "Checkpoint", a), ("b", "Compare with", b))
    ]
    box = el("input", type="checkbox", name="structure", value="true", checked=structure)
    only = el("label", box, " names, shapes and small leaves only")
    form = el(
        "form",
        fields,
        only,
        el("button", "Compare", type="submit"),
        action="/ui/diff",
        class_="fields",
    )
    parts = [section("Checkpoints", form)]
    if doc is not None:
        parts.append(section("Result", _verdict(doc, structure=structure), *_changes(doc, b or "")))
    return frame(
        "Compare", el("main", el("h1", "Compare"), parts, id="main"), here="/ui/diff", viewer=viewer
    )


def _verdict(doc: dict[str, Any], *, structure: bool) -> Html:
    """A comparison in a sentence."""
    verdict = "equal" if doc["equal"] else "different"
    compared = (
        "values were not compared"
        if structure
        else f"{count(doc['tensors_compared'], 'tensor')} compared bit by bit"
    )
    if doc["values"]:
        most = max(doc["values"], key=_relative)
        compared += f"; {len(doc['values']):,} of them differ, most of all {most['name']}"
        compared += f" (by {most['relative']:.2%})" if most["relative"] is not None else ""
    alone = len(doc["only_a"]) + len(doc["only_b"])
    extra = [f"; only one of them has {count(alone, 'name')}"] if alone else []
    extra += (
        [f"; {count(len(doc['changes']), 'name')} with another shape, dtype or small value"]
        if doc["changes"]
        else []
    )
    return el("p", el("strong", verdict), f": {compared}", *extra, ".", class_="verdict")


def _relative(one: Mapping[str, Any]) -> float:
    """Key by which tensors with other values are sorted: those with NaN or infinity first."""
    return inf if one["relative"] is None else one["relative"]


def _changes(doc: dict[str, Any], b: str) -> list[Html | None]:
    parts: list[Html | None] = []
    for key, title in (("only_a", "Only in the first"), ("only_b", "Only in the second")):
        names = doc[key]
        if names:
            parts.append(el("h3", f"{title} ({len(names):,})"))
            parts.append(el("ul", [el("li", name) for name in names[:MOST_CHANGES]]))
    if doc["changes"]:
        rows = [
            (one["name"], one["aspect"], _side(one["a"]), _side(one["b"]))
            for one in doc["changes"][:MOST_CHANGES]
        ]
        heads = (("Name", False), ("What", False), ("First", False), ("Second", False))
        parts.append(
            table(heads, rows, caption=count(len(doc["changes"]), "change"), ident="changes")
        )
    if doc["values"]:
        rows_of_values = [
            (
                link("tensor", b, one["name"], name=one["name"]),
                data("differing", one["differing"], f"{one['differing']:,}"),
                data(
                    "share",
                    one["differing"] / one["elements"],
                    f"{one['differing'] / one['elements']:.1%}",
                ),
                "–"
                if one["relative"] is None
                else data("relative", one["relative"], f"{one['relative']:.2%}"),
                "–"
                if one["largest"] is None
                else data("largest", one["largest"], f"{float(one['largest']):.6g}"),
                f"{one['nans']:,}",
            )
            for one in sorted(doc["values"], key=_relative, reverse=True)[:MOST_CHANGES]
        ]
        numbers = ("Elements", "Share of elements", "Relative", "Largest difference", "NaN")
        parts.append(
            table(
                (("Tensor", False), *((text, True) for text in numbers)),
                rows_of_values,
                caption=f"{count(len(doc['values']), 'tensor')} with other values",
                ident="values",
            )
        )
    if doc["layouts"]:
        parts.append(
            el(
                "p",
                f"Another layout in {count(len(doc['layouts']), 'tensor')}, which counts as no "
                "difference.",
                class_="quiet",
            )
        )
    return parts


def _side(value: object) -> str:
    return "–" if value is None else shape_text(value) if isinstance(value, list) else str(value)
