"""Pages of one checkpoint: its tree, a tensor of it, a comparison with another one, and the form of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shardckpt.excerpt import count, file_size, shape_text
from shardckpt.layout.text import layout_text, spec_text
from shardckpt.reading.documents import leaf_text, node_totals
from shardckpt.serve.pages.charts import histogram, is_damaged, words
from shardckpt.serve.pages.figures import tile_grid
from shardckpt.serve.pages.frame import Viewer, address, crumbs, facts, frame, link, search, table
from shardckpt.serve.pages.markup import Html, data, el
from shardckpt.serve.pages.plan import section
from shardckpt.state.document import Branch, Tensor, Tied, leaves_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.state.document import Node

MOST_ROWS = 400
"""Most names of a tree on one page; containers beyond lead to pages of their own."""
MOST_FOUND = 200
_FEW = 12
"""Containers on a page from which on they are closed at first."""
MOST_CHANGES = 500
MOST_DEVICES = 256


def checkpoint_page(
    ident: str,
    ckpt: Checkpoint,
    top: Node,
    entry: dict[str, Any] | None,
    text: str | None,
    viewer: Viewer,
    sections: Sequence[Html | None] = (),
) -> str:
    """A checkpoint, or a container of it, as a tree; or the names that contain a text. `sections` follow the tree."""
    record, name = ckpt.record, top.name
    shown: list[tuple[str, Html | str]] = [
        ("Tensors", f"{record.totals['tensors']:,}"),
        ("Elements", file_size(record.totals["bytes"])),
        ("Stored", file_size(record.totals["stored_bytes"])),
        ("Hosts", f"{len(record.hosts):,}"),
        ("Layout", record.layout + (f", {record.compression}" if record.compression else "")),
        ("Created", el("span", record.created[:10], el("small", f" {record.created[11:].removesuffix('+00:00')}"))),
    ]
    shown += [(key, value if isinstance(value, str) else f"{value:.6g}") for key, value in (entry or {}).get("metrics", {}).items()]
    bases = el("p", "Some tensors lie in ", ", ".join(base.url for base in record.structure.bases), ".") if record.structure.bases else None
    state: Html | str = "" if entry is None else words(entry).removeprefix(", ")
    if entry is not None and is_damaged(entry):
        state = el("a", state, href="#section-verification", class_="state mark-unreadable")
    fetch = el(
        "ul",
        el("li", el("a", "model.safetensors", href=f"/files/{quote(ident)}/model.safetensors")),
        el("li", el("code", f'shardckpt.open("…/raw/{ident}")')),
        el("li", el("code", f'zarr.open_group("…/zarr/{ident}", mode="r")')),
    )
    body = _found(ident, ckpt, top, text) if text else el("div", _Tree(ident, ckpt, top).shown(), class_="tree")
    up = el("p", link("checkpoint", ident, "the whole checkpoint")) if name else None
    main = el(
        "main",
        el("h1", ident if not name else f"{ident}: {name}"),
        section("Facts", facts(shown), bases, el("p", state) if state else None),
        section("Tree", search("Names that contain", "text", text), up, body),
        sections,
        section("Reshard", plan_form(ident, {})),
        section("Fetch", fetch),
        id="main",
    )
    return frame(ident, crumbs(ident, checkpoint=True), main, here="/ui/runs", viewer=viewer)


def unreadable_page(ident: str, reason: str, viewer: Viewer, sections: Sequence[Html | None]) -> str:
    """A checkpoint that cannot be opened: why, and what is known of it besides."""
    said = el("p", reason, class_="bad", role="alert")
    main = el("main", el("h1", ident), section("Unreadable", said), sections, id="main")
    return frame(ident, crumbs(ident, checkpoint=True), main, here="/ui/runs", viewer=viewer)


def tensor_page(
    ident: str, ckpt: Checkpoint, name: str, devices: Sequence[dict[str, Any]], found: dict[str, Any] | None, viewer: Viewer
) -> str:
    """A tensor: its layout as a picture, the devices' boxes, and on demand statistics of its values."""
    info = ckpt.info(name)
    shown = [
        ("Shape", shape_text(info.shape)),
        ("Dtype", info.dtype.name),
        ("Size", file_size(info.nbytes)),
        ("Chunks", f"{info.num_chunks:,} of {shape_text(info.chunks)}"),
    ]
    shown += [("Tied to", ", ".join(info.tied_names))] if info.tied_names else []
    shown += [("Lies in", info.base)] if info.base else []
    picture = tile_grid(name, info.layout, info.shape, None, info.chunks, "plain, from the host")
    boxes = [(f"{one['device']}", _box_text(one)) for one in devices[:MOST_DEVICES]]
    listed = (
        table((("Device", True), ("Box", False)), boxes, caption=f"{count(len(devices), 'device')}", ident="devices") if boxes else None
    )
    details = el("details", el("summary", "Which device held which box"), listed) if listed else None
    ask = el("a", "Read values", href=address("tensor", ident, name=name, values="read"), class_="button", rel="nofollow")
    values = _values(found) if found is not None else el("p", ask, " Reads at most 16 MiB of it.")
    main = el(
        "main",
        el("h1", name),
        section("Facts", facts(shown)),
        section("Layout", el("p", layout_text(info.layout)), el("div", picture, class_="wide"), details),
        section("Values", values),
        id="main",
    )
    return frame(name, crumbs(ident, checkpoint=True, tensor=name), main, here="/ui/runs", viewer=viewer)


