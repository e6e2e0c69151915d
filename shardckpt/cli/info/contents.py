"""The contents of a checkpoint as a tree for people.

Cost is linear in the number of leaves: every layout is described once, however many tensors have
it, and the tree is walked without recursion.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from shardckpt.cli.screen import Cell, Screen, column_widths
from shardckpt.format.hf_files import ENTRY
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.text import mesh_text, spec_text
from shardckpt.reading.inspection.outline import number_text, outline, walk
from shardckpt.reading.inspection.words import leaf_text, parameter_counts
from shardckpt.state.document import Branch, Node, Tensor, Tied
from shardckpt.text import clip, count, few, file_size, shape_text, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.format.record import CheckpointRecord
    from shardckpt.format.structure import StoredLayout
    from shardckpt.layout.mesh import Mesh
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.inspection.outline import OutlineEntry

MOST_MESHES = 8
MOST_METADATA = 20
MOST_SPECS = 30
"""Most lines of each kind in the text output; --json has all."""
LONGEST_METADATA = 200
"""Most characters of a line of metadata."""
LONGEST_WORD = 80
"""Most characters of a text in the metadata that could be base64."""
_ENCODED = re.compile(r"[A-Za-z0-9+/_=\s-]+")


def lines(
    screen: Screen,
    checkpoint: Checkpoint,
    node: Node,
    *,
    depth: int | None = None,
    heading: bool = True,
) -> Iterator[str]:
    """The checkpoint's facts, and the tree below `node`."""
    if heading:
        yield from _heading(screen, checkpoint)
        yield ""
    yield from _Tree(screen, checkpoint, node, depth).lines()


def _heading(screen: Screen, checkpoint: Checkpoint) -> Iterator[str]:
    record = checkpoint.record
    facts = [("checkpoint", visible(str(checkpoint.location))), *_origin(checkpoint)]
    facts += [("holds", _holds(record)), *_storage_form(checkpoint), *_bases(checkpoint)]
    meshes = _meshes(checkpoint)
    facts += [
        ("mesh" if len(meshes) == 1 else f"mesh {i}", mesh_text(mesh))
        for i, mesh in enumerate(meshes[:MOST_MESHES], 1)
    ]
    if len(meshes) > MOST_MESHES:
        facts.append(("", f"… and {len(meshes) - MOST_MESHES:,} more meshes"))
    metadata = [
        f"{visible(key)} = {_metadata_text(key, value)}" for key, value in record.metadata.items()
    ]
    facts += [
        ("metadata" if i == 0 else "", line) for i, line in enumerate(metadata[:MOST_METADATA])
    ]
    if len(metadata) > MOST_METADATA:
        facts.append(("", f"… and {len(metadata) - MOST_METADATA:,} more"))
    notes = [visible(note) for note in checkpoint.notes]
    facts += [("notes" if i == 0 else "", line) for i, line in enumerate(notes[:MOST_METADATA])]
    if len(notes) > MOST_METADATA:
        facts.append(("", f"… and {len(notes) - MOST_METADATA:,} more; --json has all"))
    yield from screen.rows([[Cell(what, "dim"), Cell(value)] for what, value in facts], (10, 0))


