"""Command-line options of `export` and `import` for names: which tensors, their names and sources."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Include = Annotated[list[str] | None, typer.Option("--include", metavar="PATTERN", help="Take only names that match; may be repeated.")]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave out names that match; may be repeated.")]
StripPrefix = Annotated[str | None, typer.Option("--strip-prefix", metavar="TEXT", help="Remove a prefix from names.")]
Rename = Annotated[
    list[str] | None, typer.Option("--rename", metavar="s/RE/NEW/", help="Change names by a regular expression; may be repeated.")
]
RenameFile = Annotated[str | None, typer.Option("--rename-file", metavar="FILE", help="JSON, TOML or YAML: old name to new name.")]
MappingFile = Annotated[str | None, typer.Option("--mapping", metavar="FILE", help="Rules that join, split or transpose tensors.")]
InvertMapping = Annotated[bool, typer.Option("--invert-mapping", help="Apply the mapping backwards.")]
AddPrefix = Annotated[str | None, typer.Option("--add-prefix", metavar="TEXT", help="Add a prefix to names.")]
TiesText = Annotated[str | None, typer.Option("--ties", metavar="HOW", help="Tied tensors: auto, once or copies.")]
Config = Annotated[
    str | None, typer.Option("--config", "--from-hf", metavar="PATH", help="The model's config.json, or the directory that has it.")
]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given, for a call that has defaults of its own."""
    return {name: value for name, value in options.items() if value}