def diff_page(a: str | None, b: str | None, doc: dict[str, Any] | None, *, structure: bool, viewer: Viewer) -> str:
    """A comparison of two checkpoints, and the form that asks for it."""
    fields = [
        el("label", f"{what} ", el("input", type="text", name=key, value=value or "", required=True, id=f"field-{key}", size=40))
        for key, what, value in (("a", "Checkpoint", a), ("b", "Compare with", b))
    ]
    box = el("input", type="checkbox", name="structure", value="true", checked=structure)
    only = el("label", box, " names, shapes and small leaves only")
    form = el("form", fields, only, el("button", "Compare", type="submit"), action="/ui/diff", class_="fields")
    parts = [section("Checkpoints", form)]
    if doc is not None:
        said = "equal" if doc["equal"] else "different"
        compared = "values were not compared" if structure else f"{count(doc['tensors_compared'], 'tensor')} compared bit by bit"
        parts.append(section("Result", el("p", el("strong", said), f": {compared}", class_="verdict"), *_changes(doc, b or "")))
    return frame("Compare", el("main", el("h1", "Compare"), parts, id="main"), here="/ui/diff", viewer=viewer)


def plan_form(ident: str, asked: dict[str, Any]) -> Html:
    """The form that asks for the plan of a reshard."""

    def field(name: str, label: str, hint: str) -> Html:
        value = asked.get(name) or ""
        text = " ".join(value) if isinstance(value, list) else str(value)
        box = el("input", type="text", name=name, value=text, placeholder=hint, id=f"plan-{name}", autocomplete="off")
        return el("label", f"{label} ", box)

    fields = [
        field("mesh", "New mesh", "data=2,model=4"),
        field("rule", "Rules, separated by blanks", "model/**=(model,None)"),
        field("preset", "Or rules for a family", "llama/fsdp+tp"),
        field("devices_per_host", "Devices per host", "8"),
    ]
    return el("form", fields, el("button", "Plan", type="submit"), action=address("plan", ident), class_="fields")


class _Tree:
    """A tree as nested lists, down to as many names as one page has room for."""

    def __init__(self, ident: str, ckpt: Checkpoint, top: Node) -> None:
        self._ident, self._ckpt, self._top = ident, ckpt, top
        self._totals = node_totals(ckpt, top)
        self._open = self._choose()

    def shown(self) -> Html:
        """The list of the top's children."""
        return self._list(self._top)

    def _choose(self) -> set[int]:
        """The containers whose children are on this page: level by level, while there is room."""
        chosen, level, rows = set(), [self._top], 0
        while level:
            below: list[Node] = []
            for node in level:
                if isinstance(node, Branch) and (rows + len(node.children) <= MOST_ROWS or node is self._top):
                    rows += len(node.children)
                    chosen.add(id(node))
                    below += node.children
            level = below
        return chosen

    def _list(self, node: Node) -> Html:
        if not isinstance(node, Branch):
            return el("ul", el("li", self._leaf(node, node.name)))
        items = []
        for key, child in list(zip(node.keys, node.children, strict=True))[: 5 * MOST_ROWS]:
            text = str(key)
            if not isinstance(child, Branch):
                items.append(el("li", self._leaf(child, text)))
            elif id(child) in self._open:
                summary = el("summary", text, self._inside(child))
                items.append(el("li", el("details", summary, self._list(child), open=len(self._open) < _FEW)))
            else:
                items.append(el("li", link("checkpoint", self._ident, text, under=child.name), self._inside(child)))
        left = len(node.children) - len(items)
        return el("ul", items, el("li", f"… and {left:,} more; search for them", class_="quiet") if left else None)

    def _inside(self, node: Branch) -> Html:
        total = self._totals[id(node)]
        return el("small", f" {count(total.tensors, 'tensor')}, {file_size(total.nbytes)}" if total.tensors else f" {node.form}")

    def _leaf(self, node: Node, text: str) -> list[Html]:
        return leaf_line(self._ident, self._ckpt, node, text)


