"""The rules that the options for names become. `apply` applies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.reading.naming.mapping import TensorMapping
from shardckpt.reading.naming.mapping_file import read_mapping
from shardckpt.reshard.rules.hf_config import head_counts, read_config
from shardckpt.state.select import selector

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from shardckpt.convert.options import NameOptions
    from shardckpt.reading.naming.renaming import NameTable
    from shardckpt.reading.naming.substitution import Substitution


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


def read_naming(options: NameOptions, known: object = None) -> Naming:
    """Turn options into rules.

    Args:
        options: the options.
        known: the model's configuration, as the checkpoint has it; numbers of a mapping come from
            it if no other file is given.

    Raises:
        OptionError: a file cannot be read, or the mapping cannot be inverted.
    """
    included = selector(options.include)
    excluded = selector(() if options.exclude is None else options.exclude)
    mapping, config = options.mapping, options.config
    if not isinstance(mapping, TensorMapping):
        values = _values_in(known) if config is None else config_values(config)
        mapping = TensorMapping() if mapping is None else read_mapping(mapping, values)
    is_untied = config is not None and read_config(config)[1].get("tie_word_embeddings") is False
    return Naming(
        is_selected=lambda name: included(name) and not excluded(name),
        renames=options.renames(),
        copy_ties=options.ties == "copies" or (options.ties == "auto" and is_untied),
        mapping=mapping.inverse() if options.invert_mapping else mapping,
        add_prefix=options.add_prefix,
        dtype=options.dtype,
    )


def config_values(path: str | os.PathLike[str]) -> dict[str, int]:
    """The integers in a model's configuration.

    The numbers of heads have the same names for all models.

    Args:
        path: `config.json`, or the directory that has it.

    Raises:
        OptionError: it cannot be read.
    """
    return _values_in(read_config(path)[1]) or {}


def _values_in(config: object) -> dict[str, int] | None:
    """The integers in a configuration; None: it is none."""
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")  # of a multimodal model
    config = {**config, **text} if isinstance(text, dict) else config
    heads = head_counts(config)
    named = (
        {}
        if heads is None
        else {"num_attention_heads": heads.query, "num_key_value_heads": heads.key_value}
    )
    return {key: value for key, value in config.items() if type(value) is int} | named
