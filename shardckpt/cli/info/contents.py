"""The contents of a checkpoint as a tree for people.

Cost is linear in the number of leaves: every layout is described once, however many tensors have it, and the tree is walked
without recursion.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardckpt.cli.screen import Cell, Screen, column_widths
from shardckpt.excerpt import count, file_size, shape_text, shortened, visible
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.text import mesh_text, spec_text
from shardckpt.reading.documents import leaf_text, node_totals
from shardckpt.state.document import Branch, Node, Tensor, Tied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.format.structure import StoredLayout
    from shardckpt.layout.mesh import Mesh
    from shardckpt.reading.checkpoint import Checkpoint

MOST_MESHES = 8
MOST_METADATA = 20
MOST_SPECS = 30
"""Most lines of each kind in the text output; --json has all."""
LONGEST_METADATA = 200
"""Most characters of a line of metadata."""


def lines(screen: Screen, checkpoint: Checkpoint, node: Node, *, depth: int | None = None, heading: bool = True) -> Iterator[str]:
    """The checkpoint's facts, and the tree below `node`."""
    if heading:
        yield from _heading(screen, checkpoint)
        yield ""
    yield from _Tree(screen, checkpoint, node, depth).lines()


def _heading(screen: Screen, checkpoint: Checkpoint) -> Iterator[str]:
    record = checkpoint.record
    totals = record.totals
    stored = (
        record.layout,
        record.compression or "not compressed",
        count(len(record.hosts), "host"),
        count(totals["chunks"], "chunk"),
        file_size(totals["stored_bytes"]),
    )
    facts = [
        ("checkpoint", visible(str(checkpoint.location))),
        ("created", visible(f"{record.created.replace('T', ' ').replace('+00:00', ' UTC')} by {record.writer}")),
        ("holds", f"{count(totals['tensors'], 'tensor')}, {file_size(totals['bytes'])}"),
        ("stored", ", ".join(stored)),
        *_bases(checkpoint),
    ]
    meshes = _meshes(checkpoint)
    facts += [("mesh" if len(meshes) == 1 else f"mesh {i}", mesh_text(mesh)) for i, mesh in enumerate(meshes[:MOST_MESHES], 1)]
    if len(meshes) > MOST_MESHES:
        facts.append(("", f"… and {len(meshes) - MOST_MESHES:,} more meshes"))
    metadata = [shortened(f"{visible(key)} = {json.dumps(value)}", LONGEST_METADATA) for key, value in record.metadata.items()]
    facts += [("metadata" if i == 0 else "", line) for i, line in enumerate(metadata[:MOST_METADATA])]
    if len(metadata) > MOST_METADATA:
        facts.append(("", f"… and {len(metadata) - MOST_METADATA:,} more"))
    yield from screen.rows([[Cell(what, "dim"), Cell(value)] for what, value in facts], (10, 0))