def _origin(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Time and writer of a checkpoint; of another format, its name."""
    record = checkpoint.record
    if checkpoint.native:
        yield (
            "created",
            visible(
                f"{record.created.replace('T', ' ').replace('+00:00', ' UTC')} by {record.writer}"
            ),
        )
    else:
        yield "format", f"{checkpoint.format}, read in place"


def _storage_form(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """The form in which a checkpoint of shardckpt is stored."""
    record, totals = checkpoint.record, checkpoint.record.totals
    if not checkpoint.native:
        return
    parts = f"{count(len(record.hosts), 'part')}, " if len(record.hosts) > record.processes else ""
    stored = record.layout, record.compression or "not compressed", count(record.processes, "host")
    yield (
        "stored",
        (
            f"{', '.join(stored)}, {parts}{count(totals['chunks'], 'chunk')}, "
            f"{file_size(totals['stored_bytes'])}"
        ),
    )
    if "changed_bytes" in totals:
        yield (
            "changed",
            (
                f"{totals['changed_bytes'] / max(1, totals['bytes']):.2%} of the elements' bytes "
                "since the version before"
            ),
        )


def _holds(record: CheckpointRecord) -> str:
    """Tensors, bytes, and numbers of parameters."""
    counts = parameter_counts(record.structure.tensors.values())
    parameters = [f"{number_text(counts['model'])} parameters"] if counts["model"] else []
    parameters += (
        [f"{number_text(counts['optimizer'])} numbers of the optimizer"]
        if counts["optimizer"]
        else []
    )
    return ", ".join(
        [count(record.totals["tensors"], "tensor"), file_size(record.totals["bytes"]), *parameters]
    )


def _metadata_text(key: str, value: object) -> str:
    """A value of the metadata in one line; encoded bytes by their names, or their length alone."""
    if key == ENTRY and isinstance(value, dict):
        return few([visible(str(name)) for name in value], 8)
    if isinstance(value, str) and len(value) > LONGEST_WORD and _ENCODED.fullmatch(value):
        return f"{len(value):,} characters of encoded bytes"
    return clip(json.dumps(value), LONGEST_METADATA)


def _bases(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """The checkpoint that this one differs from, and the tensors that lie in other checkpoints.

    The tensors are given for each of these other checkpoints.
    """
    tensors, chain = (
        checkpoint.record.structure.tensors.values(),
        len(checkpoint.record.structure.chain),
    )
    places = checkpoint.bases()
    if chain:
        others = f", which needs {count(chain - 1, 'other checkpoint')}" if chain > 1 else ""
        yield (
            "differs",
            (
                f"{count(sum(t.difference for t in tensors), 'tensor')} from "
                f"{visible(places[0])}{others}"
            ),
        )
    for base, place in zip(checkpoint.record.structure.bases[chain:], places[chain:], strict=True):
        there = [t for t in tensors if t.base is not None and t.base.base == base]
        yield (
            "base",
            (
                f"{count(len(there), 'tensor')}, {file_size(sum(t.nbytes for t in there))} of "
                f"that in {visible(place)}"
            ),
        )


def _meshes(checkpoint: Checkpoint) -> list[Mesh]:
    """All meshes, in the order of their first tensors."""
    layouts = {id(t.layout): t.layout for t in checkpoint.record.structure.tensors.values()}
    return list(
        dict.fromkeys(
            layout.mesh for layout in layouts.values() if isinstance(layout, Sharding | Placements)
        )
    )


class _Tree:
    """An outline as lines: guides and labels, with columns beside them."""

    def __init__(
        self, screen: Screen, checkpoint: Checkpoint, root: Node, depth: int | None
    ) -> None:
        self.screen = screen
        self.tensors = checkpoint.record.structure.tensors
        self.root = outline(checkpoint, root)
        self.depth = depth
        self.meshes = _meshes(checkpoint)
        self.specs: dict[int, str] = {}
        """Descriptions of layouts, by the layout's id: tensors share layouts."""
        self.legend: dict[str, str] | None = None
        """Description of each number in the legend; None while the table shows the descriptions
        themselves."""
        self.numbers: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        """All lines.

        If the specs do not fit the width, they become numbers, with a legend below.
        """
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
        top = self.root
        yield [
            Cell(visible(top.name) or ".", "bold blue" if top.children else "bold"),
            *self._facts(top, 1),
        ]
        for entry, guide, times in walk(top, self.depth):
            style = "blue" if entry.children or isinstance(entry.node, Branch) else ""
            yield [Cell(f"{guide}{visible(entry.label)}", style), *self._facts(entry, times)]

    def _facts(self, entry: OutlineEntry, times: int) -> list[Cell]:
        """The cells of an entry that stands for `times` nodes.

        For a tensor they are shape, dtype, size and spec.
        """
        node = entry.node
        if entry.values is not None:
            return [Cell(visible(entry.values), "yellow"), Cell(""), Cell(""), Cell("")]
        if node is None or isinstance(node, Branch):
            return [Cell(_inside(entry, times), "dim"), Cell(""), Cell(""), Cell("")]
        if isinstance(node, Tied):
            return [Cell(f"= {visible(node.stored)}", "dim"), Cell(""), Cell(""), Cell("")]
        if isinstance(node, Tensor):
            t = self.tensors[node.name]
            return [
                Cell(shape_text(t.shape), "cyan"),
                Cell(t.dtype.name, "green"),
                Cell(f"{'' if times == 1 else f'{times:,} × '}{file_size(t.nbytes)}", right=True),
                Cell(
                    f"{self._spec(t.layout)} "
                    f"{'' if t.base is None else f'in {visible(t.base.base.url)}'}".strip(),
                    "magenta",
                ),
            ]
        kind, value = leaf_text(node)
        return [Cell(visible(f"{value}  {kind}".strip()), "yellow"), Cell(""), Cell(""), Cell("")]

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


def _inside(entry: OutlineEntry, times: int) -> str:
    """Summary of a container's or group's contents.

    Of one that repeats, of all that it stands for.
    """
    node = entry.node
    facts: list[str] = [node.form] if isinstance(node, Branch) and node.form != "dict" else []
    if isinstance(node, Branch) and not node.children:
        facts = [f"empty {node.form}"]
    if entry.tensors:
        outer = times // entry.repeats
        facts += [count(entry.tensors * outer, "tensor"), file_size(entry.nbytes * outer)]
    return ", ".join(facts)
