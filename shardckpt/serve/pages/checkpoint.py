"""Pages of one checkpoint: its tree, a tensor of it, and the form of a plan."""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from shardckpt.convert.options import below
from shardckpt.layout.text import layout_text, spec_text
from shardckpt.reading.inspection.figures import tile_grid
from shardckpt.reading.inspection.markup import Html, data, el
from shardckpt.reading.inspection.outline import number_text, outline
from shardckpt.reading.inspection.words import leaf_text
from shardckpt.serve.pages.actions import disclosed
from shardckpt.serve.pages.charts import histogram, is_damaged, words
from shardckpt.serve.pages.frame import (
    Viewer,
    address,
    crumbs,
    facts,
    frame,
    link,
    search,
    section,
    table,
    when,
)
from shardckpt.state.document import Branch, Tensor, Tied, leaves_of
from shardckpt.text import count, file_size, shape_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.inspection.outline import OutlineEntry
    from shardckpt.state.document import Node

MOST_ROWS = 400
"""Most names of a tree on one page; containers beyond lead to pages of their own."""
MOST_FOUND = 200
_SHORT, _LONGEST_METADATA = 60, 20_000
_FEW = 12
"""Containers on a page from which on they are closed at first."""
MOST_DEVICES = 256


def checkpoint_page(
    ident: str,
    ckpt: Checkpoint,
    top: Node,
    entry: dict[str, Any] | None,
    text: str | None,
    names: Html,
    viewer: Viewer,
    sections: Sequence[Html | None] = (),
    url: str = "http://localhost:8470",
) -> str:
    """A checkpoint, or a container of it, with its `tree` or `found_names`.

    `url` is that of the service, for commands.
    """
    record, name = ckpt.record, top.name
    model = [
        one for one in record.structure.tensors.values() if one.name.startswith("model/")
    ] or record.structure.tensors.values()
    parameters = sum(prod(one.shape) for one in model)
    shown: list[tuple[str, Html | str]] = [
        ("Parameters", data("parameters", parameters, number_text(parameters))),
        ("Tensors", f"{record.totals['tensors']:,}"),
        ("Size", file_size(record.totals["bytes"])),
        ("Stored", file_size(record.totals["stored_bytes"])),
        ("Hosts", f"{len(record.hosts):,}"),
        ("Layout", record.layout + (f", {record.compression}" if record.compression else "")),
        ("Created", when(record.created)),
    ]
    shown += [
        (key, value if isinstance(value, str) else f"{value:.6g}")
        for key, value in (entry or {}).get("metrics", {}).items()
    ]
    chain = record.structure.chain
    places = [base.url for base in record.structure.bases[len(chain) :]]
    bases = el("p", "Some tensors lie in ", ", ".join(places), ".") if places else None
    version = (
        el(
            "p",
            "Stored as differences from ",
            chain[0].url,
            f"; needs {len(chain)} other checkpoints.",
        )
        if chain
        else None
    )
    state: Html | str = "" if entry is None else words(entry).removeprefix(", ")
    if entry is not None and is_damaged(entry):
        state = el("a", state, href="#section-verification", class_="state mark-unreadable")
    up = el("p", link("checkpoint", ident, "the whole checkpoint")) if name else None
    main = el(
        "main",
        el("h1", ident if not name else f"{ident}: {name}"),
        section("Facts", facts(shown), version, bases, el("p", state) if state else None),
        section("Tree", search("Names that contain", "text", text), up, names),
        _metadata(record.metadata),
        sections,
        section(
            "Reshard",
            disclosed(
                "Plan a reshard",
                "Nothing is written: the plan says what would be read and written.",
                plan_form(ident, {}),
            ),
        ),
        section("Fetch", *_commands(ident, url, ckpt.names())),
        id="main",
    )
    return frame(ident, crumbs(ident, checkpoint=True), main, here="/ui/runs", viewer=viewer)


def _metadata(metadata: Mapping[str, Any]) -> Html | None:
    """Metadata of the save, but for the metrics, which are among the facts.

    Long documents are folded.
    """
    items = []
    for key, value in sorted(metadata.items()):
        if key != "metrics":
            text = value if isinstance(value, str) else json.dumps(value, indent=1)
            whole = text[:_LONGEST_METADATA] + (" …" if len(text) > _LONGEST_METADATA else "")
            long = len(text) > _SHORT
            items.append(
                el("details", el("summary", key), el("pre", whole))
                if long
                else el("p", f"{key}: ", el("code", text))
            )
    return section("Metadata", items) if items else None


