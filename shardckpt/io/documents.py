"""The `zarr.json` of every array of a checkpoint, with mesh, spec and OpSharding in its attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.io.zarr_meta import array_json

if TYPE_CHECKING:
    from shardckpt.structure import Structure

__all__ = ["zarr_documents"]

LONGEST_TEXT = 1 << 14
"""Characters of a sharding that an array's attributes repeat."""


def zarr_documents(structure: Structure, compression: str | None) -> dict[str, dict[str, Any]]:
    """Array path → document."""
    doc = structure.to_json()
    documents = {}
    for name, tensor in structure.tensors.items():
        entry = doc["tensors"][name]
        attribute: dict[str, Any] = {"name": name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)}
        if "sharding" in entry:
            sharding = doc["shardings"][entry["sharding"]]
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
            documents[piece.path] = array_json(piece.shape, tensor.dtype, piece.chunks, compression, {"shardckpt": {**attribute, **start}})
    return documents
