"""The options for names, and the rules that they become. `apply` applies the rules."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from shardckpt.errors import OptionError
from shardckpt.excerpt import excerpt
from shardckpt.options import check_flag
from shardckpt.reading.naming.mapping import TensorMapping
from shardckpt.reading.naming.mapping_file import read_mapping
from shardckpt.reading.naming.renaming import read_names
from shardckpt.reading.naming.substitution import parse_substitutions, without_prefix
from shardckpt.reshard.dtype_rules import check_dtypes
from shardckpt.reshard.rules.hf_config import head_counts, read_config
from shardckpt.state.select import selector

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardckpt.reading.naming.renaming import NameTable
    from shardckpt.reading.naming.substitution import Substitution

Patterns: TypeAlias = "str | Sequence[str] | None"
"""Patterns of names: one, or several; None: all."""
Ties = Literal["auto", "once", "copies"]
"""Treatment of tied names: "once", "copies", or "auto": copies if the configuration says that nothing is tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOptions:
    """Options of export and import for names, sources and dtypes of tensors. `read_naming` reads the files."""

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
    mapping: str | os.PathLike[str] | TensorMapping | None = None
    """A mapping, its file, or the name of a built-in one."""
    invert_mapping: bool = False
    """Read the mapping from its `to` to its `from`."""
    add_prefix: str = ""
    """A prefix to add to all names at the end."""
    dtype: str | Mapping[str, str] | None = None
    """Name of a dtype, or pattern of new names → dtype, of which the first that matches applies (`dtype_rules`)."""
    ties: Ties = "auto"
    """Treatment of tied names (`ties`)."""
    config: str | os.PathLike[str] | None = None
    """The model's `config.json`, or its directory: numbers that mappings name, and whether embeddings are tied."""

    def __post_init__(self) -> None:
        """Check everything that needs no files."""
        for what, patterns in (("include", self.include), ("exclude", self.exclude)):
            if callable(patterns):
                raise OptionError(f"{what}: give patterns of names, as text.")
            selector(patterns)
        parse_substitutions(self.rename)
        object.__setattr__(self, "rename", (self.rename,) if isinstance(self.rename, str) else tuple(self.rename))
        for what, file in (("rename_file", self.rename_file), ("mapping", self.mapping), ("config", self.config)):
            if file is not None and not isinstance(file, str | os.PathLike | TensorMapping):
                raise OptionError(f"{what}={excerpt(file)}: give the path of a file.")
        if self.strip_prefix is not None:
            without_prefix(self.strip_prefix)
        if not isinstance(self.add_prefix, str):
            raise OptionError(f"add_prefix={excerpt(self.add_prefix)}: give the text to put before each name.")
        if self.ties not in ("auto", "once", "copies"):
            raise OptionError(f'ties={excerpt(self.ties)}: use "auto", "once" or "copies".')
        check_flag(self.invert_mapping, "invert_mapping")
        check_dtypes(self.dtype)


@dataclass(frozen=True, slots=True)
class Naming:
    """The rules that `NameOptions` ask for."""

    is_selected: Callable[[str], bool]
    """Whether a name in the source is selected."""
    renames: tuple[Substitution | NameTable, ...]
    """Rules that change names, in order."""
    copy_ties: bool
    """Whether each name of a tied tensor gets a copy."""
    mapping: TensorMapping
    """Rules that join and split tensors, in the requested direction."""
    add_prefix: str
    """A prefix to add to all names at the end."""
    dtype: str | Mapping[str, str] | None
    """As in `NameOptions`."""


def read_naming(options: NameOptions) -> Naming:
    """Turn options into rules.

    Raises:
        OptionError: a file cannot be read, or the mapping cannot be inverted.
    """
    included = selector(options.include)
    excluded = selector(() if options.exclude is None else options.exclude)
    renames: list[Substitution | NameTable] = []
    if options.strip_prefix is not None:
        renames.append(without_prefix(options.strip_prefix))
    if options.rename_file is not None:
        renames.append(read_names(options.rename_file))
    renames += parse_substitutions(options.rename)
    mapping, config = options.mapping, options.config
    if not isinstance(mapping, TensorMapping):
        mapping = TensorMapping() if mapping is None else read_mapping(mapping, None if config is None else config_values(config))
    is_untied = config is not None and read_config(config)[1].get("tie_word_embeddings") is False
    return Naming(
        is_selected=lambda name: included(name) and not excluded(name),
        renames=tuple(renames),
        copy_ties=options.ties == "copies" or (options.ties == "auto" and is_untied),
        mapping=mapping.inverse() if options.invert_mapping else mapping,
        add_prefix=options.add_prefix,
        dtype=options.dtype,
    )


def config_values(path: str | os.PathLike[str]) -> dict[str, int]:
    """The integers in a model's configuration; the numbers of heads have the same names for all models.

    Args:
        path: `config.json`, or the directory that has it.

    Raises:
        OptionError: it cannot be read.
    """
    _, config = read_config(path)
    text = config.get("text_config")  # of a multimodal model
    config = {**config, **text} if isinstance(text, dict) else config
    heads = head_counts(config)
    named = {} if heads is None else {"num_attention_heads": heads.query, "num_key_value_heads": heads.key_value}
    return {key: value for key, value in config.items() if type(value) is int} | named
