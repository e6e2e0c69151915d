"""The options of exports and imports, checked where they are made.

The command line makes its flags of them, so nothing heavy is imported before a value needs it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shardckpt.errors import OptionError
from shardckpt.options import Options, option
from shardckpt.reshard.options import DEFAULT_MEMORY_LIMIT, ReshardOptions, dtype_option
from shardckpt.text import Message, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardckpt.reading.naming.mapping import TensorMapping
    from shardckpt.reading.naming.renaming import NameTable
    from shardckpt.reading.naming.substitution import Substitution

Patterns: TypeAlias = "str | Sequence[str] | None"
"""Patterns of names: one, or several; None: all."""
Ties = Literal["auto", "once", "copies"]
"""Treatment of tied names: "once", "copies", or "auto": copies if the configuration says that
nothing is tied."""


def ignore_progress(_done: int, _total: int) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class SelectionOptions(Options):
    """Options that select and convert tensors."""

    include: Patterns = option(
        "Read only tensors and values whose name in the source matches a pattern.",
        kind="texts",
        metavar="PATTERN",
        served="texts",
    )
    exclude: Patterns = option(
        "Leave out tensors and values whose name in the source matches a pattern.",
        kind="texts",
        metavar="PATTERN",
        served="texts",
    )
    dtype: str | Mapping[str, str] | None = dtype_option()

    def __post_init__(self) -> None:
        """Check everything that needs no files."""
        super().__post_init__()
        from shardckpt.reshard.dtype_rules import check_dtypes
        from shardckpt.state.select import selector

        for name, patterns in (("include", self.include), ("exclude", self.exclude)):
            if callable(patterns):
                raise OptionError(Message(named(name, ...), ": give patterns of names, as text."))
            selector(patterns, name)
        check_dtypes(self.dtype)

    @classmethod
    def arguments(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """As in `Options`.

        An empty text for names, such as an unset variable of a shell, is nothing.
        """
        about_names = NameOptions.declared()
        return super().arguments(
            {name: value for name, value in given.items() if value != "" or name not in about_names}
        )


@dataclass(frozen=True, kw_only=True)
class NameOptions(SelectionOptions):
    """Options of export and import for names, sources and dtypes of tensors.

    `naming.choose.read_naming` reads the files.
    """

    strip_prefix: str | None = option(
        "Remove this prefix, such as model/, from names.", metavar="TEXT", served="text"
    )
    rename: str | Sequence[str] = option(
        "Change names, of tensors and all other values, by a regular expression, as sed does.",
        (),
        kind="texts",
        metavar="s/RE/NEW/",
    )
    rename_file: str | os.PathLike[str] | None = option(
        "A JSON, TOML or YAML file: old name → new name, or null to leave it out.", metavar="FILE"
    )
    mapping: str | os.PathLike[str] | TensorMapping | None = option(
        "Rules that join, split or transpose tensors: a file, or the name of a built-in mapping "
        "(docs/mapping.md).",
        metavar="FILE",
        served="text",
    )
    invert_mapping: bool = option(
        "Apply the mapping backwards, from its `to` to its `from`.", False
    )
    add_prefix: str = option(
        "Add a prefix to the names of all tensors, after the other options.",
        "",
        metavar="TEXT",
        served="text",
    )
    ties: Ties = option(
        "Treatment of tied tensors. once: stored under one name. copies: one copy per name. "
        "auto: copies if the model's config.json says that nothing is tied, else once. In an "
        "import, once keeps them tied.",
        "auto",
        metavar="HOW",
        choices=("auto", "once", "copies"),
        served="text",
    )
    config: str | os.PathLike[str] | None = option(
        "The model's config.json, or its directory. A mapping reads numbers from it (as "
        "num_attention_heads; default: from the one that the checkpoint has), ties whether "
        "embeddings are tied. An export to a directory writes it, and other small files of its "
        "directory, beside the weights.",
        metavar="PATH",
        flags=("--config", "--from-hf"),
    )

    def __post_init__(self) -> None:
        """Check everything that needs no files."""
        super().__post_init__()
        from shardckpt.reading.naming.mapping import TensorMapping
        from shardckpt.reading.naming.substitution import parse_substitutions

        parse_substitutions(self.rename)
        object.__setattr__(
            self, "rename", (self.rename,) if isinstance(self.rename, str) else tuple(self.rename)
        )
        for what, file in (
            ("rename_file", self.rename_file),
            ("mapping", self.mapping),
            ("config", self.config),
        ):
            if file is not None and not isinstance(file, str | os.PathLike | TensorMapping):
                raise OptionError(Message(named(what, file), ": give the path of a file."))
        prefix: Any = self.strip_prefix
        if prefix is not None and (not isinstance(prefix, str) or not prefix):
            raise OptionError(
                Message(
                    named("strip_prefix", prefix),
                    ": give the beginning of names, such as 'model/'.",
                )
            )
        if not isinstance(self.add_prefix, str):
            raise OptionError(
                Message(
                    named("add_prefix", self.add_prefix), ": give the text to put before each name."
                )
            )

    def renames(self) -> tuple[Substitution | NameTable, ...]:
        """The rules that change names, in order.

        Raises:
            OptionError: `rename_file` cannot be read.
        """
        from shardckpt.reading.naming.renaming import read_names
        from shardckpt.reading.naming.substitution import parse_substitutions, without_prefix

        prefix = (
            ()
            if self.strip_prefix is None
            else (without_prefix(self.strip_prefix, named("strip_prefix", self.strip_prefix)),)
        )
        table = () if self.rename_file is None else (read_names(self.rename_file),)
        return (*prefix, *table, *parse_substitutions(self.rename))


def below(key: str, names: Iterable[str]) -> dict[str, str]:
    """Options that select the names below `key`, such as "model/", and remove it from them.

    {} if there are none.
    """
    inside = [name.startswith(key) for name in names]
    if not any(inside):
        return {}
    return {"strip_prefix": key} | ({} if all(inside) else {"include": f"{key}**"})


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Options of all exports."""

    memory_limit: int | str = option(
        "Limit of memory for buffers; the process uses up to 128 MiB more.",
        DEFAULT_MEMORY_LIMIT,
        kind="size",
        metavar="BYTES",
    )
    overwrite: bool = option(
        "Replace what is at the destination; in a directory, all files of the model in it.",
        False,
        served="boolean",
    )
    verify: bool = option(
        "Read back what was written to a disk; an object store compares checksums by itself.", True
    )
    progress: Callable[[int, int], None] | None = option(
        "Called with the bytes of elements written so far, and the total.", kind="function"
    )

    @property
    def budget(self) -> int:
        """`memory_limit` in bytes."""
        return self.nbytes("memory_limit")

    @property
    def report_progress(self) -> Callable[[int, int], None]:
        """`progress`, or a function that does nothing."""
        return self.progress or ignore_progress


