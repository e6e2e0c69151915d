"""Choosing the output: tensors, their names, sources and dtypes. The same steps for exports and imports.

1. `include` and `exclude` select tensors, by their names in the source.
2. Names change: `strip_prefix`, `rename_file`, `rename` (`renaming`). For an export the keys of nested containers are joined with ".".
3. One name of each tied tensor is kept (`ties`).
4. `mapping` joins or splits tensors (`mapping`), and `add_prefix` is put in front of all names.
5. `dtype` converts, by the new names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from shardckpt.convert.naming import ties as tied
from shardckpt.convert.naming.mapping import Mapping
from shardckpt.convert.naming.mapping_file import config_values, read_mapping
from shardckpt.convert.naming.renamed_state import end_names
from shardckpt.convert.naming.renaming import Renaming, read_names
from shardckpt.convert.naming.substitution import Substitution
from shardckpt.errors import NamesMismatchError, OptionError
from shardckpt.excerpt import excerpt, few, given
from shardckpt.options import check_flag
from shardckpt.reshard.dtype_rules import check_dtypes, plan_dtypes
from shardckpt.reshard.optimizer_state import optimizer_state
from shardckpt.reshard.rules.hf_config import read_config
from shardckpt.state import alias_map, leaf_names, meanings
from shardckpt.state.names import shown
from shardckpt.state.select import selector

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from collections.abc import Mapping as Named

    from shardckpt.convert.streaming.outputs import OutputTensor
    from shardckpt.format.structure import Structure
    from shardckpt.reshard.dtype_rules import ConvertedSubtree

__all__ = ["NameOptions", "Outputs", "Patterns", "mapping_of", "outputs_of"]

Patterns: TypeAlias = "str | Sequence[str] | None"
"""Patterns of names: one, or several; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOptions:
    """Options of export and import for names, sources and dtypes of tensors. Files are read in `outputs_of`."""

    include: Patterns = None
    """The names to select: a pattern, or several; None: all."""
    exclude: Patterns = None
    """The selected names to leave out."""
    strip_prefix: str | None = None
    """A prefix to remove from names."""
    rename: str | Sequence[str] = ()
    """`s/regex/replacement/`, one or several, in order."""
    rename_file: str | os.PathLike[str] | None = None
    """JSON, TOML or YAML: old name → new name, or null."""
    mapping: str | os.PathLike[str] | Mapping | None = None
    """A mapping, its file, or the name of a built-in one."""
    invert: bool = False
    """Read the mapping from its `to` to its `from`."""
    add_prefix: str = ""
    """A prefix to add to all names at the end."""
    dtype: str | Named[str, str] | None = None
    """Name of a dtype, or pattern of new names → dtype, of which the first that matches applies (`dtype_rules`)."""
    ties: tied.Ties = "auto"
    """Treatment of tied names (`ties`)."""
    config: str | os.PathLike[str] | None = None
    """The model's `config.json`: numbers that mappings name, and whether embeddings are tied."""

    def __post_init__(self) -> None:
        """Check everything that needs no files."""
        for what, patterns in (("include", self.include), ("exclude", self.exclude)):
            if callable(patterns):
                raise OptionError(f"{what}: give patterns of names, as text.")
            selector(patterns)
        rename = (self.rename,) if isinstance(self.rename, str) else self.rename
        if not isinstance(rename, list | tuple):
            raise OptionError(f"rename={excerpt(rename)}: give s/regex/replacement/, or a list of them.")
        for text in rename:
            Substitution(text)
        object.__setattr__(self, "rename", tuple(rename))
        for what, file in (("rename_file", self.rename_file), ("mapping", self.mapping), ("config", self.config)):
            if file is not None and not isinstance(file, str | os.PathLike | Mapping):
                raise OptionError(f"{what}={excerpt(file)}: give the path of a file.")
        Renaming(self.strip_prefix)
        if not isinstance(self.add_prefix, str):
            raise OptionError(f"add_prefix={excerpt(self.add_prefix)}: give what names shall begin with.")
        check_flag(self.invert, "invert")
        check_dtypes(self.dtype)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tensors to write, with their names."""

    tensors: tuple[OutputTensor, ...]
    """In the order of the source state."""
    tied: Named[str, str]
    """Names that are not written → the output that is the same tensor."""
    notes: tuple[str, ...]
    """Messages about tensors that were left out or duplicated, a line each."""
    renamed: Named[str, str]
    """Selected name in the source → new name, before a mapping; for an import, small leaves are included."""
    conversions: tuple[ConvertedSubtree, ...]
    """Tensors that `dtype` converts and leaves, counted by subtree of the new names."""


def outputs_of(structure: Structure, options: NameOptions, where: str, *, importing: bool = False) -> Outputs:
    """The outputs of a checkpoint, shardckpt's or a foreign one.

    Args:
        structure: structure of the source.
        options: selection and naming.
        where: location of the checkpoint, for messages.
        importing: whether the new names belong to a state: then "/" still separates its containers.

    Raises:
        OptionError: a file cannot be read, or a rule matches nothing.
        NamesMismatchError: nothing is selected, a part is missing, or two tensors would have one name.
        ShapeMismatchError, DtypeMismatchError: tensors do not fit a rule.
    """
    stored = _selected(structure, options, where)
    leaves = _selected_leaves(structure, options) if importing else []
    new = _renaming(options).apply([*stored, *leaves], keep_slashes=importing)
    names = {name: stored[old] for old, name in new.items() if old in stored}
    kept, further = tied.resolve(names, options.ties, _are_tied(options))
    outputs = mapping_of(options).outputs({name: structure.tensors[source] for name, source in kept.items()})
    meaning = meanings(structure.tree)
    meant = {options.add_prefix + o.name: meaning[v.tensor] for o in outputs for v in o.sources[:1] if v.tensor in meaning}
    moments = optimizer_state(structure.tree) if options.dtype else frozenset()
    optimizer = {options.add_prefix + o.name for o in outputs for v in o.sources[:1] if v.tensor in moments}
    planned = plan_dtypes({options.add_prefix + output.name: output for output in outputs}, options.dtype, meant, optimizer)
    dtypes = planned.dtypes
    written = tuple(
        output if (output.name, output.dtype) == (name, dtype) else replace(output, name=name, dtype=dtype)
        for output, (name, dtype) in zip(outputs, dtypes.items(), strict=True)
    )
    left = {options.add_prefix + name: options.add_prefix + first for name, first in further.items() if name not in kept}
    unwritten = [] if importing else list(filter(_taken_by(options), leaf_names(structure.tree)))
    return Outputs(
        written,
        {name: first for name, first in left.items() if first in dtypes},
        tuple(
            _notes(unwritten, meant, left, {name: first for name, first in further.items() if name in kept}, dtypes, importing=importing)
        ),
        {old: options.add_prefix + name if old in stored else name for old, name in new.items()},
        planned.subtrees,
    )


def _selected(structure: Structure, options: NameOptions, where: str) -> dict[str, str]:
    """Selected name → name under which the tensor is stored."""
    further = alias_map(structure.tree)
    taken_by = _taken_by(options)
    names = {name: name for name in structure.tensors} | further
    taken = {name: stored for name, stored in names.items() if taken_by(name)}
    if not taken:
        if not names:
            raise NamesMismatchError(f"{where}: there is no tensor in it, and nothing else is written to such files.")
        asked = given(include=options.include, exclude=options.exclude)
        raise NamesMismatchError(f"{where}: {asked}: none of its {len(names)} tensors is left; there are {few(list(names))}.")
    return taken


def _selected_leaves(structure: Structure, options: NameOptions) -> list[str]:
    """The selected small leaves and empty containers."""
    return list(filter(_taken_by(options), end_names(structure.tree)))


def _taken_by(options: NameOptions) -> Callable[[str], bool]:
    """A function that returns whether a name is selected."""
    included = selector(options.include)
    excluded = selector(() if options.exclude is None else options.exclude)
    return lambda name: included(name) and not excluded(name)


def _renaming(options: NameOptions) -> Renaming:
    names = {} if options.rename_file is None else read_names(options.rename_file)
    return Renaming(options.strip_prefix, names, tuple(map(Substitution, options.rename)), str(options.rename_file))


def mapping_of(options: NameOptions) -> Mapping:
    """The mapping of the options; an empty one if there is none."""
    given = options.mapping
    if given is None:
        return Mapping()
    values = None if options.config is None else config_values(options.config)
    mapping = given if isinstance(given, Mapping) else read_mapping(given, values)
    return mapping.inverse() if options.invert else mapping


def _are_tied(options: NameOptions) -> bool | None:
    """Whether the model ties its embeddings; None if unknown."""
    tie = None if options.config is None else read_config(options.config)[1].get("tie_word_embeddings")
    return tie if isinstance(tie, bool) else None


def _notes(
    leaves: Sequence[str],
    meant: Named[str, str],
    left: Named[str, str],
    copied: Named[str, str],
    written: Collection[str],
    *,
    importing: bool,
) -> Iterator[str]:
    """Messages for the user, a line each."""
    if leaves:
        others = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        yield f"{shown(leaves[0])}{others}: no tensor, and not written."
    for name, what in ({} if importing else meant).items():
        yield f"{shown(name)} is {what}, and is written as numbers."
    for name, first in left.items():
        if importing and first in written:
            continue  # it stays tied
        yield f"{shown(name)} is the same tensor as {shown(first)}, and is not written again."
    for name, first in copied.items():
        yield f"{shown(name)} is the same tensor as {shown(first)}, and is written for itself."
