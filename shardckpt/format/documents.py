"""The `zarr.json` of every array of a checkpoint, with mesh, spec and OpSharding in its attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.format.zarr_meta import array_json

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from shardckpt.format.structure import Structure

__all__ = ["zarr_documents"]

LONGEST_TEXT = 1 << 14
"""Characters of a sharding that an array's attributes repeat."""


def zarr_documents(structure: Structure, compression: str | None, *, in_bases: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each array's path and document.

    Args:
        structure: of the checkpoint.
        compression: of its own chunks.
        in_bases: also of tensors that lie in bases; a stock reader would find no chunks of those beside the documents.
    """
    number, doc = structure.layouts_json()
    forms: dict[Hashable, dict[str, Any]] = {}
    """Of arrays that differ in their attributes alone."""
    for name, tensor in structure.tensors.items():
        if tensor.base is not None and not in_bases:
            continue
        codec = compression if tensor.base is None else tensor.base.base.compression
        attribute: dict[str, Any] = {"name": name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)}
        if tensor.layout is not None:
            sharding = doc["shardings"][number[tensor.layout, len(tensor.shape)]]
            attribute |= {k: v for k, v in sharding.items() if k != "mesh"}
            if "mesh" in sharding:
                attribute["mesh"] = dict(doc["meshes"][sharding["mesh"]])
            listed = attribute.get("mesh", attribute).get("devices")
            if max(len(sharding.get("op_sharding", "")), 2 * len(listed) if isinstance(listed, list) else 0) > LONGEST_TEXT:
                # Ids that follow no pattern, of very many devices: the record has them once, not each array.
                for key in ("op_sharding", "devices"):
                    attribute.pop(key, None)
                attribute.get("mesh", {}).pop("devices", None)
        for piece in tensor.pieces:
            start = {} if piece.shape == tensor.shape else {"start": list(piece.start)}
            cut = (piece.shape, tensor.dtype.name, piece.chunks, codec)
            form = forms.get(cut)
            if form is None:
                form = forms[cut] = array_json(piece.shape, tensor.dtype, piece.chunks, codec)
            yield piece.path, {**form, "attributes": {"shardckpt": {**attribute, **start}}}
