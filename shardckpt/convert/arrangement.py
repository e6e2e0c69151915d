"""Where in the new checkpoint does each tensor of a foreign one go?

An `Arrangement` is the structure that is resharded, and for each of its tensors the foreign one that it is. Whatever names tensors
otherwise makes one of another; how they are laid out and stored is the reshard's to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt
from shardckpt.reshard.targets import renamed
from shardckpt.structure import Structure, TensorRecord
from shardckpt.tree import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Arrangement", "check_into"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The structure of the new checkpoint, and what it is made of."""

    structure: Structure
    """With tensors in the pieces and chunks of the foreign ones."""
    origins: Mapping[str, TensorRecord]
    """By name there, the tensor of the foreign checkpoint."""

    @classmethod
    def of(cls, structure: Structure) -> Arrangement:
        """Everything where it is."""
        return cls(structure, structure.tensors)

    def below(self, into: str) -> Arrangement:
        """The whole state as a value of nested dicts.

        Args:
            into: their keys, from the outermost one on, with slashes between.

        Raises:
            OptionError: that is no name.
        """
        check_into(into)
        state = unflatten(self.structure.tree, self.structure.tensors)
        for key in reversed(into.split("/")):
            state = {key: state}
        flat = flatten(state, lambda value: isinstance(value, TensorRecord), id)
        tensors = {name: renamed(tensor, name, tensor.dtype) for name, tensor in flat.tensors.items()}
        return Arrangement(Structure(flat.tree, tensors), {name: self.origins[tensor.name] for name, tensor in flat.tensors.items()})


def check_into(into: object) -> None:
    """Raise OptionError unless that is a place in the state."""
    if not isinstance(into, str) or not all(into.split("/")):
        raise OptionError(f'into={excerpt(into)}: give keys with slashes between, as in "model".')
