"""Arrays of which processes hold parts, as a framework would have them, without one.

Every process has the whole array.

Importing this makes `Held` a tensor leaf. What a save makes of it is what it makes of a DTensor
(`over`), or of a tensor that speaks the protocol of torch.distributed.checkpoint (`own_rows`).
"""

import sys
from dataclasses import dataclass

import numpy as np

from shardckpt import frameworks
from shardckpt.frameworks.base import HostSource
from shardckpt.layout.box import Box, BoxArray
from shardckpt.layout.dtypes import of_numpy
from shardckpt.layout.mesh import Mesh
from shardckpt.layout.placements import Placements


@dataclass(eq=False)
class Held:
    """An array, and the parts of it that one process holds."""

    array: np.ndarray
    """All of it, whatever is held."""
    boxes: BoxArray
    holders: list
    layout: object = None
    own_pieces: bool = False


def over(mesh, texts, array, rank):
    """An array laid out by DTensor's placements over a mesh of ranks."""
    placements = Placements.of(
        mesh if isinstance(mesh, Mesh) else Mesh(mesh, tuple(f"dim{d}" for d in range(len(mesh)))),
        texts,
    )
    boxes = placements.rank_boxes(array.shape, rank)
    return Held(
        array,
        boxes,
        [placements.holders(rank)] * len(boxes),
        placements.as_sharding(array.shape) or placements,
    )


def own_rows(array, spans, process):
    """An array of which the process knows these rows, and no other process's."""
    boxes = [Box((a, *(0,) * (array.ndim - 1)), (b, *array.shape[1:])) for a, b in spans]
    return Held(array, BoxArray.of(boxes, array.ndim), [(process,)] * len(boxes), own_pieces=True)


@dataclass
class HeldSource(HostSource):
    """A `Held` to be saved."""

    name: str
    held: Held
    staged_bytes: int = 0

    def __getattr__(self, attribute):
        return getattr(self.held, attribute)

    @property
    def own_pieces(self):
        return self.held.own_pieces

    @property
    def shape(self):
        return self.held.array.shape

    @property
    def dtype(self):
        return of_numpy(self.held.array.dtype)

    @classmethod
    def fetch(cls, sources, positions):
        return [
            [source.held.array[source.held.boxes[i].slices] for i in boxes]
            for source, boxes in zip(sources, positions, strict=True)
        ]


# --- the adapter ----------------------------------------------------------------------------------


def matches(leaf):
    return isinstance(leaf, Held)


def accepts(_leaf):
    return False


def identity(leaf):
    return "held", id(leaf.array)


def sources(leaves, _world):
    return {name: HeldSource(name, leaf) for name, leaf in leaves.items()}


frameworks._ADAPTERS["held"] = "shardckpt.frameworks.held"
sys.modules["shardckpt.frameworks.held"] = sys.modules[__name__]
