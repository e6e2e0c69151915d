"""JSON documents about checkpoints, for programs; docs/json.md describes their keys.

Cost is linear in the number of leaves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardckpt.errors import NamesMismatchError
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.text import layout_text
from shardckpt.reading.inspection.words import leaf_text, parameter_counts, walk_nodes
from shardckpt.state.document import Branch, Node, Tensor, Tied, leaves_of
from shardckpt.state.names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.compare import Change, Comparison
    from shardckpt.reading.compare_values import ValueChange


def find_node(checkpoint: Checkpoint, name: str | None) -> Node:
    """The node with a name in the tree; None: the root.

    Raises:
        NamesMismatchError: No node has the name.
    """
    if name is None:
        return checkpoint.parsed_tree
    names = []
    for node in walk_nodes(checkpoint.parsed_tree):
        if node.name == name:
            return node
        names.append(node.name)
    raise NamesMismatchError(
        f"{checkpoint.location}: no tensor, leaf or container "
        f"{name!r}{did_you_mean(name, names)}; `info` without a name lists all."
    )


def choose_nodes(node: Node, selects: Callable[[str], bool]) -> Node | None:
    """The node without its unselected leaves, and without containers that held only those.

    None if nothing is left.
    """
    if not isinstance(node, Branch):
        return node if selects(node.name) else None
    if not node.children:
        return node if selects(node.name) else None
    kept = [
        (key, chosen)
        for key, child in zip(node.keys, node.children, strict=True)
        if (chosen := choose_nodes(child, selects)) is not None
    ]
    return (
        replace(node, keys=[key for key, _ in kept], children=[child for _, child in kept])
        if kept
        else None
    )


def checkpoint_json(checkpoint: Checkpoint, node: Node) -> dict[str, Any]:
    """The checkpoint's facts, and the tensors and small leaves below `node`, as JSON."""
    record = checkpoint.record
    structure = record.structure.to_json()
    tensors, leaves = [], []
    tied: dict[str, list[str]] = {}
    for leaf in leaves_of(node):
        if isinstance(leaf, Tied):
            tied.setdefault(leaf.stored, []).append(leaf.name)
        elif isinstance(leaf, Tensor):
            t = record.structure.tensors[leaf.name]
            tensors.append(
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "dtype": t.dtype.name,
                    "bytes": t.nbytes,
                    "chunk_shape": list(t.pieces[0].chunks),
                    "chunks": t.num_chunks,
                    "pieces": len(t.pieces),
                    "sharding": structure["tensors"][t.name].get("sharding"),
                    "base": structure["tensors"][t.name].get("base"),
                    "difference": t.difference,
                    "tied": tied.setdefault(t.name, []),
                }
            )
        else:
            kind, value = leaf_text(leaf)
            leaves.append({"name": leaf.name, "kind": kind, "value": value})
    return {
        "url": str(checkpoint.location),
        "format": checkpoint.format,
        "attempt": record.attempt,
        "created": record.created,
        "writer": record.writer,
        "layout": record.layout,
        "compression": record.compression,
        "hosts": len(record.hosts),
        "processes": record.processes,
        "parameters": parameter_counts(record.structure.tensors.values()),
        "totals": dict(record.totals),
        "metadata": record.metadata,
        "notes": list(checkpoint.notes),
        "bases": structure.get("bases", []),
        "meshes": structure["meshes"],
        "shardings": structure["shardings"],
        "tensors": tensors,
        "leaves": leaves,
    }


def tensor_json(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """All facts about a tensor, as JSON."""
    info = checkpoint.info(name)
    tensor = checkpoint.tensor(name)
    doc: dict[str, Any] = {
        "url": str(checkpoint.location),
        "name": name,
        "shape": list(info.shape),
        "dtype": info.dtype.name,
        "stored_dtype": info.dtype.storage.name,
        "bytes": info.nbytes,
        "chunk_shape": list(info.chunks),
        "chunks": info.num_chunks,
        "pieces": [
            {"start": list(piece.start), "shape": list(piece.shape)} for piece in tensor.pieces
        ],
        "mesh": None,
        "spec": None,
        "placements": None,
        "op_sharding": None,
        "tied": list(info.tied_names),
        "base": info.base,
        "difference": tensor.difference,
        "tensorstore": without_secrets(checkpoint.stock_spec(name))
        if checkpoint.has_stock_reader(name)
        else None,
    }
    if isinstance(info.layout, Sharding):
        doc["mesh"], doc["spec"] = info.layout.mesh.to_json(), info.layout.spec.to_json()
    if isinstance(info.layout, Placements):
        doc["mesh"], doc["placements"] = (
            info.layout.mesh.to_json(),
            list(map(str, info.layout.placements)),
        )
    elif info.layout is not None:
        op_sharding = (
            info.layout.op_sharding(len(info.shape))
            if isinstance(info.layout, Sharding)
            else info.layout
        )
        doc["op_sharding"] = op_sharding.to_hlo()
    return doc


def without_secrets(spec: Any) -> Any:
    """A spec of TensorStore to show: headers, which may have a token, only by name."""
    if isinstance(spec, dict):
        return {
            key: [f"{header.partition(':')[0]}: …" for header in value]
            if key == "headers"
            else without_secrets(value)
            for key, value in spec.items()
        }
    return spec


def comparison_json(comparison: Comparison, *, structure: bool, layout: bool) -> dict[str, Any]:
    """All differences between two checkpoints, as JSON."""
    return {
        "equal": comparison.equal(layout=layout),
        "only_a": list(comparison.only_a),
        "only_b": list(comparison.only_b),
        "changes": [_change_document(change) for change in comparison.changes],
        "layouts": [_change_document(change) for change in comparison.layouts],
        "values": None if structure else [_value_document(value) for value in comparison.values],
        "tensors_compared": comparison.tensors_compared,
        "bytes_compared": comparison.bytes_compared,
    }


def _change_document(change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "aspect": change.aspect,
        "a": _side_document(change.a),
        "b": _side_document(change.b),
    }


def _side_document(side: Any) -> object:
    if isinstance(side, tuple):
        return list(side)
    return side if side is None or isinstance(side, str) else layout_text(side)


def _value_document(value: ValueChange) -> dict[str, Any]:
    finite = value.largest is None or math.isfinite(value.largest)
    return {
        "name": value.name,
        "differing": value.differing,
        "elements": value.size,
        "largest": value.largest if finite else "inf",  # JSON has no infinity
        "nans": value.nans,
        "first": list(value.first),
        "relative": value.relative,
    }
