"""Applying the name rules to a checkpoint: tensors to write, their names, sources and dtypes.

1. `include` and `exclude` select tensors, by their names in the source.
2. Names change: a prefix goes, `rename_file`, `rename` (`renaming`). For an export the keys of
   nested containers are joined with ".".
3. An export keeps one name of each tied tensor (`ties`).
4. `mapping` joins or splits tensors (`mapping`), and `add_prefix` is put in front of all names. An
   import applies the mapping to each name of a tied tensor: the outputs that stay the same tensor
   stay tied.
5. `dtype` converts, by the new names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardckpt.convert.naming.choose import read_naming
from shardckpt.convert.naming.renamed_state import end_names
from shardckpt.convert.naming.ties import first_names
from shardckpt.errors import NamesMismatchError
from shardckpt.reading.naming.renaming import dotted, rename
from shardckpt.reshard.dtype_rules import plan_dtypes
from shardckpt.reshard.optimizer_state import unrounded
from shardckpt.state import alias_map, leaf_names, meanings
from shardckpt.state.names import shown
from shardckpt.state.select import unused_patterns
from shardckpt.text import Message, few, given

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from typing import NoReturn

    from shardckpt.convert.options import NameOptions
    from shardckpt.format.structure import Structure
    from shardckpt.reading.naming.outputs import OutputTensor
    from shardckpt.reshard.dtype_rules import ConvertedSubtree


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tensors to write, with their names."""

    tensors: tuple[OutputTensor, ...]
    """In the order of the source state."""
    tied: Mapping[str, str]
    """Names that are not written → the output that is the same tensor."""
    notes: tuple[str, ...]
    """Messages about tensors that were left out or duplicated, a line each."""
    renamed: Mapping[str, str]
    """Selected name in the source → new name, before a mapping; for an import, small leaves are
    included."""
    conversions: tuple[ConvertedSubtree, ...]
    """Tensors that `dtype` converts and leaves, counted by subtree of the new names."""


def outputs_of(
    structure: Structure,
    options: NameOptions,
    where: str,
    *,
    importing: bool = False,
    config: object = None,
) -> Outputs:
    """The outputs of a checkpoint, shardckpt's or a foreign one.

    Args:
        structure: structure of the source.
        options: selection and naming.
        where: location of the checkpoint, for messages.
        importing: whether the new names belong to a state. Then "/" still separates its containers,
            its small leaves and empty containers are selected and renamed, too, and tied names stay
            tied.
        config: the model's configuration, as the checkpoint has it; None: it has none.

    Raises:
        OptionError: a file cannot be read, or a rule matches nothing.
        NamesMismatchError: nothing is selected, a part is missing, or two tensors would have one
            name.
        ShapeMismatchError, DtypeMismatchError: tensors do not fit a rule.
    """
    naming, tree = read_naming(options, config), structure.tree

    # Select.
    stored = {name: name for name in structure.tensors} | alias_map(tree)
    selected = [name for name in stored if naming.is_selected(name)]
    places = [*stored, *end_names(tree)]
    unused = given(
        include=unused_patterns(options.include, places, places),
        exclude=unused_patterns(options.exclude or None, places, places),
    )
    leaves = list(filter(naming.is_selected, end_names(tree) if importing else leaf_names(tree)))
    if unused or not (selected or (importing and (leaves or not places))):
        asked = unused or given(include=options.include, exclude=options.exclude)
        _refuse_selection(places if importing else list(stored), where, asked, importing)

    # Rename, and keep one name of each tied tensor.
    present = (
        {name: name for name in [*selected, *leaves]}
        if importing
        else {name: dotted(name) for name in selected}
    )
    renamed = rename(present, naming.renames)
    sources = {name: stored[old] for old, name in renamed.items() if old in stored}
    firsts = first_names(sources)
    kept = {
        name: structure.tensors[source]
        for name, source in sources.items()
        if naming.copy_ties or importing or name not in firsts
    }

    # Join, split and convert.
    prefix = naming.add_prefix
    left_out = {name: first for name, first in firsts.items() if name not in kept}
    mapped = naming.mapping.outputs(kept, left_out)
    copied = firsts if naming.copy_ties else {}
    if importing and firsts and not naming.copy_ties:
        left_out = _ties_of(mapped, {sources[name] for name in firsts})
        mapped = tuple(output for output in mapped if output.name not in left_out)
    outputs = {
        prefix + output.name: replace(output, name=prefix + output.name) if prefix else output
        for output in mapped
    }
    origins = {name: output.sources[0].tensor for name, output in outputs.items() if output.sources}
    meaning, left = meanings(tree), unrounded(structure) if naming.dtype else {}
    meant = {name: meaning[origin] for name, origin in origins.items() if origin in meaning}
    planned = plan_dtypes(
        outputs,
        naming.dtype,
        meant,
        {name: left[origin] for name, origin in origins.items() if origin in left},
    )

    tied = {prefix + name: prefix + first for name, first in left_out.items()}
    notes = [] if importing else list(_notes_of_leaves(leaves, meant))
    notes += [
        f"{shown(name)} is the same tensor as {shown(first)}, and is not written again."
        for name, first in ({} if importing else tied).items()
    ]
    notes += [
        f"{shown(prefix + name)} is the same tensor as {shown(prefix + first)}, and is written for "
        "itself."
        for name, first in copied.items()
    ]
    return Outputs(
        tensors=tuple(
            output
            if output.dtype == planned.dtypes[name]
            else replace(output, dtype=planned.dtypes[name])
            for name, output in outputs.items()
        ),
        tied={name: first for name, first in tied.items() if first in outputs},
        notes=tuple(notes),
        renamed={old: prefix + name if old in stored else name for old, name in renamed.items()},
        conversions=planned.subtrees,
    )


def _ties_of(outputs: Sequence[OutputTensor], tied: Collection[str]) -> dict[str, str]:
    """For each output that another one equals: the name of the one that is written.

    Args:
        outputs: all outputs.
        tied: the tensors in the source that have several names.
    """
    return first_names(
        {
            output.name: output.sources
            if any(view.tensor in tied for view in output.sources)
            else output.name
            for output in outputs
        }
    )


def _refuse_selection(names: list[str], where: str, asked: Message, importing: bool) -> NoReturn:
    if not names:
        lack = "is empty" if importing else "has no tensors, and such files hold only tensors"
        raise NamesMismatchError(f"{where}: it {lack}.")
    raise NamesMismatchError(
        Message(
            f"{where}: ",
            asked,
            f" selects none of its {len(names)} {'names' if importing else 'tensors'}, which are "
            f"{few(names)}.",
        )
    )


def _notes_of_leaves(leaves: Sequence[str], meant: Mapping[str, str]) -> Iterator[str]:
    """Notes of an export about leaves that are not tensors, and tensors whose meaning is lost."""
    if leaves:
        others = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        yield f"{shown(leaves[0])}{others}: no tensor, and not written."
    for name, what in meant.items():
        yield f"{shown(name)} is {what}, and is written as numbers."
