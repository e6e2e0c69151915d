"""Command-line options of `export` and `import` for names: which tensors, their names and sources."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Include = Annotated[
    list[str] | None, typer.Option("--include", metavar="PATTERN", help="Read only tensors whose name in SRC matches; may be repeated.")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave out tensors whose name in SRC matches; may be repeated.")
]
StripPrefix = Annotated[str | None, typer.Option("--strip-prefix", metavar="TEXT", help="Remove a prefix from names.")]
Rename = Annotated[
    list[str] | None, typer.Option("--rename", metavar="s/RE/NEW/", help="Change names by a regular expression; may be repeated.")
]
RenameFile = Annotated[str | None, typer.Option("--rename-file", metavar="FILE", help="A JSON, TOML or YAML file: old name, new name.")]
MappingFile = Annotated[
    str | None, typer.Option("--mapping", metavar="FILE", help="A file of rules that join, split or transpose tensors.")
]
InvertMapping = Annotated[bool, typer.Option("--invert-mapping", help="Apply the mapping backwards.")]
AddPrefix = Annotated[str | None, typer.Option("--add-prefix", metavar="TEXT", help="Add a prefix to names.")]
TiesText = Annotated[
    str | None,
    typer.Option(
        "--ties", metavar="HOW", help="Write tied tensors once or as copies; auto (default): as the model's config.json says, else once."
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        "--from-hf",
        metavar="PATH",
        help="The model's config.json, or its directory: has numbers that a mapping needs, and whether embeddings are tied.",
    ),
]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given, for a call that has defaults of its own."""
    return {name: value for name, value in options.items() if value}