def _commands(ident: str, url: str, names: Sequence[str]) -> list[Html]:
    """Files to download, and commands that fetch a checkpoint, with the url of this service.

    The token is read from a variable.
    """
    here, origin = f"{url}/raw/{quote(ident)}", "/".join(url.split("/")[:3])
    path, part = f"/files/{quote(ident)}/model.safetensors", below("model/", names)
    files = (
        [("the model", "model.safetensors", f"{path}?{urlencode(part, safe='/*')}")] if part else []
    )
    files += (
        []
        if not names or (part and "include" not in part)
        else [("all tensors of the state", "state.safetensors", path)]
    )
    commands_shown = (
        (
            "Once, for all of them",
            f'export SHARDCKPT_HTTP_HEADERS="{origin} Authorization: Bearer $SHARDCKPT_TOKEN"',
        ),
        ("Restore", f'state = shardckpt.restore("{here}")'),
        ("Copy", f"shardckpt reshard {here} ./{ident.rpartition('/')[2]}"),
        *(
            (
                what.capitalize(),
                f"curl -H \"Authorization: Bearer $SHARDCKPT_TOKEN\" -o {name} '{url}{file}'",
            )
            for what, name, file in files
        ),
        ("zarr", f'zarr.open_group("{url}/zarr/{quote(ident)}", mode="r")'),
    )
    links = [
        el("p", el("a", f"Download {what}", href=file, download=name), " (safetensors)")
        for what, name, file in files
    ]
    commands = el(
        "details",
        el("summary", "Commands"),
        facts([(title, el("pre", text)) for title, text in commands_shown], "commands"),
    )
    return [*links, commands]


def unreadable_page(
    ident: str, reason: str, viewer: Viewer, sections: Sequence[Html | None]
) -> str:
    """A checkpoint that cannot be opened: why, and what is known of it besides."""
    notice = el("p", reason, class_="bad", role="alert")
    main = el("main", el("h1", ident), section("Unreadable", notice), sections, id="main")
    return frame(ident, crumbs(ident, checkpoint=True), main, here="/ui/runs", viewer=viewer)


def tensor_page(
    ident: str,
    ckpt: Checkpoint,
    name: str,
    devices: Sequence[dict[str, Any]],
    statistics: dict[str, Any] | None,
    viewer: Viewer,
) -> str:
    """A tensor: its layout as a picture, the devices' boxes, and value statistics on demand."""
    info = ckpt.info(name)
    shown = [
        ("Shape", shape_text(info.shape)),
        ("Dtype", info.dtype.name),
        ("Size", file_size(info.nbytes)),
        ("Chunks", f"{info.num_chunks:,} of {shape_text(info.chunks)}"),
    ]
    shown += [("Tied to", ", ".join(info.tied_names))] if info.tied_names else []
    shown += [("Lies in", info.base)] if info.base else []
    picture = (
        tile_grid(name, info.layout, info.shape, None, info.chunks, "")
        if info.layout is not None
        else None
    )
    spans = (
        (one["device"], zip(one["start"], one["stop"], strict=True))
        for one in devices[:MOST_DEVICES]
    )
    boxes = [
        (f"{device}", ", ".join(f"{a}:{b}" for a, b in span) or "scalar") for device, span in spans
    ]
    listed = (
        table(
            (("Device", True), ("Box", False)),
            boxes,
            caption=f"{count(len(devices), 'device')}",
            ident="devices",
        )
        if boxes
        else None
    )
    details = (
        el("details", el("summary", "Which device held which box"), listed) if listed else None
    )
    ask = el(
        "a",
        "Read values",
        href=address("tensor", ident, name=name, values="read"),
        class_="button",
        rel="nofollow",
    )
    values = (
        _values(statistics)
        if statistics is not None
        else el("p", ask, " Reads at most 16 MiB of it.")
    )
    main = el(
        "main",
        el("h1", name),
        section("Facts", facts(shown)),
        section(
            "Layout",
            el("p", layout_text(info.layout)),
            el("div", picture, class_="wide") if picture else None,
            details,
        ),
        section("Values", values),
        id="main",
    )
    return frame(
        name, crumbs(ident, checkpoint=True, tensor=name), main, here="/ui/runs", viewer=viewer
    )


