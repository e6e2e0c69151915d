"""The place in the new checkpoint of each tensor of a foreign one.

An `Arrangement` is the structure that is resharded, with the views of foreign tensors from which
each of its tensors is made. The reshard decides how tensors are laid out over devices and stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardckpt.convert.naming.apply import outputs_of
from shardckpt.convert.naming.renamed_state import end_names, renamed_state
from shardckpt.convert.options import NameOptions
from shardckpt.errors import OptionError
from shardckpt.format.structure import Structure, TensorRecord
from shardckpt.plan.views import View
from shardckpt.reshard.targets import renamed
from shardckpt.state import flatten, meanings, unflatten
from shardckpt.state.names import array_path, piece_path, shown
from shardckpt.text import Message, named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.reading.naming.outputs import OutputTensor


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The structure of the new checkpoint, and the foreign elements from which it is made."""

    structure: Structure
    """Structure of the new checkpoint; pieces and chunks of tensors are as they lie in the foreign
    checkpoint."""
    views: Mapping[str, tuple[View, ...]]
    """New tensor name → the views of foreign tensors from which the tensor is made."""
    notes: tuple[str, ...] = ()
    """Messages about changes to names, a line each."""
    is_unchanged: bool = False
    """Whether every tensor is the foreign one of the same name."""

    @classmethod
    def of(cls, structure: Structure) -> Arrangement:
        """The arrangement that keeps every tensor under its name."""
        views = {
            name: (View.whole(name, tensor.shape),) for name, tensor in structure.tensors.items()
        }
        return cls(structure, views, is_unchanged=True)

    @classmethod
    def named(
        cls, structure: Structure, options: NameOptions, where: str, config: object = None
    ) -> Arrangement:
        """The arrangement in which options choose, name and make the tensors.

        The options also choose and name the other leaves.

        Args:
            structure: structure of the foreign checkpoint.
            options: selection and naming of its tensors.
            where: location of the foreign checkpoint, for messages.
            config: the model's configuration, if it has one.

        Raises:
            OptionError, NamesMismatchError, ShapeMismatchError, DtypeMismatchError: as in
                `outputs_of`; or a tensor would have the place of another leaf.
        """
        if options == NameOptions():
            return cls.of(structure)
        outputs = outputs_of(structure, options, where, importing=True, config=config)
        made = {output.name: output for output in outputs.tensors}
        made |= {name: made[first] for name, first in outputs.tied.items()}
        leaves = {
            name: outputs.renamed[name]
            for name in end_names(structure.tree)
            if name in outputs.renamed
        }
        origins = {new: old for old, new in outputs.renamed.items() if old not in leaves}
        state = renamed_state(structure.tree, made, leaves, origins)
        known = meanings(structure.tree)
        meaning = {
            id(output): _meaning(output, structure.tensors, known) for output in outputs.tensors
        }
        flat = flatten(
            state, lambda value: id(value) in meaning, id, lambda value: meaning[id(value)]
        )
        tensors = {
            name: _record(name, output, structure.tensors) for name, output in flat.tensors.items()
        }
        views = {name: output.sources for name, output in flat.tensors.items()}
        return cls(Structure(flat.tree, tensors), views, outputs.notes)

    def below(self, into: str) -> Arrangement:
        """The same arrangement with the complete state nested in dicts.

        Args:
            into: keys of these dicts, from the outermost one on, with slashes between.

        Raises:
            OptionError: `into` is not such a name.
        """
        check_into(into)
        state = unflatten(self.structure.tree, self.structure.tensors)
        known = meanings(self.structure.tree)
        meaning = {id(tensor): known.get(name) for name, tensor in self.structure.tensors.items()}
        for key in reversed(into.split("/")):
            state = {key: state}
        flat = flatten(
            state,
            lambda value: isinstance(value, TensorRecord),
            id,
            lambda tensor: meaning[id(tensor)],
        )
        tensors = {
            name: renamed(tensor, name, tensor.dtype) for name, tensor in flat.tensors.items()
        }
        views = {name: self.views[tensor.name] for name, tensor in flat.tensors.items()}
        return replace(
            self, structure=Structure(flat.tree, tensors), views=views, is_unchanged=False
        )


def is_whole(views: tuple[View, ...], tensors: Mapping[str, TensorRecord]) -> bool:
    """Whether views are one complete tensor, unchanged."""
    if len(views) != 1:
        return False
    (view,), shape = views, tensors[views[0].tensor].shape
    return (
        view.box.stop == shape
        and not any((*view.box.start, *view.start))
        and view.permutation == tuple(range(len(shape)))
    )


def _record(name: str, output: OutputTensor, tensors: Mapping[str, TensorRecord]) -> TensorRecord:
    """The record of a new tensor; it keeps the layout only of a complete foreign tensor."""
    if is_whole(output.sources, tensors):
        return renamed(tensors[output.sources[0].tensor], name, output.dtype)
    pieces = [
        piece for view in output.sources for piece in view.pieces(tensors[view.tensor].pieces)
    ]
    whole = len(pieces) == 1 and pieces[0].shape == output.shape
    paths = (
        [array_path(name)]
        if whole
        else [piece_path(name, output.shape, piece.start) for piece in pieces]
    )
    return TensorRecord(
        name,
        output.shape,
        output.dtype,
        None,
        tuple(replace(piece, path=path) for piece, path in zip(pieces, paths, strict=True)),
    )


def _meaning(
    output: OutputTensor, tensors: Mapping[str, TensorRecord], known: Mapping[str, str]
) -> str | None:
    """The meaning of an output's elements to a framework; None: plain numbers.

    Raises:
        OptionError: the output cuts or joins tensors, which loses the meaning.
    """
    meant = next((view.tensor for view in output.sources if view.tensor in known), None)
    if meant is None or is_whole(output.sources, tensors):
        return None if meant is None else known[meant]
    raise OptionError(
        f"{shown(output.name)}: the mapping cuts or joins {shown(meant)}, which holds "
        f"{known[meant]}, not plain numbers; leave it out of the rule."
    )


def check_into(into: object) -> None:
    """Raise OptionError unless `into` is a place in a state."""
    if not isinstance(into, str) or not all(into.split("/")):
        raise OptionError(
            Message(named("into", into), ': give keys joined by slashes, as in "model".')
        )
