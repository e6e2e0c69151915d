"""Check that shardckpt's own reader of a format finds each tensor of an exported state.

Each tensor must be at its place, and there must be no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.convert.foreign import ForeignPart, ForeignTensor, structure_and_tensors
from shardckpt.convert.nested import nested
from shardckpt.errors import StructureMismatchError
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.format.structure import Structure, TensorRecord

Path = tuple[str | int, ...]
"""The keys that lead to a leaf: texts in dicts, ints in lists."""


def check_tree(
    leaves: Iterable[tuple[Path, TensorRecord | None]], read_back: Structure, where: str
) -> None:
    """Compare the written leaves with the structure that a reader finds.

    Args:
        leaves: path and tensor of all written leaves, in any order; None for a leaf that is not a
            tensor.
        read_back: the reader's structure.
        where: location of the export, for messages.

    Raises:
        StructureMismatchError: a tensor is missing, differs, or was never written; the message
            names it.
    """
    paths: dict[str, Path] = {}
    values: dict[str, ForeignTensor | None] = {}
    for number, (path, tensor) in enumerate(leaves):
        paths[str(number)] = path
        values[str(number)] = None if tensor is None else _placeholder(tensor)
    structure, _ = structure_and_tensors(nested(values, paths, (), where), where)
    written = _describe(structure.tensors)
    present = _describe(read_back.tensors)
    odd = next(
        (name for name in [*written, *present] if written.get(name) != present.get(name)), None
    )
    if odd is not None:
        before, after = written.get(odd, "no tensor"), present.get(odd, "no tensor")
        raise StructureMismatchError(
            f"{where}: {shown(odd)} was written as {before}, but reads back as {after}; nothing "
            "was published. Export another format, or leave it out (exclude)."
        )


def _placeholder(tensor: TensorRecord) -> ForeignTensor:
    return ForeignTensor(tensor.shape, tensor.dtype, (ForeignPart.whole(tensor.shape),))


def _describe(tensors: Mapping[str, TensorRecord]) -> dict[str, str]:
    return {name: f"{tensor.dtype} of shape {tensor.shape}" for name, tensor in tensors.items()}