def leaf_line(ident: str, ckpt: Checkpoint, node: Node, text: str) -> list[Html]:
    """A leaf as a name and what is known of it."""
    if isinstance(node, Tensor | Tied):
        t = ckpt.tensor(node.name)
        tied = f", tied to {node.stored}" if isinstance(node, Tied) else ""
        return [
            link("tensor", ident, text, name=node.name),
            el("small", f" {shape_text(t.shape)} {t.dtype.name}, {file_size(t.nbytes)}, {spec_text(t.layout)}{tied}"),
        ]
    assert not isinstance(node, Branch)
    type_name, value = leaf_text(node)
    return [el("span", text), el("small", f" {value} {type_name}")]


def _found(ident: str, ckpt: Checkpoint, top: Node, text: str) -> Html:
    wanted = text.lower()
    found = [leaf for leaf in leaves_of(top) if wanted in leaf.name.lower()]
    items = [el("li", leaf_line(ident, ckpt, leaf, leaf.name)) for leaf in found[:MOST_FOUND]]
    more = el("p", f"… and {len(found) - MOST_FOUND:,} more", class_="quiet") if len(found) > MOST_FOUND else None
    return el("div", el("p", f"{count(len(found), 'name')} found", role="status"), el("ul", items), more, class_="tree")


def _values(found: dict[str, Any]) -> Html:
    def text(value: float | None) -> str:
        return "–" if value is None else f"{value:.6g}"

    shown = [
        ("Read", f"{found['read']:,} of {found['elements']:,}"),
        *((key.capitalize(), text(found[key])) for key in ("min", "max", "mean", "std")),
        *((key.capitalize(), f"{found[key]:,}") for key in ("zeros", "nans", "infinities")),
    ]
    return el("div", facts(shown), histogram(found))


def _changes(doc: dict[str, Any], b: str) -> list[Html | None]:
    parts: list[Html | None] = []
    for key, title in (("only_a", "Only in the first"), ("only_b", "Only in the second")):
        names = doc[key]
        if names:
            parts.append(el("h3", f"{title} ({len(names):,})"))
            parts.append(el("ul", [el("li", name) for name in names[:MOST_CHANGES]]))
    if doc["changes"]:
        rows = [(one["name"], one["aspect"], _side(one["a"]), _side(one["b"])) for one in doc["changes"][:MOST_CHANGES]]
        heads = (("Name", False), ("What", False), ("First", False), ("Second", False))
        parts.append(table(heads, rows, caption=count(len(doc["changes"]), "change"), ident="changes"))
    if doc["values"]:
        rows_of_values = [
            (
                link("tensor", b, one["name"], name=one["name"]),
                data("differing", one["differing"], f"{one['differing']:,}"),
                data("share", one["differing"] / one["elements"], f"{one['differing'] / one['elements']:.1%}"),
                "–" if one["largest"] is None else data("largest", one["largest"], f"{float(one['largest']):.6g}"),
                f"{one['nans']:,}",
            )
            for one in doc["values"][:MOST_CHANGES]
        ]
        numbers = (("Tensor", False), ("Elements", True), ("Share", True), ("By up to", True), ("NaN", True))
        parts.append(table(numbers, rows_of_values, caption=f"{count(len(doc['values']), 'tensor')} with other values", ident="values"))
    if doc["layouts"]:
        parts.append(el("p", f"Another layout in {count(len(doc['layouts']), 'tensor')}, which counts as no difference.", class_="quiet"))
    return parts


def _side(value: object) -> str:
    return "–" if value is None else shape_text(value) if isinstance(value, list) else str(value)


def _box_text(one: dict[str, Any]) -> str:
    return ", ".join(f"{a}:{b}" for a, b in zip(one["start"], one["stop"], strict=True)) or "scalar"