@dataclass(frozen=True, kw_only=True)
class SafetensorsOptions(ExportOptions, NameOptions):
    """Options of `export_safetensors`."""

    max_shard_size: int | str | None = option(
        "Write several files of at most this size, as in 5GB, and an index; a larger tensor gets "
        "a file of its own. Default: one file.",
        metavar="BYTES",
        served="text",
    )
    metadata: Mapping[str, str] | None = option("Texts for the files' headers.", kind="python")


@dataclass(frozen=True, kw_only=True)
class DeltaOptions(SafetensorsOptions):
    """Options of an export to canonical-delta."""

    since: int | None = option(
        "For canonical-delta: the step of the version that receivers start from; it becomes "
        "version 0.",
        kind="integer",
        least=0,
        metavar="STEP",
    )
    follow: bool = option(
        "For canonical-delta: wait for further versions, and write each, until the program is "
        "interrupted.",
        False,
    )
    delta_encoding: str = option(
        "For canonical-delta: xor, or overwrite (positions and new bytes).",
        "xor",
        metavar="ENCODING",
        choices=("xor", "overwrite"),
    )
    checksum_format: str = option(
        "For canonical-delta: digest of each tensor. adler32 needs no package.",
        "adler32",
        metavar="DIGEST",
        choices=("adler32", "xxh3-128", "blake3"),
    )
    on_version: Callable[[Any], None] | None = option(
        "Called with each `WrittenVersion` when its directory is complete.", kind="function"
    )

    def __post_init__(self) -> None:
        """Check everything that needs no files."""
        super().__post_init__()
        since: Any = self.since
        if isinstance(since, bool) or not isinstance(since, int) or since < 0:
            advice = ": give the step of the version that receivers start from, 0 or more."
            needed = Message("canonical-delta needs ", named("since", ...), advice)
            raise OptionError(needed if since is None else Message(named("since", since), advice))
        if self.ties == "copies":
            raise OptionError(
                Message(
                    named("ties", "copies"),
                    ": receivers have tied tensors once; leave it out, for canonical-delta.",
                )
            )