def _bases(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """The tensors that lie in other checkpoints, for each of these."""
    tensors = checkpoint.record.structure.tensors.values()
    for base, place in zip(checkpoint.record.structure.bases, checkpoint.bases(), strict=True):
        there = [t for t in tensors if t.base is not None and t.base.base == base]
        yield "base", f"{count(len(there), 'tensor')}, {file_size(sum(t.nbytes for t in there))} of that in {visible(place)}"


def _meshes(checkpoint: Checkpoint) -> list[Mesh]:
    """All meshes, in the order of their first tensors."""
    layouts = {id(t.layout): t.layout for t in checkpoint.record.structure.tensors.values()}
    return list(dict.fromkeys(layout.mesh for layout in layouts.values() if isinstance(layout, Sharding | Placements)))


class _Tree:
    """A tree as lines: guides and the last components of names, with columns beside them."""

    def __init__(self, screen: Screen, checkpoint: Checkpoint, root: Node, depth: int | None) -> None:
        self.screen = screen
        self.tensors = checkpoint.record.structure.tensors
        self.root = root
        self.depth = depth
        self.meshes = _meshes(checkpoint)
        self.specs: dict[int, str] = {}
        """Descriptions of layouts, by the layout's id: tensors share layouts."""
        self.legend: dict[str, str] | None = None
        """Description of each number in the legend; None while the table shows the descriptions themselves."""
        self.numbers: dict[str, str] = {}
        self.totals = node_totals(checkpoint, root)

    def lines(self) -> Iterator[str]:
        """All lines. If the specs do not fit the width, they become numbers, with a legend below."""
        rows = list(self._rows())
        if sum(column_widths(rows)) + 2 * len(rows[0]) - 2 > self.screen.width:
            self.legend = {}
            rows = list(self._rows())
        yield from self.screen.table(rows)
        if self.legend:
            yield ""
            for number, text in list(self.legend.items())[:MOST_SPECS]:
                yield f"{self.screen.paint(number, 'magenta')} {text}"
            if len(self.legend) > MOST_SPECS:
                yield f"… and {len(self.legend) - MOST_SPECS:,} more"

    def _rows(self) -> Iterator[list[Cell]]:
        root = self.root
        top = [Cell(visible(root.name) or ".", "bold blue" if isinstance(root, Branch) else "bold"), *self._facts(root)]
        yield top
        stack = [(child, "", last, 1) for child, last in self._children(root, 0)]
        while stack:
            node, guide, is_last, depth = stack.pop()
            component = visible(node.name.rpartition("/")[2])
            yield [Cell(f"{guide}{'└─' if is_last else '├─'} {component}", "blue" if isinstance(node, Branch) else ""), *self._facts(node)]
            below = guide + ("   " if is_last else "│  ")
            stack.extend((child, below, last, depth + 1) for child, last in self._children(node, depth))

    def _children(self, node: Node, depth: int) -> list[tuple[Node, bool]]:
        """Children to show, last first, each with whether it is the last."""
        if not isinstance(node, Branch) or (self.depth is not None and depth >= self.depth):
            return []
        return [(child, i == 0) for i, child in enumerate(reversed(node.children))]

    def _facts(self, node: Node) -> list[Cell]:
        """The cells of a node: for a tensor shape, dtype, size and spec."""
        if isinstance(node, Branch):
            return [Cell(self._inside(node), "dim"), Cell(""), Cell(""), Cell("")]
        if isinstance(node, Tied):
            return [Cell(f"= {visible(node.stored)}", "dim"), Cell(""), Cell(""), Cell("")]
        if isinstance(node, Tensor):
            t = self.tensors[node.name]
            return [
                Cell(shape_text(t.shape), "cyan"),
                Cell(t.dtype.name, "green"),
                Cell(file_size(t.nbytes), right=True),
                Cell(f"{self._spec(t.layout)} {'' if t.base is None else f'in {visible(t.base.base.url)}'}".strip(), "magenta"),
            ]
        kind, value = leaf_text(node)
        return [Cell(visible(f"{value}  {kind}".strip()), "yellow"), Cell(""), Cell(""), Cell("")]

    def _inside(self, node: Branch) -> str:
        """Summary of a container's contents."""
        total = self.totals[id(node)]
        facts: list[str] = [node.form] if node.form != "dict" else []
        if not node.children:
            facts = [f"empty {node.form}"]
        if total.tensors:
            facts += [count(total.tensors, "tensor"), file_size(total.nbytes)]
        return ", ".join(facts)

    def _spec(self, layout: StoredLayout | None) -> str:
        """The description of a layout, or its number in the legend."""
        if layout is None:
            return ""
        if id(layout) not in self.specs:
            text = spec_text(layout)
            if len(self.meshes) > 1 and isinstance(layout, Sharding | Placements):
                text += f" on mesh {self.meshes.index(layout.mesh) + 1}"
            self.specs[id(layout)] = text
        text = self.specs[id(layout)]
        if self.legend is None:
            return text
        if text not in self.numbers:
            self.numbers[text] = f"[{len(self.numbers) + 1}]"
            self.legend[self.numbers[text]] = text
        return self.numbers[text]
