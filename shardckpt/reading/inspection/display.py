"""Checkpoints, tensors and comparisons as Python shows them: text for `print`, HTML for notebooks.

The HTML brings its own styles, in the colours of the notebook, light or dark. All texts are
escaped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.layout.text import layout_text, spec_text
from shardckpt.reading.inspection.figures import tile_grid
from shardckpt.reading.inspection.markup import Html, el
from shardckpt.reading.inspection.outline import number_text, outline, walk
from shardckpt.reading.inspection.words import leaf_text, parameter_counts
from shardckpt.state.document import Branch, Tensor, Tied
from shardckpt.text import count, file_size, shape_text, visible

if TYPE_CHECKING:
    from shardckpt.format.structure import StoredLayout
    from shardckpt.reading.inspection.outline import OutlineEntry
    from shardckpt.reading.inspection.words import Inspected

MOST_LINES = 60
"""Most entries of the printed text."""
MOST_ENTRIES = 2000
"""Most entries of the HTML."""
_OPEN = 2
"""Levels that are open at first."""
_STYLE = """
.shardckpt { font: 13px/1.5 system-ui, sans-serif; }
.shardckpt ul { list-style: none; margin: 0; padding-left: 1.2em; }
.shardckpt summary { cursor: pointer; }
.shardckpt small { opacity: 0.7; }
.shardckpt code { font: 12px ui-monospace, monospace; background: none; color: inherit; }
.shardckpt svg { max-width: 26em; height: auto; display: block; margin: 0.5em 0; }
.shardckpt .tile { stroke: #fff; stroke-width: 1; }
.shardckpt .chunks { stroke: #16202c; stroke-width: 0.5; stroke-opacity: 0.28; fill: none; }
.shardckpt .label { font: 11px system-ui, sans-serif; fill: #16202c; text-anchor: middle;
  dominant-baseline: central; }
.shardckpt .c0 { fill: #8fbcea; } .shardckpt .c1 { fill: #f2b880; }
.shardckpt .c2 { fill: #96d3a4; } .shardckpt .c3 { fill: #e7a1b6; }
.shardckpt .c4 { fill: #c3b1ec; } .shardckpt .c5 { fill: #86cfd0; }
.shardckpt .c6 { fill: #e3d27b; } .shardckpt .c7 { fill: #c2b6a6; }
.shardckpt .cn, .shardckpt .cj { fill: #cfd6de; }
"""


def checkpoint_repr(checkpoint: Inspected) -> str:
    """A checkpoint in one line: place, format, and what it holds."""
    totals = checkpoint.record.totals
    of = "" if checkpoint.native else f" ({checkpoint.format})"
    holds = f"{count(totals['tensors'], 'tensor')}, {file_size(totals['bytes'])}"
    return visible(f"<shardckpt.Checkpoint {checkpoint.location}{of} with {holds}>")


def checkpoint_text(checkpoint: Inspected) -> str:
    """A checkpoint as a tree, for `print`."""
    lines = [visible(str(checkpoint.location)), _summary(checkpoint)]
    root = outline(checkpoint, checkpoint.parsed_tree)
    entries = walk(root)
    rows = [
        (f"{guide}{visible(entry.label)}", _facts(checkpoint, entry, times))
        for _, (entry, guide, times) in zip(range(MOST_LINES), entries, strict=False)
    ]
    width = max((len(label) for label, _ in rows), default=0)
    lines += [f"{label:<{width}}  {facts}".rstrip() for label, facts in rows]
    left = sum(1 for _ in entries)
    return "\n".join(
        [*lines, *([f"… and {left:,} more; `shardckpt info` lists all"] if left else [])]
    )


def checkpoint_html(checkpoint: Inspected) -> str:
    """A checkpoint as a tree that opens and closes, for notebooks."""
    root = outline(checkpoint, checkpoint.parsed_tree)
    head = el(
        "div",
        el("code", visible(str(checkpoint.location))),
        el("br"),
        el("small", _summary(checkpoint)),
    )
    return framed(head, _list(checkpoint, root))


def tensor_html(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    layout: StoredLayout | None,
    chunks: tuple[int, ...],
) -> str:
    """A tensor with a drawing of the devices that held its parts."""
    drawing = tile_grid(name, layout, shape, None, chunks, "plain, from the host")
    return framed(
        el(
            "div",
            el("code", visible(name)),
            " ",
            el("small", f"{shape_text(shape)} {dtype}, {layout_text(layout)}"),
        ),
        drawing,
    )


def framed(*parts: Html) -> str:
    """HTML with the styles of all that is shown."""
    return str(el("div", el("style", Html(_STYLE)), *parts, class_="shardckpt"))


def _summary(checkpoint: Inspected) -> str:
    """Format, number of tensors, bytes and parameters."""
    record = checkpoint.record
    counts = parameter_counts(record.structure.tensors.values())
    parts = [
        checkpoint.format,
        count(record.totals["tensors"], "tensor"),
        file_size(record.totals["bytes"]),
    ]
    parts += [f"{number_text(counts['model'])} parameters"] if counts["model"] else []
    return ", ".join(
        [
            *parts,
            *(
                [f"{number_text(counts['optimizer'])} numbers of the optimizer"]
                if counts["optimizer"]
                else []
            ),
        ]
    )


def _facts(checkpoint: Inspected, entry: OutlineEntry, times: int) -> str:
    """Facts about an entry, in one line."""
    node = entry.node
    if entry.values is not None:
        return visible(entry.values)
    if node is None or isinstance(node, Branch):
        outer = times // entry.repeats
        return (
            f"{count(entry.tensors * outer, 'tensor')}, {file_size(entry.nbytes * outer)}"
            if entry.tensors
            else ""
        )
    if isinstance(node, Tied):
        return f"= {visible(node.stored)}"
    if isinstance(node, Tensor):
        tensor = checkpoint.tensor(node.name)
        size = f"{'' if times == 1 else f'{times:,} × '}{file_size(tensor.nbytes)}"
        return (
            f"{shape_text(tensor.shape)}  {tensor.dtype.name}  {size}  "
            f"{spec_text(tensor.layout) if tensor.layout else ''}".rstrip()
        )
    kind, value = leaf_text(node)
    return visible(f"{value}  {kind}".strip())


def _list(checkpoint: Inspected, root: OutlineEntry) -> Html:
    """The entries below the root as nested lists, built from the deepest entry up."""
    made: dict[int, list[Html]] = {}
    order: list[tuple[OutlineEntry, OutlineEntry, int, int]] = []
    stack = [(child, root, 1, root.repeats) for child in reversed(root.children)]
    while stack and len(order) < MOST_ENTRIES:
        entry, above, level, times = stack.pop()
        times *= entry.repeats
        order.append((entry, above, level, times))
        stack += [(child, entry, level + 1, times) for child in reversed(entry.children)]
    for entry, above, level, times in reversed(order):
        line = [visible(entry.label), " ", el("small", _facts(checkpoint, entry, times))]
        inside = made.pop(id(entry), [])
        item = (
            el("details", el("summary", line), el("ul", reversed(inside)), open=level < _OPEN)
            if inside
            else el("span", line)
        )
        made.setdefault(id(above), []).append(el("li", item))
    more = (
        el("li", el("small", f"… and {len(stack):,} more; `shardckpt info` lists all"))
        if stack
        else None
    )
    return el("ul", reversed(made.get(id(root), [])), more)
