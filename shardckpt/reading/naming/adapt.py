"""A restore's changes between a checkpoint and `like`: names, joined or split tensors, sizes.

1. `rename` moves the leaves of the stored tree to other places. They keep their stored names:
   patterns, messages and reads go by these.
2. `mapping` replaces tensors of the tree by others that are made of them (`MadeTensor`). Such a
   tensor has the name of its place.
3. `fit` allows a tensor another size in `like`. A `Landing` reads what both have, and makes the
   rest zero.

The tensors of a model and their optimizer's state belong together.
`training.optimizer_state.moments` makes the state follow.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardckpt.errors import NamesMismatchError, OptionError, ShapeMismatchError
from shardckpt.frameworks.base import whole
from shardckpt.options import check_flag
from shardckpt.plan.views import View
from shardckpt.reading.locate import Request
from shardckpt.reading.naming.mapping import TensorMapping, refuse_unused
from shardckpt.reading.naming.mapping_file import read_mapping
from shardckpt.reading.naming.renaming import rename as renamed_by
from shardckpt.reading.naming.substitution import parse_substitutions
from shardckpt.reading.read_list import MadeTensor
from shardckpt.state.document import Branch, Tensor, Tied, leaves_of
from shardckpt.state.moving import End, ends_by_place, moved_tree
from shardckpt.state.names import child_name, component_names, shown
from shardckpt.state.select import Only, check_selection, selector
from shardckpt.text import few, shorten

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from shardckpt.format.structure import TensorRecord
    from shardckpt.frameworks.base import Sink
    from shardckpt.io.url import Location
    from shardckpt.reading.checkpoint import Checkpoint
    from shardckpt.reading.naming.mapping_rule import MappingRule
    from shardckpt.reading.naming.outputs import OutputTensor
    from shardckpt.state.document import Node

_log = logging.getLogger("shardckpt")
MOST_NOTES = 20
"""Most tensors with another name, shape or size that the log names."""
Fit = Literal["pad", "slice"]
"""Treatment of a tensor of another size: the rest becomes zero, or its first part is restored."""


class Adaptation:
    """The changes of one restore."""

    def __init__(
        self,
        *,
        rename: str | Sequence[str],
        mapping: str | os.PathLike[str] | TensorMapping | None,
        invert_mapping: bool,
        fit: Mapping[str, Fit] | None,
    ) -> None:
        """Take the options; `begin` checks them."""
        self._rename, self._given, self._inverts, self._fit = rename, mapping, invert_mapping, fit
        self.places: dict[str, str] = {}
        """Stored name of each leaf, or name of a made tensor → its place in `like`."""
        self.at: dict[str, str] = {}
        """Place in `like` → the name under which the tensor there is stored, or name of a made
        tensor."""
        self.made: dict[str, MadeTensor] = {}
        """Tensors that the mapping made, by their names."""
        self.stored: dict[str, str] = {}
        """Place in the stored state → the name under which the tensor there is stored."""
        self.moved: dict[str, str] = {}
        """Place in the stored state → place in `like`, for the leaves that are left after the
        renaming and are not joined or split."""
        self._names: set[str] = set()
        """Names of the stored state's tensors and leaves, and of the made ones."""
        self._titles: dict[str, str] = {}
        """Names of made leaves → their places."""
        self._made_names: dict[object, str] = {}
        """Shape, dtype and sources of an output of the mapping → the name of the made tensor."""
        self._modes: dict[str, Fit] = {}
        """Tensors that are fitted because another one is, by stored name."""
        self._fitted: dict[str, str] = {}
        self._restored: set[str] = set()

    def begin(self, checkpoint: Checkpoint, like: object, only: Only | None) -> None:
        """Read and check the options.

        Args:
            checkpoint: the source.
            like: the destination, or None.
            only: the names to restore; others give way where one of these takes their place.

        Raises:
            OptionError: one is invalid, or the file of the mapping cannot be read.
        """
        self._checkpoint = checkpoint
        self._selects = selector(only)
        self._rules = parse_substitutions(self._rename)
        check_flag(self._inverts, "invert_mapping")
        mapping = self._given
        if mapping is None and self._inverts:
            raise OptionError("invert_mapping=True: there is no mapping; give mapping=.")
        mapping = (
            TensorMapping()
            if mapping is None
            else mapping
            if isinstance(mapping, TensorMapping)
            else read_mapping(mapping)
        )
        self._mapping = mapping.inverse() if self._inverts else mapping
        fits = self._fit.items() if isinstance(self._fit, Mapping) else []
        wrong = any(
            not isinstance(pattern, str) or mode not in ("pad", "slice") for pattern, mode in fits
        )
        if wrong or not isinstance(self._fit, Mapping | None):
            raise OptionError(
                f'fit={shorten(self._fit)}: give patterns of names with "pad" or "slice", as in '
                'fit={"**/embed.weight": "pad"}.'
            )
        if self._fit and like is None:
            raise OptionError(
                f"fit={shorten(self._fit)}: without `like` nothing has another size; give `like`, "
                "or leave fit= out."
            )
        self._patterns = [
            (pattern, selector(pattern), mode) for pattern, mode in (self._fit or {}).items()
        ]

    def tensor(self, name: str) -> TensorRecord:
        """The record of a stored or made tensor."""
        return self.made[name] if name in self.made else self._checkpoint.tensor(name)

    # --- names and made tensors

    def rearranged(
        self, tree: Node, apart: Collection[str] = (), modules: Sequence[str] | None = None
    ) -> Branch:
        """A stored state with the places and the tensors of `like`.

        Args:
            tree: the stored state, as this process has it.
            apart: keys of it whose contents stay as they are, because they follow others.
            modules: keys of it in which the mapping applies, to the names inside of them. None: to
                the complete names.

        Raises:
            OptionError: a rule matches nothing.
            NamesMismatchError: two leaves would have one place, or a part of a tensor is missing.
            ShapeMismatchError, DtypeMismatchError: tensors do not fit a rule.
        """
        old = ends_by_place(tree)
        own = {place: place for place in old if place.partition("/")[0] not in apart}
        self._names = {
            *self._checkpoint.record.structure.tensors,
            *(leaf.name for leaf in leaves_of(tree)),
        }
        self.stored = {
            place: end.node.stored
            for place, end in old.items()
            if isinstance(end.node, Tensor | Tied)
        }
        self.moved = renamed_by(own, self._rules, partial(self._give_way, old))
        present = {
            self.moved.get(place, place): end
            for place, end in old.items()
            if place not in own or place in self.moved
        }
        if self._mapping.rules:
            present = (
                self._map(present, "") if modules is None else self._map_modules(present, modules)
            )
        return moved_tree(tree, present.items())

    def _give_way(self, ends: Mapping[str, End], moved: Mapping[str, str]) -> dict[str, str]:
        """The moves, except of unrestored leaves whose place another leaf takes."""
        selected = {
            place
            for place, end in ends.items()
            if any(self._selects(leaf.name) for leaf in (end.node, *leaves_of(end.node)))
        }
        claimed = {new for place, new in moved.items() if place in selected}
        above = {parent for new in claimed for parent in _parents(new)}
        return {
            place: new
            for place, new in moved.items()
            if place in selected
            or not (
                new in claimed or new in above or any(parent in claimed for parent in _parents(new))
            )
        }

    def _map_modules(self, present: dict[str, End], modules: Sequence[str]) -> dict[str, End]:
        """The contents of the state after the mapping in each module; a rule must match in one."""
        prefixes = tuple(f"{key}/" for key in modules)
        names = [place.partition("/")[2] for place in present if place.startswith(prefixes)]
        applied: set[MappingRule] = set()
        for prefix in prefixes:
            present = self._map(present, prefix, applied)
        for rule in self._mapping.rules:
            if names and not rule.optional and rule not in applied:
                refuse_unused(rule, names)
        return present

    def _map(
        self, present: dict[str, End], prefix: str, applied: set[MappingRule] | None = None
    ) -> dict[str, End]:
        """The contents of the state after the mapping of the names with a prefix."""
        inside = {
            place.removeprefix(prefix): self._checkpoint.tensor(end.node.stored)
            for place, end in present.items()
            if place.startswith(prefix) and isinstance(end.node, Tensor | Tied)
        }
        first = {record.name: prefix + name for name, record in reversed(inside.items())}
        outputs: dict[str, End] = {}
        moves: dict[str, str] = {}
        for output in self._mapping.outputs(inside, applied=applied):
            place, sources = prefix + output.name, [view.tensor for view in output.sources]
            own = output.name in inside and (not sources or inside[output.name].name in sources)
            before = place if own else first.get(sources[0], "") if sources else ""
            outputs[place] = present.get(before, End(Tensor(place)))
            if sources and output.sources == (
                View.whole(sources[0], self._checkpoint.tensor(sources[0]).shape),
            ):
                moves.setdefault(before, place)  # of a tied tensor the first name
            else:
                outputs[place] = End(self._made_leaf(place, output), outputs[place].path)
        for old, place in list(self.moved.items()):
            if place in moves:
                self.moved[old] = moves[place]
            elif place.startswith(prefix) and place.removeprefix(prefix) in inside:
                del self.moved[old]
        kept = {
            place: end
            for place, end in present.items()
            if not (place.startswith(prefix) and place.removeprefix(prefix) in inside)
        }
        clash = next((place for place in outputs if place in kept), None)
        if clash is not None:
            raise NamesMismatchError(
                f"mapping: {shown(clash)} is the name of a leaf that is not a tensor; choose "
                "another name."
            )
        return {**outputs, **kept}

    def _made_leaf(self, place: str, output: OutputTensor) -> Tensor | Tied:
        """The leaf of an output: of several that are equal, all but the first are tied to it."""
        if not output.sources:  # of such tensors, each is stored by itself
            return Tensor(self.make(place, output))
        key = output.shape, output.dtype, output.sources
        if key in self._made_names:
            return Tied(self._unused_name(place), self._made_names[key])
        self._made_names[key] = self.make(place, output)
        return Tensor(self._made_names[key])

    def make(self, place: str, output: OutputTensor) -> str:
        """Add a tensor that is made of stored ones.

        Return its name, which is its place unless another leaf has this name.
        """
        name = self._unused_name(place)
        sources = tuple((view, self._checkpoint.tensor(view.tensor)) for view in output.sources)
        pieces = tuple(piece for view, record in sources for piece in view.pieces(record.pieces))
        self.made[name] = MadeTensor(
            name, output.shape, output.dtype, None, pieces, sources=sources
        )
        return name

    def _unused_name(self, place: str) -> str:
        """A name for a new leaf at a place: its place, unless another leaf has this name."""
        name = place
        while name in self._names:
            name += "'"
        self._names.add(name)
        self.places[name] = self._titles[name] = place
        return name

    def title(self, name: str) -> str:
        """The name of a leaf for users: the place of a made one, and otherwise its name."""
        return self._titles.get(name, name)

    def selects(self, name: str) -> bool:
        """Whether a leaf is restored; `only` selects it by its title."""
        return self._selects(self.title(name))

    def renamed(self, place: str) -> str:
        """The new place of anything in the stored state, whether or not the state has it."""
        if place in self.moved:
            return self.moved[place]
        for rule in self._rules:
            place = rule.of(place) or place
        return place

    def settle(self, tree: Node, only: Only | None, *, each: bool) -> Node:
        """Note the places of the state that is restored, and return it.

        Args:
            tree: the state.
            only: the names to restore.
            each: whether each of their patterns must select a name.

        Raises:
            OptionError: a pattern of `fit` matches no tensor.
            NamesMismatchError: patterns of `only` select nothing.
        """
        if only is not None:
            where = str(self._checkpoint.location)
            check_selection(only, tree, where, each=each, title=self.title)
        known: set[str] = set()
        for place, end in ends_by_place(tree).items():
            self._note_place(place, end.node)
            if isinstance(end.node, Tensor | Tied):
                self.at[place] = end.node.stored
            if isinstance(end.node, Tensor | Tied | Branch):
                known |= {place, end.node.name}
        for pattern, selects, _ in self._patterns:
            if not any(map(selects, known)):
                raise OptionError(
                    f"fit={{{pattern!r}: …}}: it matches none of the tensors, which are "
                    f"{few(sorted(known), 3)}; correct it."
                )
        return tree

    def _note_place(self, place: str, node: Node) -> None:
        if isinstance(node, Branch):
            for component, part in zip(component_names(node.keys), node.children, strict=True):
                self._note_place(child_name(place, component), part)
        else:
            self.places[node.name] = place

    def elements(self, names: Sequence[str]) -> list[np.ndarray[Any, Any]]:
        """Read some small tensors, all with one call."""
        records = [self.tensor(name) for name in names]
        arrays = [np.empty(record.shape, record.dtype.storage) for record in records]
        requests = [
            Request.of(record, whole(record.shape), [array][: len(whole(record.shape))])
            for record, array in zip(records, arrays, strict=True)
        ]
        with self._checkpoint.reading():
            self._checkpoint.reader.read(requests)
        return arrays

    # --- sizes

    def mode(self, name: str) -> Fit | None:
        """Treatment of a tensor of another size.

        The first pattern that matches its stored name or its place decides.
        """
        names = (name, self.places.get(name, name))
        asked = next(
            (mode for _, selects, mode in self._patterns if any(map(selects, names))), None
        )
        return self._modes.get(name) if asked is None else asked

    def record_for(self, record: TensorRecord, own: Any) -> TensorRecord:
        """The record of a tensor, with the shape of an object's own tensor if fitted to that."""
        shape = getattr(own, "shape", None)
        return (
            record
            if shape is None or self.mode(record.name) is None
            else replace(record, shape=tuple(shape))
        )

    @property
    def changes_tensors(self) -> bool:
        """Whether tensors are made, or may be fitted; otherwise only names change."""
        return bool(self.made or self._patterns)

    def fit_like(self, name: str, mode: Fit) -> None:
        """Fit a tensor as another one that it belongs to."""
        self._modes[name] = mode

    def fits(self, name: str, tensor: TensorRecord, sink: Sink) -> bool:
        """Whether a tensor may be restored into a sink of another shape.

        Raises:
            ShapeMismatchError: the shapes do not fit as it was asked for.
        """
        mode = self.mode(name) or self.mode(tensor.name)
        if mode is None or getattr(sink, "word_dims", None):
            return False
        pairs = list(zip(tensor.shape, sink.shape, strict=False))
        right = all(a <= b for a, b in pairs) if mode == "pad" else all(a >= b for a, b in pairs)
        if not right or len(tensor.shape) != len(sink.shape):
            needs = (
                "no dimension may be smaller in `like`"
                if mode == "pad"
                else "no dimension may be larger in `like`"
            )
            raise ShapeMismatchError(
                f"{self.title(name)}: {self._checkpoint.location} has shape {tensor.shape}, the "
                f"leaf to restore into has {sink.shape}, and fit= says {mode!r}: {needs}, and both "
                "must have as many dimensions. Make them fit, or leave the tensor out with only=."
            )
        if mode == "pad" and complex(np.zeros((), np.float32).astype(sink.dtype.numpy)) != 0:
            raise ShapeMismatchError(
                f"{self.title(name)}: {sink.dtype.name} has no zero to fill the rest with; "
                "restore it as another dtype."
            )
        self._fitted[name] = f"{tensor.shape} → {sink.shape}, {mode}"
        return True

    # --- the report

    def restored(self, names: Iterable[str]) -> None:
        """Note the names that were restored."""
        self._restored.update(names)

    def log_notes(self, location: Location) -> None:
        """Log the lines of `notes`, if there are any, for the checkpoint at a location."""
        if notes := self.notes():
            more = f"\n… and {len(notes) - MOST_NOTES} more" if len(notes) > MOST_NOTES else ""
            _log.warning("%s: restore(): %s%s", location, "\n".join(notes[:MOST_NOTES]), more)

    def notes(self) -> list[str]:
        """A line per tensor that was restored under another name or size, or made of others."""
        return list(self._notes())

    def _notes(self) -> Iterator[str]:
        for name, place in self.places.items():
            if name not in self._restored:
                continue
            says = []
            made = self.made.get(self.at.get(place, name))
            if made is not None:
                parts = list(dict.fromkeys(record.name for _, record in made.sources))
                says.append(f"{made.shape} made of {few(parts, 3)}")
            elif name != place:
                says.append(f"restored as {shown(place)}")
            if name in self._fitted:
                says.append(self._fitted[name])
            if says:
                yield f"{shown(self.title(name))}: {'; '.join(says)}"

    def expected(self, recorded: Mapping[str, str]) -> dict[str, str]:
        """Recorded fingerprints, by place in `like`, of tensors that are restored as stored."""
        return {
            self.places[name]: digest
            for name, digest in recorded.items()
            if name in self.places and name not in self._fitted
        }


def _parents(place: str) -> list[str]:
    """The places of the containers around a place."""
    components = place.split("/")
    return ["/".join(components[:depth]) for depth in range(1, len(components))]
