"""Layouts by tensor name, from another checkpoint or computed for each tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardckpt.errors import ShardingError
from shardckpt.layout.op_sharding import OpSharding
from shardckpt.layout.placements import Placements
from shardckpt.layout.sharding import Sharding
from shardckpt.state.names import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.format.structure import StoredLayout, Structure
    from shardckpt.layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Like:
    """Tensors with their layouts somewhere else."""

    tensors: tuple[tuple[str, tuple[int, ...] | None, StoredLayout | None], ...]
    """Name, shape (None: not known), layout (None: a plain host tensor)."""
    origin: str = field(default="the other checkpoint", compare=False)
    """Origin of the layouts, for messages."""
    _by_name: Mapping[str, tuple[tuple[int, ...] | None, StoredLayout | None]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Index the names."""
        object.__setattr__(
            self, "_by_name", {name: (shape, layout) for name, shape, layout in self.tensors}
        )

    @classmethod
    def of(cls, structure: Structure, origin: str = "the other checkpoint") -> Like:
        """The layouts of a checkpoint's tensors."""
        return cls(
            tuple(
                (name, tensor.shape, tensor.layout) for name, tensor in structure.tensors.items()
            ),
            origin,
        )

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def mesh(self) -> Mesh | None:
        """The common mesh of all layouts; None if there are several."""
        meshes = {
            layout.mesh
            for _, _, layout in self.tensors
            if isinstance(layout, Sharding | Placements)
        }
        return meshes.pop() if len(meshes) == 1 else None

    def layout(self, name: str, shape: tuple[int, ...], mesh: Mesh | None) -> StoredLayout | None:
        """The layout of one of the tensors, over the given mesh, or over its own.

        Raises:
            ShardingError: the layout does not fit the shape, or cannot be expressed over that mesh.
        """
        there, layout = self._by_name[name]
        if layout is None:
            return None
        if there is not None and len(shape) != len(there):
            raise ShardingError(
                f"{shown(name)} has shape {shape}, but {there} in {self.origin}, so that layout "
                "does not fit; give the tensor its own rule."
            )
        if mesh is None:
            return layout
        if isinstance(layout, OpSharding):
            return self._over_devices(name, layout, mesh, len(shape))
        if layout.mesh == mesh:
            return layout
        over = layout.as_sharding(shape) if isinstance(layout, Placements) else layout
        if over is None:
            assert isinstance(layout, Placements)
            raise ShardingError(
                f"{shown(name)}: its layout in {self.origin}, {layout.text}, is not a partition "
                "spec and fits no other mesh; give the tensor its own rule."
            )
        try:
            return Sharding(mesh, over.spec)
        except ShardingError as error:
            raise ShardingError(
                f"{shown(name)}: its layout in {self.origin} does not fit the mesh: {error}"
            ) from error

    def _over_devices(self, name: str, layout: OpSharding, mesh: Mesh, ndim: int) -> StoredLayout:
        """Translate a layout without axis names to an equivalent spec over the mesh.

        If there is no such spec, the layout itself is used over as many devices.
        """
        sharding = Sharding.infer(mesh, layout, ndim)
        if sharding is None and layout.num_devices != mesh.size:
            raise ShardingError(
                f"{shown(name)}: its layout in {self.origin} is over {layout.num_devices} devices "
                f"without named axes, but the mesh has {mesh.size} devices; give the tensor its "
                "own rule."
            )
        return layout if sharding is None else sharding