def plan_form(ident: str, asked: dict[str, Any]) -> Html:
    """The form that asks for the plan of a reshard."""

    def field(name: str, label: str, hint: str) -> Html:
        value = asked.get(name) or ""
        text = " ".join(value) if isinstance(value, list) else str(value)
        box = el(
            "input",
            type="text",
            name=name,
            value=text,
            placeholder=hint,
            id=f"plan-{name}",
            autocomplete="off",
        )
        return el("label", f"{label} ", box)

    fields = [
        field("mesh", "New mesh", "data=2,model=4"),
        field("rule", "Rules, separated by blanks", "model/**=(model,None)"),
        field("preset", "Or rules for a family", "llama/fsdp+tp"),
        field("devices_per_host", "Devices per host", "8"),
    ]
    return el(
        "form",
        fields,
        el("button", "Plan", type="submit"),
        action=address("plan", ident),
        class_="fields",
    )


def tree(ident: str, ckpt: Checkpoint, top: Node) -> Html:
    """An outline as nested lists, down to as many names as one page has room for."""
    entry = outline(ckpt, top)
    shown, level, rows = {id(entry)}, [entry], 0
    while level:  # level by level, while there is room
        here = [one for one in level if one.children]
        level = []
        for one in here:
            if rows + len(one.children) <= MOST_ROWS or one is entry:
                rows += len(one.children)
                shown.add(id(one))
                level += one.children
    return el("div", _list(ident, ckpt, entry, shown), class_="tree")


def _list(ident: str, ckpt: Checkpoint, above: OutlineEntry, shown: set[int]) -> Html:
    items = []
    for one in above.children[: 5 * MOST_ROWS] or [above]:
        times = f" × {one.repeats:,}," if one.repeats > 1 else ""
        inside = el(
            "small",
            f"{times} {count(one.tensors, 'tensor')}, {file_size(one.nbytes)}"
            if one.tensors
            else times,
        )
        if one.values is not None or (one.node is not None and not isinstance(one.node, Branch)):
            items.append(el("li", leaf_line(ident, ckpt, one.node, one.label, one.values), times))
        elif one is not above and id(one) in shown and one.children:
            below = _list(ident, ckpt, one, shown)
            items.append(
                el(
                    "li",
                    el("details", el("summary", one.label, inside), below, open=len(shown) < _FEW),
                )
            )
        elif one is not above and isinstance(one.node, Branch) and one.children:
            items.append(el("li", link("checkpoint", ident, one.label, under=one.name), inside))
        elif one is not above and one.children:  # a group of keys has no page of its own
            items.append(
                el(
                    "li",
                    el("a", one.label, href=address("checkpoint", ident, text=one.name)),
                    inside,
                )
            )
        else:
            items.append(el("li", one.label, el("small", " empty")))
    left = len(above.children) - len(items)
    more = el("li", f"… and {left:,} more; search for them", class_="quiet") if left > 0 else None
    return el("ul", items, more)


def leaf_line(
    ident: str, ckpt: Checkpoint, node: Node | None, text: str, values: str | None = None
) -> list[Html]:
    """A leaf, or a list of small `values`, as a name and what is known of it."""
    if values is not None or node is None:
        return [el("span", text), el("small", f" {values}")]
    if isinstance(node, Tensor | Tied):
        t = ckpt.tensor(node.name)
        held = "" if t.layout is None else f", {spec_text(t.layout)}"
        tied = f", tied to {node.stored}" if isinstance(node, Tied) else ""
        return [
            link("tensor", ident, text, name=node.name),
            el(
                "small", f" {shape_text(t.shape)} {t.dtype.name}, {file_size(t.nbytes)}{held}{tied}"
            ),
        ]
    assert not isinstance(node, Branch)
    type_name, value = leaf_text(node)
    return [el("span", text), el("small", f" {value} {type_name}")]


def found_names(ident: str, ckpt: Checkpoint, top: Node, text: str) -> Html:
    """The names that contain a text."""
    lowered = text.lower()
    matches = [leaf for leaf in leaves_of(top) if lowered in leaf.name.lower()]
    items = [el("li", leaf_line(ident, ckpt, leaf, leaf.name)) for leaf in matches[:MOST_FOUND]]
    more = (
        el("p", f"… and {len(matches) - MOST_FOUND:,} more", class_="quiet")
        if len(matches) > MOST_FOUND
        else None
    )
    return el(
        "div",
        el("p", f"{count(len(matches), 'name')} found", role="status"),
        el("ul", items),
        more,
        class_="tree",
    )


def _values(statistics: dict[str, Any]) -> Html:
    def text(value: float | None) -> str:
        return "–" if value is None else f"{value:.6g}"

    shown = [
        ("Read", f"{statistics['read']:,} of {statistics['elements']:,}"),
        *((key.capitalize(), text(statistics[key])) for key in ("min", "max", "mean", "std")),
        *((key.capitalize(), f"{statistics[key]:,}") for key in ("zeros", "nans", "infinities")),
    ]
    return el("div", facts(shown), histogram(statistics))
