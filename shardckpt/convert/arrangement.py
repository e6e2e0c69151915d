"""The place in the new checkpoint of each tensor of a foreign one.

An `Arrangement` is the structure that is resharded, and what each of its tensors is made of: views of the foreign ones. How they are
laid out over devices and stored is the reshard's to say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardckpt.convert.naming.choose import NameOptions, outputs_of
from shardckpt.convert.naming.renamed_state import end_names, renamed_state
from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.plan.views import View
from shardckpt.reshard.targets import renamed
from shardckpt.state import flatten, meanings, unflatten
from shardckpt.state.names import array_path, piece_path, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.convert.streaming.outputs import OutputTensor

__all__ = ["Arrangement", "check_into", "is_whole"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The structure of the new checkpoint, and what it is made of."""

    structure: Structure
    """With tensors in pieces and chunks as they lie in the foreign ones."""
    views: Mapping[str, tuple[View, ...]]
    """By name there, the elements of which foreign tensors it is made of."""
    notes: tuple[str, ...] = ()
    """What became of names, a line each."""

    @classmethod
    def of(cls, structure: Structure) -> Arrangement:
        """Everything where it is."""
        return cls(structure, {name: (View.whole(name, tensor.shape),) for name, tensor in structure.tensors.items()})

    @classmethod
    def named(cls, structure: Structure, options: NameOptions, where: str) -> Arrangement:
        """Tensors as options choose, name and make them; other leaves as options choose and name them.

        Args:
            structure: of the foreign checkpoint.
            options: what is wanted of it.
            where: its place, for messages.

        Raises:
            OptionError, NamesMismatchError, ShapeMismatchError, DtypeMismatchError: as in `outputs_of`; or a tensor would lie where
                another leaf does.
        """
        if options == NameOptions():
            return cls.of(structure)
        outputs = outputs_of(structure, options, where, importing=True)
        made = {output.name: output for output in outputs.tensors}
        made |= {name: made[first] for name, first in outputs.tied.items()}
        leaves = {name: outputs.renamed[name] for name in end_names(structure.tree) if name in outputs.renamed}
        origins = {new: old for old, new in outputs.renamed.items() if old not in leaves}
        state = renamed_state(structure.tree, made, leaves, origins)
        known = meanings(structure.tree)
        meaning = {id(output): _meaning(output, structure.tensors, known) for output in outputs.tensors}
        flat = flatten(state, lambda value: id(value) in meaning, id, lambda value: meaning[id(value)])
        tensors = {name: _record(name, output, structure.tensors) for name, output in flat.tensors.items()}
        views = {name: output.sources for name, output in flat.tensors.items()}
        return cls(Structure(flat.tree, tensors), views, outputs.notes)

    def below(self, into: str) -> Arrangement:
        """The whole state as a value of nested dicts.

        Args:
            into: their keys, from the outermost one on, with slashes between.

        Raises:
            OptionError: that is no name.
        """
        check_into(into)
        state = unflatten(self.structure.tree, self.structure.tensors)
        known = meanings(self.structure.tree)
        meaning = {id(tensor): known.get(name) for name, tensor in self.structure.tensors.items()}
        for key in reversed(into.split("/")):
            state = {key: state}
        flat = flatten(state, lambda value: isinstance(value, TensorRecord), id, lambda tensor: meaning[id(tensor)])
        tensors = {name: renamed(tensor, name, tensor.dtype) for name, tensor in flat.tensors.items()}
        views = {name: self.views[tensor.name] for name, tensor in flat.tensors.items()}
        return replace(self, structure=Structure(flat.tree, tensors), views=views)


def is_whole(views: tuple[View, ...], tensors: Mapping[str, TensorRecord]) -> bool:
    """Whether views are one tensor as it is."""
    if len(views) != 1:
        return False
    (view,), shape = views, tensors[views[0].tensor].shape
    return view.box.stop == shape and not any((*view.box.start, *view.start)) and view.permutation == tuple(range(len(shape)))


def _record(name: str, output: OutputTensor, tensors: Mapping[str, TensorRecord]) -> TensorRecord:
    """A tensor of the new structure: in the layout of the one that it is, or in none."""
    if is_whole(output.sources, tensors):
        return renamed(tensors[output.sources[0].tensor], name, output.dtype)
    pieces = [piece for view in output.sources for piece in view.pieces(tensors[view.tensor].pieces)]
    whole = len(pieces) == 1 and pieces[0].shape == output.shape
    paths = [array_path(name)] if whole else [piece_path(name, output.shape, piece.start) for piece in pieces]
    return TensorRecord(
        name, output.shape, output.dtype, None, tuple(replace(piece, path=path) for piece, path in zip(pieces, paths, strict=True))
    )


def _meaning(output: OutputTensor, tensors: Mapping[str, TensorRecord], known: Mapping[str, str]) -> str | None:
    """What its elements mean to a framework.

    Raises:
        OptionError: that is lost when tensors are cut, or joined.
    """
    meant = next((view.tensor for view in output.sources if view.tensor in known), None)
    if meant is None or is_whole(output.sources, tensors):
        return None if meant is None else known[meant]
    raise OptionError(
        f"{shown(output.name)}: the mapping takes {shown(meant)} for numbers, and it is {known[meant]}; leave it out of the rule."
    )


def check_into(into: object) -> None:
    """Raise OptionError unless that is a place in the state."""
    if not isinstance(into, str) or not all(into.split("/")):
        raise OptionError(f'into={excerpt(into)}: give keys with slashes between, as in "model".')
