"""Details of one tensor, and a drawing of its layout."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from shardckpt.cli.info.picture import picture
from shardckpt.cli.screen import Cell, Screen
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.layout.text import mesh_text, op_sharding_text, spec_text
from shardckpt.reading.documents import without_secrets
from shardckpt.text import count, file_size, shape_text, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.format.structure import TensorRecord
    from shardckpt.reading.checkpoint import Checkpoint


def lines(screen: Screen, checkpoint: Checkpoint, name: str) -> Iterator[str]:
    """All facts about a tensor as text, and the drawing."""
    info = checkpoint.info(name)
    tensor = checkpoint.tensor(name)
    facts = [
        ("tensor", visible(name)),
        ("shape", shape_text(info.shape)),
        (
            "dtype",
            info.dtype.name + (f", stored as {info.dtype.storage}" if info.dtype.as_bits else ""),
        ),
        ("size", file_size(info.nbytes)),
        ("chunks", _chunks(tensor)),
    ]
    if info.base is not None:
        assert tensor.base is not None
        other = "" if tensor.base.name == tensor.name else f", as {visible(tensor.base.name)}"
        facts.append(
            ("lies in", f"{visible(info.base)} (attempt {tensor.base.base.attempt}){other}")
        )
    if isinstance(info.layout, Placements):
        facts += [("mesh", mesh_text(info.layout.mesh)), ("placements", spec_text(info.layout))]
    elif info.layout is not None:
        if isinstance(info.layout, Sharding):
            facts += [("mesh", mesh_text(info.layout.mesh)), ("spec", spec_text(info.layout))]
        facts.append(("OpSharding", op_sharding_text(info.layout, len(info.shape))))
    facts += [("tied to", visible(other)) for other in info.tied_names]
    if tensor.difference:
        facts.append(
            ("differs", f"chunks may be differences from those in {visible(checkpoint.bases()[0])}")
        )
    if checkpoint.has_stock_reader(name):
        facts.append(
            (
                "open with",
                visible(f"tensorstore.open({without_secrets(checkpoint.stock_spec(name))!r})"),
            )
        )
    yield from screen.rows(
        [
            [Cell(what, "dim"), Cell(value, "bold" if what == "tensor" else "")]
            for what, value in facts
        ],
        (10, 0),
    )
    yield ""
    if info.layout is None:
        yield "Saved as a plain tensor, from the host: no device held it."
    elif isinstance(info.layout, Placements):
        yield (
            "Cut unevenly, as DTensor does, into boxes of no common grid; each is stored as an "
            "array of its own."
        )
    else:
        yield from picture(screen, info.layout, info.shape)


def _chunks(tensor: TensorRecord) -> str:
    piece = tensor.pieces[0]
    size = prod(piece.chunks) * tensor.dtype.itemsize
    text = f"{count(tensor.num_chunks, 'chunk')} of {shape_text(piece.chunks)} ({file_size(size)})"
    return (
        text
        if len(tensor.pieces) == 1
        else f"{text}, in {len(tensor.pieces)} pieces, one per shard"
    )