@dataclass(frozen=True, kw_only=True)
class StateOptions(ExportOptions, SelectionOptions):
    """Options of an export to a format that holds states."""

    optimizer: Literal["names", "numbers", "flat"] | None = option(
        "Form of optimizers in torch, dcp and orbax: names of parameters, for "
        "set_optimizer_state_dict; numbers, for Optimizer.load_state_dict; flat, one dict with "
        "complete names. Default: names; in orbax, the stored form (docs/export.md).",
        metavar="FORM",
    )

    def __post_init__(self) -> None:
        """Check everything that needs no files."""
        super().__post_init__()
        from shardckpt.training.optimizer_state.forms import FORMS

        if self.optimizer is not None and self.optimizer not in FORMS:
            raise OptionError(
                Message(
                    named("optimizer", self.optimizer), f": give {', '.join(map(repr, FORMS))}."
                )
            )


@dataclass(frozen=True, kw_only=True)
class ToOptions(Options):
    """The option that chooses a format."""

    to: Literal["safetensors", "peft", "torch", "dcp", "orbax", "canonical-delta"] = option(
        "Format to write: safetensors, which holds tensors; peft, the files of an adapter that "
        "was trained with ShardckptCallback; torch, dcp or orbax, which hold the state with its "
        "containers and values; canonical-delta, a directory for each version of a publisher.",
        "safetensors",
        metavar="FORMAT",
    )


@dataclass(frozen=True, kw_only=True)
class AnyExportOptions(StateOptions, DeltaOptions, ToOptions):
    """All options of `export`, including those for only one format."""


@dataclass(frozen=True, kw_only=True)
class ForeignOptions(Options):
    """Options for a checkpoint of another format."""

    from_: str = option(
        "Format of the source: auto, safetensors, torch, dcp, orbax, megatron, torch_xla, xser "
        "or zarr.",
        "auto",
        metavar="FORMAT",
    )
    into: str | None = option(
        "Put the state below this name: with model, w becomes model/w. Default: the imported "
        "state is the new state.",
        metavar="NAME",
        served="text",
    )
    trust_pickle: bool = option(
        "Also read metadata that the format stores only in a pickle (DCP, Megatron, torch_xla): "
        "confirm that you trust its contents, which no checksum covers. The pickle is "
        "interpreted; nothing that it names is called, with or without this flag.",
        False,
    )
    on_note: Callable[[str], None] | None = option(
        "Called with each note of the report before anything is written.", kind="function"
    )


@dataclass(frozen=True, kw_only=True)
class ImportOptions(ReshardOptions, NameOptions, ForeignOptions):
    """Options of `import_checkpoint`."""

    def names(self) -> NameOptions:
        """The options that choose and name; `dtype` is left to the reshard."""
        return self.part(NameOptions, dtype=None)
